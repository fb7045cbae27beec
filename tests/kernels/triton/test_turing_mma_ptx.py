# SPDX-License-Identifier: Apache-2.0
"""The rewriting of PTX, run on a warp modelled in numpy, and checked against the assembler.

The model knows matrix instructions only by the fragment layouts that the PTX ISA gives for them, so
it is an oracle of its own for the claim that one of Ampere's is several of Turing's.
"""

import re
import subprocess
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from triton import knobs

from vllm.pre_ampere.kernels.triton import turing_ptx

Fragment = npt.NDArray[np.float64]
Coordinates = list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]

LANE = np.arange(32)
GROUP, IN_GROUP = LANE // 4, LANE % 4


def _a(rows: int, k: int, bits: int) -> list[Coordinates]:
    """For each register of A, the (row, k) of each element that it packs, over the 32 lanes."""
    packed = 32 // bits
    return [
        [(GROUP + row, part + IN_GROUP * packed + i) for i in range(packed)]
        for part in range(0, k, 4 * packed)
        for row in range(0, rows, 8)
    ]


def _b(k: int, bits: int) -> list[Coordinates]:
    """The same of B: (k, column)."""
    packed = 32 // bits
    return [
        [(part + IN_GROUP * packed + i, GROUP) for i in range(packed)]
        for part in range(0, k, 4 * packed)
    ]


def _c(rows: int, packed: int) -> list[Coordinates]:
    """The same of C and D: (row, column); fp16 results are packed two to a register."""
    return [
        [(GROUP + row, IN_GROUP * 2 + start + i) for i in range(packed)]
        for row in range(0, rows, 8)
        for start in range(0, 2, packed)
    ]


def _operands(shape: str, types: str) -> tuple[list[Coordinates], ...]:
    rows, columns, k = (int(number) for number in re.findall(r"\d+", shape))
    assert columns == 8
    bits = 16 if "f16.f16" in types else 8
    return _a(rows, k, bits), _b(k, bits), _c(rows, 2 if types.startswith("f16") else 1)


class Warp:
    """Registers by name; each holds, for each lane, the elements packed in it."""

    def __init__(self) -> None:
        self.registers: dict[str, Fragment] = {}

    def write(self, names: list[str], layout: list[Coordinates], matrix: Fragment) -> None:
        for name, coordinates in zip(names, layout, strict=True):
            self.registers[name] = np.stack([matrix[at] for at in coordinates])

    def read(self, names: list[str], layout: list[Coordinates], shape: tuple[int, int]) -> Fragment:
        matrix = np.full(shape, np.nan)
        for name, coordinates in zip(names, layout, strict=True):
            for at, elements in zip(coordinates, self.registers[name], strict=True):
                matrix[at] = elements
        assert not np.isnan(matrix).any()
        return matrix

    def run(self, ptx: str) -> None:
        for line in ptx.splitlines():
            if move := re.fullmatch(r"\s*mov\.b32 (\S+), (\S+);", line):
                self.registers[move[1]] = self.registers[move[2]]
            elif mma := re.fullmatch(r"\s*mma\.sync\.aligned\.(\w+)\.row\.col\.(\S+) (.*);", line):
                self._mma(mma[1], mma[2], mma[3])
            else:
                assert re.fullmatch(r"\s*([{}]|\.reg \.b32 %\w+<\d+>;)?", line), line

    def _mma(self, shape: str, types: str, text: str) -> None:
        d, a, b, c = ([r.strip() for r in part.split(",")] for part in re.findall(r"{(.*?)}", text))
        rows, columns, k = (int(number) for number in re.findall(r"\d+", shape))
        of_a, of_b, of_c = _operands(shape, types)
        product = self.read(a, of_a, (rows, k)) @ self.read(b, of_b, (k, columns))
        self.write(d, of_c, product + self.read(c, of_c, (rows, columns)))


AMPERE = {
    "f32.f16.f16.f32": ("m16n8k16", "", (4, 4, 2)),
    "f16.f16.f16.f16": ("m16n8k16", "", (2, 4, 2)),
    "s32.s8.s8.s32": ("m16n8k32", "satfinite.", (4, 4, 2)),
    "s32.u8.s8.s32": ("m16n8k32", "satfinite.", (4, 4, 2)),
}


