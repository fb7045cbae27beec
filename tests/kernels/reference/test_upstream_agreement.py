# SPDX-License-Identifier: Apache-2.0
"""The reference operations against the Triton kernels that upstream runs, interpreted."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from vllm.pre_ampere.kernels import host

Call = tuple[str, dict[str, Any]]

KEY_HEADS, VALUE_HEADS, DIM = 2, 4, 16


def normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def gates(generator: torch.Generator, tokens: int) -> dict[str, Tensor]:
    return {
        "a": normal(generator, tokens, VALUE_HEADS) * 8,
        "b": normal(generator, tokens, VALUE_HEADS),
        "A_log": normal(generator, VALUE_HEADS),
        "dt_bias": normal(generator, VALUE_HEADS),
    }


def ragged(generator: torch.Generator, num_drafts: int) -> dict[str, Tensor]:
    """Five requests of 0 to num_drafts + 1 tokens; the fourth is padding."""
    lengths = torch.randint(0, num_drafts + 2, (5,), generator=generator)
    lengths[3] = 1
    slots = 1 + torch.randperm(5 * (num_drafts + 1), generator=generator).int()
    slots = slots.reshape(5, num_drafts + 1)
    slots[3] = 0
    return {
        "slots": slots,
        "query_start_loc": torch.tensor([0, *lengths.cumsum(0)], dtype=torch.int32),
        "num_accepted_tokens": torch.randint(1, num_drafts + 2, (5,), generator=generator).int(),
    }


def verification(seed: int) -> Call:
    generator = torch.Generator().manual_seed(seed)
    num_drafts = 1 + seed
    layout = ragged(generator, num_drafts)
    tokens = int(layout["query_start_loc"][-1])
    return "fused_sigmoid_gating_delta_rule_update", {
        "q": normal(generator, tokens, KEY_HEADS, DIM),
        "k": normal(generator, tokens, KEY_HEADS, DIM),
        "v": normal(generator, tokens, VALUE_HEADS, DIM),
        "state": normal(generator, 5 * (num_drafts + 1) + 2, VALUE_HEADS, DIM, DIM),
        **gates(generator, tokens),
        **layout,
    }


def decode(seed: int) -> Call:
    generator = torch.Generator().manual_seed(seed)
    return "fused_sigmoid_gating_delta_rule_update", {
        "q": normal(generator, 3, KEY_HEADS, DIM),
        "k": normal(generator, 3, KEY_HEADS, DIM),
        "v": normal(generator, 3, VALUE_HEADS, DIM),
        "state": normal(generator, 6, VALUE_HEADS, DIM, DIM),
        **gates(generator, 3),
        "slots": torch.tensor([4, 0, 2], dtype=torch.int32),
        "query_start_loc": torch.arange(4, dtype=torch.int32),
    }


def packed(seed: int) -> Call:
    """Decode for seed 0, verification for the others."""
    generator = torch.Generator().manual_seed(seed)
    layout: dict[str, Any] = {
        "slots": torch.tensor([4, 0, 2], dtype=torch.int32),
        "query_start_loc": None,
        "num_accepted_tokens": None,
    }
    if seed:
        layout = ragged(generator, seed)
    tokens = 3 if not seed else int(layout["query_start_loc"][-1])
    return "packed_delta_rule_update", {
        "mixed_qkv": normal(generator, tokens, (2 * KEY_HEADS + VALUE_HEADS) * DIM),
        "state": normal(generator, 5 * (seed + 1) + 2, VALUE_HEADS, DIM, DIM),
        **gates(generator, tokens),
        **layout,
        "out": torch.zeros(tokens, VALUE_HEADS, DIM),
    }


def convolution(generator: torch.Generator, tokens: int, slots: int, spare: int) -> dict[str, Any]:
    return {
        "x": normal(generator, tokens, DIM),
        "weight": normal(generator, DIM, 4),
        "bias": normal(generator, DIM),
        "activation": "silu",
        "conv_states": normal(generator, slots, DIM, 3 + spare),
    }


def convolution_verification(seed: int) -> Call:
    generator = torch.Generator().manual_seed(seed)
    num_drafts = 1 + seed
    layout = ragged(generator, num_drafts)
    layout["slots"] = layout["slots"][:, 0].contiguous()
    tokens = int(layout["query_start_loc"][-1])
    return "causal_conv1d_update", {
        **convolution(generator, tokens, 5 * (num_drafts + 1) + 2, num_drafts),
        **layout,
        "max_query_len": num_drafts + 1,
    }


def convolution_decode(seed: int) -> Call:
    generator = torch.Generator().manual_seed(seed)
    slots = torch.tensor([4, 0, 2], dtype=torch.int32)
    return "causal_conv1d_update", {**convolution(generator, 3, 6, seed % 3), "slots": slots}


def convolution_prefill(seed: int) -> Call:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 20, (4,), generator=generator)
    return "causal_conv1d_prefill", {
        **convolution(generator, int(lengths.sum()), 6, seed % 3),
        "query_start_loc": torch.tensor([0, *lengths.cumsum(0)], dtype=torch.int32),
        "slots": torch.tensor([5, 1, 0, 3], dtype=torch.int32),
        "has_initial_state": torch.rand(4, generator=generator) < 0.5,
    }


def post_convolution(seed: int) -> Call:
    generator = torch.Generator().manual_seed(seed)
    return "post_convolution", {
        "conv_output": normal(generator, 9, (2 * KEY_HEADS + VALUE_HEADS) * DIM),
        **gates(generator, 9),
        "num_key_heads": KEY_HEADS,
        "head_dim_k": DIM,
        "head_dim_v": DIM,
    }


def chunks(seed: int) -> Call:
    generator = torch.Generator().manual_seed(seed)
    half = torch.float16
    return "chunk_gated_delta_rule", {
        "q": normal(generator, 70, KEY_HEADS, DIM, dtype=half),
        "k": normal(generator, 70, KEY_HEADS, DIM, dtype=half),
        "v": normal(generator, 70, VALUE_HEADS, DIM, dtype=half),
        "g": -torch.rand(70, VALUE_HEADS, generator=generator),
        "beta": torch.rand(70, VALUE_HEADS, generator=generator),
        "initial_state": normal(generator, 2, VALUE_HEADS, DIM, DIM),
        "query_start_loc": torch.tensor([0, 3, 70], dtype=torch.int32),
        "scale": 0.3,
        "normalize_qk": True,
    }


CASES: dict[str, tuple[Callable[[int], Call], int]] = {
    "verification": (verification, 3),
    "decode": (decode, 1),
    "packed": (packed, 3),
    "convolution_verification": (convolution_verification, 3),
    "convolution_decode": (convolution_decode, 2),
    "convolution_prefill": (convolution_prefill, 2),
    "post_convolution": (post_convolution, 1),
    "chunks": (chunks, 1),
}
IDS = [(name, seed) for name, (_, count) in CASES.items() for seed in range(count)]


@pytest.fixture(scope="module")
def upstream_answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """For case i: "i.returned.0" and on, and "i.NAME" for each tensor as upstream left it."""
    folder = tmp_path_factory.mktemp("interpreted")
    calls, tensors = [], {}
    for number, (name, seed) in enumerate(IDS):
        function, arguments = CASES[name][0](seed)
        given = {key: value for key, value in arguments.items() if isinstance(value, Tensor)}
        tensors |= {f"{number}.{key}": value for key, value in given.items()}
        calls.append((function, {k: v for k, v in arguments.items() if k not in given}))
    (folder / "calls.json").write_text(json.dumps(calls))
    save_file(tensors, folder / "arguments.safetensors")
    program = Path(__file__).with_name("interpret_upstream.py")
    files = [folder / n for n in ("calls.json", "arguments.safetensors", "results.safetensors")]
    finished = subprocess.run(
        ["env", "TRITON_INTERPRET=1", sys.executable, program, *files],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    return load_file(files[-1])


def computed_tokens(arguments: dict[str, Any], tokens: int) -> Tensor:
    """Which rows of the output belong to a request that is not skipped; [tokens], bool."""
    slots = arguments.get("slots")
    if slots is None:
        return torch.ones(tokens, dtype=torch.bool)
    real = (slots if slots.dim() == 1 else slots[:, 0]) > 0
    layout = arguments.get("query_start_loc")
    return real if layout is None else torch.repeat_interleave(real, layout.diff())


@pytest.mark.parametrize(
    ("number", "name", "seed"),
    [(number, *case) for number, case in enumerate(IDS)],
    ids=[f"{name}-{seed}" for name, seed in IDS],
)
def test_reference_and_upstream_agree(
    number: int, name: str, seed: int, upstream_answers: dict[str, Tensor]
) -> None:
    function, arguments = CASES[name][0](seed)
    before = copy.deepcopy(arguments)
    ours = getattr(host, function)(**arguments)
    ours = ours if isinstance(ours, tuple) else (ours,)
    # The chunk kernels round what they write within a chunk to half precision.
    tolerance = 2e-3 if function == "chunk_gated_delta_rule" else 2e-6
    rows = computed_tokens(before, len(ours[0]))
    assert rows.any()
    for place, mine in enumerate(ours):
        selected = rows if len(mine) == len(rows) else slice(None)
        torch.testing.assert_close(
            mine[selected].float(),
            upstream_answers[f"{number}.returned.{place}"][selected].float(),
            rtol=tolerance,
            atol=tolerance,
        )
    for key in ("state", "conv_states", "initial_state"):
        if key in arguments:
            theirs = upstream_answers[f"{number}.{key}"]
            torch.testing.assert_close(arguments[key], theirs, rtol=tolerance, atol=tolerance)
            unchanged = (before[key] == theirs).flatten(1).all(1)
            assert torch.equal(arguments[key][unchanged], before[key][unchanged])
