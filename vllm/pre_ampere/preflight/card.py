# SPDX-License-Identifier: Apache-2.0
"""Tell Triton, PyTorch and upstream that this process runs on a Volta or Turing card.

For a process that does nothing else: kernels are compiled by their real launchers, with the
arguments the launchers make, and are never run. `pose_as` has to be called before vLLM's kernels
are imported. What has a hook is given through it (Triton's active driver, upstream's platform); the
rest is replaced, each with the reason beside it.
"""

import gc
import types
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import torch
import triton
from triton.backends import Backend, backends
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from vllm.pre_ampere.devices import Capability, Device, emulated_devices

T = TypeVar("T")

# Streaming multiprocessors; launchers derive grids from it, never code.
_MULTIPROCESSORS = {(7, 0): 80, (7, 2): 8, (7, 5): 40}
_THREADS_PER_BLOCK = 1024


class _Utilities:
    """What Triton's runtime asks of the CUDA driver."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def get_device_properties(self, index: int) -> dict[str, int]:
        return {
            "max_shared_mem": self._device.shared_memory_per_block,
            "multiprocessor_count": _MULTIPROCESSORS[self._device.capability],
            "warpSize": 32,
            "max_num_regs": 65536,
        }

    def load_binary(
        self, name: str, binary: bytes, shared_memory: int, index: int
    ) -> tuple[int, int, int, int, int]:
        """(module, function, registers, spilled registers, threads a block may have)."""
        return 1, 1, 0, 0, _THREADS_PER_BLOCK

    def unload_module(self, module: int) -> None:
        pass


class _NoLaunch:
    """Stands where Triton's launcher of a compiled kernel stands; calling it does nothing."""

    def __init__(self, source: Any, metadata: Any) -> None:
        pass

    def __call__(self, *arguments: Any) -> None:
        pass


class OfflineDriver(DriverBase):
    """Triton's driver for a card that is not there. `device` is set by `pose_as`."""

    device: ClassVar[Device]

    def __init__(self) -> None:
        self.utils = _Utilities(self.device)
        self.launcher_cls = _NoLaunch

    @classmethod
    def is_active(cls) -> bool:
        """Triton chooses among the drivers that are."""
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Asked for by launchers that are generated; there is none here."""
        raise NotImplementedError("no launcher is generated for a card that is not there")

    def get_current_target(self) -> GPUTarget:
        """What to compile for."""
        major, minor = self.device.capability
        return GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_device(self) -> int:
        """There is one device."""
        return 0

    def set_current_device(self, index: int) -> None:
        """There is one device."""

    def get_current_stream(self, index: int) -> int:
        """Nothing is queued."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Where the launchers' tensors are."""
        return torch.device("cpu")

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """Each configuration is compiled by launching it once; all are equally fast."""

        def benchmark(launch: Callable[[], Any], quantiles: Sequence[float]) -> list[float]:
            launch()
            return [0.0] * len(quantiles)

        return benchmark


def pose_as(capability: Capability) -> Device:
    """Make this process answer as that card. Returns the card."""
    (device,) = emulated_devices([capability], 1)
    OfflineDriver.device = device
    backends["nvidia"] = Backend(backends["nvidia"].compiler, OfflineDriver)
    triton.runtime.driver.set_active(OfflineDriver())
    _answer_for_torch(device)
    _answer_for_vllm(device)
    return device


def _answer_for_torch(device: Device) -> None:
    """FLA asks PyTorch for the card's name and capability when it is imported (vLLM 0.32,
    third_party/flash_linear_attention/ops/utils.py); PyTorch has no driver that could be set."""
    properties = types.SimpleNamespace(
        name=device.name,
        major=device.capability[0],
        minor=device.capability[1],
        multi_processor_count=_MULTIPROCESSORS[device.capability],
        shared_memory_per_block_optin=device.shared_memory_per_block,
    )
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_name = lambda index=None: device.name  # type: ignore[assignment,return-value]
    torch.cuda.get_device_capability = lambda index=None: device.capability  # type: ignore[assignment,return-value]
    torch.cuda.get_device_properties = lambda index=None: properties  # type: ignore[assignment,return-value]


def _answer_for_vllm(device: Device) -> None:
    import vllm.platforms

    from vllm.pre_ampere.platform.hooks import PreAmperePlatform

    class OfflineCudaPlatform(PreAmperePlatform):
        """A CUDA platform that imports no CUDA library."""

        # A CUDA platform only when upstream's modules are imported (`see_cuda`): at import they
        # load libraries that a box without CUDA does not have.
        _enum = vllm.platforms.PlatformEnum.OOT
        device_name = "cuda"
        # Tensors are on the CPU, and upstream makes its own beside them.
        device_type = "cpu"
        dispatch_key = "CPU"

        @classmethod
        def devices(cls, ranks: int) -> tuple[Device, ...]:
            """A card for each rank."""
            return emulated_devices([device.capability], ranks)

        @classmethod
        def worker_device(cls) -> Device:
            """The card."""
            return device

        @classmethod
        def answering_device(cls) -> Device:
            """The card."""
            return device

        @classmethod
        def import_kernels(cls) -> None:
            """None of upstream's compiled operators is called."""

        @classmethod
        def is_pin_memory_available(cls) -> bool:
            """Tensors stay where they are."""
            return False

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            """Streaming multiprocessors of the card."""
            return _MULTIPROCESSORS[device.capability]

    vllm.platforms.current_platform = OfflineCudaPlatform()
    # vLLM's CPU build turns Triton off by its own version, whatever driver is active.
    vllm.platforms.vllm_version_matches_substr = lambda text: False
    import vllm.triton_utils

    assert vllm.triton_utils.HAS_TRITON, "vLLM hides Triton although a driver is active"


def see_cuda() -> None:
    """Let upstream's launchers, now imported, take their branches for CUDA."""
    import vllm.platforms

    type(vllm.platforms.current_platform)._enum = vllm.platforms.PlatformEnum.CUDA


def forget_compiled_kernels() -> None:
    """Empty Triton's caches in memory, so that the next launch of each kernel is seen again."""
    for kernel in kernels(JITFunction):
        kernel.device_caches.clear()
    for tuner in kernels(Autotuner):
        tuner.cache.clear()


def kernels(kind: type[T]) -> list[T]:
    """Every Triton kernel, or autotuner of one, that this process has made."""
    # By its type alone: asking a lazily imported module for its class would import it.
    return [found for found in gc.get_objects() if issubclass(type(found), kind)]
