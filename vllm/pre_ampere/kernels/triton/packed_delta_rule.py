# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Decode and verification of a GDN layer in one kernel, from the convolution's output to the rows.

Gates, normalisation and the gated delta rule a token at a time: Yang, Kautz, Hatamizadeh, "Gated
Delta Networks" (arXiv 2412.06464); the definition is `kernels/reference/recurrent.py`. Slots and
accepted counts mean what they mean to `fused_sigmoid_gating_delta_rule_update` in vLLM 0.32
(third_party/flash_linear_attention/ops/fused_sigmoid_gating.py).

A token's result does not depend, to the last bit, on how many tokens its request brings along: one
program walks through a request's tokens with tiles of one size, the state is rounded to its dtype
after each, and multiplications and additions are fused only where the kernel says so, not where a
compiler sees fit, which for a loop and for a single token need not be the same places.
"""

import triton
import triton.language as tl
from torch import Tensor

MAX_HEAD_DIM_K = 256
"""The largest K: a warp holds a tile of the state in its registers, BLOCK_V rows of K."""

# One warp a program, so that no sum crosses warps and nothing waits at a barrier. Eight rows of
# K=128 are 32 registers a thread, and a layer of 32 value heads is 512 programs a request: enough
# for every multiprocessor of these cards to have loads in flight when there is one request.
BLOCK_V = 8
NUM_WARPS = 1


@triton.jit
def packed_delta_rule_kernel(
    mixed_qkv,
    a,
    b,
    A_log,
    dt_bias,
    state,
    slots,
    query_start_loc,
    num_accepted_tokens,
    out,
    scale,
    mixed_qkv_stride,
    a_stride,
    b_stride,
    state_stride,
    slots_request_stride,
    slots_token_stride,
    out_stride,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    RAGGED: tl.constexpr,
    SPECULATIVE: tl.constexpr,
):
    """One request, one value head, BLOCK_V rows of the state; all tokens of the request."""
    v_blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0)
    v_block = program % v_blocks
    head = program // v_blocks % HV
    request = program // v_blocks // HV
    if RAGGED:
        token = tl.load(query_start_loc + request)
        count = tl.load(query_start_loc + request + 1) - token
    else:
        token = request
        count = 1
    if count <= 0:
        return
    token = tl.cast(token, tl.int64)

    k_index = tl.arange(0, BLOCK_K)
    v_index = v_block * BLOCK_V + tl.arange(0, BLOCK_V)
    k_inside = k_index < K
    v_inside = v_index < V
    inside = v_inside[:, None] & k_inside[None, :]
    q_at = mixed_qkv + token * mixed_qkv_stride + head // (HV // H) * K + k_index
    v_at = mixed_qkv + token * mixed_qkv_stride + 2 * H * K + head * V + v_index
    a_at = a + token * a_stride + head
    b_at = b + token * b_stride + head
    out_at = out + token * out_stride + head * V + v_index
    slots_at = slots + tl.cast(request, tl.int64) * slots_request_stride

    source_at = slots_at
    if SPECULATIVE:
        source_at += (tl.load(num_accepted_tokens + request) - 1) * slots_token_stride
    source = tl.cast(tl.load(source_at), tl.int64)
    if source <= 0:
        for _ in range(count):
            tl.store(out_at, tl.zeros([BLOCK_V], out.dtype.element_ty), mask=v_inside)
            out_at += out_stride
        return

    state_at = state + head * V * K + v_index[:, None] * K + k_index[None, :]
    # Read whole before the first store, so that a slot may be both source and target.
    current = tl.load(state_at + source * state_stride, mask=inside, other=0.0).to(tl.float32)
    rate = -tl.exp(tl.load(A_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)

    for _ in range(count):
        q = tl.load(q_at, mask=k_inside, other=0.0).to(tl.float32)
        k = tl.load(q_at + H * K, mask=k_inside, other=0.0).to(tl.float32)
        v = tl.load(v_at, mask=v_inside, other=0.0).to(tl.float32)
        x = tl.load(a_at).to(tl.float32) + bias
        beta = tl.sigmoid(tl.load(b_at).to(tl.float32))

        decay = tl.exp(rate * tl.where(x <= 20.0, tl.log(1.0 + tl.exp(x)), x))
        q = q * tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * scale
        k = k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
        current = current * decay
        written = (v - tl.sum(current * k[None, :], 1)) * beta
        written_k = tl.broadcast_to(written[:, None], [BLOCK_V, BLOCK_K])
        current = tl.fma(written_k, tl.broadcast_to(k[None, :], [BLOCK_V, BLOCK_K]), current)
        read = tl.sum(current * q[None, :], 1)
        tl.store(out_at, read.to(out.dtype.element_ty), mask=v_inside)

        rounded = current.to(state.dtype.element_ty)
        target = tl.cast(tl.load(slots_at), tl.int64)
        if target > 0:
            tl.store(state_at + target * state_stride, rounded, mask=inside)
        current = rounded.to(tl.float32)

        q_at += mixed_qkv_stride
        v_at += mixed_qkv_stride
        a_at += a_stride
        b_at += b_stride
        out_at += out_stride
        slots_at += slots_token_stride


def packed_delta_rule_update(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    slots: Tensor,
    query_start_loc: Tensor | None,
    num_accepted_tokens: Tensor | None,
    out: Tensor,
) -> Tensor:
    """Update the state slots and write the rows of one decode or verification step; one launch.

    Only the first dimension of a tensor may be strided, and both of slots.

    Args:
        mixed_qkv: [num_tokens, 2 H K + HV V]: queries, keys and values of all heads side by side,
            fp16, bf16 or fp32, as the convolution left them.
        a, b: [num_tokens, HV], the inputs of the gates.
        A_log, dt_bias: [HV].
        state: [num_slots, HV, V, K], fp32, fp16 or bf16, updated in place.
        slots: int32 or int64. [n] for one token a request, read and written. [n, k + 1] for
            verification: the state after a request's token j goes to slots[i, j]; no request may
            have more tokens, which only the card could check.
        query_start_loc: [n + 1], int32 or int64; a request may have no tokens, as padding has. None
            means one token a request.
        num_accepted_tokens: [n], at least 1: the state is read from slots[i, accepted - 1]. None
            means from slots[i, 0].
        out: [num_tokens, HV, V], written. Zero for a request whose read slot is 0 or below, which
            is skipped; a state that would go to such a slot is not stored.

    Returns:
        out.

    Raises:
        ValueError: shapes or strides do not fit together, or K is above `MAX_HEAD_DIM_K`.
    """
    value_heads, head_dim_v, head_dim_k = state.shape[1:]
    width, tokens = mixed_qkv.shape[1], len(mixed_qkv)
    key_heads, rest = divmod(width - value_heads * head_dim_v, 2 * head_dim_k)
    if rest or key_heads < 1 or value_heads % key_heads:
        raise ValueError(
            f"mixed_qkv has rows of {width}, which are not queries, keys and values for a state of "
            f"{value_heads} value heads, V={head_dim_v} and K={head_dim_k}"
        )
    if head_dim_k > MAX_HEAD_DIM_K:
        raise ValueError(f"K is {head_dim_k}; this kernel takes K up to {MAX_HEAD_DIM_K}")
    for name, tensor, row in (
        ("a", a, (value_heads,)),
        ("b", b, (value_heads,)),
        ("out", out, (value_heads, head_dim_v)),
    ):
        if tensor.shape != (tokens, *row):
            raise ValueError(f"{name} is {tuple(tensor.shape)}; {(tokens, *row)} is needed")
    for name, tensor in (
        ("mixed_qkv", mixed_qkv),
        ("a", a),
        ("b", b),
        ("state", state),
        ("out", out),
    ):
        if not _rows_are_contiguous(tensor):
            raise ValueError(f"{name} has strides {tensor.stride()}; only the first may be free")
    requests = len(slots)
    if query_start_loc is None and requests != tokens:
        raise ValueError(
            f"{tokens} tokens for {requests} requests need query_start_loc, "
            "which says whose they are"
        )
    if requests == 0:
        return out
    packed_delta_rule_kernel[(requests * value_heads * triton.cdiv(head_dim_v, BLOCK_V),)](
        mixed_qkv,
        a,
        b,
        A_log,
        dt_bias,
        state,
        slots,
        query_start_loc,
        num_accepted_tokens,
        out,
        head_dim_k**-0.5,
        mixed_qkv.stride(0),
        a.stride(0),
        b.stride(0),
        state.stride(0),
        slots.stride(0),
        slots.stride(1) if slots.dim() == 2 else 0,
        out.stride(0),
        H=key_heads,
        HV=value_heads,
        K=head_dim_k,
        V=head_dim_v,
        BLOCK_K=triton.next_power_of_2(head_dim_k),
        BLOCK_V=BLOCK_V,
        RAGGED=query_start_loc is not None,
        SPECULATIVE=num_accepted_tokens is not None,
        num_warps=NUM_WARPS,
        num_stages=1,
        enable_fp_fusion=False,
    )
    return out


def _rows_are_contiguous(tensor: Tensor) -> bool:
    """Whether all dimensions but the first lie as in a contiguous tensor."""
    expected = 1
    for size, stride in zip(tensor.shape[:0:-1], tensor.stride()[:0:-1], strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
