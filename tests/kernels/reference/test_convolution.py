# SPDX-License-Identifier: Apache-2.0
"""The convolution reference against torch's conv1d, transformers, and itself a token at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5

from vllm.pre_ampere.kernels.reference.convolution import (
    causal_conv1d_prefill,
    causal_conv1d_update,
)

DIM = 6
WIDTHS = st.integers(2, 5)
SEEDS = st.integers(0, 2**32 - 1)


def generator_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def convolve(history: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """conv1d and SiLU over history [dim, width - 1] and then x [tokens, dim]."""
    padded = torch.cat([history, x.T], dim=1)[None]
    out = torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=weight.shape[0])[0].T
    return out * torch.sigmoid(out)


@settings(max_examples=50, deadline=None)
@given(WIDTHS, st.lists(st.integers(0, 9), min_size=1, max_size=4), st.booleans(), SEEDS, st.data())
def test_prefill_is_a_convolution_that_leaves_its_last_inputs(
    width: int, lengths: list[int], with_bias: bool, seed: int, data: st.DataObject
) -> None:
    generator = generator_of(seed)
    n, tokens = len(lengths), sum(lengths)
    spare = data.draw(st.integers(0, 3))
    x, weight = normal(generator, tokens, DIM), normal(generator, DIM, width)
    bias = normal(generator, DIM) if with_bias else None
    states = normal(generator, n + 3, DIM, width - 1 + spare)
    slots = (1 + torch.randperm(n + 2, generator=generator)[:n]).int()
    for request in data.draw(st.sets(st.integers(0, n - 1), max_size=1)):
        slots[request] = data.draw(st.sampled_from([0, -1]))
    has_initial = torch.rand(n, generator=generator) < 0.5
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]

    updated = states.clone()
    out = causal_conv1d_prefill(
        x, weight, bias, "silu", updated, torch.tensor(starts), slots, has_initial
    )

    expected, expected_states = torch.zeros_like(x), states.clone()
    for request, slot in enumerate(slots.tolist()):
        rows = slice(starts[request], starts[request + 1])
        if slot <= 0 or lengths[request] == 0:
            continue
        history = states[slot, :, : width - 1] * has_initial[request]
        expected[rows] = convolve(history, x[rows], weight, bias)
        last = torch.cat([history, x[rows].T], dim=1)[:, -(width - 1) :]
        expected_states[slot, :, : width - 1] = last
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(updated, expected_states)


def test_stale_state_without_initial_state_is_not_read() -> None:
    states = torch.full((2, DIM, 3), torch.nan, dtype=torch.float16)
    out = causal_conv1d_prefill(
        torch.ones(2, DIM, dtype=torch.float16),
        torch.ones(DIM, 4, dtype=torch.float16),
        None,
        None,
        states,
        torch.tensor([0, 2]),
        torch.tensor([1]),
        torch.tensor([False]),
    )
    assert out.tolist() == [[1.0] * DIM, [2.0] * DIM]
    assert states[1].tolist() == [[0.0, 1.0, 1.0]] * DIM


@settings(max_examples=40, deadline=None)
@given(WIDTHS, st.integers(1, 12), SEEDS, st.data())
def test_cut_and_decoded_tokens_equal_the_whole_prompt_bit_for_bit(
    width: int, tokens: int, seed: int, data: st.DataObject
) -> None:
    generator = generator_of(seed)
    x = normal(generator, tokens, DIM, dtype=torch.float16)
    weight = normal(generator, DIM, width, dtype=torch.float16)
    bias = normal(generator, DIM, dtype=torch.float16)
    states = normal(generator, 3, DIM, width - 1, dtype=torch.float16)
    slot = torch.tensor([2])

    def prefill(rows: slice, state: Tensor, has_initial: bool) -> Tensor:
        length = len(x[rows])
        return causal_conv1d_prefill(
            *(x[rows], weight, bias, "silu", state),
            torch.tensor([0, length]),
            slot,
            torch.tensor([has_initial]),
        )

    whole_state, cut_state, decoded_state = states.clone(), states.clone(), states.clone()
    whole = prefill(slice(None), whole_state, True)
    cut = data.draw(st.integers(0, tokens))
    pieces = [prefill(rows, cut_state, True) for rows in (slice(0, cut), slice(cut, None))]
    decoded = [
        causal_conv1d_update(x[i : i + 1], weight, bias, "silu", decoded_state, slot)
        for i in range(tokens)
    ]
    assert torch.equal(torch.cat(pieces), whole)
    assert torch.equal(torch.cat(decoded), whole)
    assert torch.equal(cut_state, whole_state)
    assert torch.equal(decoded_state, whole_state)


@settings(max_examples=40, deadline=None)
@given(WIDTHS, st.integers(1, 4), st.integers(1, 3), SEEDS)
def test_speculation_gives_what_decoding_the_accepted_tokens_gives(
    width: int, num_drafts: int, n: int, seed: int
) -> None:
    """Several steps of ragged verification with random acceptance, against plain decoding."""
    generator = generator_of(seed)
    weight = normal(generator, DIM, width, dtype=torch.float16)
    states = normal(generator, n + 2, DIM, width - 1 + num_drafts, dtype=torch.float16)
    slots = (1 + torch.randperm(n + 1, generator=generator)[:n]).int()
    plain = states[..., : width - 1].clone()
    padded_slots = torch.cat([slots, torch.tensor([0, -1], dtype=torch.int32)])
    accepted = torch.ones(n + 2, dtype=torch.int32)

    for _ in range(4):
        lengths = torch.randint(1, num_drafts + 2, (n + 2,), generator=generator)
        starts = [0, *lengths.cumsum(0).tolist()]
        x = normal(generator, starts[-1], DIM, dtype=torch.float16)
        before = states.clone()
        out = causal_conv1d_update(
            x, weight, None, "silu", states, padded_slots, torch.tensor(starts), accepted
        )
        for request in range(n):
            rows = range(starts[request], starts[request + 1])
            continued = plain.clone()
            newly_accepted = int(torch.randint(1, len(rows) + 1, (1,), generator=generator))
            for position, token in enumerate(rows):
                single = causal_conv1d_update(
                    *(x[token : token + 1], weight, None, "silu", continued),
                    slots[request : request + 1],
                )
                assert torch.equal(single[0], out[token])
                if position + 1 == newly_accepted:
                    plain[slots[request]] = continued[slots[request]]
            accepted[request] = newly_accepted
            # Columns beyond what this request's length needs are not its business.
            beyond = width - 2 + len(rows)
            slot = slots[request]
            assert torch.equal(states[slot, :, beyond:], before[slot, :, beyond:])
        assert torch.equal(out[starts[n] :], torch.zeros_like(out[starts[n] :]))
        unused = [slot for slot in range(n + 2) if slot not in slots.tolist()]
        assert torch.equal(states[unused], before[unused])


@settings(max_examples=25, deadline=None)
@given(WIDTHS, st.integers(1, 4), SEEDS)
def test_update_agrees_with_transformers(width: int, n: int, seed: int) -> None:
    generator = generator_of(seed)
    x = normal(generator, n, DIM, dtype=torch.float32)
    weight = normal(generator, DIM, width, dtype=torch.float32)
    bias = normal(generator, DIM, dtype=torch.float32)
    states = normal(generator, n + 1, DIM, width - 1, dtype=torch.float32)
    expected_states = states[1:].clone()
    expected = modeling_qwen3_5.causal_conv1d_update(
        x[..., None], expected_states, weight, bias, "silu"
    )
    out = causal_conv1d_update(x, weight, bias, "silu", states, torch.arange(1, n + 1))
    torch.testing.assert_close(out, expected[..., 0], rtol=1e-5, atol=1e-5)
    assert torch.equal(states[1:], expected_states)


def test_a_state_too_short_is_an_error() -> None:
    x, weight = torch.zeros(3, DIM), torch.zeros(DIM, 4)
    with pytest.raises(ValueError, match="keeps 3 inputs, but conv_states has 2 columns"):
        causal_conv1d_update(x, weight, None, None, torch.zeros(4, DIM, 2), torch.arange(1, 4))
    with pytest.raises(ValueError, match="3 tokens needs a convolution state of 5 columns"):
        causal_conv1d_update(
            *(x, weight, None, None, torch.zeros(4, DIM, 4), torch.tensor([1])),
            torch.tensor([0, 3]),
            torch.tensor([1]),
        )


def test_an_unknown_activation_is_an_error() -> None:
    with pytest.raises(ValueError, match="'silu' or None, not 'gelu'"):
        causal_conv1d_update(
            torch.zeros(1, DIM),
            torch.zeros(DIM, 4),
            None,
            "gelu",
            torch.zeros(2, DIM, 3),
            torch.tensor([1]),
        )
