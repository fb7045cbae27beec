# SPDX-License-Identifier: Apache-2.0
"""Preflight of a linear layer with INT8 activations, and of a launch after it.

    python int8_product.py REQUEST TABLES

As `vllm.pre_ampere.preflight.compile_for_card`, with these in place of a model's launches, whether or
not matrix products go to tensor cores.
"""

import sys

from vllm.pre_ampere.preflight import compile_for_card, launches
from vllm.pre_ampere.preflight.launches.launch import Launch
from vllm.pre_ampere.preflight.model import ModelShapes


def chosen(shapes: ModelShapes, tensor_cores: bool) -> dict[str, Launch]:
    # Here, for it imports Triton's users.
    from vllm.pre_ampere.preflight.launches import quantized

    return {**quantized.INT8_LAUNCHES, "afterwards": quantized.LAUNCHES["quantized, embedding"]}


if __name__ == "__main__":
    launches.launches = chosen
    compile_for_card.main(*sys.argv[1:])
