# SPDX-License-Identifier: Apache-2.0
"""Cases for Triton's interpreter, chosen by TRITON_INTERPRET=1 before Triton is imported.

`test_packed_delta_rule.py` runs them in a process of their own.
"""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton import knobs

from vllm.pre_ampere.kernels import host
from vllm.pre_ampere.kernels.triton.packed_delta_rule import packed_delta_rule_update


@dataclass(frozen=True)
class Sizes:
    key_heads: int
    value_heads: int
    head_dim_k: int
    head_dim_v: int

    @property
    def width(self) -> int:
        return 2 * self.key_heads * self.head_dim_k + self.value_heads * self.head_dim_v


# K and V that are a power of two and a block, and that are not.
SIZES = (Sizes(1, 2, 16, 8), Sizes(2, 2, 24, 11), Sizes(1, 1, 128, 16))
STATE_DTYPES = (torch.float32, torch.float16)


def spaced(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    """Random, with room between the rows, as a slice of a projection or a page of a cache has."""
    rows = torch.randn(shape[0], 5 + torch.Size(shape[1:]).numel(), generator=generator)
    return rows.to(dtype)[:, 5:].unflatten(1, shape[1:])


def tokens_and_gates(generator: torch.Generator, sizes: Sizes, tokens: int) -> tuple[Tensor, ...]:
    """mixed_qkv, a, b, A_log and dt_bias."""
    return (
        spaced(generator, torch.float16, tokens, sizes.width),
        3 * spaced(generator, torch.float16, tokens, sizes.value_heads),
        spaced(generator, torch.float16, tokens, sizes.value_heads),
        torch.randn(sizes.value_heads, generator=generator),
        torch.randn(sizes.value_heads, generator=generator).half(),
    )


def states(generator: torch.Generator, sizes: Sizes, dtype: torch.dtype, count: int) -> Tensor:
    return spaced(generator, dtype, count, sizes.value_heads, sizes.head_dim_v, sizes.head_dim_k)


def unwritten(tokens: int, sizes: Sizes, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.full((tokens, sizes.value_heads, sizes.head_dim_v), torch.nan, dtype=dtype)


def copy(state: Tensor) -> Tensor:
    """With the strides; `clone` would close the gaps between the slots."""
    return torch.empty_strided(state.shape, state.stride(), dtype=state.dtype).copy_(state)


def assert_as_defined(
    inputs: tuple[Tensor, ...],
    state: Tensor,
    slots: Tensor,
    query_start_loc: Tensor | None,
    accepted: Tensor | None,
    sizes: Sizes,
) -> None:
    expected_state, expected = state.clone(), unwritten(len(inputs[0]), sizes)
    host.packed_delta_rule_update(
        *inputs, expected_state, slots, query_start_loc, accepted, expected
    )
    out, before = unwritten(len(inputs[0]), sizes), state.clone()
    returned = packed_delta_rule_update(*inputs, state, slots, query_start_loc, accepted, out)
    assert returned is out
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4)
    tight = state.dtype == torch.float32
    torch.testing.assert_close(
        state, expected_state, rtol=2e-5 if tight else 2e-3, atol=2e-5 if tight else 1e-3
    )
    untouched = [*sorted(set(range(len(state))) - set(slots.flatten().tolist())), 0]
    assert torch.equal(state[untouched], before[untouched])


def test_the_kernel_is_interpreted() -> None:
    assert knobs.runtime.interpret


@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
@settings(max_examples=8, deadline=None)
@given(
    sizes=st.sampled_from(SIZES),
    lengths=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    padded=st.sets(st.integers(0, 3), max_size=2),
    seed=st.integers(0, 2**31),
)
def test_verification_of_ragged_requests(
    state_dtype: torch.dtype, sizes: Sizes, lengths: list[int], padded: set[int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    requests = len(lengths)
    slots = 1 + torch.randperm(4 * requests + 2, generator=generator)[: 4 * requests].int()
    # A column of another's, so that rows of slots are strided as well.
    slots = torch.cat([slots.view(requests, 4), slots[:requests, None]], 1)[:, :4]
    for request in padded & set(range(requests)):
        slots[request] = -(request % 2)
    # One request may be read and have nowhere to store its last draft.
    slots[0, 3] = 0
    assert_as_defined(
        tokens_and_gates(generator, sizes, sum(lengths)),
        states(generator, sizes, state_dtype, 4 * requests + 3),
        slots,
        torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32),
        torch.randint(1, 5, (requests,), generator=generator).int(),
        sizes,
    )


@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
@settings(max_examples=6, deadline=None)
@given(sizes=st.sampled_from(SIZES), ragged=st.booleans(), seed=st.integers(0, 2**31))
def test_decoding(state_dtype: torch.dtype, sizes: Sizes, ragged: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    slots = torch.tensor([[4, 9], [0, 9], [2, 9], [-1, 9]], dtype=torch.int32)[:, 0]
    assert_as_defined(
        tokens_and_gates(generator, sizes, 4),
        states(generator, sizes, state_dtype, 6),
        slots,
        torch.arange(5, dtype=torch.int32) if ragged else None,
        None,
        sizes,
    )


@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
@settings(max_examples=6, deadline=None)
@given(
    sizes=st.sampled_from(SIZES),
    tokens=st.integers(2, 8),
    data=st.data(),
    seed=st.integers(0, 2**31),
)
def test_a_verified_token_is_the_decoded_token_to_the_last_bit(
    state_dtype: torch.dtype, sizes: Sizes, tokens: int, data: st.DataObject, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = tokens_and_gates(generator, sizes, tokens)
    state = states(generator, sizes, state_dtype, tokens + 2)
    slots = (1 + torch.randperm(tokens, generator=generator)).int()
    accepted = data.draw(st.integers(1, tokens), label="accepted")
    decoded = copy(state)
    decoded[-1] = decoded[slots[accepted - 1]]
    out = unwritten(tokens, sizes)
    packed_delta_rule_update(
        *inputs,
        state,
        slots[None],
        torch.tensor([0, tokens], dtype=torch.int32),
        torch.tensor([accepted], dtype=torch.int32),
        out,
    )
    for token in range(tokens):
        row = slice(token, token + 1)
        single = unwritten(1, sizes)
        packed_delta_rule_update(
            *(part[row] for part in inputs[:3]),
            *inputs[3:],
            decoded,
            torch.tensor([tokens + 1], dtype=torch.int32),
            None,
            None,
            single,
        )
        assert torch.equal(single[0], out[token])
        assert torch.equal(decoded[-1], state[slots[token]])


def test_a_large_gate_is_its_own_softplus() -> None:
    """log(1 + exp(x)) overflows in float32 from 89 on, and is x to the last bit from 20 on."""
    sizes, generator = SIZES[0], torch.Generator().manual_seed(2)
    mixed_qkv, a, b, _, dt_bias = tokens_and_gates(generator, sizes, 3)
    a[:] = torch.tensor([19.0, 21.0, 200.0])[:, None].half()
    A_log = torch.full((sizes.value_heads,), -5.0)
    state = states(generator, sizes, torch.float32, 4)
    slots = torch.tensor([1, 2, 3], dtype=torch.int32)
    assert_as_defined((mixed_qkv, a, b, A_log, dt_bias), state, slots, None, None, sizes)
