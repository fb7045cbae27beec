# SPDX-License-Identifier: Apache-2.0
"""The kinds of quantised checkpoints that docs/quantization.md has a row for, and which of them one is.

A row has the quantisation part of such a checkpoint's configuration. A checkpoint is of the row whose
configuration upstream reads as it reads the checkpoint's own: upstream has resolved the method by
then, and knows what its name in the file, `auto-round` or `modelopt`, stands for.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.model_executor.layers.quantization import QuantizationConfig

GROUP_SIZE = 128
# Names of the layers that are made of a format.
LINEAR_PREFIX = "model.layers.0.mlp.down_proj"
EXPERTS_PREFIX = "model.layers.0.mlp.experts"


@dataclass(frozen=True)
class Format:
    """A kind of quantised checkpoint.

    Attributes:
        name: what people call it.
        method: upstream's name of the quantisation method.
        configuration: the quantisation part of such a checkpoint's configuration.
        variants: others of which upstream makes the same on these cards.
    """

    name: str
    method: str
    configuration: Mapping[str, Any]
    variants: tuple[Mapping[str, Any], ...] = ()


def _gptq(bits: int) -> dict[str, Any]:
    return {"bits": bits, "group_size": GROUP_SIZE, "desc_act": False, "sym": True}


def _auto_round(bits: int, packing: str, symmetric: bool) -> dict[str, Any]:
    return {
        "bits": bits,
        "group_size": GROUP_SIZE,
        "sym": symmetric,
        "packing_format": f"auto_round:{packing}",
    }


def _quark(weights: dict[str, Any]) -> dict[str, Any]:
    return {
        "export": {
            "kv_cache_group": [],
            "pack_method": "reorder",
            "weight_format": "real_quantized",
        },
        "global_quant_config": {
            "weight": {"is_dynamic": False, "symmetric": True, **weights},
            "input_tensors": None,
            "output_tensors": None,
            "bias": None,
        },
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": [],
    }


def _model_optimizer(algorithm: str, **more: object) -> dict[str, Any]:
    return {"quant_algo": algorithm, "ignore": [], **more}


def _compressed(
    packing: str, weights: dict[str, Any], activations: dict[str, Any] | None = None
) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {"symmetric": True, "dynamic": False, **weights},
        "input_activations": activations and {"symmetric": True, **activations},
    }
    return {"format": packing, "ignore": [], "config_groups": {"group_0": group}}


_FLOAT4 = {"num_bits": 4, "type": "float"}
_FLOAT8 = {"num_bits": 8, "type": "float"}
_INT4 = {"num_bits": 4, "type": "int"}
_INT8 = {"num_bits": 8, "type": "int"}
_NVFP4 = {**_FLOAT4, "strategy": "tensor_group", "group_size": 16}
_MXFP4 = {**_FLOAT4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
_PER_TENSOR = {"strategy": "tensor"}
_PER_CHANNEL = {"strategy": "channel"}
_PER_BLOCK = {"strategy": "block", "block_structure": [128, 128]}
_PER_TOKEN = {"strategy": "token", "dynamic": True}
_PER_GROUP = {"strategy": "group", "group_size": GROUP_SIZE}
_QUARK_GROUPS = {"qscheme": "per_group", "ch_axis": -1, "group_size": GROUP_SIZE}
_MIXED_LAYERS = {
    prefix: {"quant_algo": "NVFP4", "group_size": 16} for prefix in (LINEAR_PREFIX, EXPERTS_PREFIX)
}

FORMATS: tuple[Format, ...] = (
    Format("AWQ, 4 bits", "awq", {"bits": 4, "group_size": GROUP_SIZE, "zero_point": True}),
    Format("GPTQ, 4 bits", "gptq", _gptq(4)),
    Format("GPTQ, 8 bits", "gptq", _gptq(8)),
    Format("GPTQ, 4 bits, by request", "moe_wna16", {"quant_method": "gptq", **_gptq(4)}),
    Format("GPTQ, 8 bits, by request", "moe_wna16", {"quant_method": "gptq", **_gptq(8)}),
    Format("AutoRound packed as GPTQ, 4 bits", "inc", _auto_round(4, "auto_gptq", True)),
    Format("AutoRound packed as GPTQ, 8 bits", "inc", _auto_round(8, "auto_gptq", True)),
    Format("AutoRound packed as AWQ, 4 bits", "inc", _auto_round(4, "auto_awq", False)),
    Format(
        "AutoRound, FP8 in blocks",
        "inc",
        {"bits": 8, "group_size": [128, 128], "data_type": "fp", "sym": True},
    ),
    Format(
        "INT4 weights (W4A16)",
        "quark",
        _quark({"dtype": "int4", **_QUARK_GROUPS}),
    ),
    Format(
        "INT4 weights with zero points (W4A16)",
        "quark",
        _quark({"dtype": "uint4", "symmetric": False, **_QUARK_GROUPS}),
    ),
    Format(
        "INT4 weights (W4A16)",
        "compressed-tensors",
        _compressed("pack-quantized", {**_INT4, **_PER_GROUP}),
        (_compressed("pack-quantized", {**_INT4, **_PER_GROUP, "symmetric": False}),),
    ),
    Format(
        "INT8 weights (W8A16)",
        "compressed-tensors",
        _compressed("pack-quantized", {**_INT8, **_PER_GROUP}),
    ),
    Format(
        "INT8 (W8A8)",
        "compressed-tensors",
        _compressed("int-quantized", {**_INT8, **_PER_CHANNEL}, {**_INT8, **_PER_TOKEN}),
        (
            _compressed(
                "int-quantized",
                {**_INT8, **_PER_CHANNEL},
                {**_INT8, **_PER_TOKEN, "symmetric": False},
            ),
        ),
    ),
    Format("NVFP4, ModelOpt", "modelopt_fp4", _model_optimizer("NVFP4", group_size=16)),
    Format(
        "NVFP4",
        "compressed-tensors",
        _compressed("nvfp4-pack-quantized", _NVFP4, {**_NVFP4, "dynamic": "local"}),
        (_compressed("nvfp4-pack-quantized", _NVFP4, _NVFP4),),
    ),
    Format(
        "NVFP4 weights (W4A16)",
        "compressed-tensors",
        _compressed("nvfp4-pack-quantized", _NVFP4),
    ),
    Format(
        "NVFP4 and FP8 mixed, ModelOpt",
        "modelopt_mixed",
        _model_optimizer("MIXED_PRECISION", quantized_layers=_MIXED_LAYERS),
    ),
    Format("MXFP4", "mxfp4", {}),
    Format(
        "MXFP4",
        "compressed-tensors",
        _compressed("mxfp4-pack-quantized", _MXFP4),
        (_compressed("mxfp4-pack-quantized", _MXFP4, {**_MXFP4, "dynamic": True}),),
    ),
    Format("FP8", "fp8", {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    Format("FP8, ModelOpt", "modelopt", _model_optimizer("FP8")),
    Format(
        "FP8",
        "compressed-tensors",
        _compressed("float-quantized", {**_FLOAT8, **_PER_CHANNEL}, {**_FLOAT8, **_PER_TOKEN}),
        (
            _compressed("float-quantized", {**_FLOAT8, **_PER_TENSOR}, {**_FLOAT8, **_PER_TENSOR}),
            _compressed(
                "float-quantized",
                {**_FLOAT8, **_PER_BLOCK},
                {**_FLOAT8, **_PER_GROUP, "dynamic": True},
            ),
        ),
    ),
)


# What upstream's classes keep of a configuration and choose a kernel by, where they have it.
_CHOSEN_BY = (
    "is_sym",
    "sym",
    "zero_point",
    "has_zp",
    "packing_format",
    "data_type",
    "linear_quant_method",
    "store_dtype",
)


def row_of(quantization: "QuantizationConfig | None") -> Format | None:
    """The row of the table that a checkpoint is of.

    Args:
        quantization: what upstream has read from the checkpoint's configuration; None without
            quantisation.

    Returns:
        None where it is of no row, or has layers of several.
    """
    from vllm.model_executor.layers.quantization import get_quantization_config

    if quantization is None:
        return None
    kind = _kind(quantization)
    for each in FORMATS:
        method = get_quantization_config(each.method)
        if type(quantization) is not method:
            continue
        alike = (each.configuration, *each.variants)
        if any(_kind(method.from_config(dict(configuration))) == kind for configuration in alike):
            return each
    return None


def _kind(quantization: Any) -> Hashable:
    """What tells the rows of one of upstream's classes apart."""
    match quantization.get_name():
        case "compressed-tensors":
            schemes = quantization.target_scheme_map.values()
            parts = ("weights", "input_activations")
            kinds = frozenset(tuple(_numbers(scheme[part]) for part in parts) for scheme in schemes)
            return kinds, quantization.transform_config is None
        case "quark":
            described = quantization.quant_config
            whole, apart = described["global_quant_config"], described.get("layer_quant_config")
            numbers = (_quark_numbers(whole[part]) for part in ("weight", "input_tensors"))
            return *numbers, bool(apart)
    bits = {getattr(quantization, "weight_bits", None)}
    for name in ("dynamic", "extra_config"):
        for layer in (getattr(quantization, name, None) or {}).values():
            # Without bits, or with those of float16, a layer is not quantised.
            bits |= {layer["bits"]} if layer.get("bits", 16) < 16 else set()
    return frozenset(bits), *(getattr(quantization, name, None) for name in _CHOSEN_BY)


def _numbers(arguments: Any) -> Hashable:
    """How compressed-tensors keeps the numbers of a tensor; None where it leaves them alone."""
    if arguments is None:
        return None
    names = ("num_bits", "type", "strategy", "symmetric")
    return *(getattr(arguments, name) for name in names), bool(arguments.dynamic)


def _quark_numbers(described: Any) -> Hashable:
    """The same of Quark, which may describe a tensor in several steps."""
    steps = described if isinstance(described, list) else [described]
    names = ("dtype", "qscheme", "symmetric", "is_dynamic")
    return tuple(step and tuple(step.get(name) for name in names) for step in steps)
