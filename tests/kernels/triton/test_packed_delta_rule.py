# SPDX-License-Identifier: Apache-2.0
"""The packed delta rule: right in Triton's interpreter, free of spills for sm_75 and sm_70."""

import re
import subprocess
from pathlib import Path
from typing import Any

import interpreter
import pytest
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm.pre_ampere.kernels.triton import packed_delta_rule
from vllm.pre_ampere.kernels.triton.packed_delta_rule import packed_delta_rule_update


def test_the_kernel_is_right_in_the_interpreter() -> None:
    assert interpreter.passed("interpreted_packed_delta_rule.py") == 8


def compile_for(capability: int, head_dim_k: int, state_dtype: str, verifies: bool) -> Any:
    """16 key and 32 value heads of V=128, as the launcher has them compiled; no GPU is needed."""
    kernel = packed_delta_rule.packed_delta_rule_kernel
    half, integers = ("mixed_qkv", "a", "b", "dt_bias", "out"), ("slots",)
    constants: dict[str, Any] = {
        "H": 16,
        "HV": 32,
        "K": head_dim_k,
        "V": 128,
        "BLOCK_K": triton.next_power_of_2(head_dim_k),
        "BLOCK_V": packed_delta_rule.BLOCK_V,
        "RAGGED": verifies,
        "SPECULATIVE": verifies,
    }
    if verifies:
        integers += ("query_start_loc", "num_accepted_tokens")
    else:
        constants |= {"query_start_loc": None, "num_accepted_tokens": None}
    types = dict.fromkeys(half, "*fp16") | dict.fromkeys(integers, "*i32")
    types |= {"A_log": "*fp32", "state": f"*{state_dtype}", "scale": "fp32"}
    types |= dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or (name.endswith("_stride") and not name.startswith("slots"))
    }
    options = {
        "num_warps": packed_delta_rule.NUM_WARPS,
        "num_stages": 1,
        "enable_fp_fusion": False,
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.parametrize("verifies", [False, True], ids=["decode", "verify"])
@pytest.mark.parametrize("state_dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("head_dim_k", [128, packed_delta_rule.MAX_HEAD_DIM_K])
@pytest.mark.parametrize("capability", [75, 70])
def test_the_state_stays_in_registers(
    capability: int, head_dim_k: int, state_dtype: str, verifies: bool, tmp_path: Path
) -> None:
    compiled = compile_for(capability, head_dim_k, state_dtype, verifies)
    ptx = tmp_path / "kernel.ptx"
    ptx.write_text(compiled.asm["ptx"])
    command = [knobs.nvidia.ptxas.path, f"--gpu-name=sm_{capability}", "-v", ptx, "-o", "/dev/null"]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log
    used = re.search(r"Used (\d+) registers", log)
    assert used is not None
    # A multiprocessor has 65536 registers and, on Turing, room for 16 blocks: all 16 fit.
    assert int(used[1]) * 32 * 16 <= 65536
    assert compiled.metadata.shared <= 64


def test_single_and_verified_tokens_round_alike() -> None:
    """The same rounding operations in the same order, where one token's loop is unrolled, too."""

    def arithmetic(verifies: bool) -> list[str]:
        ptx = compile_for(75, 128, "fp32", verifies).asm["ptx"]
        pattern = r"\b(?:fma|add|sub|mul|div|rsqrt|ex2|lg2)\.[\w.]*f32\b"
        return re.findall(pattern, ptx)

    decoded = arithmetic(verifies=False)
    assert len(decoded) > 100
    assert sorted(decoded) == sorted(arithmetic(verifies=True))


WELL_FORMED = {
    "mixed_qkv": torch.zeros(3, 2 * 2 * 16 + 4 * 8),
    "a": torch.zeros(3, 4),
    "b": torch.zeros(3, 4),
    "A_log": torch.zeros(4),
    "dt_bias": torch.zeros(4),
    "state": torch.zeros(5, 4, 8, 16),
    "slots": torch.ones(3, dtype=torch.int32),
    "query_start_loc": None,
    "num_accepted_tokens": None,
    "out": torch.zeros(3, 4, 8),
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mixed_qkv": torch.zeros(3, 95)}, "rows of 95.*4 value heads, V=8 and K=16"),
        ({"a": torch.zeros(2, 4)}, r"a is \(2, 4\); \(3, 4\) is needed"),
        ({"out": torch.zeros(3, 8, 4).mT}, r"out has strides \(32, 1, 4\)"),
        ({"state": torch.zeros(5, 4, 16, 8).mT}, "state has strides"),
        ({"slots": torch.ones(2, dtype=torch.int32)}, "3 tokens for 2 requests"),
        (
            {"mixed_qkv": torch.zeros(3, 2 * 257 + 32), "state": torch.zeros(5, 4, 8, 257)},
            "K is 257; this kernel takes K up to 256",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        packed_delta_rule_update(**{**WELL_FORMED, **changed})
