# SPDX-License-Identifier: Apache-2.0
"""Refuse a checkpoint whose GDN tensors do not fit the configuration, by name and with both shapes.

Upstream's loaders take a slice of what they are given: a tensor that is too long loads without a
word and the model answers with garbage; one that is too short fails inside `narrow`, unnamed.
"""

from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

ShardId = int | tuple[int, ...] | None


def check_shapes_while_loading(layer: Any) -> None:
    """Wrap the weight loaders of a GDN layer's unquantised parameters with a check of the shape.

    Args:
        layer: upstream's QwenGatedDeltaNetAttention (0.32.0), built and not yet loaded.
    """
    for name, whole in _parameters(layer).items():
        module_name, _, attribute = name.rpartition(".")
        module = layer.get_submodule(module_name) if module_name else layer
        parameter = getattr(module, attribute, None)
        if parameter is None or not parameter.is_floating_point():
            continue
        load = getattr(parameter, "weight_loader", default_weight_loader)
        parameter.weight_loader = _checked(load, f"{layer.prefix}.{name}", whole)


def _parameters(layer: Any) -> dict[str, Callable[[ShardId], tuple[int, ...]]]:
    """For each parameter, the shape that the checkpoint must hold for a shard of it."""

    def fixed(*shape: int) -> Callable[[ShardId], tuple[int, ...]]:
        return lambda shard: shape

    def rows_of(sizes: list[int]) -> Callable[[ShardId], tuple[int, ...]]:
        def shape(shard: ShardId) -> tuple[int, ...]:
            if shard is None:
                chosen = sizes
            else:
                chosen = [sizes[i] for i in ((shard,) if isinstance(shard, int) else shard)]
            return (sum(chosen), layer.hidden_size)

        return shape

    return {
        "A_log": fixed(layer.num_v_heads),
        "dt_bias": fixed(layer.num_v_heads),
        "conv1d.weight": fixed(layer.conv_dim, 1, layer.conv_kernel_size),
        "norm.weight": fixed(layer.head_v_dim),
        "in_proj_qkvz.weight": rows_of(layer.in_proj_qkvz.output_sizes),
        "in_proj_ba.weight": rows_of(layer.in_proj_ba.output_sizes),
        "out_proj.weight": fixed(layer.hidden_size, layer.value_dim),
    }


def _checked(
    load: Callable[..., None], name: str, whole: Callable[[ShardId], tuple[int, ...]]
) -> Callable[..., None]:
    def checked(
        parameter: torch.nn.Parameter, loaded_weight: torch.Tensor, shard: ShardId = None
    ) -> None:
        expected, held = whole(shard), tuple(loaded_weight.shape)
        if held != expected:
            part = "" if shard is None else f" (part {shard})"
            raise ValueError(
                f"{name}{part}: the checkpoint holds shape {held}, but config.json asks for "
                f"{expected}; the two do not belong together"
            )
        load(parameter, loaded_weight, *(() if shard is None else (shard,)))

    return checked
