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
        Level.REFERENCE,
        "tests/model_executor/layers/test_gdn_prefill_backend_resolve.py",
    ),
    Claim(
        "Any participating pre-Ampere card brings the baseline, in every topology",
        Level.REFERENCE,
        "tests/config/test_sm70_gates_any_visible_device.py",
    ),
    Claim(
        "Verification is one fused call, with the gating inside",
        Level.REFERENCE,
        "tests/v1/spec_decode/test_dflash2.py",
    ),
    Claim(
        "GDN layers stay in the compiled graph with speculation; only Volta runs them eagerly",
        Level.REFERENCE,
        "tests/compile/test_sm70_decode_graph.py",
    ),
    Claim(
        "Speculation changes no token of a greedy answer",
        Level.REFERENCE,
        "tests/engine/test_speculation_is_lossless.py",
    ),
    Claim(
        "Prefix caching with MTP changes no token either",
        Level.REFERENCE,
        "tests/guards/test_prefix_caching.py",
    ),
    Claim(
        "Triton's matrix products run on Turing's tensor cores",
        Level.COMPILED,
        "tests/kernels/triton/test_turing_mma.py",
    ),
    Claim(
        "GDN kernels start with one pinned launch each, without autotuning",
        Level.COMPILED,
        "tests/kernels/triton/test_launch_configurations.py",
    ),
    Claim(
        "A custom all-reduce that hangs or returns wrong sums is not used",
        Level.REFERENCE,
        "tests/guards/test_all_reduce.py",
    ),
    Claim(
        "A request with NaN logits fails instead of streaming token 0",
        Level.REFERENCE,
        "tests/guards/test_nan_logits.py",
    ),
)


def table() -> str:
    """The table of docs/proof.md, in Markdown."""
    lines = ["| claim | level | shown by |", "| --- | --- | --- |"]
    lines += [f"| {c.statement} | {int(c.level)} | `{c.shown_by}` |" for c in CLAIMS]
    return "\n".join(lines) + "\n"
