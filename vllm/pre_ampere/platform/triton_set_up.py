# SPDX-License-Identifier: Apache-2.0
"""What Triton is told in a worker, once its card is known and before it compiles a kernel."""

from vllm.logger import init_logger

from vllm.pre_ampere import environment, upstream_patches
from vllm.pre_ampere.devices import Device

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


def set_up(device: Device) -> None:
    """Choose the lowering for this worker's card, and pin the launch configurations under it."""
    from vllm.pre_ampere.kernels.triton import launch_configurations, turing_mma

    lowering: launch_configurations.Lowering = "sm70" if device.is_volta else "sm75"
    suits = device.is_turing and device.has_tensor_cores and tensor_cores_wanted()
    if suits and turing_mma.enable():
        lowering = "sm75 tensor cores"
        upstream_patches.scale_key_products_afterwards()
    names = [name for switch, kernels in _PINNED_BY if switch.get() for name in kernels]
    pinned = launch_configurations.pin(lowering, names) if device.is_pre_ampere else {}
    logger.info("Triton lowering: %s; pinned: %s", lowering, ", ".join(pinned) or "nothing")
