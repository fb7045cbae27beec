# SPDX-License-Identifier: Apache-2.0
"""Which quantised checkpoints load on which card, by upstream's own rules.

Nothing is decided here: each format has the quantisation part of a checkpoint's configuration, and
`support` has upstream make a layer from it without memory for the weights, as it does while it
builds a model. So every step of upstream's that can refuse is asked: the method's capability, its
choice of a class for the layer, that class's constructor, the choice of a kernel, and the creation
of the weights. docs/quantization.md is generated from the answers.
"""

import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal
from unittest import mock

import torch

from vllm.pre_ampere.devices import PRE_AMPERE, Capability, Device

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_FEATURES = 4096
_GROUP_SIZE = 128
_EXPERTS = 8
_LINEAR_PREFIX = "model.layers.0.mlp.down_proj"
_EXPERTS_PREFIX = "model.layers.0.mlp.experts"

Layer = Literal["linear", "experts"]
LAYERS: tuple[Layer, ...] = ("linear", "experts")


@dataclass(frozen=True)
class Format:
    """A kind of quantised checkpoint.

    Attributes:
        name: what people call it.
        method: upstream's name of the quantisation method.
        configuration: the quantisation part of such a checkpoint's configuration.
    """

    name: str
    method: str
    configuration: Mapping[str, Any]


@dataclass(frozen=True)
class Support:
    """Whether upstream makes a layer of a format on a capability.

    Attributes:
        loads: it does.
        how: the kernel that multiplies, or why there is none, as upstream says it.
    """

    loads: bool
    how: str


def _gptq(bits: int) -> dict[str, Any]:
    return {"bits": bits, "group_size": _GROUP_SIZE, "desc_act": False, "sym": True}


