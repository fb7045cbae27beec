# SPDX-License-Identifier: Apache-2.0
"""The platform of a box with pre-Ampere cards. Imports only where upstream's CUDA build is."""

from collections.abc import Collection
from typing import TYPE_CHECKING, ClassVar

import torch
from vllm.platforms.cuda import CudaPlatform
from vllm.platforms.interface import DeviceCapability

from vllm.pre_ampere import environment
from vllm.pre_ampere.devices import (
    Capability,
    Device,
    current_device,
    emulated_devices,
    participating_devices,
    visible_devices,
)
from vllm.pre_ampere.platform import triton_set_up
from vllm.pre_ampere.platform.hooks import PreAmperePlatform, oldest

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class PreAmpereCudaPlatform(PreAmperePlatform, CudaPlatform):
    """Upstream's CUDA platform with our defaults, our refusals and the card that will run it."""

    own_attention_backends: ClassVar[Collection[str]] = ("TRITON_ATTN",)

    @classmethod
    def devices(cls, ranks: int) -> tuple[Device, ...]:
        return participating_devices(cls._visible(), ranks)

    @classmethod
    def worker_device(cls) -> Device:
        if not torch.cuda.is_initialized():
            raise RuntimeError("no device is current in this process: it is no worker")
        return current_device(cls._visible())

    @classmethod
    def answering_device(cls) -> Device:
        return cls.worker_device() if torch.cuda.is_initialized() else oldest(cls._visible())

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        super().check_and_update_config(vllm_config)
        additional = vllm_config.additional_config
        if isinstance(additional, dict):
            # A part of the key of upstream's compile cache: code of one lowering is not the other's.
            additional["pre_ampere_turing_mma"] = triton_set_up.tensor_cores_wanted()

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        """The first question in a worker after its device is set, so Triton is set up here."""
        triton_set_up.set_up(cls.worker_device())
        super().check_if_supports_dtype(dtype)

    @classmethod
    def _visible(cls) -> tuple[Device, ...]:
        return visible_devices(
            environment.CUDA_DEVICE_ORDER.get(), environment.CUDA_VISIBLE_DEVICES.get()
        )


class EmulatedCudaPlatform(PreAmpereCudaPlatform):
    """A newer card that answers, compiles and refuses as `VLLM_PRE_AMPERE_EMULATE` says."""

    def __init__(self) -> None:
        from vllm.pre_ampere import emulation

        capabilities = self._capabilities()
        cards = emulated_devices(capabilities, len(capabilities))
        emulation.start(cards, PreAmpereCudaPlatform._visible())

    @classmethod
    def devices(cls, ranks: int) -> tuple[Device, ...]:
        """The emulated cards of the ranks; as many as the variable lists, or all alike."""
        return emulated_devices(cls._capabilities(), ranks)

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        """Triton learns first which card it compiles for, then how."""
        from vllm.pre_ampere import emulation

        emulation.lower_for(cls.worker_device())
        super().check_if_supports_dtype(dtype)

    @classmethod
    def get_device_capability(cls, device_id: int | None = None) -> DeviceCapability:
        """Upstream's interface; `device_id` counts visible devices."""
        device = cls.answering_device() if device_id is None else cls._visible()[device_id]
        return DeviceCapability(*device.capability)

    @classmethod
    def get_device_name(cls, device_id: int | None = None) -> str:
        """Upstream's interface; `device_id` counts visible devices."""
        device = cls.answering_device() if device_id is None else cls._visible()[device_id]
        return device.name

    @classmethod
    def _visible(cls) -> tuple[Device, ...]:
        """The emulated cards in place of the visible ones."""
        capabilities = cls._capabilities()
        alike = len(capabilities) == 1
        return cls.devices(len(super()._visible()) if alike else len(capabilities))

    @classmethod
    def _capabilities(cls) -> tuple[Capability, ...]:
        capabilities = environment.EMULATE.get()
        assert capabilities is not None, "the emulated platform was chosen without its variable"
        return capabilities
