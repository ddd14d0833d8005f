"""Would dyld load a library into this program? Read from its Mach-O header and code signature before it runs.

Pure but for reading the file. Called by `run`; a program that would silently stay stock is refused with the reason.
"""

from __future__ import annotations

import plistlib
import stat
import struct
from pathlib import Path
from xml.parsers.expat import ExpatError

EXECUTABLE, SEGMENT, CODE_SIGNATURE = 2, 0x19, 0x1D
CODE_DIRECTORY, ENTITLEMENTS = 0xFADE0C02, 0xFADE7171
RESTRICT, LIBRARY_VALIDATION, HARDENED = 0x800, 0x2000, 0x10000  # code-signature flags
PROTECTED = ("/usr/bin/", "/usr/sbin/", "/usr/lib/", "/usr/libexec/", "/bin/", "/sbin/", "/System/")
SF_RESTRICTED = 0x80000  # a file that System Integrity Protection guards
ALLOWS = ("com.apple.security.cs.allow-dyld-environment-variables", "com.apple.security.cs.disable-library-validation")


class Refusal(Exception):
    """Why the program cannot be given the layer."""


def architecture(path: Path) -> str:
    """Which slice would run: arm64 or arm64e. Raises Refusal, OSError."""
    status, real, data = path.stat(), str(path.resolve()), path.read_bytes()
    if data[:2] == b"#!":
        interpreter = data[2:200].partition(b"\n")[0].decode(errors="replace").strip()
        raise Refusal(f"it is a script for {interpreter}; name that interpreter's own binary, and the script after it")
    if status.st_mode & (stat.S_ISUID | stat.S_ISGID):
        raise Refusal("it is set-user-id or set-group-id")
    if real.startswith(PROTECTED) or getattr(status, "st_flags", 0) & SF_RESTRICTED:
        raise Refusal("System Integrity Protection guards it; use a copy that is not part of macOS")
    try:
        name, image = _slice(data)
        _check(image)
    except (struct.error, IndexError, ValueError, ExpatError) as error:
        raise Refusal(f"its Mach-O header or signature cannot be read ({error})") from error
    return name


def _slice(data: bytes) -> tuple[str, bytes]:
    """The image that would run; plain arm64 before arm64e, as the kernel does for third-party programs."""
    count = struct.unpack_from(">I", data, 4)[0] if data[:4] == b"\xca\xfe\xba\xbe" else 0
    parts = [struct.unpack_from(">2I", data, 16 + 20 * index) for index in range(count)]
    found = {}
    for image in [data[offset : offset + size] for offset, size in parts] or [data]:
        if image[:8] == b"\xcf\xfa\xed\xfe\x0c\0\0\x01":  # 64-bit Mach-O, ARM
            kind, filetype = struct.unpack_from("<2I", image, 8)
            if filetype == EXECUTABLE:
                found["arm64e" if kind & 0xFF == 2 else "arm64"] = image
    if not found:
        raise Refusal("it is no program for Apple silicon (no arm64 Mach-O executable)")
    return min(found.items())


def _check(image: bytes) -> None:
    offset = 32
    for _ in range(struct.unpack_from("<I", image, 16)[0]):
        command, size = struct.unpack_from("<2I", image, offset)
        if size < 8:
            raise ValueError(f"a load command of {size} bytes")
        if command == SEGMENT and image[offset + 8 : offset + 24].rstrip(b"\0") == b"__RESTRICT":
            raise Refusal("it has a __RESTRICT segment")
        if command == CODE_SIGNATURE:
            _check_signature(image[struct.unpack_from("<I", image, offset + 8)[0] :])
        offset += size


def _check_signature(blob: bytes) -> None:
    flags, platform, entitlements = 0, 0, {}
    for index in range(struct.unpack_from(">I", blob, 8)[0]):
        at = struct.unpack_from(">I", blob, 16 + 8 * index)[0]
        magic, length = struct.unpack_from(">2I", blob, at)
        if magic == CODE_DIRECTORY:
            flags, platform = flags | struct.unpack_from(">I", blob, at + 12)[0], platform | blob[at + 38]
        elif magic == ENTITLEMENTS:
            entitlements = plistlib.loads(blob[at + 8 : at + length])
    missing = [name for name in ALLOWS if entitlements.get(name) is not True]
    if platform or flags & RESTRICT:
        raise Refusal("its signature marks it as part of macOS or restricted")
    if flags & HARDENED and missing:
        raise Refusal(f"it has the hardened runtime without the entitlement {missing[0]}; sign a copy of it ad hoc")
    if flags & LIBRARY_VALIDATION and ALLOWS[1] in missing:
        raise Refusal("its signature demands library validation; sign a copy of it ad hoc")
