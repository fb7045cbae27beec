# SPDX-License-Identifier: Apache-2.0
"""Launches around the emulated card's shared memory, and a prefill kernel that needs more.

    VLLM_PRE_AMPERE_EMULATE=7.5 python3 tests/gpu/refused_launches.py

Prints one JSON line: what a launch that fits gave, what one that does not raised, and why the
kernel registry refuses `flashqla_sm70`.
"""

import json

import torch
import triton
import triton.language as tl


@triton.jit
def product(a, b, out, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """out = a @ b of one block, whose operands both lie in shared memory."""
    row = tl.arange(0, ROWS)
    depth = tl.arange(0, DEPTH)
    x = tl.load(a + row[:, None] * DEPTH + depth[None, :])
    y = tl.load(b + depth[:, None] * ROWS + row[None, :])
    tl.store(out + row[:, None] * ROWS + row[None, :], tl.dot(x, y))


def multiply(depth: int) -> tuple[int, float]:
    """Shared memory of the launch in bytes, and the greatest error against float64."""
    a = torch.randn(16, depth, dtype=torch.float16, device="cuda")
    b = torch.randn(depth, 16, dtype=torch.float16, device="cuda")
    out = torch.empty(16, 16, dtype=torch.float32, device="cuda")
    kernel = product[(1,)](a, b, out, ROWS=16, DEPTH=depth)
    error = (out.double() - a.double() @ b.double()).abs().max().item()
    return kernel.metadata.shared, error


def refusal() -> str:
    from vllm.platforms import current_platform

    from vllm.pre_ampere.kernels import registry
    from vllm.pre_ampere.kernels.kernel import Problem

    problem = Problem("gdn_prefill", torch.float16, 128, 128)
    try:
        registry.select("gdn_prefill", problem, current_platform.worker_device(), "flashqla_sm70")
    except registry.KernelUnavailableError as error:
        return str(error)
    raise AssertionError("flashqla_sm70 was accepted")


def main() -> None:
    from vllm.platforms import current_platform

    result = {
        "capability": current_platform.get_device_capability().as_version_str(),
        "device": current_platform.get_device_name(),
    }
    torch.cuda.init()
    shared, error = multiply(512)
    result |= {"fits": shared, "error": error}
    result["needed"] = 16 * 2048 * 2 * 2
    try:
        multiply(2048)
    except triton.runtime.errors.OutOfResources as refused:
        result["over"] = str(refused)
    result["refusal"] = refusal()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