@pytest.mark.parametrize("types", AMPERE)
@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), clash=st.permutations(range(6)))
def test_the_rewritten_instruction_computes_the_product(
    types: str, seed: int, clash: list[int]
) -> None:
    """Also where LLVM gives a result the register of an operand."""
    shape, saturation, (of_d, of_a, of_b) = AMPERE[types]
    rows, columns, k = (int(number) for number in re.findall(r"\d+", shape))
    a = [f"%a{i}" for i in range(of_a)]
    b = [f"%b{i}" for i in range(of_b)]
    c = [f"%c{i}" for i in range(of_d)]
    d = [(a + b)[i] for i in clash[:of_d]]
    lists = ", ".join("{ " + ", ".join(registers) + " }" for registers in (d, a, b, c))
    ptx, instructions = turing_ptx.for_turing(
        f"mma.sync.aligned.{shape}.row.col.{saturation}{types} {lists};"
    )
    assert instructions == (2 if shape == "m16n8k16" else 4)
    assert shape not in ptx
    random = np.random.default_rng(seed)
    left = random.integers(-8, 8, (rows, k)).astype(np.float64)
    right = random.integers(-8, 8, (k, columns)).astype(np.float64)
    start = random.integers(-8, 8, (rows, columns)).astype(np.float64)
    warp = Warp()
    layouts = _operands(shape, types)
    for names, layout, matrix in zip((a, b, c), layouts, (left, right, start), strict=True):
        warp.write(names, layout, matrix)
    warp.run(ptx)
    np.testing.assert_array_equal(warp.read(d, layouts[2], (rows, columns)), left @ right + start)


@pytest.mark.parametrize(
    "instruction",
    [
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%a0}, {%a1}, {%a2}, {%a3};",
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%a0}, {%a1}, {%a2}, {%a3};",
    ],
)
def test_an_instruction_of_other_types_is_left_alone_and_named(instruction: str) -> None:
    assert turing_ptx.for_turing(instruction) == (instruction, 0)
    assert turing_ptx.first_beyond_turing(instruction) == instruction.split()[0]


_BEYOND = [
    "cp.async.ca.shared.global [%s], [%l], 16;",
    "cp.async.commit_group;",
    "cp.async.wait_group 0;",
    "createpolicy.fractional.L2::evict_last.b64 %l, 1.0;",
    "ld.global.L2::cache_hint.b32 %s, [%l], %l;",
    "redux.sync.add.s32 %s, %s, -1;",
    "mbarrier.init.shared.b64 [%s], 1;",
    "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%s], {%s};",
    "griddepcontrol.wait;",
    "setmaxnreg.inc.sync.aligned.u32 64;",
    "barrier.cluster.arrive.aligned;",
    "fence.proxy.async;",
    "cvt.rn.bf16x2.f32 %s, %f, %f;",
    "cvt.rn.satfinite.e4m3x2.f32 %h, %f, %f;",
    "cvt.rna.tf32.f32 %s, %f;",
    "fma.rn.bf16x2 %s, %s, %s, %s;",
    "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%d, %d}, {%d}, {%d}, {%d, %d};",
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
    " {%f,%f,%f,%f}, {%s,%s,%s,%s}, {%s,%s}, {%f,%f,%f,%f};",
    "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32"
    " {%s,%s,%s,%s}, {%s,%s,%s,%s}, {%s,%s}, {%s,%s,%s,%s};",
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
    " {%f,%f,%f,%f}, {%s,%s,%s,%s}, {%s,%s}, {%f,%f,%f,%f};",
]
_WITHIN = [
    "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%f,%f,%f,%f}, {%s,%s}, {%s}, {%f,%f,%f,%f};",
    "mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%s,%s}, {%s,%s}, {%s}, {%s,%s};",
    "mma.sync.aligned.m8n8k16.row.col.s32.s8.u8.s32 {%s,%s}, {%s}, {%s}, {%s,%s};",
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%s,%s,%s,%s}, [%s];",
    "fma.rn.f16x2 %s, %s, %s, %s;",
    "cvt.rn.f16.f32 %h, %f;",
    "shfl.sync.bfly.b32 %s, %s, 1, 31, -1;",
    "bar.sync 0;",
    "membar.gl;",
]


def _assembles(instruction: str, directory: Path) -> bool:
    source = directory / "kernel.ptx"
    source.write_text(
        ".version 8.7\n.target sm_75\n.address_size 64\n.visible .entry kernel()\n{\n"
        ".reg .b32 %s;\n.reg .f32 %f;\n.reg .b64 %l;\n.reg .f64 %d;\n.reg .b16 %h;\n"
        f"mov.b32 %s, 0;\nmov.f32 %f, 0f00000000;\nmov.b64 %l, 0;\n{instruction}\nret;\n}}\n"
    )
    command = [knobs.nvidia.ptxas.path, "--gpu-name=sm_75", str(source), "-o", "/dev/null"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        # A mistake in the test's own PTX would be another error.
        assert "requires" in run.stderr or "not supported" in run.stderr, run.stderr
    return run.returncode == 0


@pytest.mark.parametrize("instruction", _BEYOND + _WITHIN)
def test_we_and_the_assembler_agree_on_what_turing_has(instruction: str, tmp_path: Path) -> None:
    named = turing_ptx.first_beyond_turing(instruction)
    assert (named is None) == _assembles(instruction, tmp_path)
    assert named == (None if instruction in _WITHIN else instruction.split()[0].rstrip(";"))
