# SPDX-License-Identifier: Apache-2.0
"""Small Triton kernels, one for each way of using `tl.dot`, and their compilation for Turing."""

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TURING = GPUTarget("cuda", 75, 32)


@triton.jit
def matmul(
    a, b, c, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ACC: tl.constexpr,
    TRANSPOSED_A: tl.constexpr, TRANSPOSED_B: tl.constexpr, FROM_REGISTERS: tl.constexpr,
):  # fmt: skip
    """c = a @ b with masks; an operand may lie transposed in memory, and may be computed on."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), ACC)
    for start in tl.range(0, K, BK, num_stages=3):
        k = start + tl.arange(0, BK)
        if TRANSPOSED_A:
            at = tl.load(a + k[:, None] * M + m[None, :], mask=(k < K)[:, None] & (m < M), other=0)
            x = tl.trans(at)
        else:
            x = tl.load(a + m[:, None] * K + k[None, :], mask=(m < M)[:, None] & (k < K), other=0)
        if TRANSPOSED_B:
            bt = tl.load(b + n[:, None] * K + k[None, :], mask=(n < N)[:, None] & (k < K), other=0)
            y = tl.trans(bt)
        else:
            y = tl.load(b + k[:, None] * N + n[None, :], mask=(k < K)[:, None] & (n < N), other=0)
        if FROM_REGISTERS:
            x = (x * 2).to(x.dtype)
        acc = tl.dot(x, y, acc, out_dtype=ACC)
    at = c + m[:, None] * N + n[None, :]
    tl.store(at, acc.to(c.dtype.element_ty), mask=(m < M)[:, None] & (n < N))


@triton.jit
def chained(q, k, v, o, S, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr):
    """o = (q @ k.T) @ v, the first product's result being the second's operand, as in attention."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    x = tl.load(q + m[:, None] * D + d[None, :], mask=(m < S)[:, None], other=0.0)
    acc = tl.zeros((BM, D), tl.float32)
    for start in range(0, S, BN):
        n = start + tl.arange(0, BN)
        rows = n[:, None] * D + d[None, :]
        y = tl.load(k + rows, mask=(n < S)[:, None], other=0.0)
        z = tl.load(v + rows, mask=(n < S)[:, None], other=0.0)
        acc += tl.dot(tl.dot(x, tl.trans(y)).to(z.dtype), z)
    tl.store(o + m[:, None] * D + d[None, :], acc, mask=(m < S)[:, None])


@triton.jit
def block(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """c = a @ b, one block."""
    m = tl.arange(0, M)
    n = tl.arange(0, N)
    k = tl.arange(0, K)
    x = tl.load(a + m[:, None] * K + k[None, :])
    y = tl.load(b + k[:, None] * N + n[None, :])
    tl.store(c + m[:, None] * N + n[None, :], tl.dot(x, y))


@triton.jit
def of_ones(b, c, N: tl.constexpr):
    """c = 1 + ones @ b in fp16: operand and accumulator hold the same constant."""
    n = tl.arange(0, N)
    at = n[:, None] * N + n[None, :]
    ones = tl.full((N, N), 1.0, tl.float16)
    tl.store(c + at, tl.dot(ones, tl.load(b + at), ones, out_dtype=tl.float16))


@triton.jit
def batched(a, b, c, G: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """A three-dimensional product of one block: c[g] = a[g] @ b[g]."""
    g = tl.arange(0, G)[:, None, None]
    m = tl.arange(0, M)
    n = tl.arange(0, N)
    k = tl.arange(0, K)
    x = tl.load(a + (g * M + m[None, :, None]) * K + k[None, None, :])
    y = tl.load(b + (g * K + k[None, :, None]) * N + n[None, None, :])
    tl.store(c + (g * M + m[None, :, None]) * N + n[None, None, :], tl.dot(x, y))


@triton.jit
def mixed(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """c = (a @ a.T) @ (a @ b): the inner products of fp16, the outer one of fp32."""
    m = tl.arange(0, M)
    n = tl.arange(0, N)
    k = tl.arange(0, K)
    x = tl.load(a + m[:, None] * K + k[None, :])
    y = tl.load(b + k[:, None] * N + n[None, :])
    outer = tl.dot(tl.dot(x, tl.trans(x)), tl.dot(x, y))
    tl.store(c + m[:, None] * N + n[None, :], outer)


@dataclass(frozen=True)
class Compiled:
    """What came out of a compilation for sm_75.

    Attributes:
        way: the compiled kernel's own word on it ("tensor cores", "refused: …"); None if silent.
        tensor_core: HMMA and IMMA instructions in the machine code, by full name.
        fma: FFMA and HFMA2 instructions in it.
        shared: bytes of shared memory.
        stack: bytes of stack a thread, which is what it spills.
        ptx: the PTX.
    """

    way: str | None
    tensor_core: dict[str, int]
    fma: int
    shared: int
    stack: int
    ptx: str


def compile_for_turing(
    kernel: triton.JITFunction,
    pointers: dict[str, str],
    integers: tuple[str, ...] = (),
    num_warps: int = 4,
    target: GPUTarget = TURING,
    **constants: Any,
) -> Compiled:
    """Compile without a GPU; pointers and integers are taken as multiples of 16."""
    signature = {name: f"*{dtype}" for name, dtype in pointers.items()}
    signature |= dict.fromkeys(integers, "i32")
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(signature))}
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=target, options={"num_warps": num_warps})
    code = _disassemble(compiled.asm["cubin"])
    instructions = re.findall(r"\b([HI]MMA\.[\w.]+|FFMA|HFMA2)\b", code)
    stack = re.search(r"STACK:(\d+)", _resource_usage(compiled.asm["cubin"]))
    assert stack is not None
    matrix = [name for name in instructions if "MMA." in name]
    return Compiled(
        way=getattr(compiled.metadata, "turing_mma", None),
        tensor_core={name: matrix.count(name) for name in sorted(set(matrix))},
        fma=len(instructions) - len(matrix),
        shared=compiled.metadata.shared,
        stack=int(stack[1]),
        ptx=compiled.asm["ptx"],
    )


def compile_matmul(
    dtype: str = "fp16",
    accumulator: Any = tl.float32,
    tile: tuple[int, int, int] = (64, 64, 32),
    num_warps: int = 4,
    transposed: tuple[bool, bool] = (False, False),
    from_registers: bool = False,
    target: GPUTarget = TURING,
) -> Compiled:
    output = "i32" if dtype == "i8" else "fp32"
    return compile_for_turing(
        matmul,
        {"a": dtype, "b": dtype, "c": output},
        ("M", "N", "K"),
        num_warps=num_warps,
        target=target,
        BM=tile[0],
        BN=tile[1],
        BK=tile[2],
        ACC=accumulator,
        TRANSPOSED_A=transposed[0],
        TRANSPOSED_B=transposed[1],
        FROM_REGISTERS=from_registers,
    )


def compile_block(
    dtype: str = "fp16", num_warps: int = 1, size: int = 32, target: GPUTarget = TURING
) -> Compiled:
    """The smallest whole kernel: quick to compile, also off the tensor cores."""
    operands = {"a": dtype, "b": dtype, "c": "fp32"}
    return compile_for_turing(
        block, operands, num_warps=num_warps, target=target, M=size, N=size, K=size
    )


def _tool(name: str, option: str, cubin: bytes) -> str:
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tools / name), option, file.name]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return run.stdout


def _disassemble(cubin: bytes) -> str:
    return _tool("cuobjdump", "-sass", cubin)


def _resource_usage(cubin: bytes) -> str:
    return _tool("cuobjdump", "-res-usage", cubin)
