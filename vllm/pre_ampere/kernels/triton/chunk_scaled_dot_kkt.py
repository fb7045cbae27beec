# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The key products of a chunk, scaled by beta and the decay, on tensor cores.

The same quantity as `chunk_scaled_dot_kkt_fwd` of flash-linear-attention (vLLM 0.32's copy is in
third_party/flash_linear_attention/ops/chunk_scaled_dot_kkt.py). There, beta multiplies the keys
before their product, and since beta is fp32 the product is one of fp32, for which Turing has no
matrix instruction. beta is a factor of a whole row, so here it multiplies the product afterwards:
the operands are the fp16 keys as they are, their products are exact in the fp32 accumulator, and
one rounding (of key times beta) falls away.
"""

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["T"])
def chunk_scaled_dot_kkt_kernel(
    k,
    beta,
    g,
    out,
    cu_seqlens,
    chunk_indices,
    T,
    H: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_GATE: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """One chunk of one value head; grid (chunks, batch * H)."""
    head = tl.program_id(1) % H
    if VARLEN:
        sequence = tl.load(chunk_indices + tl.program_id(0) * 2)
        chunk = tl.load(chunk_indices + tl.program_id(0) * 2 + 1)
        first = tl.load(cu_seqlens + sequence)
        length = tl.load(cu_seqlens + sequence + 1) - first
    else:
        chunk = tl.program_id(0)
        first = (tl.program_id(1) // H) * T
        length = T
    lane = tl.arange(0, CHUNK)
    position = chunk * CHUNK + lane
    inside = position < length
    token = tl.cast(first, tl.int64) + position

    product = tl.zeros((CHUNK, CHUNK), tl.float32)
    key_row = (token * KEY_HEADS + head // (H // KEY_HEADS)) * K
    for start in tl.static_range(0, K, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        keys = tl.load(
            k + key_row[:, None] + column[None, :],
            mask=inside[:, None] & (column < K)[None, :],
            other=0.0,
        )
        product = tl.dot(keys, tl.trans(keys), product)

    earlier = (lane[:, None] > lane[None, :]) & inside[:, None]
    scale = tl.load(beta + token * H + head, mask=inside, other=0.0).to(tl.float32)[:, None]
    if HAS_GATE:
        decay = tl.load(g + token * H + head, mask=inside, other=0.0).to(tl.float32)
        # Masked before the exponential: above the diagonal it could overflow.
        scale = scale * tl.exp(tl.where(earlier, decay[:, None] - decay[None, :], 0.0))
    result = tl.where(earlier, product * scale, 0.0)
    at = out + (token * H + head)[:, None] * CHUNK + lane[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=inside[:, None])


def chunk_scaled_dot_kkt_fwd(
    k: torch.Tensor,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    chunk_size: int = 64,
    output_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """beta_i <k_i, k_j> exp(g_i - g_j) for j before i in the same chunk, and 0 for the others.

    Takes and returns what upstream's function of this name does. Rows of tokens that belong to no
    sequence are left unset.

    Args:
        k: [B, T, KEY_HEADS, K], contiguous; B is 1 with cu_seqlens.
        g: [B, T, H], the logarithm of the decay summed up within each chunk; None for no decay.
        beta: [B, T, H], of any floating type; H is a multiple of KEY_HEADS.
        cu_seqlens: [n + 1], integers: sequence i is tokens cu_seqlens[i] to cu_seqlens[i + 1] - 1.
        chunk_indices: [chunks, 2], (sequence, chunk in it); computed from cu_seqlens where None.
        chunk_size: tokens in a chunk, a power of two from 16 on.
        output_dtype: of the result.

    Returns:
        [B, T, H, chunk_size]; entry (…, i, h, j) belongs to token j of i's chunk.

    Raises:
        ValueError: beta is missing, or its heads are no multiple of the key heads.
    """
    batch, tokens, key_heads, head_dim = k.shape
    if beta is None:
        raise ValueError("chunk_scaled_dot_kkt_fwd needs beta, of shape [B, T, H]")
    heads = beta.shape[-1]
    if heads % key_heads:
        raise ValueError(
            f"{heads} value heads cannot share {key_heads} key heads evenly: "
            "the first must be a multiple of the second"
        )
    if cu_seqlens is not None and chunk_indices is None:
        from vllm.third_party.flash_linear_attention.ops.index import prepare_chunk_indices

        chunk_indices = prepare_chunk_indices(cu_seqlens, chunk_size)
    chunks = triton.cdiv(tokens, chunk_size) if chunk_indices is None else len(chunk_indices)
    out = torch.empty(batch, tokens, heads, chunk_size, device=k.device, dtype=output_dtype)
    chunk_scaled_dot_kkt_kernel[(chunks, batch * heads)](
        k,
        beta,
        g,
        out,
        cu_seqlens,
        chunk_indices,
        tokens,
        H=heads,
        KEY_HEADS=key_heads,
        K=head_dim,
        CHUNK=chunk_size,
        BLOCK_K=min(triton.next_power_of_2(head_dim), 64),
        HAS_GATE=g is not None,
        VARLEN=cu_seqlens is not None,
        num_warps=4,
        num_stages=1,
    )
    return out
