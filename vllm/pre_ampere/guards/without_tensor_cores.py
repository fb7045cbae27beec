# SPDX-License-Identifier: Apache-2.0
"""Matrix products for Turing cards without tensor cores (GTX 16xx).

There the float16 product of one row runs at memory speed, and that of two rows at a twentieth of
it (public reports for the GTX 1650: PyTorch issue 195716, and vLLM issue 54950, which found float32
6 to 9 times as fast for 2 to 8 requests). So one row stays in float16, and more are multiplied in
float32, a slice of the weight at a time. The result is that of float16 inputs with float32
accumulation, as a tensor core's, rounded to float16 once.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from vllm.utils.torch_utils import direct_register_custom_op

from vllm.pre_ampere.devices import Device

# Bytes of float32 weight that exist at once.
_SLICE_BYTES = 64 * 1024 * 1024
_FLOAT32_BYTES = 4

# CUDA's numbers of the cards that have tensor cores after all, in a box that mixes them.
_ordinals_with_tensor_cores: frozenset[int] = frozenset()


def linear_without_tensor_cores(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias`, in float32 where x has more than one row.

    Args:
        x: [..., in_features], float16.
        weight: [out_features, in_features], float16.
        bias: [out_features] or None.

    Returns:
        [..., out_features], float16.
    """
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0] == 1 or x.device.index in _ordinals_with_tensor_cores:
        return torch.nn.functional.linear(x, weight, bias)
    out = x.new_empty(rows.shape[0], weight.shape[0])
    wide = rows.float()
    step = max(_SLICE_BYTES // (_FLOAT32_BYTES * weight.shape[1]), 1)
    for start in range(0, weight.shape[0], step):
        part = slice(start, start + step)
        wide_bias = None if bias is None else bias[part].float()
        out[:, part] = torch.nn.functional.linear(wide, weight[part].float(), wide_bias)
    return out.reshape(*x.shape[:-1], weight.shape[0])


def _shape_only(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def unquantized_gemm(
    layer: torch.nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """In place of upstream's `default_unquantized_gemm`; the arguments are upstream's."""
    if x.dtype != torch.float16:
        return torch.nn.functional.linear(x, weight, bias)
    return torch.ops.vllm.linear_without_tensor_cores(x, weight, bias)


def register(visible: Sequence[Device]) -> None:
    """Put the operator in upstream's library; a second call changes nothing.

    Args:
        visible: all cards that this process sees.
    """
    global _ordinals_with_tensor_cores
    _ordinals_with_tensor_cores = frozenset(d.index for d in visible if d.has_tensor_cores)
    if getattr(torch.ops.vllm, "linear_without_tensor_cores", None) is None:
        direct_register_custom_op(
            op_name="linear_without_tensor_cores",
            op_func=linear_without_tensor_cores,
            mutates_args=[],
            fake_impl=_shape_only,
        )
