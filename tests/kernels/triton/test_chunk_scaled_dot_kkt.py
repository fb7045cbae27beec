# SPDX-License-Identifier: Apache-2.0
"""The key products of a chunk: right against float64 in Triton's interpreter, HMMA for sm_75."""

import interpreter
import pytest
import torch
from turing_kernels import compile_for_turing

from vllm.pre_ampere.kernels.triton import chunk_scaled_dot_kkt, turing_mma


def test_the_products_are_right_in_the_interpreter() -> None:
    assert interpreter.passed("interpreted_kkt.py") == 2


def test_what_cannot_be_meant_is_refused() -> None:
    k = torch.zeros(1, 4, 2, 16, dtype=torch.float16)
    with pytest.raises(ValueError, match="needs beta"):
        chunk_scaled_dot_kkt.chunk_scaled_dot_kkt_fwd(k)
    with pytest.raises(ValueError, match="3 value heads cannot share 2 key heads"):
        chunk_scaled_dot_kkt.chunk_scaled_dot_kkt_fwd(k, beta=torch.zeros(1, 4, 3))


def test_it_meets_the_tensor_cores() -> None:
    operands = {
        "k": "fp16",
        "beta": "fp32",
        "g": "fp32",
        "out": "fp32",
        "cu_seqlens": "i32",
        "chunk_indices": "i32",
    }
    turing_mma.enable()
    try:
        compiled = compile_for_turing(
            chunk_scaled_dot_kkt.chunk_scaled_dot_kkt_kernel,
            operands,
            ("T",),
            H=16,
            KEY_HEADS=8,
            K=128,
            CHUNK=64,
            BLOCK_K=64,
            HAS_GATE=True,
            VARLEN=True,
        )
    finally:
        turing_mma.disable()
    # 64x64x128 over four warps: 2 * 4 tiles of 16x8 and 16 steps of 8 for each.
    assert compiled.tensor_core == {"HMMA.1688.F32": 128}
    assert (compiled.stack, compiled.fma) == (0, 0)
    assert compiled.shared <= 16384
