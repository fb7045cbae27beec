# SPDX-License-Identifier: Apache-2.0
"""Fix 3: verification is one fused routine with the gating inside, and it changes no token.

MTP, DFlash and every other method that drafts reach the same `GatedDeltaNetCore.verify`.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

from vllm.pre_ampere.gdn.core import (
    GatedDeltaNetCore,
    GatedDeltaNetKernels,
    GatedDeltaNetState,
)
from vllm.pre_ampere.kernels import host

KEY_HEADS, VALUE_HEADS, DIM, WIDTH = 2, 4, 16, 4
CONV_DIM = (2 * KEY_HEADS + VALUE_HEADS) * DIM


class Launches:
    """The reference operations, counting their calls by name."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def kernels(self) -> GatedDeltaNetKernels:
        return GatedDeltaNetKernels(
            **{name: self._counted(name) for name in GatedDeltaNetKernels.__dataclass_fields__}
        )

    def _counted(self, name: str) -> Any:
        function = getattr(host, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.names.append(name)
            return function(*args, **kwargs)

        return call


def make_layer(generator: torch.Generator) -> SimpleNamespace:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return SimpleNamespace(
        A_log=random(VALUE_HEADS),
        dt_bias=random(VALUE_HEADS),
        conv1d=SimpleNamespace(weight=random(CONV_DIM, 1, WIDTH), bias=None),
        activation="silu",
        num_k_heads=KEY_HEADS,
        tp_size=1,
        head_k_dim=DIM,
        head_v_dim=DIM,
    )


def make_core(layer: SimpleNamespace, launches: Launches) -> GatedDeltaNetCore:
    return GatedDeltaNetCore(layer, launches.kernels(), host_chunk_rule)


def host_chunk_rule(**kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    names = ("q", "k", "v", "g", "beta")
    out, state = host.chunk_gated_delta_rule(
        *(kwargs[name].squeeze(0) for name in names), kwargs["initial_state"], kwargs["cu_seqlens"]
    )
    return out.unsqueeze(0), state


def verify_metadata(drafts: int, accepted: list[int], slots: torch.Tensor) -> GDNAttentionMetadata:
    requests, step = len(accepted), drafts + 1
    return GDNAttentionMetadata(
        num_prefills=0,
        num_prefill_tokens=0,
        num_decodes=0,
        num_decode_tokens=0,
        num_spec_decodes=requests,
        num_spec_decode_tokens=requests * step,
        num_actual_tokens=requests * step,
        spec_query_start_loc=torch.arange(0, (requests + 1) * step, step, dtype=torch.int32),
        spec_state_indices_tensor=slots,
        spec_sequence_masks=torch.ones(requests, dtype=torch.bool),
        num_accepted_tokens=torch.tensor(accepted, dtype=torch.int32),
    )


def decode_metadata(slots: torch.Tensor) -> GDNAttentionMetadata:
    requests = len(slots)
    return GDNAttentionMetadata(
        num_prefills=0,
        num_prefill_tokens=0,
        num_decodes=requests,
        num_decode_tokens=requests,
        num_spec_decodes=0,
        num_spec_decode_tokens=0,
        num_actual_tokens=requests,
        non_spec_query_start_loc=torch.arange(requests + 1, dtype=torch.int32),
        non_spec_state_indices_tensor=slots,
    )


def make_state(slots: int, drafts: int, generator: torch.Generator) -> GatedDeltaNetState:
    return GatedDeltaNetState(
        torch.randn(slots, CONV_DIM, WIDTH - 1 + drafts, generator=generator).half(),
        torch.randn(slots, VALUE_HEADS, DIM, DIM, generator=generator),
    )


def make_tokens(
    count: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.randn(count, CONV_DIM, generator=generator).half(),
        torch.randn(count, VALUE_HEADS, generator=generator).half(),
        torch.randn(count, VALUE_HEADS, generator=generator).half(),
    )


def test_verification_is_one_convolution_and_one_fused_routine() -> None:
    generator = torch.Generator().manual_seed(0)
    launches = Launches()
    core = make_core(make_layer(generator), launches)
    slots = torch.arange(1, 9, dtype=torch.int32).reshape(2, 4)
    out = torch.empty(8, VALUE_HEADS, DIM, dtype=torch.float16)
    core.forward(
        *make_tokens(8, generator),
        out,
        make_state(9, 3, generator),
        verify_metadata(3, [1, 2], slots),
    )
    assert launches.names == ["causal_conv1d_update", "packed_delta_rule_update"]
    assert not out.isnan().any()


def test_decode_is_one_convolution_and_one_packed_routine() -> None:
    generator = torch.Generator().manual_seed(0)
    launches = Launches()
    core = make_core(make_layer(generator), launches)
    out = torch.empty(3, VALUE_HEADS, DIM, dtype=torch.float16)
    metadata = decode_metadata(torch.tensor([2, 5, 1], dtype=torch.int32))
    core.forward(*make_tokens(3, generator), out, make_state(6, 0, generator), metadata)
    assert launches.names == ["causal_conv1d_update", "packed_delta_rule_update"]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    drafts=st.integers(1, 7),
    requests=st.integers(1, 4),
    data=st.data(),
)
def test_a_verified_token_is_the_decoded_token_to_the_last_bit(
    seed: int, drafts: int, requests: int, data: st.DataObject
) -> None:
    """Verify k+1 tokens at once, then again from some accepted count; decode the same one by one."""
    generator = torch.Generator().manual_seed(seed)
    layer = make_layer(generator)
    core = make_core(layer, Launches())
    step = drafts + 1
    order = torch.randperm(requests * step, generator=generator) + 1
    slots = order.to(torch.int32).reshape(requests, step)
    state = make_state(requests * step + 1, drafts, generator)
    accepted = [1] * requests
    single = GatedDeltaNetState(
        state.convolution[slots[:, 0].long(), :, : WIDTH - 1].clone(),
        state.recurrent[slots[:, 0].long()].clone(),
    )
    # Slot 0 is upstream's null block.
    single = GatedDeltaNetState(
        torch.cat([torch.zeros_like(single.convolution[:1]), single.convolution]),
        torch.cat([torch.zeros_like(single.recurrent[:1]), single.recurrent]),
    )
    single_slots = torch.arange(1, requests + 1, dtype=torch.int32)
    for _ in range(3):
        qkv, b, a = make_tokens(requests * step, generator)
        out = torch.empty(requests * step, VALUE_HEADS, DIM, dtype=torch.float16)
        core.forward(qkv, b, a, out, state, verify_metadata(drafts, accepted, slots))
        accepted = [data.draw(st.integers(1, step), label="accepted") for _ in range(requests)]
        for request, count in enumerate(accepted):
            for position in range(count):
                row = request * step + position
                one = torch.empty(1, VALUE_HEADS, DIM, dtype=torch.float16)
                core.forward(
                    qkv[row : row + 1],
                    b[row : row + 1],
                    a[row : row + 1],
                    one,
                    single,
                    decode_metadata(single_slots[request : request + 1]),
                )
                assert torch.equal(one[0], out[row])
            kept = slots[request, count - 1].long()
            assert torch.equal(state.recurrent[kept], single.recurrent[request + 1])


def test_requests_that_verify_and_requests_that_prefill_share_a_step() -> None:
    generator = torch.Generator().manual_seed(3)
    layer = make_layer(generator)
    core = make_core(layer, Launches())
    drafts, prompt = 2, 5
    state = make_state(9, drafts, generator)
    reference = GatedDeltaNetState(state.convolution.clone(), state.recurrent.clone())
    tokens = make_tokens(drafts + 1 + prompt, generator)
    # The batch holds the prompt first, then the request that verifies.
    spec = torch.arange(prompt, prompt + drafts + 1)
    rest = torch.arange(prompt)
    slots = torch.tensor([[1, 2, 3]], dtype=torch.int32)
    prefill_slots = torch.tensor([5], dtype=torch.int32)
    metadata = GDNAttentionMetadata(
        num_prefills=1,
        num_prefill_tokens=prompt,
        num_decodes=0,
        num_decode_tokens=0,
        num_spec_decodes=1,
        num_spec_decode_tokens=drafts + 1,
        num_actual_tokens=prompt + drafts + 1,
        has_initial_state=torch.tensor([False]),
        spec_query_start_loc=torch.tensor([0, drafts + 1], dtype=torch.int32),
        non_spec_query_start_loc=torch.tensor([0, prompt], dtype=torch.int32),
        spec_state_indices_tensor=slots,
        non_spec_state_indices_tensor=prefill_slots,
        spec_sequence_masks=torch.tensor([False, True]),
        spec_token_indx=spec,
        non_spec_token_indx=rest,
        num_accepted_tokens=torch.tensor([1], dtype=torch.int32),
        prefill_query_start_loc=torch.tensor([0, prompt], dtype=torch.int32),
        prefill_state_indices=prefill_slots,
        prefill_has_initial_state=torch.tensor([False]),
    )
    out = torch.empty(prompt + drafts + 1, VALUE_HEADS, DIM, dtype=torch.float16)
    core.forward(*tokens, out, state, metadata)

    alone = torch.empty(drafts + 1, VALUE_HEADS, DIM, dtype=torch.float16)
    core.forward(
        *(part[spec] for part in tokens), alone, reference, verify_metadata(drafts, [1], slots)
    )
    assert torch.equal(out[spec], alone)
    # A prompt from an empty state is a decode of it, token by token, from zeros.
    reference.convolution[5], reference.recurrent[5] = 0, 0
    for row in range(prompt):
        one = torch.empty(1, VALUE_HEADS, DIM, dtype=torch.float16)
        core.forward(
            *(part[row : row + 1] for part in tokens),
            one,
            reference,
            decode_metadata(prefill_slots),
        )
        torch.testing.assert_close(one[0], out[row], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(state.recurrent[5], reference.recurrent[5], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("padding", [0, 3])
def test_padding_after_the_actual_tokens_is_left_alone(padding: int) -> None:
    generator = torch.Generator().manual_seed(5)
    core = make_core(make_layer(generator), Launches())
    out = torch.full((2 + padding, VALUE_HEADS, DIM), 7.0, dtype=torch.float16)
    core.forward(
        *make_tokens(2 + padding, generator),
        out,
        make_state(4, 0, generator),
        decode_metadata(torch.tensor([1, 3], dtype=torch.int32)),
    )
    assert (out[2:] == 7).all()
    assert not (out[:2] == 7).all()
