# SPDX-License-Identifier: Apache-2.0
"""The launches of a model's steps, each through the launcher that a step calls.

A launch is a function of the model's shapes that makes tensors as a step would and calls the
launcher; its name is what the report shows. Batches are small where the size of a batch does not
reach the code: three requests, one with k=3 drafts each, a prompt of 131 tokens.

CUDA and TileLang kernels get a module each here when the project has some.
"""

from vllm.pre_ampere.preflight.launches.launch import AUTOTUNED, Launch
from vllm.pre_ampere.preflight.model import ModelShapes

__all__ = ["AUTOTUNED", "launches"]


def launches(shapes: ModelShapes, tensor_cores: bool) -> dict[str, Launch]:
    """All launches of the model, in the order of a step; quantised layers come last.

    Args:
        shapes: of the model.
        tensor_cores: whether matrix products go to tensor cores; those of int8 compile only there.
    """
    from vllm.pre_ampere.preflight.launches import (
        attention,
        gdn,
        linear,
        lora,
        quantized,
        sampling,
        step,
    )

    found = {**step.LAUNCHES, **gdn.LAUNCHES, **attention.LAUNCHES, **sampling.LAUNCHES}
    found |= {**linear.LAUNCHES, **lora.LAUNCHES, **quantized.LAUNCHES}
    if shapes.num_experts:
        from vllm.pre_ampere.preflight.launches import experts

        found |= {**experts.LAUNCHES, **lora.EXPERT_LAUNCHES, **quantized.EXPERT_LAUNCHES}
    if tensor_cores:
        found |= quantized.INT8_LAUNCHES
        found |= quantized.INT8_EXPERT_LAUNCHES if shapes.num_experts else {}
    return found
