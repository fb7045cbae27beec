# SPDX-License-Identifier: Apache-2.0
"""How far each claim of the project is proven: the one place that says so.

docs/proof.md holds the same table for readers and `vllm-pre-ampere doctor` prints it; a test holds
the three together and looks that what a claim rests on exists. A level rises here, with the test or
the result that shows it, and nowhere else.
"""

from dataclasses import dataclass
from enum import IntEnum


class Level(IntEnum):
    """How far a claim is proven; each level includes those before it."""

    REFERENCE = 1
    COMPILED = 2
    NEWER_GPU = 3
    CARD = 4

    @property
    def meaning(self) -> str:
        """What was done, in words."""
        return _MEANINGS[self]


_MEANINGS = {
    Level.REFERENCE: "computed by the reference on a CPU",
    Level.COMPILED: "compiled for sm_70 and sm_75, inside the cards' limits",
    Level.NEWER_GPU: "run on a newer GPU that answers, compiles and refuses as the card",
    Level.CARD: "run on the card itself",
}


@dataclass(frozen=True)
class Claim:
    """One thing that the project says of itself.

    Attributes:
        statement: the claim.
        level: how far it is proven.
        shown_by: file in the repository that shows it: a test, a benchmark or a result.
    """

    statement: str
    level: Level
    shown_by: str


CLAIMS: tuple[Claim, ...] = (
    Claim(
        "A Turing box boots: no default asks for more shared memory than its card has",
        Level.NEWER_GPU,
        "benchmarks/results/emulated_serve.json",
    ),
    Claim(
        "Any participating pre-Ampere card brings the baseline, in every topology",
        Level.REFERENCE,
        "tests/config/test_sm70_gates_any_visible_device.py",
    ),
    Claim(
        "Verification is one fused call, with the gating inside",
        Level.NEWER_GPU,
        "benchmarks/results/emulated_serve.json",
    ),
    Claim(
        "GDN layers stay in the compiled graph with speculation; only Volta runs them eagerly",
        Level.NEWER_GPU,
        "benchmarks/results/emulated_serve.json",
    ),
    Claim(
        "Every Triton kernel that the known models launch fits sm_70 and sm_75",
        Level.COMPILED,
        "vllm/pre_ampere/preflight/results/kernels.json",
    ),
    Claim(
        "On a CPU, speculation changes no token of a greedy answer",
        Level.REFERENCE,
        "tests/engine/test_speculation_is_lossless.py",
    ),
    Claim(
        "With VLLM_BATCH_INVARIANT=1 and no prefix cache, speculation on a GPU changes no token and no "
        "log probability (five decimals), one request at a time",
        Level.NEWER_GPU,
        "benchmarks/results/emulated_serve.json",
    ),
    Claim(
        "Without that, speculation on a GPU changes a token only where float64 cannot tell candidates apart",
        Level.NEWER_GPU,
        "benchmarks/results/emulated_serve.json",
    ),
    Claim(
        "Prefix caching with MTP changes a token only at a rounding tie",
        Level.NEWER_GPU,
        "benchmarks/results/cached_prefixes_sm75.json",
    ),
    Claim(
        "Prefix caching with MTP in full CUDA graphs changes a token only at a rounding tie",
        Level.NEWER_GPU,
        "benchmarks/results/cached_prefixes_full_graphs_sm75.json",
    ),
    Claim(
        "Full CUDA graphs of verification answer as eager steps do, but for rounding ties",
        Level.NEWER_GPU,
        "benchmarks/results/verification_graphs_sm75.json",
    ),
    Claim(
        "Triton's matrix products become Turing's tensor-core instructions",
        Level.NEWER_GPU,
        "benchmarks/results/triton_turing.json",
    ),
    Claim(
        "GDN kernels start with one pinned launch each, without autotuning",
        Level.NEWER_GPU,
        "benchmarks/results/cold_start.json",
    ),
    Claim(
        "A custom all-reduce that hangs or returns wrong sums is not used",
        Level.REFERENCE,
        "tests/guards/test_all_reduce.py",
    ),
    Claim(
        "Without speculation, a request with NaN logits fails instead of streaming token 0",
        Level.REFERENCE,
        "tests/guards/test_nan_logits.py",
    ),
)


def table() -> str:
    """The table of docs/proof.md, in Markdown."""
    lines = ["| claim | level | shown by |", "| --- | --- | --- |"]
    lines += [f"| {c.statement} | {int(c.level)} | `{c.shown_by}` |" for c in CLAIMS]
    return "\n".join(lines) + "\n"
