# SPDX-License-Identifier: Apache-2.0
"""The chunked reference against the recurrence, transformers, and itself cut at other places."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5

from vllm.pre_ampere.kernels.reference.chunk import (
    chunk_gated_delta_rule,
    post_convolution,
    recurrent_gated_delta_rule,
)
from vllm.pre_ampere.kernels.reference.recurrent import fused_sigmoid_gating_delta_rule_update

KEY_DIM, VALUE_DIM = 8, 6
SEEDS = st.integers(0, 2**32 - 1)
LENGTHS = st.lists(st.integers(0, 90), min_size=1, max_size=4)


def inputs(
    seed: int,
    tokens: int,
    num_states: int,
    dtype: torch.dtype = torch.float64,
    dims: tuple[int, int] = (KEY_DIM, VALUE_DIM),
) -> tuple[tuple[Tensor, ...], Tensor]:
    """(q, k, v, g, beta) with unit queries and keys, and the states, in float32 unless dtype is
    float64."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(normal(tokens, 2, dims[0]), dim=-1) for _ in "qk")
    v = normal(tokens, 4, dims[1])
    g = -torch.nn.functional.softplus(2 * normal(tokens, 4))
    beta = normal(tokens, 4).sigmoid()
    state = normal(num_states, 4, dims[1], dims[0])
    return (q.to(dtype), k.to(dtype), v.to(dtype), g.to(wide), beta.to(wide)), state.to(wide)


def boundaries(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.sampled_from([1, 3, 16, 64]), SEEDS)
def test_chunks_equal_the_recurrence(lengths: list[int], chunk_size: int, seed: int) -> None:
    tensors, state = inputs(seed, sum(lengths), len(lengths))
    before = state.clone()
    out, final = chunk_gated_delta_rule(*tensors, state, boundaries(lengths), chunk_size=chunk_size)
    expected, expected_final = recurrent_gated_delta_rule(*tensors, state, boundaries(lengths))
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(final, expected_final, rtol=1e-10, atol=1e-11)
    assert torch.equal(state, before)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 150), min_size=1, max_size=3), SEEDS)
