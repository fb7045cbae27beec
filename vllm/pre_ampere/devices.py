# SPDX-License-Identifier: Apache-2.0
"""What a card can do, which cards take part, and which one is mine.

Everything that decides is a pure function of what NVML and the CUDA driver say; the few functions
that ask them (`nvml_devices`, `visible_devices`) only collect the answers. Nothing here imports vLLM
or starts a CUDA context, so the engine's front end may call all of it before it forks or spawns.

Source of the numbers: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
"""

import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

Capability = tuple[int, int]

VOLTA: tuple[Capability, ...] = ((7, 0), (7, 2))
TURING: tuple[Capability, ...] = ((7, 5),)
PRE_AMPERE: tuple[Capability, ...] = VOLTA + TURING

# Bytes of shared memory one block can opt in to (cudaDevAttrMaxSharedMemoryPerBlockOptin).
_SHARED_MEMORY_PER_BLOCK: Mapping[Capability, int] = {
    (7, 0): 98304,
    (7, 2): 98304,
    (7, 5): 65536,
    (8, 0): 166912,
    (8, 6): 101376,
    (8, 7): 166912,
    (8, 9): 101376,
    (9, 0): 232448,
    (10, 0): 232448,
    (10, 3): 232448,
    (12, 0): 101376,
    (12, 1): 101376,
}
_SHARED_MEMORY_WITHOUT_OPT_IN = 49152

# TU116 and TU117 answer capability 7.5 but were built without tensor cores: GeForce GTX 16xx,
# MX450/MX550, the entry-level workstation T cards and the CMP 30HX.
_TURING_WITHOUT_TENSOR_CORES = re.compile(
    r"\bGTX 16\d\d|\bMX ?(450|550)\b|\bT(400|500|550|600|1000|1200|2000)\b|\bCMP 30HX\b"
)

_EMULATED_NAMES: Mapping[Capability, str] = {
    (7, 0): "Tesla V100-SXM2-32GB",
    (7, 2): "Jetson AGX Xavier",
    (7, 5): "Tesla T4",
}


@dataclass(frozen=True)
class Device:
    """One card, as CUDA would describe it.

    Attributes:
        index: CUDA's ordinal of the card among the visible ones.
        name: product name.
        capability: compute capability, (major, minor).
        uuid: "GPU-…" or "MIG-…"; empty for an emulated card.
        pci_bus_id: "00000000:01:00.0"; empty for an emulated card.
        total_memory: bytes; 0 where nobody said.
        emulated: True where `VLLM_PRE_AMPERE_EMULATE` answers instead of a card.
    """

    index: int
    name: str
    capability: Capability
    uuid: str = ""
    pci_bus_id: str = ""
    total_memory: int = 0
    emulated: bool = False

    @property
    def architecture(self) -> str:
        """The compiler's name of the capability, such as "sm75"."""
        return f"sm{self.capability[0]}{self.capability[1]}"

    @property
    def is_volta(self) -> bool:
        return self.capability in VOLTA

    @property
    def is_turing(self) -> bool:
        return self.capability in TURING

    @property
    def is_pre_ampere(self) -> bool:
        """Volta or Turing: the cards this project serves. Pascal and older are not meant."""
        return self.capability in PRE_AMPERE

    @property
    def has_tensor_cores(self) -> bool:
        if self.is_turing:
            return _TURING_WITHOUT_TENSOR_CORES.search(self.name) is None
        return self.capability >= (7, 0)

    @property
    def supports_bfloat16(self) -> bool:
        """Whether the card computes bfloat16 in hardware; an emulated conversion does not count."""
        return self.capability >= (8, 0)

    @property
    def shared_memory_per_block(self) -> int:
        """Bytes of shared memory that one block can opt in to."""
        return _SHARED_MEMORY_PER_BLOCK.get(self.capability, _SHARED_MEMORY_WITHOUT_OPT_IN)


def emulated_devices(capabilities: Sequence[Capability], ranks: int) -> tuple[Device, ...]:
    """The cards that `VLLM_PRE_AMPERE_EMULATE` asks for, one a rank.

    Args:
        capabilities: one for all ranks, or one for each.
        ranks: how many ranks there are.

    Raises:
        ValueError: several capabilities, but not as many as there are ranks.
    """
    if len(capabilities) == 1:
        capabilities = list(capabilities) * ranks
    if len(capabilities) != ranks:
        raise ValueError(
            f"VLLM_PRE_AMPERE_EMULATE names {len(capabilities)} cards, but there are {ranks} ranks "
            "(tensor parallel x pipeline parallel x data parallel): give one capability for all "
            "ranks, or one for each"
        )
    return tuple(
        Device(index=rank, name=_EMULATED_NAMES[capability], capability=capability, emulated=True)
        for rank, capability in enumerate(capabilities)
    )


