# SPDX-License-Identifier: Apache-2.0
"""The platform of a box with pre-Ampere cards. Imports only where upstream's CUDA build is installed."""

from collections.abc import Collection
from typing import ClassVar

import torch

from vllm.platforms.cuda import CudaPlatform
from vllm.pre_ampere import environment
from vllm.pre_ampere.devices import (
    Device,
    current_device,
    participating_devices,
    visible_devices,
)
from vllm.pre_ampere.platform.hooks import PreAmperePlatform, oldest


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
    def _visible(cls) -> tuple[Device, ...]:
        return visible_devices(
            environment.CUDA_DEVICE_ORDER.get(), environment.CUDA_VISIBLE_DEVICES.get()
        )