def _auto_round(bits: int, packing: str, symmetric: bool) -> dict[str, Any]:
    return {
        "bits": bits,
        "group_size": _GROUP_SIZE,
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
    common: dict[str, Any] = {
        "quant_algo": algorithm,
        "kv_cache_quant_algo": None,
        "exclude_modules": [],
    }
    return {"quantization": {**common, **more}}


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
_INT8 = {"num_bits": 8, "type": "int"}
_NVFP4 = {**_FLOAT4, "strategy": "tensor_group", "group_size": 16}
_PER_CHANNEL = {"strategy": "channel"}
_PER_TOKEN = {"strategy": "token", "dynamic": True}
_MIXED_LAYERS = {
    prefix: {"quant_algo": "NVFP4", "group_size": 16}
    for prefix in (_LINEAR_PREFIX, _EXPERTS_PREFIX)
}

FORMATS: tuple[Format, ...] = (
    Format("AWQ, 4 bits", "awq", {"bits": 4, "group_size": _GROUP_SIZE, "zero_point": True}),
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
        _quark({"dtype": "int4", "qscheme": "per_group", "ch_axis": -1, "group_size": _GROUP_SIZE}),
    ),
    Format(
        "INT4 weights (W4A16)",
        "compressed-tensors",
        _compressed(
            "pack-quantized",
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": _GROUP_SIZE},
        ),
    ),
    Format(
        "INT8 (W8A8)",
        "compressed-tensors",
        _compressed("int-quantized", {**_INT8, **_PER_CHANNEL}, {**_INT8, **_PER_TOKEN}),
    ),
    Format("NVFP4, ModelOpt", "modelopt_fp4", _model_optimizer("NVFP4", group_size=16)),
    Format(
        "NVFP4",
        "compressed-tensors",
        _compressed("nvfp4-pack-quantized", _NVFP4, {**_NVFP4, "dynamic": "local"}),
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
        _compressed(
            "mxfp4-pack-quantized",
            {**_FLOAT4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
        ),
    ),
    Format("FP8", "fp8", {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    Format("FP8, ModelOpt", "modelopt", _model_optimizer("FP8")),
    Format(
        "FP8",
        "compressed-tensors",
        _compressed("float-quantized", {**_FLOAT8, **_PER_CHANNEL}, {**_FLOAT8, **_PER_TOKEN}),
    ),
)


def support(checkpoint_format: Format, capability: Capability, layer: Layer = "linear") -> Support:
    """Ask upstream whether it makes a layer of a format on a card, and which kernel multiplies.

    Where upstream picks a scheme or a kernel without asking its own rule for it, that rule is asked
    here: upstream refuses nothing then, and the card is still not one for it.

    Raises:
        ValueError: the format's configuration is not one that upstream reads.
    """
    # Imported before upstream is told that this is a CUDA card: on its CPU build, modules that look
    # for the platform while they are imported would then want operators that are not there.
    import vllm.model_executor.layers.fused_moe  # noqa: F401
    from vllm.model_executor.layers.quantization import get_quantization_config

    method = get_quantization_config(checkpoint_format.method)
    needed = method.get_min_capability()
    if needed > 10 * capability[0] + capability[1]:
        return Support(False, f"needs {needed // 10}.{needed % 10}")
    with as_cuda_card(capability), _as_while_a_model_is_built():
        quantization = method.from_config(dict(checkpoint_format.configuration))
        quantization.packed_modules_mapping = {}
        try:
            made = _linear(quantization) if layer == "linear" else _experts(quantization)
        except (ValueError, RuntimeError) as error:
            # Upstream's refusals; a NotImplementedError is a RuntimeError, too.
            return Support(False, _reason(error))
        return _multiplied(made, capability)


def _linear(quantization: Any) -> torch.nn.Module:
    from vllm.model_executor.layers.linear import ReplicatedLinear

    layer: torch.nn.Module = ReplicatedLinear(
        _FEATURES,
        _FEATURES,
        bias=False,
        params_dtype=torch.float16,
        quant_config=quantization,
        prefix=_LINEAR_PREFIX,
        disable_tp=True,
    )
    return layer


def _experts(quantization: Any) -> torch.nn.Module:
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import (
        FusedMoEConfig,
        FusedMoEParallelConfig,
        RoutingMethodType,
    )

    shape = FusedMoEConfig(
        num_experts=_EXPERTS,
        experts_per_token=2,
        hidden_dim=_FEATURES,
        intermediate_size=_FEATURES,
        num_local_experts=_EXPERTS,
        num_logical_experts=_EXPERTS,
        activation=MoEActivation.SILU,
        device="meta",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=torch.float16,
    )
    everything_here = SimpleNamespace(
        local_num_experts=_EXPERTS,
        placement_strategy="linear",
        expert_map=None,
        expert_mask=None,
        routing_tables=None,
    )
    layer: torch.nn.Module = RoutedExperts(
        _EXPERTS_PREFIX, torch.float16, shape, quantization, everything_here
    )
    return layer


def _multiplied(layer: torch.nn.Module, capability: Capability) -> Support:
    """What multiplies in a layer that upstream made: its kernel, or the method that is its own."""
    method: Any = layer.quant_method
    experts = getattr(method, "experts_cls", None)
    if experts is not None:
        name = str(experts.__name__).removesuffix("Experts")
        if experts._supports_current_device():
            return Support(True, name)
        return Support(False, f"not refused, but {name} does not take the card")
    holder: Any = getattr(layer, "scheme", None) or method
    needed = 0
    name = ""
    while holder is not None:
        if hasattr(holder, "get_min_capability"):
            # AutoRound never asks its schemes.
            needed = max(needed, holder.get_min_capability())
        for held in vars(holder).values():
            if type(held).__module__.startswith("vllm.model_executor.kernels.linear."):
                name = type(held).__name__.removesuffix("Kernel").removesuffix("Linear")
        method = holder
        # AutoRound's method holds a scheme, which holds the method of AWQ or GPTQ.
        holder = getattr(holder, "scheme", None) or getattr(holder, "linear_method", None)
    if not name:
        name = type(method).__name__.removesuffix("LinearMethod")
        needed = max(needed, method.quant_config.get_min_capability())
    if needed <= 10 * capability[0] + capability[1]:
        return Support(True, name)
    return Support(False, f"not refused, but {name} needs {needed // 10}.{needed % 10}")


def _reason(error: Exception) -> str:
    """Upstream's refusal in short: the capability that it wants, or its first sentence."""
    needed = re.search(r"Min capability: (\d+)", str(error))
    if needed is not None:
        return f"needs {int(needed[1]) // 10}.{int(needed[1]) % 10}"
    return re.split(r"\n|\. | \(", str(error), maxsplit=1)[0].rstrip(".")


def refuse_linear_layers(vllm_config: "VllmConfig", devices: Sequence[Device]) -> None:
    """Refuse a model without experts whose quantised linear layers no card of the oldest kind takes.

    Upstream would refuse it while it builds the model. A method of which some format loads is left to
    upstream, and so is a model with experts, which may have quantised nothing else.

    Raises:
        ValueError: upstream's reason, and the formats that load on the card.
    """
    from vllm.model_executor.layers.quantization import get_quantization_config

    model = vllm_config.model_config
    if model is None or model.quantization is None or model.get_num_experts():
        return
    # A method has several names, "gptq" and "auto_gptq".
    method = get_quantization_config(model.quantization)
    described = getattr(model.hf_config, "quantization_config", None) or {}
    formats = [
        each
        for each in FORMATS
        if get_quantization_config(each.method) is method
        and each.configuration.get("bits") in (None, described.get("bits"))
    ]
    card = min(devices, key=lambda device: device.capability)
    answers = [support(each, card.capability) for each in formats]
    if answers and not any(answer.loads for answer in answers):
        raise ValueError(
            f"quantization {model.quantization} does not load on {card.name} "
            f"({card.architecture}): {answers[0].how}. "
            f"{_formats_that_load(card.capability, ('linear',))}"
        )


def refuse_unsupported(method: str, capability: Capability, card: str) -> None:
    """Refuse a quantisation method whose needs a card does not meet, and name those that load.

    Raises:
        ValueError: the method, the two capabilities, and the formats that load on the card.
    """
    from vllm.model_executor.layers.quantization import get_quantization_config

    needed = get_quantization_config(method).get_min_capability()
    if needed <= 10 * capability[0] + capability[1]:
        return
    raise ValueError(
        f"quantization {method} needs capability {needed // 10}.{needed % 10}; {card} has "
        f"{capability[0]}.{capability[1]}. {_formats_that_load(capability)}"
    )


def _formats_that_load(capability: Capability, quantised: tuple[Layer, ...] = LAYERS) -> str:
    usable = [
        f"{each.name} ({each.method}{_only(layers)})"
        for each in FORMATS
        if (layers := [x for x in quantised if support(each, capability, x).loads])
    ]
    return f"Use a checkpoint in one of these formats: {'; '.join(usable)}"


def _only(layers: list[Layer]) -> str:
    return "" if "linear" in layers else ", nothing but experts quantised"


@contextmanager
def _as_while_a_model_is_built() -> Iterator[None]:
    """What upstream's layers ask for while they are made: a configuration, one rank, and silence.

    The configuration is a stand-in, as making one of upstream's runs the platform's own hooks.
    Parameters get no memory.
    """
    from vllm.config import CompilationConfig, KernelConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    configuration = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.float16),
        compilation_config=CompilationConfig(custom_ops=["all"]),
        kernel_config=KernelConfig(),
    )
    one_rank = SimpleNamespace(rank_in_group=0, world_size=1)
    disabled = logging.root.manager.disable
    # Upstream would log kernels as in use that are only asked about.
    logging.disable(logging.WARNING)
    try:
        with (
            mock.patch.object(parallel_state, "_TP", one_rank),
            set_current_vllm_config(configuration),
            torch.device("meta"),
        ):
            yield
    finally:
        logging.disable(disabled)


@contextmanager
def as_cuda_card(capability: Capability) -> Iterator[None]:
    """Have upstream's rules answer as on a CUDA card of this capability, on any box.

    Pre-Ampere cards have neither of the two operators that a CPU build lacks and the rules ask for.
    """
    from vllm.model_executor.layers.quantization.utils import nvfp4_utils
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability, PlatformEnum

    from vllm import _custom_ops

    assert capability in PRE_AMPERE
    card = DeviceCapability(*capability)

    def has(cls: type, wanted: tuple[int, int] | int, device_id: int | None = None) -> bool:
        numbers = wanted if isinstance(wanted, tuple) else divmod(wanted, 10)
        return card >= DeviceCapability(*numbers)

    def never(capability: int) -> bool:
        return False

    platform = type(current_platform)
    with (
        mock.patch.object(platform, "_enum", PlatformEnum.CUDA),
        mock.patch.object(
            platform, "get_device_capability", classmethod(lambda cls, device_id=None: card)
        ),
        mock.patch.object(platform, "has_device_capability", classmethod(has)),
        mock.patch.object(platform, "supports_fp8", classmethod(lambda cls: False)),
        mock.patch.object(_custom_ops, "cutlass_scaled_mm_supports_fp8", never),
        mock.patch.object(nvfp4_utils, "cutlass_scaled_mm_supports_fp4", never),
    ):
        yield


def table() -> str:
    """The table of docs/quantization.md, in Markdown."""
    lines = [
        "| checkpoint | quantization | Turing (7.5) | its experts | Volta (7.0) | its experts |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for each in FORMATS:
        answers = [
            support(each, capability, layer) for capability in ((7, 5), (7, 0)) for layer in LAYERS
        ]
        cells = [answer.how if answer.loads else f"no: {answer.how}" for answer in answers]
        lines.append(f"| {each.name} | `{each.method}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def update(document: Path) -> None:
    """Put the table into a document that holds an older one.

    Raises:
        ValueError: the document has no table that starts with a column `checkpoint`.
    """
    lines = document.read_text().splitlines(keepends=True)
    first = next((i for i, line in enumerate(lines) if line.startswith("| checkpoint |")), None)
    if first is None:
        raise ValueError(f"{document} has no table that starts with the column `checkpoint`")
    last = next((i for i, line in enumerate(lines[first:], first) if line[0] != "|"), len(lines))
    document.write_text("".join([*lines[:first], table(), *lines[last:]]))


if __name__ == "__main__":
    update(Path(sys.argv[1]))
