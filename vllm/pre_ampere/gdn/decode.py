# SPDX-License-Identifier: Apache-2.0
"""Which kernels run the rest of the recurrent core: convolution, decode and verification."""

from collections.abc import Callable
from typing import Any

from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm.pre_ampere.devices import Device
from vllm.pre_ampere.gdn.core import GatedDeltaNetKernels
from vllm.pre_ampere.kernels import registry
from vllm.pre_ampere.kernels.kernel import Problem

logger = init_logger("vllm.pre_ampere.gdn.decode")


def resolve_gdn_kernels(layer: Any, device: Device) -> GatedDeltaNetKernels:
    """Choose each operation's kernel for one rank's card.

    Args:
        layer: upstream's layer; its head dimensions and dtype are read.
        device: the card of the rank.

    Raises:
        registry.KernelUnavailableError: an operation has no kernel that can run.
    """
    excluded = registry.switched_off()

    def load(operation: str) -> Callable[..., Any]:
        problem = Problem(operation, layer.model_config.dtype, layer.head_k_dim, layer.head_v_dim)
        selection = registry.select(
            operation,
            problem,
            device,
            on_cpu=current_platform.is_cpu(),
            excluded=excluded,
        )
        logger.info_once("%s kernel: %s", operation, selection.kernel.name)
        return selection.kernel.load()

    return GatedDeltaNetKernels(
        causal_conv1d_prefill=load("convolution_prefill"),
        causal_conv1d_update=load("convolution_update"),
        packed_delta_rule_update=load("gdn_decode"),
        post_convolution=load("gdn_post_convolution"),
    )