def test_chunks_agree_with_transformers(lengths: list[int], seed: int) -> None:
    tensors, state = inputs(seed, sum(lengths), len(lengths), torch.float32)
    out, final = chunk_gated_delta_rule(*tensors, state, boundaries(lengths))
    for request, (start, end) in enumerate(pairwise(boundaries(lengths).tolist())):
        q, k, v, g, beta = (x[None, start:end] for x in tensors)
        expected, expected_final = modeling_qwen3_5.torch_chunk_gated_delta_rule(
            q.repeat_interleave(2, 2),
            k.repeat_interleave(2, 2),
            v,
            g=g,
            beta=beta,
            initial_state=state[request, None].mT,
            output_final_state=True,
        )
        torch.testing.assert_close(out[start:end], expected[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(final[request], expected_final[0].mT, rtol=1e-4, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 150), SEEDS, st.data())
def test_a_prompt_cut_anywhere_carries_its_state(
    tokens: int, seed: int, data: st.DataObject
) -> None:
    tensors, state = inputs(seed, tokens, 1)
    cut = data.draw(st.integers(0, tokens))
    out, final = chunk_gated_delta_rule(*tensors, state, boundaries([tokens]))
    first, carried = chunk_gated_delta_rule(*(x[:cut] for x in tensors), state, boundaries([cut]))
    second, cut_final = chunk_gated_delta_rule(
        *(x[cut:] for x in tensors), carried, boundaries([tokens - cut])
    )
    torch.testing.assert_close(torch.cat([first, second]), out, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(cut_final, final, rtol=1e-10, atol=1e-11)


@settings(max_examples=30, deadline=None)
@given(LENGTHS, SEEDS, st.data())
def test_cut_at_chunks_or_batched_the_result_is_the_same_bit_for_bit(
    lengths: list[int], seed: int, data: st.DataObject
) -> None:
    size = 16
    tensors, state = inputs(seed, sum(lengths), len(lengths), torch.float16)
    out, final = chunk_gated_delta_rule(*tensors, state, boundaries(lengths), chunk_size=size)
    for request, (start, end) in enumerate(pairwise(boundaries(lengths).tolist())):
        cut = start + size * data.draw(st.integers(0, (end - start) // size))
        carried, pieces = state[request : request + 1], []
        for rows in (slice(start, cut), slice(cut, end)):
            piece, carried = chunk_gated_delta_rule(
                *(x[rows] for x in tensors),
                carried,
                boundaries([rows.stop - rows.start]),
                chunk_size=size,
            )
            pieces.append(piece)
        assert torch.equal(torch.cat(pieces), out[start:end])
        assert torch.equal(carried[0], final[request])


@pytest.mark.parametrize("threads", [1, 2])
def test_chunked_prefill_is_the_same_bit_for_bit_at_a_models_size(threads: int) -> None:
    tensors, state = inputs(0, 400, 2, torch.float16, dims=(128, 128))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out, final = chunk_gated_delta_rule(*tensors, state, boundaries([300, 100]))
        first, carried = chunk_gated_delta_rule(
            *(x[:128] for x in tensors), state[:1], boundaries([128])
        )
        second, cut_final = chunk_gated_delta_rule(
            *(x[128:300] for x in tensors), carried, boundaries([172])
        )
    finally:
        torch.set_num_threads(before)
    assert torch.equal(torch.cat([first, second]), out[:300])
    assert torch.equal(cut_final[0], final[0])


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 100), SEEDS, st.data())
def test_a_token_does_not_see_later_ones(tokens: int, seed: int, data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, tokens - 1))
    tensors, state = inputs(seed, tokens, 1, torch.float16)
    others, _ = inputs(seed + 1, tokens, 1, torch.float16)
    changed = [torch.cat([x[:cut], y[cut:]]) for x, y in zip(tensors, others, strict=True)]
    out, _ = chunk_gated_delta_rule(*tensors, state, boundaries([tokens]))
    changed_out, _ = chunk_gated_delta_rule(*changed, state, boundaries([tokens]))
    assert torch.equal(out[:cut], changed_out[:cut])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_results_are_the_float64_ones_rounded_once(dtype: torch.dtype) -> None:
    tensors, state = inputs(7, 60, 2, dtype)
    layout = boundaries([23, 37])
    out, final = chunk_gated_delta_rule(*tensors, state, layout)
    exact, exact_final = chunk_gated_delta_rule(
        *(x.double() for x in tensors), state.double(), layout
    )
    assert out.dtype == dtype
    assert final.dtype == torch.float32
    assert torch.equal(out, exact.to(dtype))
    assert torch.equal(final, exact_final.float())


@pytest.mark.parametrize("decay", [0.0, -1e-6, -50.0, -2000.0])
def test_no_decay_is_too_weak_or_too_strong(decay: float) -> None:
    (q, k, v, g, beta), state = inputs(3, 130, 1)
    tensors = (q, k, v, torch.full_like(g, decay), beta)
    out, final = chunk_gated_delta_rule(*tensors, state, boundaries([130]))
    expected, expected_final = recurrent_gated_delta_rule(*tensors, state, boundaries([130]))
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(final, expected_final, rtol=1e-9, atol=1e-10)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 80), SEEDS)
def test_a_prefilled_prompt_equals_a_decoded_one(tokens: int, seed: int) -> None:
    """post_convolution and the chunks against the decode routine, which gates and normalises."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mixed = normal(tokens, 2 * 2 * KEY_DIM + 4 * VALUE_DIM)
    a, b, A_log, dt_bias = normal(tokens, 4), normal(tokens, 4), normal(4), normal(4)
    state = normal(2, 4, VALUE_DIM, KEY_DIM)
    prepared = post_convolution(mixed, a, b, A_log, dt_bias, 2, KEY_DIM, VALUE_DIM)
    out, final = chunk_gated_delta_rule(*prepared, state[1:], boundaries([tokens]))

    q, k, v = mixed.split([2 * KEY_DIM, 2 * KEY_DIM, 4 * VALUE_DIM], dim=1)
    expected = torch.stack(
        [
            fused_sigmoid_gating_delta_rule_update(
                q[i].reshape(1, 2, KEY_DIM),
                k[i].reshape(1, 2, KEY_DIM),
                v[i].reshape(1, 4, VALUE_DIM),
                *(a[i : i + 1], b[i : i + 1], A_log, dt_bias, state),
                torch.tensor([1]),
                torch.tensor([0, 1]),
            )[0]
            for i in range(tokens)
        ]
    )
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(final[0], state[1], rtol=1e-9, atol=1e-10)
