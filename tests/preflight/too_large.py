# SPDX-License-Identifier: Apache-2.0
"""Preflight of one launch that needs more shared memory than a Turing block has.

    python too_large.py REQUEST TABLES

As `vllm.pre_ampere.preflight.compile_for_card`, with that launch in place of a model's.
"""

import sys
from pathlib import Path

import torch
import triton
import triton.language as tl

from vllm.pre_ampere.preflight import compile_for_card, launches
from vllm.pre_ampere.preflight.model import ModelShapes


@triton.jit
def permute(values, order, out, SIZE: tl.constexpr):
    """out = values[order], in one block whose values all lie in shared memory."""
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.gather(tl.load(values + at), tl.load(order + at), 0))


def launch(shapes: ModelShapes) -> None:
    single, order = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    for size in (1 << 14, 1 << 15):
        permute[(1,)](single, order, single, SIZE=size, num_warps=16)


def main(request_path: str, tables_path: str) -> None:
    launches.launches = lambda shapes, tensor_cores: {"permutation": launch}
    compile_for_card.main(request_path, tables_path)


if __name__ == "__main__":
    assert Path(sys.argv[1]).exists()
    main(*sys.argv[1:])
