# SPDX-License-Identifier: Apache-2.0
"""A wider launch of upstream's paged attention for prompts, on Turing's tensor cores.

`unified_attention` (vllm/v1/attention/ops/triton_unified_attention.py, 0.32.0) gives a block 16 rows
of queries times heads, so with 4 query heads on a key head every 4 tokens of a prompt read all keys
and values before them once more. It has a wider launch for heads of 256, but for capability 10.0
alone. Here a block gets 32 rows in steps whose sequences are long: those of prompts, not of drafts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

HEAD_DIM = 256
"""The head dimension that was measured; others keep upstream's launch."""

FLOAT16_BYTES = 2
PROMPT_BLOCKS = 16
"""Blocks that a sequence of a step fills on average, from which on the step is taken for prompts. A
request's 15 drafts and the token before them fill 8, with 16 query heads on a key head."""


@dataclass(frozen=True)
class AttentionLaunch:
    """One launch.

    Attributes:
        rows: queries times heads in a block (upstream's BLOCK_M).
        keys: in a tile (TILE_SIZE).
        num_warps: warps a block.
    """

    rows: int
    keys: int
    num_warps: int


PROMPTS = AttentionLaunch(32, 32, 4)
"""Code for sm_75 on an H200 took 5.3 ms for 8192 tokens of 16 heads on 4, upstream's launch 7.2, and
64 rows 5.4 to 13 (benchmarks/results/triton_turing.json). It needs 49152 B and spills nothing."""


class WideAttention:
    """Stands where upstream's launcher finds its kernel, and widens the launches of prompts.

    Args:
        kernel: upstream's.
        launch: for steps of prompts.
    """

    def __init__(self, kernel: Any, launch: AttentionLaunch = PROMPTS) -> None:
        self.kernel = kernel
        self.launch = launch

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def run(**arguments: Any) -> Any:
            tiles = self.tiles(arguments)
            if not tiles:
                return self.kernel[grid](**arguments)
            # As many blocks of tokens as upstream's own formula has for tiles of this size.
            blocks = arguments["query_ptr"].shape[0] // tiles["BLOCK_Q"] + arguments["num_seqs"]
            return self.kernel[blocks, *grid[1:]](**arguments | tiles)

        return run

    def tiles(self, arguments: Mapping[str, Any]) -> dict[str, int]:
        """What replaces upstream's arguments; nothing where its launch stays."""
        tokens_a_block = self.launch.rows // arguments["num_queries_per_kv"]
        if (
            arguments["IS_3D"]
            or arguments["USE_TD"]
            or arguments["KV_QUANT_MODE"]
            or arguments["HEAD_SIZE"] != HEAD_DIM
            or arguments["query_ptr"].element_size() != FLOAT16_BYTES
            or arguments["BLOCK_M"] > self.launch.rows
            or arguments["query_ptr"].shape[0]
            < PROMPT_BLOCKS * tokens_a_block * arguments["num_seqs"]
        ):
            return {}
        return {
            "BLOCK_M": self.launch.rows,
            "BLOCK_Q": tokens_a_block,
            "TILE_SIZE": self.launch.keys,
            "num_warps": self.launch.num_warps,
        }
