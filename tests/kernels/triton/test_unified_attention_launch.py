# SPDX-License-Identifier: Apache-2.0
"""The wider launch of paged attention: which launches it takes, and that they cover every token."""

import inspect
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.pre_ampere.kernels.triton.unified_attention_launch import PROMPTS, WideAttention


class Recorded:
    """Stands for upstream's kernel, and notes how it is launched."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(**arguments: Any) -> None:
            self.grid, self.arguments = grid, arguments

        return run


def launch(tokens: int, sequences: int, heads: int = 4, **changes: Any) -> Recorded:
    """As upstream's launcher would, for `heads` query heads on a key head."""
    kernel = Recorded()
    blocks = tokens // (16 // heads) + sequences
    arguments = {
        "query_ptr": torch.empty(tokens, 2, 256, dtype=torch.float16, device="meta"),
        "num_seqs": sequences,
        "num_queries_per_kv": heads,
        "HEAD_SIZE": 256,
        "BLOCK_M": 16,
        "BLOCK_Q": 16 // heads,
        "TILE_SIZE": 32,
        "IS_3D": False,
        "USE_TD": False,
        "KV_QUANT_MODE": 0,
    } | changes
    WideAttention(kernel)[(blocks, 2)](**arguments)
    return kernel


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=9),
    padding=st.integers(0, 40),
    heads=st.sampled_from([1, 2, 4, 6, 8, 16]),
)
def test_the_blocks_cover_every_token(lengths: list[int], padding: int, heads: int) -> None:
    """Upstream's kernel gives block b to the sequence whose tokens begin at or before (b - i) * BLOCK_Q."""
    kernel = launch(sum(lengths) + padding, len(lengths), heads)
    tokens_a_block = kernel.arguments["BLOCK_Q"]
    assert 0 < tokens_a_block * heads <= kernel.arguments["BLOCK_M"]
    starts = [sum(lengths[:i]) // tokens_a_block + i for i in range(len(lengths) + 1)]
    for i, length in enumerate(lengths):
        assert (starts[i + 1] - starts[i]) * tokens_a_block >= length
    assert kernel.grid == (
        (sum(lengths) + padding) // tokens_a_block + len(lengths),
        2,
    )
    assert starts[-1] <= kernel.grid[0]


def test_a_prompt_is_widened() -> None:
    kernel = launch(2048, 1)
    assert kernel.grid == (2048 // 8 + 1, 2)
    taken = {name: kernel.arguments[name] for name in ("BLOCK_M", "BLOCK_Q", "TILE_SIZE")}
    assert taken == {"BLOCK_M": 32, "BLOCK_Q": 8, "TILE_SIZE": 32}
    assert kernel.arguments["num_warps"] == PROMPTS.num_warps == 4


@pytest.mark.parametrize(
    ("tokens", "sequences", "changes"),
    [
        (8, 8, {"IS_3D": True}),
        (8, 8, {}),
        (32, 8, {}),
        (2048, 1, {"HEAD_SIZE": 128}),
        (2048, 1, {"HEAD_SIZE": 192}),
        (2048, 1, {"KV_QUANT_MODE": 2}),
        (2048, 1, {"USE_TD": True}),
        (2048, 1, {"query_ptr": torch.empty(2048, 2, 256, device="meta")}),
    ],
    ids=[
        "split keys",
        "decode",
        "verify",
        "D=128",
        "D=192",
        "int8 cache",
        "descriptors",
        "float32",
    ],
)
def test_other_launches_stay_as_they_are(
    tokens: int, sequences: int, changes: dict[str, Any]
) -> None:
    kernel = launch(tokens, sequences, **changes)
    assert kernel.grid == (tokens // 4 + sequences, 2)
    assert (kernel.arguments["BLOCK_M"], kernel.arguments["BLOCK_Q"]) == (16, 4)
    assert "num_warps" not in kernel.arguments


@given(
    sequences=st.integers(1, 64),
    drafts=st.integers(0, 15),
    heads=st.sampled_from([1, 2, 4, 6, 8, 16]),
)
def test_verification_is_never_taken_for_a_prompt(sequences: int, drafts: int, heads: int) -> None:
    """Its few rows would have half as many blocks to themselves."""
    kernel = launch(sequences * (1 + drafts), sequences, heads)
    assert kernel.arguments["BLOCK_M"] == 16
    assert "num_warps" not in kernel.arguments


def test_upstreams_launcher_passes_what_is_asked_for() -> None:
    from vllm.v1.attention.ops import triton_unified_attention

    text = inspect.getsource(triton_unified_attention.unified_attention)
    for name in launch(2048, 1).arguments:
        assert f"{name}=" in text or name == "num_warps"
