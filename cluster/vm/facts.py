"""Is a host a virtual Mac, and what follows from that. Pure.

Probe calls `virtual_machine` and keeps the result in the host's facts; whoever plans, checks or shows hosts asks that
object and imports nothing from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class VirtualMachine:
    """A host that is a guest. `host_chip` is the chip underneath ("" if not told); `evidence` is what gave it away.

    `consequences` are what doctor, plan and status say about it, a sentence each.
    """

    model: str
    metal_device: str
    host_chip: str
    evidence: tuple[str, ...]

    fast_synch_has_effect: ClassVar[bool] = False  # MLX_METAL_FAST_SYNCH needs Metal3, which no guest reports
    consequences: ClassVar[tuple[str, ...]] = (
        "It has no Thunderbolt RDMA: a guest sees neither the ports nor the RDMA devices of its host.",
        "MLX_METAL_FAST_SYNCH has no effect there: its GPU does not report Metal3.",
        "A raised Metal profile gains MLX nothing (reported: 1.005x prompt, 0.993x generation).",
        "It serves alone, or as a stage of a pipeline over the TCP ring.",
        "Its memory limit is the guest's, not that of the Mac it runs on.",
    )

    def why_not_placed(self, *, hosts: int, strategy: str, backend: str) -> str:
        """Why a plan must not use it so, or "". `strategy`: single, pipeline, tensor; `backend`: ring, jaccl, ..."""
        if hosts == 1 or (strategy, backend) == ("pipeline", "ring"):
            return ""
        if backend != "ring":
            return f"is a virtual machine: it has no Thunderbolt RDMA, which {backend} needs"
        return f"is a virtual machine: only a pipeline over the TCP ring is for it, not {strategy} parallel"


def virtual_machine(hv_vmm: str, hw_model: str, metal_device: str = "", cpu_brand: str = "") -> VirtualMachine | None:
    """The fact from what sysctl prints for kern.hv_vmm_present, hw.model, machdep.cpu.brand_string, and the Metal name.

    With or without the "name: " that sysctl puts before a value. None for bare metal and for outputs that say nothing.
    """
    texts = (hv_vmm, hw_model, metal_device, cpu_brand)
    present, model, device, brand = (text.strip().rpartition(": ")[2] for text in texts)
    signs = {
        f"kern.hv_vmm_present is {present}": present == "1",
        f"hw.model is {model}": model.startswith("VirtualMac"),
        f"the Metal device is {device}": "Paravirtual" in device,
    }
    evidence = tuple(sign for sign, seen in signs.items() if seen)
    chip = brand.removeprefix("Apple ").removesuffix("(Virtual)").strip() if brand.endswith("(Virtual)") else ""
    return VirtualMachine(model, device, chip, evidence) if evidence else None
