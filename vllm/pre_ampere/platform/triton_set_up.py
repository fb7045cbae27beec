# SPDX-License-Identifier: Apache-2.0
"""What Triton is told in a worker, once its card is known and before it compiles a kernel."""

from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm.pre_ampere import environment, upstream_patches
from vllm.pre_ampere.devices import Device

if TYPE_CHECKING:
    from vllm.pre_ampere.kernels.triton.launch_configurations import Lowering

logger = init_logger("vllm.pre_ampere.platform.triton_set_up")

# A switch of the baseline pins the kernel it is named after; the small kernels of the prefill chain
# that have no switch of their own go with its first one.
_PINNED_BY = (
    (
        environment.KKT_SCHEDULE,
        ("chunk_scaled_dot_kkt", "chunk_local_cumsum", "solve_tril", "recompute_w_u"),
    ),
    (environment.DELTA_H_SCHEDULE, ("chunk_delta_h",)),
    (environment.CHUNK_O_SCHEDULE, ("chunk_o",)),
    (environment.RECURRENT_SCHEDULE, ("fused_recurrent",)),
    (environment.SIGMOID_GATING_SCHEDULE, ("fused_sigmoid_gating",)),
)


def tensor_cores_wanted() -> bool:
    """Whether the user left Turing's tensor-core lowering on."""
    return environment.TURING_MMA.get() is not False


def choose_lowering(device: Device, tensor_cores: bool) -> "Lowering":
    """Switch on how this process compiles matrix products for its card, and say which way it is.

    Args:
        device: the card of the process.
        tensor_cores: whether Turing's may be used where the card has them.
    """
    from vllm.pre_ampere.kernels.triton import turing_mma

    if device.is_volta:
        return "sm70"
    if not (tensor_cores and device.is_turing and device.has_tensor_cores and turing_mma.enable()):
        return "sm75"
    upstream_patches.scale_key_products_afterwards()
    if not environment.BATCH_INVARIANT.get():
        # A row's sum over keys has another order in a wider block.
        upstream_patches.widen_attention_of_prompts()
    return "sm75 tensor cores"


def set_up(device: Device) -> None:
    """Choose the lowering for this worker's card, and the launch configurations that suit it."""
    from vllm.pre_ampere.kernels.triton import launch_configurations

    lowering = choose_lowering(device, tensor_cores_wanted())
    if device.is_pre_ampere and environment.BATCH_INVARIANT.get():
        upstream_patches.multiply_in_tiles_by_rows(lowering)
    names = [name for switch, kernels in _PINNED_BY if switch.get() for name in kernels]
    pinned = launch_configurations.pin(lowering, names) if device.is_pre_ampere else {}
    logger.info("Triton lowering: %s; pinned: %s", lowering, ", ".join(pinned) or "nothing")
