"""Would dyld load a library into this program? Read from its Mach-O header and code signature before it runs.

Pure but for reading the file. Called by `run`; a program that would silently stay stock is refused with the reason.
"""

from __future__ import annotations

import stat
import struct
from pathlib import Path

UNIVERSAL = b"\xca\xfe\xba\xbe"
PROGRAM = struct.pack("<4I", 0xFEEDFACF, 0x0100000C, 0, 2)  # arm64; arm64e needs a boot argument and a layer of its own
SEGMENT, CODE_SIGNATURE, CODE_DIRECTORY = 0x19, 0x1D, 0xFADE0C02
BARS = {0x800: "restrictions", 0x2000: "library validation", 0x10000: "the hardened runtime"}  # code-signature flags
PROTECTED = ("/usr/bin/", "/usr/sbin/", "/usr/lib/", "/usr/libexec/", "/bin/", "/sbin/", "/System/")
SF_RESTRICTED = 0x80000  # a file that System Integrity Protection guards


def why_stock(path: Path) -> str:
    """Why this program could not be given the layer, or ""."""
    try:
        status, data = path.stat(), path.read_bytes()
        if data[:2] == b"#!":
            interpreter = data[2:200].partition(b"\n")[0].decode(errors="replace").strip()
            return f"it is a script for {interpreter}; name that interpreter's own binary, and the script after it"
        if status.st_mode & (stat.S_ISUID | stat.S_ISGID):
            return "it is set-user-id or set-group-id"
        if str(path.resolve()).startswith(PROTECTED) or getattr(status, "st_flags", 0) & SF_RESTRICTED:
            return "System Integrity Protection guards it; use a copy that is not part of macOS"
        images = [image for image in _slices(data) if image.startswith(PROGRAM)]
        return _in_header(images[0]) if images else "it has no arm64 program (Intel, arm64e only, or no Mach-O at all)"
    except (OSError, struct.error, IndexError) as error:
        return f"it, its Mach-O header or its signature cannot be read ({error})"


def _slices(data: bytes) -> list[bytes]:
    count = struct.unpack_from(">I", data, 4)[0] if data[:4] == UNIVERSAL else 0
    parts = [struct.unpack_from(">2I", data, 16 + 20 * index) for index in range(count)]
    return [data[offset : offset + size] for offset, size in parts] or [data]


def _in_header(image: bytes) -> str:
    offset = len(PROGRAM) + 16
    for _ in range(struct.unpack_from("<I", image, len(PROGRAM))[0]):
        command, size, start = struct.unpack_from("<3I", image, offset)
        if command == SEGMENT and image[offset + 8 : offset + 24].rstrip(b"\0") == b"__RESTRICT":
            return "it has a __RESTRICT segment"
        if command == CODE_SIGNATURE:
            return _in_signature(image[start:])
        offset += max(size, 8)
    return ""


def _in_signature(blob: bytes) -> str:
    """A hardened program could have entitlements that let the layer in; signing a copy is simpler than reading them."""
    flags = 0
    for index in range(struct.unpack_from(">I", blob, 8)[0]):
        at = struct.unpack_from(">I", blob, 16 + 8 * index)[0]
        if struct.unpack_from(">I", blob, at)[0] == CODE_DIRECTORY:
            flags |= struct.unpack_from(">I", blob, at + 12)[0]
            if blob[at + 38]:
                return "its signature marks it as part of macOS"
    barred = ", ".join(name for flag, name in BARS.items() if flags & flag)
    return f"its signature asks for {barred}; sign a copy of it ad hoc" if barred else ""
