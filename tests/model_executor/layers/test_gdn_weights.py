# SPDX-License-Identifier: Apache-2.0
"""Every GDN parameter of both layouts is loaded only from a tensor of the configuration's shape."""

import pytest
import torch
from torch import nn

from vllm.pre_ampere.gdn.weights import check_shapes_while_loading

HIDDEN, KEY_HEADS, VALUE_HEADS, DIM, WIDTH = 12, 2, 4, 8, 4
KEY, VALUE = KEY_HEADS * DIM, VALUE_HEADS * DIM


class Layer(nn.Module):
    """The parameters of upstream's layer, whole (one rank)."""

    def __init__(self, interleaved: bool) -> None:
        super().__init__()
        self.prefix = "model.layers.0.linear_attn"
        self.hidden_size, self.head_v_dim = HIDDEN, DIM
        self.num_v_heads, self.conv_kernel_size = VALUE_HEADS, WIDTH
        self.conv_dim, self.value_dim = 2 * KEY + VALUE, VALUE
        self.A_log = nn.Parameter(torch.zeros(VALUE_HEADS))
        self.dt_bias = nn.Parameter(torch.zeros(VALUE_HEADS))
        self.conv1d = holder(self.conv_dim, 1, WIDTH)
        self.norm = holder(DIM)
        self.out_proj = holder(HIDDEN, VALUE)
        sizes = [KEY, KEY, VALUE, VALUE]
        self.in_proj_qkvz = holder(sum(sizes), HIDDEN)
        self.in_proj_qkvz.output_sizes = [sum(sizes)] if interleaved else sizes
        self.in_proj_ba = holder(2 * VALUE_HEADS, HIDDEN)
        self.in_proj_ba.output_sizes = [2 * VALUE_HEADS] if interleaved else [VALUE_HEADS] * 2
        self.loaded: list[object] = []
        for parameter in self.parameters():
            parameter.weight_loader = lambda p, w, shard=None: self.loaded.append(shard)


def holder(*shape: int) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(*shape))
    return module


FLAT = [
    ("in_proj_qkvz.weight", (0, 1, 2), (2 * KEY + VALUE, HIDDEN)),
    ("in_proj_qkvz.weight", 3, (VALUE, HIDDEN)),
    ("in_proj_ba.weight", 0, (VALUE_HEADS, HIDDEN)),
    ("in_proj_ba.weight", 1, (VALUE_HEADS, HIDDEN)),
]
INTERLEAVED = [
    ("in_proj_qkvz.weight", None, (2 * KEY + 2 * VALUE, HIDDEN)),
    ("in_proj_ba.weight", None, (2 * VALUE_HEADS, HIDDEN)),
]
COMMON = [
    ("A_log", None, (VALUE_HEADS,)),
    ("dt_bias", None, (VALUE_HEADS,)),
    ("conv1d.weight", None, (2 * KEY + VALUE, 1, WIDTH)),
    ("norm.weight", None, (DIM,)),
    ("out_proj.weight", None, (HIDDEN, VALUE)),
]
CASES = [(False, *case) for case in FLAT + COMMON] + [(True, *case) for case in INTERLEAVED]


@pytest.mark.parametrize(("interleaved", "name", "shard", "shape"), CASES)
def test_the_right_shape_loads_and_any_other_is_refused_by_name(
    interleaved: bool, name: str, shard: object, shape: tuple[int, ...]
) -> None:
    layer = Layer(interleaved)
    check_shapes_while_loading(layer)
    parameter = layer.get_parameter(name)
    arguments = () if shard is None else (shard,)
    parameter.weight_loader(parameter, torch.zeros(shape), *arguments)
    assert layer.loaded == [shard]
    for dimension in range(len(shape)):
        for change in (-1, 1):
            wrong = list(shape)
            wrong[dimension] += change
            with pytest.raises(ValueError, match="do not belong together") as error:
                parameter.weight_loader(parameter, torch.zeros(wrong), *arguments)
            assert f"{layer.prefix}.{name}" in str(error.value)
            assert str(tuple(wrong)) in str(error.value)
            assert str(shape) in str(error.value)
    assert layer.loaded == [shard]


def test_quantised_parameters_are_left_to_their_own_loaders() -> None:
    layer = Layer(interleaved=False)

    del layer.out_proj.weight
    layer.out_proj.weight_packed = nn.Parameter(
        torch.zeros(3, dtype=torch.int32), requires_grad=False
    )
    check_shapes_while_loading(layer)
    assert not hasattr(layer.out_proj.weight_packed, "weight_loader")
