# SPDX-License-Identifier: Apache-2.0
"""Which matrix products a Triton kernel holds, and whether Turing's tensor cores can compute them.

Works on the text of a kernel's TTIR, the first intermediate form that Triton makes: in it each
`tl.dot` is one line, `tt.dot %a, %b, %c : tensor<64x32xf16> * tensor<32x64xf16> -> …`. A line of
another form is refused rather than guessed at.
"""

import re
from dataclasses import dataclass

_ANY_DOT = re.compile(r"\btt\.dot(?:_scaled)?\b")
_DOT = re.compile(
    r"\btt\.dot [^:\n]*: tensor<([^>]+)> \* tensor<([^>]+)> -> tensor<([^>]+)>", re.ASCII
)
_KERNEL_NAME = re.compile(r"tt\.func public @(\w+)")
_INPUT_PRECISION = re.compile(r", inputPrecision = \w+")
_LOOP_STAGES = re.compile(r"\btt\.num_stages = \d+ : i32")

# (element of a, element of b, element of the result) of the instructions m16n8k8 and m8n8k16.
_ON_TENSOR_CORES = {("f16", "f16", "f32"), ("f16", "f16", "f16"), ("i8", "i8", "i32")}
# Exact on the ordinary units, which is where Triton leaves it beside tensor-core products.
_LEFT_ON_FMA = ("f32", "f32", "f32")

_REMEDY = {
    "bf16": "; run the model in float16",
    "f8E5M2": "; dequantize to float16 before the product",
    "f8E4M3FN": "; dequantize to float16 before the product",
}


@dataclass(frozen=True)
class Dot:
    """Element types of one `tl.dot`: of its operands and of its result (and accumulator)."""

    a: str
    b: str
    result: str

    @property
    def types(self) -> tuple[str, str, str]:
        """(a, b, result)."""
        return self.a, self.b, self.result


@dataclass(frozen=True)
class Products:
    """The matrix products of one kernel.

    Attributes:
        kernel: the kernel's name.
        dots: those that could be read.
        refusal: why the kernel cannot take the tensor-core path; None where it can, or where it
            has nothing to gain.
    """

    kernel: str
    dots: tuple[Dot, ...]
    refusal: str | None

    @property
    def gain(self) -> bool:
        """Whether at least one product is of types that Turing's tensor cores take."""
        return any(dot.types in _ON_TENSOR_CORES for dot in self.dots)


def read(ttir: str) -> Products:
    """The products of a kernel from the text of its TTIR."""
    name = _KERNEL_NAME.search(ttir)
    dots = tuple(
        Dot(*(shape_and_type.rsplit("x", 1)[1] for shape_and_type in match.groups()))
        for match in _DOT.finditer(ttir)
    )
    return Products(
        kernel=name.group(1) if name else "unnamed",
        dots=dots,
        refusal=_refusal(ttir, dots),
    )


def _refusal(ttir: str, dots: tuple[Dot, ...]) -> str | None:
    present = len(_ANY_DOT.findall(ttir))
    if present != len(dots):
        return f"{present - len(dots)} of its {present} matrix products have an unknown form"
    for dot in dots:
        if dot.types not in _ON_TENSOR_CORES and dot.types != _LEFT_ON_FMA:
            return (
                f"it multiplies {dot.a} by {dot.b} into {dot.result}, for which Turing has no "
                f"instruction{_REMEDY.get(dot.a, '')}"
            )
    if dots and "tt.warp_specialize" in ttir:
        return "it asks for warp specialization, which the borrowed passes would apply"
    return None


def without_ampere_requests(ttir: str) -> str:
    """The same kernel without what would mean something only from Ampere on.

    fp32 products lose their input precision (`tf32`, which Triton's frontend writes by default, or
    a bf16 or tf32 decomposition) and so become exact ones; loops lose their own pipeline depth, for
    without asynchronous copies there is nothing to fill a pipeline with.
    """
    ttir = _INPUT_PRECISION.sub("", ttir)
    return _LOOP_STAGES.sub("tt.num_stages = 1 : i32", ttir)