def order_as_cuda(
    devices: Sequence[Device],
    cuda_device_order: str | None,
    driver_order: Callable[[], Sequence[str]],
) -> tuple[Device, ...]:
    """The cards in the order in which CUDA numbers them before `CUDA_VISIBLE_DEVICES` is applied.

    NVML numbers cards by PCI bus. CUDA does so only where `CUDA_DEVICE_ORDER` is PCI_BUS_ID; its
    default is FASTEST_FIRST, whose order only the driver knows. Cards that are all alike keep their
    PCI order, so the driver is asked only where they differ.

    Args:
        devices: as NVML lists them.
        cuda_device_order: the value of `CUDA_DEVICE_ORDER`, or None.
        driver_order: UUIDs in the driver's order with every card visible.

    Raises:
        RuntimeError: the driver did not name a card that NVML lists.
    """
    by_bus = sorted(devices, key=lambda device: device.pci_bus_id)
    alike = len({(device.capability, device.name) for device in devices}) <= 1
    if alike or cuda_device_order == "PCI_BUS_ID":
        return tuple(by_bus)
    position = {uuid: place for place, uuid in enumerate(driver_order())}
    unknown = [device.uuid for device in by_bus if device.uuid not in position]
    if unknown:
        raise RuntimeError(
            f"the CUDA driver lists {len(position)} cards and NVML {len(by_bus)}; CUDA does not name "
            f"{', '.join(unknown)}. Set CUDA_DEVICE_ORDER=PCI_BUS_ID to number the cards by bus"
        )
    return tuple(sorted(by_bus, key=lambda device: position[device.uuid]))


def apply_visibility(
    devices: Sequence[Device], cuda_visible_devices: str | None
) -> tuple[Device, ...]:
    """The cards a process sees, renumbered from 0 as CUDA does.

    The rules are the driver's: entries are indices, or unique prefixes of UUIDs (GPU or MIG); the
    first entry that names no card ends the list; a card named twice makes none visible.

    Args:
        devices: all cards in CUDA's order.
        cuda_visible_devices: the value of `CUDA_VISIBLE_DEVICES`; None means all, "" means none.
    """
    if cuda_visible_devices is None:
        chosen = list(devices)
    else:
        chosen = []
        for entry in (part.strip() for part in cuda_visible_devices.split(",")):
            device = _named_device(devices, entry)
            if device is None:
                break
            if device in chosen:
                return ()
            chosen.append(device)
    return tuple(replace(device, index=index) for index, device in enumerate(chosen))


def _named_device(devices: Sequence[Device], entry: str) -> Device | None:
    if entry.isdecimal():
        return devices[int(entry)] if int(entry) < len(devices) else None
    if not entry.startswith(("GPU-", "MIG-")):
        return None
    named = [device for device in devices if device.uuid.startswith(entry)]
    return named[0] if len(named) == 1 else None


def participating_devices(visible: Sequence[Device], ranks: int) -> tuple[Device, ...]:
    """The cards that local ranks 0 to `ranks` - 1 use: rank i takes visible card i."""
    return tuple(visible[:ranks])


def current_device(visible: Sequence[Device]) -> Device:
    """The card of this process: the one it made current, whatever its rank is.

    On a box that mixes cards every process sees them all, so card 0 would answer for the wrong one.
    """
    import torch

    return visible[torch.accelerator.current_device_index()]


def any_pre_ampere(devices: Sequence[Device]) -> bool:
    """Whether one of the cards is Volta or Turing."""
    return any(device.is_pre_ampere for device in devices)


def lowest_capability(devices: Sequence[Device]) -> Capability:
    """The capability that a decision for all of `devices` has to respect.

    Raises:
        ValueError: `devices` is empty.
    """
    return min(device.capability for device in devices)


def nvml_devices() -> tuple[Device, ...]:
    """Every card of the machine as NVML lists it; empty where there is no NVIDIA driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        return tuple(
            _nvml_device(pynvml.nvmlDeviceGetHandleByIndex(index), index)
            for index in range(pynvml.nvmlDeviceGetCount())
        )
    finally:
        pynvml.nvmlShutdown()


def _nvml_device(handle: object, index: int) -> Device:
    import pynvml

    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Device(
        index=index,
        name=pynvml.nvmlDeviceGetName(handle),
        capability=(major, minor),
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        pci_bus_id=pynvml.nvmlDeviceGetPciInfo(handle).busId,
        total_memory=pynvml.nvmlDeviceGetMemoryInfo(handle).total,
    )


def driver_order() -> tuple[str, ...]:
    """UUIDs in the CUDA driver's own order, all cards visible.

    A process of its own asks: a process that has once called cuInit can no longer fork workers that
    use CUDA.

    Raises:
        RuntimeError: the driver could not be asked.
    """
    script = Path(__file__).with_name("cuda_order.py")
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    answer = subprocess.run(
        [sys.executable, "-I", str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if answer.returncode != 0:
        raise RuntimeError(
            f"the CUDA driver could not be asked for its device order: {answer.stderr.strip()}. "
            "Set CUDA_DEVICE_ORDER=PCI_BUS_ID to number the cards by bus"
        )
    return tuple(answer.stdout.split())


@functools.cache
def visible_devices(
    cuda_device_order: str | None, cuda_visible_devices: str | None
) -> tuple[Device, ...]:
    """The cards this process sees, in CUDA's order (see `order_as_cuda`, `apply_visibility`)."""
    ordered = order_as_cuda(nvml_devices(), cuda_device_order, driver_order)
    return apply_visibility(ordered, cuda_visible_devices)
