# SPDX-License-Identifier: Apache-2.0
"""The guards that need no more than the configuration and the cards."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from vllm.pre_ampere import environment
from vllm.pre_ampere.devices import Device
from vllm.pre_ampere.guards.action import Action

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_SCHEDULERS = "vllm.pre_ampere.guards.nan_logits"


def fail_requests_with_nan_logits(vllm_config: "VllmConfig") -> Action | None:
    """Have upstream count NaN logits, and its scheduler fail the requests that have some.

    Only for float16, which a model trained in bfloat16 can overflow. Called after upstream has
    decided on asynchronous scheduling, which has a scheduler class of its own.
    """
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    if model is None or model.dtype != torch.float16 or model.runner_type != "generate":
        return None
    chosen = scheduler.scheduler_cls
    ours = isinstance(chosen, str) and chosen.startswith(_SCHEDULERS)
    if (chosen is not None and not ours) or environment.COMPUTE_NANS_IN_LOGITS.get() is False:
        setting = (
            f"{environment.COMPUTE_NANS_IN_LOGITS.name}=0"
            if chosen is None or ours
            else f"--scheduler-cls {chosen}"
        )
        return Action(
            "nan-logits",
            "Requests with NaN logits are not failed",
            f"{setting} was asked for",
            "Leave it out to have them fail instead of streaming token 0",
        )
    environment.COMPUTE_NANS_IN_LOGITS.set("1")
    kind = "NanCheckingAsyncScheduler" if scheduler.async_scheduling else "NanCheckingScheduler"
    scheduler.scheduler_cls = f"{_SCHEDULERS}.{kind}"
    return Action(
        "nan-logits",
        "Requests with NaN logits fail",
        "float16 ends at 65504, and a model trained in bfloat16 can go beyond",
        f"Set {environment.COMPUTE_NANS_IN_LOGITS.name}=0 to have it otherwise",
    )


def choose_reductions_by_rule(vllm_config: "VllmConfig") -> Action | None:
    """With `VLLM_BATCH_INVARIANT=1`, Inductor chooses a reduction's configuration without timing.

    It times a few, and the order of a row's sum is one that a configuration has: two servers of the
    same model could differ in the last bit of a norm.
    """
    from vllm.config import CompilationMode

    compilation = vllm_config.compilation_config
    if not environment.BATCH_INVARIANT.get() or compilation.mode == CompilationMode.NONE:
        return None
    chosen = compilation.inductor_compile_config
    if not chosen.setdefault("deterministic", True):
        return Action(
            "batch-invariance",
            "Inductor times configurations of reductions, whose sums differ in their order",
            f"deterministic={chosen['deterministic']} was asked for beside "
            f"{environment.BATCH_INVARIANT.name}=1",
            "Leave it out for the same bits from every server",
        )
    # Upstream lets it time whether kernels are worth combining, which this mode refuses.
    chosen["benchmark_combo_kernel"] = False
    return Action(
        "batch-invariance",
        "Inductor chooses the configurations of its reductions without timing them",
        f"{environment.BATCH_INVARIANT.name}=1 asks for the same bits in every batch, and the order "
        "of a sum is part of a configuration",
        'Pass --compilation-config \'{"inductor_compile_config": {"deterministic": false}}\' to '
        "have it otherwise",
    )


def say_where_prompts_are_split(vllm_config: "VllmConfig") -> Action | None:
    """With `VLLM_BATCH_INVARIANT=1`, the prefix cache of a GDN model still splits prompts.

    A prompt ends a step at the cache's blocks, whose size depends on the number of drafts, and the
    chunks of a GDN layer begin anew there. The answer is as right, and its last bits are others.
    """
    if not environment.BATCH_INVARIANT.get() or not vllm_config.cache_config.enable_prefix_caching:
        return None
    if vllm_config.model_config is None or not vllm_config.model_config.is_hybrid:
        return None
    return Action(
        "batch-invariance",
        "Prompts are split at the blocks of the prefix cache",
        "their size depends on the number of drafts, and GDN layers round otherwise where a prompt is "
        "split",
        "Pass --no-enable-prefix-caching for the same bits with speculation and without",
    )


def say_that_tensor_cores_are_missing(
    vllm_config: "VllmConfig", devices: Sequence[Device]
) -> Action | None:
    """Announce what Turing cards without tensor cores get in place of float16 products.

    The products themselves are replaced in the workers; see `without_tensor_cores`.
    """
    bare = [device for device in devices if device.is_turing and not device.has_tensor_cores]
    # With batch invariance, Triton multiplies.
    if not bare or vllm_config.model_config is None or environment.BATCH_INVARIANT.get():
        return None
    names = ", ".join(sorted({device.name for device in bare}))
    return Action(
        "no-tensor-cores",
        "Unquantised float16 products of more than one row are computed in float32",
        f"{names} has capability 7.5 but no tensor cores, and float16 products of two rows were "
        "reported to run at a twentieth of the speed of one row",
        "A card with tensor cores is several times as fast",
    )
