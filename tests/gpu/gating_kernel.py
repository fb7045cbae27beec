# SPDX-License-Identifier: Apache-2.0
"""The gates of the delta rule by a kernel of their own, as before they were fused into it."""

import torch
import triton
import triton.language as tl


@triton.jit
def gdn_gating_kernel(
    a, b, A_log, dt_bias, g, beta, HEADS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    head = tl.arange(0, BLOCK)
    at = tl.program_id(0) * HEADS + head
    inside = head < HEADS
    x = tl.load(a + at, mask=inside).to(tl.float32) + tl.load(dt_bias + head, mask=inside).to(
        tl.float32
    )
    softplus = tl.where(x <= 20.0, tl.log(1.0 + tl.exp(x)), x)
    rate = tl.exp(tl.load(A_log + head, mask=inside).to(tl.float32))
    tl.store(g + at, -rate * softplus, mask=inside)
    tl.store(beta + at, tl.sigmoid(tl.load(b + at, mask=inside).to(tl.float32)), mask=inside)


def gate(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """g and beta, float32 [num_tokens, heads], of a and b."""
    tokens, heads = a.shape
    g = torch.empty(tokens, heads, dtype=torch.float32, device=a.device)
    beta = torch.empty_like(g)
    block = triton.next_power_of_2(heads)
    gdn_gating_kernel[(tokens,)](
        a.contiguous(), b.contiguous(), A_log, dt_bias, g, beta, HEADS=heads, BLOCK=block
    )
    return g, beta
