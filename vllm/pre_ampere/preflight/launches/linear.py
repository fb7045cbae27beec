# SPDX-License-Identifier: Apache-2.0
"""Launches of unquantised linear layers with `VLLM_BATCH_INVARIANT=1`; cuBLAS has them otherwise."""

from functools import partial

from vllm.pre_ampere.kernels.triton.batch_invariant_linear import batch_invariant_linear
from vllm.pre_ampere.preflight.launches.launch import PROMPT_TOKENS, REQUESTS, Launch, half
from vllm.pre_ampere.preflight.model import ModelShapes

_SMALL_BATCH = 40


def _multiply(rows: int, shapes: ModelShapes) -> None:
    hidden = shapes.hidden_size
    batch_invariant_linear(half(rows, hidden), half(shapes.vocab_size, hidden), None)


LAUNCHES: dict[str, Launch] = {
    "linear, batch-invariant, decode": partial(_multiply, REQUESTS),
    "linear, batch-invariant, small batch": partial(_multiply, _SMALL_BATCH),
    "linear, batch-invariant, prompt": partial(_multiply, PROMPT_TOKENS),
}
