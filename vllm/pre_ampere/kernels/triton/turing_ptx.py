# SPDX-License-Identifier: Apache-2.0
"""Ampere's matrix instructions written as Turing's, in PTX.

The instruction m16n8k16 of compute capability 8.0 is, register by register, two of Turing's
m16n8k8, one for each half of k; and the integer m16n8k32 is four m8n8k16, one for each half of m
and of k. Fragment layouts: PTX ISA, "Matrix Fragments for mma.m16n8k8", "… m16n8k16",
"… m8n8k16" and "… m16n8k32".

    fp16   a0 a1 | b0   k 0-7, all rows
           a2 a3 | b1   k 8-15, all rows
    int8   a0 a1 | b0   k 0-15, a0 rows 0-7, a1 rows 8-15
           a2 a3 | b1   k 16-31, a2 rows 0-7, a3 rows 8-15
           d0 d1        rows 0-7
           d2 d3        rows 8-15

All results but the last instruction's pass through registers of their own, so no destination is
written before every source has been read, whatever registers LLVM chose.
"""

import re
from itertools import count

_MMA = re.compile(
    r"mma\.sync\.aligned\.(?P<shape>m16n8k16|m16n8k32)\.row\.col\.(?:satfinite\.)?"
    r"(?P<types>\w+\.\w+\.\w+\.\w+)\s*"
    r"\{(?P<d>[^}]*)\},\s*\{(?P<a>[^}]*)\},\s*\{(?P<b>[^}]*)\},\s*\{(?P<c>[^}]*)\};"
)
# What the assembler refuses for sm_75, as far as Triton has a use for it (PTX ISA, "Target ISA
# Notes" of each instruction). A test holds the list against the assembler.
_BEYOND_TURING = re.compile(
    r"\b(?:cp\.async|cp\.reduce|createpolicy|redux\.sync|mbarrier|stmatrix|wgmma|tcgen05"
    r"|griddepcontrol|setmaxnreg|barrier\.cluster|fence\.proxy"
    r"|(?:add|sub|mul|fma|neg|abs|min|max|cvt)\.[\w.]*(?:bf16|tf32|e4m3|e5m2)"
    r"|(?:ld|st)\.[\w.:]*L2::cache_hint"
    r"|mma\.sync\.aligned\.(?:m16n8k(?:4|16|32|64|128|256)\b|\S*(?:bf16|tf32|f64|e4m3|e5m2)))[^\s;]*"
)
_FP16 = {"f32.f16.f16.f32", "f16.f16.f16.f16"}
_INT8 = {f"s32.{a}.{b}.s32" for a in ("s8", "u8") for b in ("s8", "u8")}


def for_turing(ptx: str) -> tuple[str, int]:
    """The PTX with each such instruction replaced, and how many tensor-core instructions it has.

    An instruction of other types is left as it stands; the assembler refuses it for sm_75.
    Integers wrap on overflow, as in Triton's own lowering for Turing; Ampere's would saturate.
    """
    instructions = 0
    numbers = count()

    def replace(match: re.Match[str]) -> str:
        nonlocal instructions
        shape, types = match["shape"], match["types"]
        operands = {
            name: [register.strip() for register in match[name].split(",")] for name in "dabc"
        }
        temporary = f"%turing{next(numbers)}_"
        if shape == "m16n8k16" and types in _FP16:
            instructions += 2
            return _two_m16n8k8(types, operands, temporary)
        if shape == "m16n8k32" and types in _INT8:
            instructions += 4
            return _four_m8n8k16(types, operands, temporary)
        return match[0]

    return _MMA.sub(replace, ptx), instructions


def first_beyond_turing(ptx: str) -> str | None:
    """The first instruction in the PTX that needs a newer card than Turing; None for none."""
    found = _BEYOND_TURING.search(ptx)
    return found[0] if found else None


def _two_m16n8k8(types: str, operands: dict[str, list[str]], temporary: str) -> str:
    d, a, b, c = (operands[name] for name in "dabc")
    half = [f"{temporary}{i}" for i in range(len(d))]
    mma = f"mma.sync.aligned.m16n8k8.row.col.{types}"
    return _block(
        temporary,
        len(d),
        f"{mma} {_list(half)}, {_list(a[:2])}, {_list(b[:1])}, {_list(c)};",
        f"{mma} {_list(d)}, {_list(a[2:])}, {_list(b[1:])}, {_list(half)};",
    )


def _four_m8n8k16(types: str, operands: dict[str, list[str]], temporary: str) -> str:
    d, a, b, c = (operands[name] for name in "dabc")
    half = [f"{temporary}{i}" for i in range(4)]
    whole = [f"{temporary}{i}" for i in range(4, 8)]
    mma = f"mma.sync.aligned.m8n8k16.row.col.{types}"
    return _block(
        temporary,
        8,
        *(
            f"{mma} {_list(into[rows])}, {{{a[part + row]}}}, {{{b[part // 2]}}}, "
            f"{_list(start[rows])};"
            for part, into, start in ((0, half, c), (2, whole, half))
            for row, rows in enumerate((slice(0, 2), slice(2, 4)))
        ),
        *(f"mov.b32 {to}, {value};" for to, value in zip(d, whole, strict=True)),
    )


def _block(temporary: str, registers: int, *lines: str) -> str:
    body = "\n\t".join(lines)
    return f"{{\n\t.reg .b32 {temporary}<{registers}>;\n\t{body}\n\t}}"


def _list(registers: list[str]) -> str:
    return "{" + ", ".join(registers) + "}"
