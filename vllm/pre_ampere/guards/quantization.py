# SPDX-License-Identifier: Apache-2.0
"""Which quantised checkpoints load on which card, by upstream's own rules.

Nothing is decided here: each format has the quantisation part of a checkpoint's configuration, and
`support` has upstream make a layer from it without memory for the weights, as it does while it
builds a model. So every step of upstream's that can refuse is asked: the method's capability, its
choice of a class for the layer, that class's constructor, the choice of a kernel, and the creation
of the weights. docs/quantization.md is generated from the answers.

One kind of kernel is one that upstream makes and these cards may not have: Triton compiles products
of int8 for them only with this project's lowering onto Turing's tensor cores. `answer`, for a card,
takes that into account; the table, for a capability, has the lowering on.
"""

import logging
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal
from unittest import mock

import torch

from vllm.pre_ampere import environment
from vllm.pre_ampere.devices import PRE_AMPERE, Capability, Device
from vllm.pre_ampere.guards.quantized_formats import (
    EXPERTS_PREFIX,
    FORMATS,
    LINEAR_PREFIX,
    Format,
    row_of,
)

if TYPE_CHECKING:
    from vllm.config import KernelConfig, VllmConfig

_FEATURES = 4096
_EXPERTS = 8

Layer = Literal["linear", "experts"]
LAYERS: tuple[Layer, ...] = ("linear", "experts")


@dataclass(frozen=True)
class Support:
    """Whether upstream makes a layer of a format on a capability, and Triton its kernel.

    Attributes:
        loads: both do.
        how: the kernel that multiplies, or why there is none, as upstream says it.
        compiles: upstream's kernel compiles; where it does not, upstream makes the layer all the same.
    """

    loads: bool
    how: str
    compiles: bool = True


@dataclass(frozen=True)
class Answer:
    """What upstream makes of a checkpoint's layers on a card.

    Attributes:
        row: the row of the table that the checkpoint is of; None where it is of none.
        layers: for each kind of layer that the model has; empty without a row.
    """

    row: Format | None
    layers: Mapping[Layer, Support]

    @property
    def refusal(self) -> str | None:
        """Why no layer loads; None where one does, or where nothing is known."""
        if self.row is None or any(support.loads for support in self.layers.values()):
            return None
        if len(self.layers) == 1:
            return self.layers["linear"].how
        return "; ".join(f"{layer}: {support.how}" for layer, support in self.layers.items())


def answer(
    vllm_config: "VllmConfig",
    device: Device,
    *,
    as_asked: bool = True,
    lowering: bool | None = None,
) -> Answer:
    """Ask upstream about the checkpoint of a configuration.

    Args:
        vllm_config: with what upstream has read from the checkpoint's configuration.
        device: a pre-Ampere card.
        as_asked: with the kernels that the user chose; else with upstream's own choice.
        lowering: whether Triton's products go to Turing's tensor cores where the card has them; None
            for what the environment says.
    """
    row = row_of(vllm_config.quant_config)
    if row is None:
        return Answer(None, {})
    layers = LAYERS if vllm_config.model_config.get_num_experts() else LAYERS[:1]
    kernels = vllm_config.kernel_config if as_asked else None
    without_int8 = why_no_int8(device, lowering)
    return Answer(
        row,
        {
            layer: support(row, device.capability, layer, kernels, without_int8=without_int8)
            for layer in layers
        },
    )


def why_no_int8(device: Device, lowering: bool | None = None) -> str | None:
    """Why Triton compiles no product of int8 for a pre-Ampere card; None where it does.

    Arguments as those of `answer`.
    """
    if not (device.is_turing and device.has_tensor_cores):
        return "the card has none"
    if lowering is None:
        lowering = environment.TURING_MMA.get() is not False
    return None if lowering else f"{environment.TURING_MMA.name}=0 keeps products off them"


def support(
    checkpoint_format: Format,
    capability: Capability,
    layer: Layer = "linear",
    kernels: "KernelConfig | None" = None,
    *,
    without_int8: str | None = None,
) -> Support:
    """Ask upstream whether it makes a layer of a format on a card, and which kernel multiplies.

    Where upstream picks a scheme or a kernel without asking its own rule for it, that rule is asked
    here: upstream refuses nothing then, and the card is still not one for it.

    Args:
        checkpoint_format: of the checkpoint.
        capability: of the card.
        layer: its kind.
        kernels: the user's choice of them; upstream's own where None.
        without_int8: why Triton compiles no product of int8 for the card; None where it does.

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
    with as_cuda_card(capability), _as_while_a_model_is_built(kernels):
        quantization = method.from_config(dict(checkpoint_format.configuration))
        quantization.packed_modules_mapping = {}
        try:
            made = _linear(quantization) if layer == "linear" else _experts(quantization)
        except (ValueError, RuntimeError) as error:
            # Upstream's refusals; a NotImplementedError is a RuntimeError, too.
            return Support(False, _reason(error))
        found = _multiplied(made, capability)
        if found.loads and without_int8 is not None and _multiplies_int8_in_triton(made):
            reason = "multiplies int8, which compiles for Turing's tensor cores only, and"
            return Support(False, f"{found.how} {reason} {without_int8}", compiles=False)
        return found


def _linear(quantization: Any) -> torch.nn.Module:
    from vllm.model_executor.layers.linear import ReplicatedLinear

    layer: torch.nn.Module = ReplicatedLinear(
        _FEATURES,
        _FEATURES,
        bias=False,
        params_dtype=torch.float16,
        quant_config=quantization,
        prefix=LINEAR_PREFIX,
        disable_tp=True,
    )
    return layer


def _experts(quantization: Any) -> torch.nn.Module:
    from vllm.config import get_current_vllm_config
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
        moe_backend=get_current_vllm_config().kernel_config.moe_backend,
    )
    everything_here = SimpleNamespace(
        local_num_experts=_EXPERTS,
        placement_strategy="linear",
        expert_map=None,
        expert_mask=None,
        routing_tables=None,
    )
    layer: torch.nn.Module = RoutedExperts(
        EXPERTS_PREFIX, torch.float16, shape, quantization, everything_here
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


def _multiplies_int8_in_triton(layer: Any) -> bool:
    """Whether upstream's kernel of a layer is one of Triton's for int8 weights and activations."""
    from vllm.model_executor.kernels.linear import TritonInt8ScaledMMLinearKernel
    from vllm.model_executor.layers.fused_moe.oracle.int8 import Int8MoeBackend

    if getattr(layer.quant_method, "int8_backend", None) is Int8MoeBackend.TRITON:
        return True
    held = vars(getattr(layer, "scheme", None) or layer.quant_method).values()
    return any(isinstance(each, TritonInt8ScaledMMLinearKernel) for each in held)


def _reason(error: Exception) -> str:
    """Upstream's refusal in short: the capability that it wants, or its first sentence."""
    needed = re.search(r"Min capability: (\d+)", str(error))
    if needed is not None:
        return f"needs {int(needed[1]) // 10}.{int(needed[1]) % 10}"
    return re.split(r"\n|\. | \(", str(error), maxsplit=1)[0].rstrip(".")


@contextmanager
def _as_while_a_model_is_built(kernels: "KernelConfig | None") -> Iterator[None]:
    """What upstream's layers ask for while they are made: a configuration, one rank, and silence.

    The configuration is a stand-in, as making one of upstream's runs the platform's own hooks.
    Parameters get no memory.
    """
    from vllm.config import CompilationConfig, KernelConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    configuration = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.float16, quantization_config=None),
        compilation_config=CompilationConfig(custom_ops=["all"]),
        kernel_config=kernels or KernelConfig(),
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
