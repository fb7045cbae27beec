# SPDX-License-Identifier: Apache-2.0
"""Cases for Triton's interpreter, chosen by TRITON_INTERPRET=1 before Triton is imported.

`test_chunk_scaled_dot_kkt.py` runs them in a process of their own.
"""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm.pre_ampere.kernels.triton.chunk_scaled_dot_kkt import chunk_scaled_dot_kkt_fwd


def _float64(k: Tensor, g: Tensor | None, beta: Tensor, lengths: list[int], chunk: int) -> Tensor:
    """From the definition, entry by entry of each chunk; k [T, KEY_HEADS, K]."""
    heads = beta.shape[-1]
    k = k.double().repeat_interleave(heads // k.shape[1], 1)
    out = torch.zeros(k.shape[0], heads, chunk, dtype=torch.float64)
    first = 0
    for length in lengths:
        for start in range(first, first + length, chunk):
            rows = slice(start, min(start + chunk, first + length))
            product = torch.einsum("ihd,jhd->ihj", k[rows], k[rows])
            product *= beta[rows].double()[:, :, None]
            if g is not None:
                decay = g[rows].double()
                product *= (decay[:, :, None] - decay.T[None]).exp()
            size = product.shape[0]
            later = torch.ones(size, size, dtype=torch.bool).triu()
            out[rows, :, :size] = product.masked_fill(later[:, None, :], 0.0)
        first += length
    return out


@settings(max_examples=6, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=2),
    key_heads=st.integers(1, 2),
    group=st.integers(1, 2),
    head_dim=st.sampled_from([64, 100, 128]),
    chunk=st.sampled_from([32, 64]),
    gated=st.booleans(),
    half_beta=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_the_products_of_ragged_sequences(
    lengths: list[int],
    key_heads: int,
    group: int,
    head_dim: int,
    chunk: int,
    gated: bool,
    half_beta: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens, heads = sum(lengths), key_heads * group
    keys = torch.randn(tokens, key_heads, head_dim, generator=generator)
    k = torch.nn.functional.normalize(keys, dim=-1).half()
    beta = torch.rand(tokens, heads, generator=generator)
    beta = beta.half() if half_beta else beta
    g = -torch.rand(tokens, heads, generator=generator).cumsum(0) / 8 if gated else None
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    indices = torch.tensor(
        [(i, c) for i, length in enumerate(lengths) for c in range(-(-length // chunk))]
    )
    out = chunk_scaled_dot_kkt_fwd(
        k[None], None if g is None else g[None], beta[None], starts, indices, chunk
    )
    expected = _float64(k, g, beta, lengths, chunk)
    torch.testing.assert_close(out[0].double(), expected, rtol=2e-5, atol=1e-6)


def test_a_batch_of_equal_lengths() -> None:
    generator = torch.Generator().manual_seed(1)
    k = torch.randn(2, 70, 1, 32, generator=generator).half() / 8
    beta = torch.rand(2, 70, 2, generator=generator)
    out = chunk_scaled_dot_kkt_fwd(k, None, beta)
    for one, keys, factor in zip(out, k, beta, strict=True):
        expected = _float64(keys, None, factor, [70], 64)
        torch.testing.assert_close(one.double(), expected, rtol=2e-5, atol=1e-6)
