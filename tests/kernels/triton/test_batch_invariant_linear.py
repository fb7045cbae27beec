# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant linear layers: right in Triton's interpreter, and in upstream's place."""

from typing import get_args

import interpreter
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from vllm.pre_ampere import upstream_patches
from vllm.pre_ampere.gdn import layer
from vllm.pre_ampere.kernels.triton import batch_invariant_linear
from vllm.pre_ampere.kernels.triton.launch_configurations import Lowering


def test_the_products_are_right_in_the_interpreter() -> None:
    assert interpreter.passed("interpreted_batch_invariant_linear.py") == 8


@given(rows=st.integers(1, 20000), lowering=st.sampled_from(get_args(Lowering)))
def test_a_tile_is_no_larger_than_its_rows_need(rows: int, lowering: Lowering) -> None:
    tiles = batch_invariant_linear.TABLE[lowering]
    tile = batch_invariant_linear.tile_for(rows, tiles)
    assert all(rows > other.rows for other in tiles if other.rows < tile.rows)
    assert batch_invariant_linear.tile_for(1, tiles).rows == 16


def test_upstream_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers import linear, vocab_parallel_embedding

    for module in (linear, vocab_parallel_embedding):
        monkeypatch.setattr(module, "linear_batch_invariant", module.linear_batch_invariant)
    upstream_patches.multiply_in_tiles_by_rows("sm70")
    for module in (linear, vocab_parallel_embedding):
        assert module.linear_batch_invariant is batch_invariant_linear.call
    # Opaque to the compiler: of every size it says the shape alone.
    x = torch.empty(2, 3, 16, dtype=torch.float16, device="meta")
    out = batch_invariant_linear.call(x, x.new_empty(5, 16))
    assert (out.shape, out.dtype, out.device.type) == ((2, 3, 5), torch.float16, "meta")


def test_our_gdn_layer_is_batch_invariant_and_no_other() -> None:
    layer.register()
    assert MambaAttentionBackendEnum.GDN_ATTN.get_class() is GDNAttentionBackend
    assert not GDNAttentionBackend.supports_batch_invariance()
    ours = layer.PreAmpereGatedDeltaNetAttention
    backend = ours.get_attn_backend(ours.__new__(ours))
    assert issubclass(backend, GDNAttentionBackend)
    assert backend.supports_batch_invariance()
    assert backend.get_name() == "GDN_ATTN"
