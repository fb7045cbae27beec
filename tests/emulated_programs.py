# SPDX-License-Identifier: Apache-2.0
"""The program of test_emulation.py: Triton on a newer card that is not there, emulating an older.

    python emulated_programs.py CAPABILITY

prints one JSON line. Triton's compiler and assembler are the real ones; only the driver is not.
"""

import json
import re
import sys
from typing import Any

import torch
import triton
import triton.language as tl

from vllm.pre_ampere import emulation
from vllm.pre_ampere.devices import Device, emulated_devices
from vllm.pre_ampere.preflight import card

HOPPER = Device(index=0, name="NVIDIA H200", capability=(9, 0))


@triton.jit
def permute(values, order, out, SIZE: tl.constexpr):
    """out = values[order], in one block whose values all lie in shared memory."""
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.gather(tl.load(values + at), tl.load(order + at), 0))


@triton.jit
def product(a, b, out, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """out = a @ b, in one block whose operands lie in shared memory."""
    row = tl.arange(0, ROWS)
    depth = tl.arange(0, DEPTH)
    x = tl.load(a + row[:, None] * DEPTH + depth[None, :])
    y = tl.load(b + depth[:, None] * ROWS + row[None, :])
    tl.store(out + row[:, None] * ROWS + row[None, :], tl.dot(x, y))


def multiply() -> dict[str, Any]:
    half, single = torch.zeros(1, dtype=torch.float16), torch.zeros(1)
    kernel = product[(1,)](half, half, single, ROWS=64, DEPTH=32)
    return {
        "ptx_target": re.findall(r"^\.target (\w+)", kernel.asm["ptx"], re.MULTILINE),
        "cubin_architecture": _architecture(kernel.asm["cubin"]),
        "matrix_instructions": sorted(set(re.findall(r"\bmma\.sync\S+", kernel.asm["ptx"]))),
    }


def _architecture(cubin: bytes) -> int:
    """From the ELF flags: the second byte since CUDA 12.8's second ABI, the lowest before."""
    flags = int.from_bytes(cubin[48:52], "little")
    return (flags >> 8) & 0xFF if cubin[8] >= 8 else flags & 0xFF


def refuse() -> dict[str, Any]:
    single, order = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    fits = permute[(1,)](single, order, single, SIZE=1 << 14, num_warps=16).metadata.shared
    try:
        permute[(1,)](single, order, single, SIZE=1 << 15, num_warps=16)
    except triton.runtime.errors.OutOfResources as error:
        return {"fits": fits, "error": str(error)}
    return {"fits": fits, "error": ""}


def main(capability: str) -> None:
    card._MULTIPROCESSORS[HOPPER.capability] = 132
    card.OfflineDriver.device = HOPPER
    triton.runtime.driver.set_active(card.OfflineDriver())
    major, minor = capability.split(".")
    cards = emulated_devices([(int(major), int(minor))], 1)
    emulation.limit_shared_memory(triton.runtime.driver.active, cards)
    emulation.lower_for(cards[0])
    made = {"Triton's own": multiply(), "refused": refuse()}
    if cards[0].is_turing:
        from vllm.pre_ampere.kernels.triton import turing_mma

        assert turing_mma.enable()
        emulation.lower_for(cards[0])  # As a worker does once its device is set.
        made["tensor cores"] = multiply()
    print(json.dumps(made))


if __name__ == "__main__":
    main(*sys.argv[1:])
