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
def permute(values, order, out, SIZE: tl.constexpr):
    """out = values[order], in one block whose values all lie in shared memory."""
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.gather(tl.load(values + at), tl.load(order + at), 0))


def launch(size: int) -> tuple[int, bool]:
    """Shared memory of the launch in bytes, and whether its result is right."""
    values = torch.randn(size, device="cuda")
    order = torch.randperm(size, device="cuda", dtype=torch.int32)
    out = torch.empty_like(values)
    kernel = permute[(1,)](values, order, out, SIZE=size, num_warps=16)
    return kernel.metadata.shared, torch.equal(out, values[order.long()])


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
    result["fits"], result["right"] = launch(1 << 14)
    result["needed"] = 4 << 15
    try:
        launch(1 << 15)
    except triton.runtime.errors.OutOfResources as refused:
        result["over"] = str(refused)
    result["refusal"] = refusal()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
