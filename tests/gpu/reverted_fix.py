# SPDX-License-Identifier: Apache-2.0
"""One fix taken back, in every process of a server, for a run that shows what the fix is for.

A plug-in of upstream's (`vllm.general_plugins`), registered by benchmarks/emulated_serve.py and
told by `EMULATED_SERVE_REVERT` which fix: "baseline" or "verification". The prefill choice and the
device gate need no code: the first is shown by a launch, the second by
`VLLM_SM70_QWEN_GDN_FULL_FORWARD=1`.
"""

import os
from typing import Any

import torch


def register() -> None:
    fix = os.environ["EMULATED_SERVE_REVERT"]
    {"baseline": _ask_for_volta_exactly, "verification": _verify_with_two_kernels}[fix]()


def _ask_for_volta_exactly() -> None:
    """The baseline's gate as it was: capability 7.0, so a box of Turing cards gets no defaults."""
    from vllm.pre_ampere import baseline

    baseline._any_participating_device_is_pre_ampere = lambda devices: any(
        device.capability == (7, 0) for device in devices
    )


def _verify_with_two_kernels() -> None:
    """Gating in a kernel of its own, then the recurrence, on upstream's route for verification."""
    from vllm.pre_ampere import environment
    from vllm.pre_ampere.kernels import upstream

    environment.PACKED_RECURRENT_DECODE.set("0")

    upstream.fused_sigmoid_gating_delta_rule_update = _gate_then_recur


def _gate_then_recur(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_accepted_tokens: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    from gating_kernel import gate
    from vllm.third_party.flash_linear_attention.ops import fused_recurrent

    g, beta = gate(a, b, A_log, dt_bias)
    extra: dict[str, Any] = {"scale": scale} if scale is not None else {}
    out, _ = fused_recurrent.fused_recurrent_gated_delta_rule(
        q=q.unsqueeze(0),
        k=k.unsqueeze(0),
        v=v.unsqueeze(0),
        g=g.unsqueeze(0),
        beta=beta.unsqueeze(0),
        initial_state=state,
        inplace_final_state=True,
        cu_seqlens=query_start_loc,
        ssm_state_indices=slots,
        num_accepted_tokens=num_accepted_tokens,
        use_qk_l2norm_in_kernel=True,
        **extra,
    )
    return out.squeeze(0)
