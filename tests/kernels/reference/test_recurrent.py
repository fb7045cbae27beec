# SPDX-License-Identifier: Apache-2.0
"""The recurrent reference against a head-by-head oracle, transformers, and other batches."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5

from vllm.pre_ampere.kernels.reference.recurrent import (
    fused_sigmoid_gating_delta_rule_update,
    packed_recurrent_decode,
)

KEY_DIM, VALUE_DIM = 8, 5


@dataclass
class Batch:
    """Inputs of the update, and what a request's tokens and slots are."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor
    state: Tensor
    slots: Tensor
    query_start_loc: Tensor
    accepted: Tensor

    def gates(self) -> tuple[Tensor, Tensor]:
        return self.A_log, self.dt_bias

    def tokens(self, rows: slice) -> tuple[Tensor, ...]:
        return self.q[rows], self.k[rows], self.v[rows], self.a[rows], self.b[rows]

    def rows(self, request: int) -> range:
        start, end = self.query_start_loc[request : request + 2].tolist()
        return range(start, end)

    def read_slot(self, request: int) -> int:
        return int(self.slots[request, self.accepted[request] - 1])


@st.composite
def batches(draw, dtype: torch.dtype, state_dtype: torch.dtype, padding: bool = True) -> Batch:
    num_key_heads = draw(st.integers(1, 2))
    num_value_heads = num_key_heads * draw(st.integers(1, 3))
    num_drafts = draw(st.integers(0, 4))
    lengths = draw(st.lists(st.integers(0, num_drafts + 1), min_size=1, max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    tokens, requests = sum(lengths), len(lengths)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    slot_count = requests * (num_drafts + 1)
    slots = 1 + torch.randperm(slot_count + 3, generator=generator)[:slot_count]
    slots = slots.reshape(requests, num_drafts + 1).int()
    if padding:
        for request in draw(st.sets(st.integers(0, requests - 1), max_size=2)):
            slots[request] = draw(st.sampled_from([0, -1]))
    return Batch(
        q=normal(tokens, num_key_heads, KEY_DIM),
        k=normal(tokens, num_key_heads, KEY_DIM),
        v=normal(tokens, num_value_heads, VALUE_DIM),
        a=normal(tokens, num_value_heads) * 3,
        b=normal(tokens, num_value_heads),
        A_log=normal(num_value_heads, dtype=torch.float32),
        dt_bias=normal(num_value_heads, dtype=torch.float32),
        state=normal(slot_count + 4, num_value_heads, VALUE_DIM, KEY_DIM, dtype=state_dtype),
        slots=slots,
        query_start_loc=torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32),
        accepted=torch.randint(1, num_drafts + 2, (requests,), generator=generator).int(),
    )


def verify(batch: Batch, state: Tensor) -> Tensor:
    return fused_sigmoid_gating_delta_rule_update(
        *batch.tokens(slice(None)),
        *batch.gates(),
        state,
        batch.slots,
        batch.query_start_loc,
        batch.accepted,
    )


def one_head(q: Tensor, k: Tensor, v: Tensor, a: float, b: float, A_log: float, bias: float, S):
    """The paper's equation with matrices: S (alpha (I - beta k k^T)) + beta v k^T, for one head."""
    x = torch.tensor(a + bias, dtype=torch.float64)
    softplus = torch.log(1 + torch.exp(x)) if x <= 20 else x
    alpha = torch.exp(-torch.exp(torch.tensor(A_log, dtype=torch.float64)) * softplus)
    beta = 1 / (1 + torch.exp(torch.tensor(-b, dtype=torch.float64)))
    q = q / torch.sqrt(q @ q + 1e-6) / len(q) ** 0.5
    k = k / torch.sqrt(k @ k + 1e-6)
    S = alpha * S @ (torch.eye(len(k), dtype=torch.float64) - beta * torch.outer(k, k))
    S = S + beta * torch.outer(v, k)
    return S @ q, S


@settings(max_examples=40, deadline=None)
@given(batches(torch.float64, torch.float64))
def test_update_follows_the_equation_and_touches_only_its_slots(batch: Batch) -> None:
    state = batch.state.clone()
    out = verify(batch, state)

    expected_state = batch.state.clone()
    expected = torch.zeros_like(batch.v)
    group = batch.v.shape[1] // batch.q.shape[1]
    for request in range(len(batch.slots)):
        if batch.read_slot(request) <= 0:
            continue
        for head in range(batch.v.shape[1]):
            current = batch.state[batch.read_slot(request), head]
            for position, token in enumerate(batch.rows(request)):
                expected[token, head], current = one_head(
                    batch.q[token, head // group],
                    batch.k[token, head // group],
                    batch.v[token, head],
                    float(batch.a[token, head]),
                    float(batch.b[token, head]),
                    float(batch.A_log[head]),
                    float(batch.dt_bias[head]),
                    current,
                )
                expected_state[batch.slots[request, position], head] = current
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(state, expected_state, rtol=1e-10, atol=1e-12)
    written = {
        int(batch.slots[request, position])
        for request in range(len(batch.slots))
        for position in range(len(batch.rows(request)))
    }
    untouched = [slot for slot in range(len(state)) if slot not in written or slot <= 0]
    assert torch.equal(state[untouched], batch.state[untouched])


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.float16], ids=str)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_verified_tokens_equal_single_decodes_bit_for_bit(
    state_dtype: torch.dtype, data: st.DataObject
) -> None:
    batch = data.draw(batches(torch.float16, state_dtype, padding=False))
    state = batch.state.clone()
    out = verify(batch, state)

    for request in range(len(batch.slots)):
        slot = batch.read_slot(request)
        decoded = batch.state.clone()
        for position, token in enumerate(batch.rows(request)):
            single = fused_sigmoid_gating_delta_rule_update(
                *batch.tokens(slice(token, token + 1)),
                *batch.gates(),
                decoded,
                torch.tensor([slot]),
                torch.tensor([0, 1]),
            )
            assert torch.equal(single[0], out[token])
            assert torch.equal(decoded[slot], state[batch.slots[request, position]])


@pytest.mark.parametrize("threads", [1, 2])
def test_verification_equals_decoding_bit_for_bit_at_a_models_size(threads: int) -> None:
    """K = V = 128: sums long enough for a library to order them by the size of the batch."""
    generator = torch.Generator().manual_seed(0)
    lengths = [8, 1, 5, 2]
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
    tokens, heads = sum(lengths), 6

    def normal(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    q, k = normal(tokens, 2, 128), normal(tokens, 2, 128)
    v, a, b = normal(tokens, heads, 128), normal(tokens, heads), normal(tokens, heads)
    gates = normal(heads, dtype=torch.float32), normal(heads, dtype=torch.float32)
    initial = normal(33, heads, 128, 128, dtype=torch.float32)
    slots = torch.arange(1, 33).reshape(4, 8)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        verified, decoded = initial.clone(), initial.clone()
        out = fused_sigmoid_gating_delta_rule_update(
            q, k, v, a, b, *gates, verified, slots, starts, torch.ones(4)
        )
        for request, length in enumerate(lengths):
            own = slots[request, :1]
            for position in range(length):
                token = slice(int(starts[request]) + position, int(starts[request]) + position + 1)
                single = fused_sigmoid_gating_delta_rule_update(
                    *(x[token] for x in (q, k, v, a, b)), *gates, decoded, own, torch.arange(2)
                )
                assert torch.equal(single, out[token])
                assert torch.equal(decoded[own[0]], verified[slots[request, position]])
    finally:
        torch.set_num_threads(before)


@settings(max_examples=30, deadline=None)
@given(batches(torch.float16, torch.float32))
def test_a_request_computes_the_same_alone_and_in_a_batch(batch: Batch) -> None:
    state = batch.state.clone()
    out = verify(batch, state)
    for request in range(len(batch.slots)):
        rows = batch.rows(request)
        alone = batch.state.clone()
        alone_out = fused_sigmoid_gating_delta_rule_update(
            *batch.tokens(slice(rows.start, rows.stop)),
            *batch.gates(),
            alone,
            batch.slots[request : request + 1],
            torch.tensor([0, len(rows)]),
            batch.accepted[request : request + 1],
        )
        assert torch.equal(alone_out, out[rows.start : rows.stop])
        mine = batch.slots[request].clamp(min=0).long()
        assert torch.equal(alone[mine], state[mine])


@settings(max_examples=30, deadline=None)
@given(batches(torch.float32, torch.float32))
def test_packed_decode_is_the_same_function(batch: Batch) -> None:
    tokens = min(len(batch.q), len(batch.slots))
    rows, slots = slice(0, tokens), batch.slots[:tokens, 0]
    mixed = torch.cat([x[rows].flatten(1) for x in (batch.q, batch.k, batch.v)], dim=1)
    packed, separate = batch.state.clone(), batch.state.clone()
    out = packed_recurrent_decode(
        mixed,
        batch.a[rows],
        batch.b[rows],
        *batch.gates(),
        packed,
        slots,
        num_key_heads=batch.q.shape[1],
        head_dim_k=KEY_DIM,
        head_dim_v=VALUE_DIM,
    )
    expected = fused_sigmoid_gating_delta_rule_update(
        *batch.tokens(rows), *batch.gates(), separate, slots, torch.arange(tokens + 1)
    )
    assert torch.equal(out, expected)
    assert torch.equal(packed, separate)


@settings(max_examples=20, deadline=None)
@given(batches(torch.float32, torch.float32, padding=False))
def test_update_agrees_with_transformers(batch: Batch) -> None:
    state = batch.state.clone()
    out = verify(batch, state)
    group = batch.v.shape[1] // batch.q.shape[1]
    g = -batch.A_log.exp() * torch.nn.functional.softplus(batch.a + batch.dt_bias)
    for request in range(len(batch.slots)):
        rows = batch.rows(request)
        if not rows:
            continue
        tokens = slice(rows.start, rows.stop)
        expected, final = modeling_qwen3_5.torch_recurrent_gated_delta_rule(
            batch.q[None, tokens].repeat_interleave(group, 2),
            batch.k[None, tokens].repeat_interleave(group, 2),
            batch.v[None, tokens],
            g=g[None, tokens],
            beta=batch.b[None, tokens].sigmoid(),
            initial_state=batch.state[None, batch.read_slot(request)].mT,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        torch.testing.assert_close(out[tokens], expected[0], rtol=1e-5, atol=1e-5)
        last = batch.slots[request, len(rows) - 1]
        torch.testing.assert_close(state[last], final[0].mT, rtol=1e-5, atol=1e-5)


def test_more_tokens_than_slots_is_an_error() -> None:
    x, gate = torch.zeros(3, 1, 4), torch.zeros(3, 1)
    with pytest.raises(ValueError, match="a request of 3 tokens needs 3 state slots, but has 2"):
        fused_sigmoid_gating_delta_rule_update(
            *(x, x, x, gate, gate, torch.zeros(1), torch.zeros(1)),
            torch.zeros(4, 1, 4, 4),
            torch.tensor([[1, 2]]),
            torch.tensor([0, 3]),
            torch.tensor([1]),
        )
