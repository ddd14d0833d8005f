"""The Metal capability profile of this machine, read and never changed, through the Objective-C runtime by ctypes.

Standard library only and Python 3.9: `cluster vm profile --host H` sends this very file to the python3 of H over ssh.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from ctypes import c_bool, c_char_p, c_long, c_uint64, c_void_p
from typing import Any

KINDS = {"apple": 1001, "mac": 2001, "common": 3001, "metal": 5001}  # first value of each run of MTLGPUFamily
KERNEL = {"model": "hw.model", "chip": "machdep.cpu.brand_string", "hv_vmm": "kern.hv_vmm_present"}
KERNEL.update(macos="kern.osproductversion", build="kern.osversion")
FRAMEWORK = "/System/Library/Frameworks/{0}.framework/{0}"


def machine() -> dict[str, str]:
    """What the kernel says of this Mac: model, chip, hv_vmm ("1" in a guest), macos, build. Raises OSError."""
    told = subprocess.run(["sysctl", *KERNEL.values()], capture_output=True, text=True, timeout=10).stdout
    values = dict(line.split(": ", 1) for line in told.splitlines() if ": " in line)
    return {key: values.get(name, "") for key, name in KERNEL.items()}


def read(objc: Any, metal: Any) -> dict[str, Any]:
    """Device name and class, highest family of each kind (0: none), sizes in bytes; None where there is no such answer.

    Takes the Objective-C runtime and Metal as loaded by ctypes. Empty if there is no Metal device.
    """

    def call(function: Any, result: Any, *arguments: Any) -> Any:
        function.restype = result  # no argtypes, so every pointer goes in as c_void_p or bytes
        return function(*arguments)

    def ask(thing: int, name: str, result: Any, *arguments: int) -> Any:
        selector = c_void_p(call(objc.sel_registerName, c_void_p, name.encode()))
        class_name = call(objc.object_getClassName, c_char_p, c_void_p(thing))
        owner = c_void_p(call(objc.objc_lookUpClass, c_void_p, class_name))
        if not call(objc.class_getInstanceMethod, c_void_p, owner, selector):
            return None
        address = call(objc.class_getMethodImplementation, c_void_p, owner, selector)
        kind = ctypes.CFUNCTYPE(result, c_void_p, c_void_p, *[c_long] * len(arguments))
        return kind(address)(thing, selector, *arguments)

    devices = call(metal.MTLCopyAllDevices, c_void_p)
    device = ask(devices, "objectAtIndex:", c_void_p, 0) if devices and ask(devices, "count", c_long) else None
    device = device or call(metal.MTLCreateSystemDefaultDevice, c_void_p)
    if not device:
        return {}
    name = ask(device, "name", c_void_p)
    seen = {"device": ask(name, "UTF8String", c_char_p).decode() if name else ""}
    seen["class"] = call(objc.object_getClassName, c_char_p, c_void_p(device)).decode()
    for kind, first in KINDS.items():
        families = range(first + 98, first - 1, -1)
        seen[f"{kind}_family"] = next((n for n in families if ask(device, "supportsFamily:", c_bool, n)), 0)
    seen["threadgroup_memory_bytes"] = ask(device, "maxThreadgroupMemoryLength", c_uint64)
    return {**seen, "working_set_bytes": ask(device, "recommendedMaxWorkingSetSize", c_uint64)}


if __name__ == "__main__":
    if sys.platform != "darwin":
        sys.exit("not a Mac: there is no Metal here")
    ctypes.CDLL(FRAMEWORK.format("CoreGraphics"))  # without it a command-line program is given no device
    runtime, framework = ctypes.CDLL("/usr/lib/libobjc.A.dylib"), ctypes.CDLL(FRAMEWORK.format("Metal"))
    print(json.dumps({**machine(), **read(runtime, framework)}))
