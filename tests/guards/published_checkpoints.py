# SPDX-License-Identifier: Apache-2.0
"""How the tools that quantise checkpoints describe them in config.json, with the rows they are of.

Lists of module names are cut to a few; everything else is as the tools write it.
"""

from typing import Any

Description = dict[str, Any]


def group(
    packing: str, weights: Description, inputs: Description | None = None, target: str = "Linear"
) -> Description:
    return {
        "format": packing,
        "input_activations": inputs,
        "output_activations": None,
        "targets": [target],
        "weights": weights,
    }


def compressed(*groups: Description) -> Description:
    """As llm-compressor writes it."""
    return {
        "config_groups": {f"group_{number}": each for number, each in enumerate(groups)},
        "format": groups[0]["format"] if len(groups) == 1 else "mixed-precision",
        "global_compression_ratio": None,
        "ignore": ["re:.*linear_attn.*", "re:visual.*", "re:mtp.*", "lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.13.0",
    }


def numbers(bits: int, kind: str, strategy: str, **more: object) -> Description:
    return {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": None,
        "num_bits": bits,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": strategy,
        "symmetric": True,
        "type": kind,
        **more,
    }


def gptq(bits: int, **more: object) -> Description:
    """As GPTQModel writes it."""
    return {
        "bits": bits,
        "checkpoint_format": "gptq",
        "desc_act": False,
        "group_size": 128,
        "lm_head": False,
        "meta": {"damp_percent": 0.05, "quantizer": ["gptqmodel:4.0.0"], "true_sequential": True},
        "pack_dtype": "int32",
        "quant_method": "gptq",
        "sym": True,
        **more,
    }


def auto_round(bits: int, packing: str, **more: object) -> Description:
    return {
        "autoround_version": "0.9.2",
        "bits": bits,
        "block_name_to_quantize": "model.language_model.layers",
        "data_type": "int",
        "extra_config": {
            "model.language_model.layers.0.linear_attn.in_proj_a": {"bits": 16, "data_type": "fp"},
            "model.language_model.layers.0.mlp.shared_expert_gate": {"bits": 16, "data_type": "fp"},
        },
        "group_size": 128,
        "iters": 200,
        "packing_format": f"auto_round:{packing}",
        "quant_method": "auto-round",
        "sym": True,
        **more,
    }


def quark(weight: Description, inputs: Description | None = None) -> Description:
    return {
        "algo_config": None,
        "exclude": ["lm_head", "re:.*linear_attn.*"],
        "export": {
            "kv_cache_group": [],
            "min_kv_scale": 0.0,
            "pack_method": "reorder",
            "weight_format": "real_quantized",
            "weight_merge_groups": None,
        },
        "global_quant_config": {
            "bias": None,
            "input_tensors": inputs,
            "output_tensors": None,
            "target_device": None,
            "weight": {
                "ch_axis": -1,
                "group_size": 128,
                "is_dynamic": False,
                "observer_cls": "PerGroupMinMaxObserver",
                "qscheme": "per_group",
                "round_method": "half_even",
                "scale_type": "float",
                **weight,
            },
        },
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "quant_method": "quark",
        "quant_mode": "eager_mode",
        "softmax_quant_spec": None,
        "version": "0.10",
    }


def model_optimizer(algorithm: str, **more: object) -> Description:
    """As ModelOpt writes it into config.json."""
    return {
        "ignore": ["lm_head", "model.layers.0.linear_attn.in_proj_a", "mtp*"],
        "producer": {"name": "modelopt", "version": "0.40.0"},
        "quant_algo": algorithm,
        "quant_method": "modelopt",
        **more,
    }


def hf_quant_config(algorithm: str, **more: object) -> Description:
    """As older releases of ModelOpt write it into hf_quant_config.json."""
    common = {"exclude_modules": ["lm_head"], "kv_cache_quant_algo": None, "quant_algo": algorithm}
    return {
        "producer": {"name": "modelopt", "version": "0.29.0"},
        "quantization": {**common, **more},
    }


INT4 = numbers(4, "int", "group", group_size=128)
FP8_TENSOR = numbers(8, "float", "tensor")
FP8_CHANNEL = numbers(8, "float", "channel")
FP8_TOKEN = numbers(8, "float", "token", dynamic=True, observer=None)
NVFP4 = numbers(4, "float", "tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn")
NVFP4_INPUTS = {**NVFP4, "dynamic": "local"}
MXFP4 = numbers(4, "float", "group", group_size=32, scale_dtype="torch.uint8")
MIXED_LAYERS = {
    "model.layers.0.mlp.down_proj": {"group_size": 16, "quant_algo": "NVFP4"},
    "model.layers.3.self_attn.q_proj": {"quant_algo": "FP8"},
}

# What it is -> its description, and the name and the method of its row.
PUBLISHED: dict[str, tuple[Description, str, str]] = {
    "AWQ": (
        {
            "bits": 4,
            "group_size": 128,
            "modules_to_not_convert": ["linear_attn", "mtp", "visual"],
            "quant_method": "awq",
            "version": "gemm",
            "zero_point": True,
        },
        "AWQ, 4 bits",
        "awq",
    ),
    "GPTQ of experts alone": (
        gptq(4, dynamic={"-:.*attn.*": {}, "-:.*shared_expert.*": {}, "-:.*mtp.*": {}}),
        "GPTQ, 4 bits",
        "gptq",
    ),
    "GPTQ, whole channels": (gptq(4, group_size=-1), "GPTQ, 4 bits", "gptq"),
    "GPTQ, 8 bits": (gptq(8), "GPTQ, 8 bits", "gptq"),
    "GPTQ by AutoRound": (
        gptq(4, autoround_version="0.5.1", data_type="int", provider="auto-round"),
        "GPTQ, 4 bits",
        "gptq",
    ),
    "AutoRound": (auto_round(4, "auto_gptq"), "AutoRound packed as GPTQ, 4 bits", "inc"),
    "AutoRound, 8 bits": (auto_round(8, "auto_gptq"), "AutoRound packed as GPTQ, 8 bits", "inc"),
    "AutoRound, AWQ": (
        auto_round(4, "auto_awq", sym=False),
        "AutoRound packed as AWQ, 4 bits",
        "inc",
    ),
    "AutoRound, FP8": (
        auto_round(
            8,
            "fp8",
            act_bits=8,
            act_data_type="fp",
            act_dynamic=True,
            act_group_size=128,
            act_sym=True,
            activation_scheme="dynamic",
            data_type="fp",
            fmt="e4m3",
            group_size=[128, 128],
        ),
        "AutoRound, FP8 in blocks",
        "inc",
    ),
    "Quark": (quark({"dtype": "int4", "symmetric": True}), "INT4 weights (W4A16)", "quark"),
    "Quark, zero points": (
        quark({"dtype": "uint4", "symmetric": False}),
        "INT4 weights with zero points (W4A16)",
        "quark",
    ),
    "W4A16": (
        compressed(group("pack-quantized", {**INT4, "actorder": "static"})),
        "INT4 weights (W4A16)",
        "compressed-tensors",
    ),
    "W4A16, AWQ": (
        compressed(group("pack-quantized", {**INT4, "group_size": 32, "symmetric": False})),
        "INT4 weights (W4A16)",
        "compressed-tensors",
    ),
    "W8A16": (
        compressed(group("pack-quantized", numbers(8, "int", "group", group_size=32))),
        "INT8 weights (W8A16)",
        "compressed-tensors",
    ),
    "W8A8": (
        compressed(
            group(
                "int-quantized",
                numbers(8, "int", "channel"),
                numbers(8, "int", "token", dynamic=True, observer=None),
            )
        ),
        "INT8 (W8A8)",
        "compressed-tensors",
    ),
    "NVFP4": (
        compressed(group("nvfp4-pack-quantized", NVFP4, NVFP4_INPUTS)),
        "NVFP4",
        "compressed-tensors",
    ),
    "NVFP4A16": (
        compressed(group("nvfp4-pack-quantized", NVFP4)),
        "NVFP4 weights (W4A16)",
        "compressed-tensors",
    ),
    "MXFP4A16": (
        compressed(group("mxfp4-pack-quantized", MXFP4)),
        "MXFP4",
        "compressed-tensors",
    ),
    "FP8, dynamic": (
        compressed(group("float-quantized", FP8_CHANNEL, FP8_TOKEN)),
        "FP8",
        "compressed-tensors",
    ),
    "FP8, static": (
        compressed(group("float-quantized", FP8_TENSOR, FP8_TENSOR)),
        "FP8",
        "compressed-tensors",
    ),
    "FP8, blocks": (
        compressed(
            group(
                "float-quantized",
                numbers(8, "float", "block", block_structure=[128, 128]),
                numbers(8, "float", "group", group_size=128, dynamic=True, observer=None),
            )
        ),
        "FP8",
        "compressed-tensors",
    ),
    "FP8 of Qwen": (
        {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "modules_to_not_convert": ["lm_head", "model.layers.0.linear_attn.in_proj_a"],
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
        "FP8",
        "fp8",
    ),
    "FP8 of one scale": (
        {"activation_scheme": "static", "ignored_layers": ["lm_head"], "quant_method": "fp8"},
        "FP8",
        "fp8",
    ),
    "ModelOpt, NVFP4": (model_optimizer("NVFP4"), "NVFP4, ModelOpt", "modelopt_fp4"),
    "ModelOpt, NVFP4 weights": (
        model_optimizer("W4A16_NVFP4", group_size=16),
        "NVFP4, ModelOpt",
        "modelopt_fp4",
    ),
    "ModelOpt, NVFP4 by hf_quant_config.json": (
        hf_quant_config("NVFP4", group_size=16),
        "NVFP4, ModelOpt",
        "modelopt_fp4",
    ),
    "ModelOpt, mixed": (
        model_optimizer("MIXED_PRECISION", quantized_layers=MIXED_LAYERS),
        "NVFP4 and FP8 mixed, ModelOpt",
        "modelopt_mixed",
    ),
    "ModelOpt, FP8": (model_optimizer("FP8"), "FP8, ModelOpt", "modelopt"),
    "ModelOpt, FP8 by hf_quant_config.json": (hf_quant_config("FP8"), "FP8, ModelOpt", "modelopt"),
    "MXFP4": (
        {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"},
        "MXFP4",
        "mxfp4",
    ),
}

# Of no row: upstream makes another thing of each, or several.
WITHOUT_A_ROW: dict[str, Description] = {
    "AWQ without zero points": {**PUBLISHED["AWQ"][0], "zero_point": False},
    "GPTQ of 4 and 8 bits": gptq(4, dynamic={"+:.*down_proj.*": {"bits": 8}}),
    "AutoRound of 4 and 8 bits": auto_round(
        4, "auto_gptq", extra_config={"lm_head": {"bits": 8, "data_type": "int"}}
    ),
    "AutoRound with zero points": auto_round(4, "auto_gptq", sym=False),
    "Quark, FP8": quark(
        {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "symmetric": True},
        {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "symmetric": True},
    ),
    "W4A16 by channel": compressed(group("pack-quantized", numbers(4, "int", "channel"))),
    "W8A8 of one scale": compressed(
        group("int-quantized", numbers(8, "int", "channel"), numbers(8, "int", "tensor"))
    ),
    "NVFP4 and FP8": compressed(
        group("nvfp4-pack-quantized", NVFP4, NVFP4_INPUTS, "re:.*mlp.*"),
        group("float-quantized", FP8_CHANNEL, FP8_TOKEN, "re:.*self_attn.*"),
    ),
}
