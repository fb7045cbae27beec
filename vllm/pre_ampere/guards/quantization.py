# SPDX-License-Identifier: Apache-2.0
"""Which quantised checkpoints load on which card, by upstream's own rules.

Nothing is decided here: each format names upstream's quantisation method, its scheme where there
are several, and the function of upstream's that picks a kernel for a linear layer; `support` asks
them for one capability. docs/quantization.md is generated from the answers.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch

from vllm.pre_ampere.devices import PRE_AMPERE, Capability

_SHAPE = (4096, 4096)
_GROUP_SIZE = 128

ChooseKernel = Callable[[int], type | object]


@dataclass(frozen=True)
class Format:
    """A kind of quantised checkpoint.

    Attributes:
        name: what people call it.
        method: upstream's name of the quantisation method.
        choose_kernel: asks upstream for the kernel of a linear layer; takes a capability as 75.
        scheme: name of upstream's class for it, where the method has several.
    """

    name: str
    method: str
    choose_kernel: ChooseKernel
    scheme: str | None = None


@dataclass(frozen=True)
class Support:
    """Whether a format loads on a capability.

    Attributes:
        loads: it does.
        how: the kernel that multiplies, or why it does not load.
    """

    loads: bool
    how: str


def _weight_only(weight_type: str, zero_points: bool = False) -> ChooseKernel:
    def choose(capability: int) -> type:
        from vllm.model_executor.kernels.linear import (
            MPLinearLayerConfig,
            choose_mp_linear_kernel,
        )
        from vllm.scalar_type import scalar_types

        layer = MPLinearLayerConfig(
            full_weight_shape=_SHAPE,
            partition_weight_shape=_SHAPE,
            weight_type=getattr(scalar_types, weight_type),
            act_type=torch.float16,
            group_size=_GROUP_SIZE,
            zero_points=zero_points,
        )
        return choose_mp_linear_kernel(layer, capability)

    return choose


def _fp8(capability: int) -> type:
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym

    layer = linear.FP8ScaledMMLinearLayerConfig(
        weight_quant_key=kFp8StaticTensorSym,
        activation_quant_key=kFp8StaticTensorSym,
        input_dtype=torch.float16,
        out_dtype=torch.float16,
        weight_shape=_SHAPE,
    )
    return linear.choose_scaled_mm_linear_kernel(
        layer, linear._POSSIBLE_FP8_KERNELS, capability, quantization="fp8"
    )


def _int8(capability: int) -> type:
    from vllm.model_executor.kernels import linear

    layer = linear.Int8ScaledMMLinearLayerConfig(
        is_channelwise=True, is_static_input_scheme=False, input_symmetric=True
    )
    return linear.choose_scaled_mm_linear_kernel(
        layer, linear._POSSIBLE_INT8_KERNELS, capability, quantization="int8"
    )


def _nvfp4(capability: int) -> object:
    from vllm.model_executor.kernels.linear import init_nvfp4_linear_kernel

    return init_nvfp4_linear_kernel()


def _mxfp4(capability: int) -> object:
    from vllm.model_executor.kernels.linear import init_mxfp4_linear_kernel

    return init_mxfp4_linear_kernel()


FORMATS: tuple[Format, ...] = (
    Format("AWQ, 4 bits", "awq", _weight_only("uint4", zero_points=True)),
    Format("GPTQ, 4 bits", "gptq", _weight_only("uint4b8")),
    Format("GPTQ, 8 bits", "gptq", _weight_only("uint8b128")),
    Format(
        "INT4 weights (W4A16)",
        "compressed-tensors",
        _weight_only("uint4b8"),
        "CompressedTensorsWNA16",
    ),
    Format("INT8 (W8A8)", "compressed-tensors", _int8, "CompressedTensorsW8A8Int8"),
    Format("NVFP4, ModelOpt", "modelopt_fp4", _nvfp4),
    Format("NVFP4", "compressed-tensors", _nvfp4, "CompressedTensorsW4A4Fp4"),
    Format("NVFP4 and FP8 mixed, ModelOpt", "modelopt_mixed", _nvfp4),
    Format("MXFP4", "mxfp4", _mxfp4),
    Format("MXFP4", "compressed-tensors", _mxfp4, "CompressedTensorsW4A4Mxfp4"),
    Format("FP8", "fp8", _fp8),
    Format("FP8, ModelOpt", "modelopt", _fp8),
    Format("FP8", "compressed-tensors", _fp8, "CompressedTensorsW8A16Fp8"),
)


def support(checkpoint_format: Format, capability: Capability) -> Support:
    """Ask upstream whether a format loads on a card, and which kernel multiplies."""
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.model_executor.layers.quantization.compressed_tensors import schemes

    as_number = 10 * capability[0] + capability[1]
    with as_cuda_card(capability):
        needed = get_quantization_config(checkpoint_format.method).get_min_capability()
        if checkpoint_format.scheme is not None:
            scheme = getattr(schemes, checkpoint_format.scheme)
            needed = max(needed, scheme.get_min_capability())
        if needed > as_number:
            return Support(False, f"needs {needed // 10}.{needed % 10}")
        try:
            kernel = checkpoint_format.choose_kernel(as_number)
        except ValueError:
            # Upstream's way of saying that none of its kernels takes the layer.
            return Support(False, "no kernel")
    chosen = kernel if isinstance(kernel, type) else type(kernel)
    return Support(True, chosen.__name__.removesuffix("LinearKernel"))


def refuse_unsupported(method: str, capability: Capability, card: str) -> None:
    """Refuse a quantisation method whose needs a card does not meet, and name those that load.

    Raises:
        ValueError: the method, the two capabilities, and the formats that load on the card.
    """
    from vllm.model_executor.layers.quantization import get_quantization_config

    needed = get_quantization_config(method).get_min_capability()
    if needed <= 10 * capability[0] + capability[1]:
        return
    usable = [
        f"{candidate.name} ({candidate.method})"
        for candidate in FORMATS
        if support(candidate, capability).loads
    ]
    raise ValueError(
        f"quantization {method} needs capability {needed // 10}.{needed % 10}; {card} has "
        f"{capability[0]}.{capability[1]}. Use a checkpoint in one of these formats: "
        f"{'; '.join(usable)}"
    )


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
        mock.patch.object(_custom_ops, "cutlass_scaled_mm_supports_fp8", never),
        mock.patch.object(nvfp4_utils, "cutlass_scaled_mm_supports_fp4", never),
    ):
        yield


def table() -> str:
    """The table of docs/quantization.md, in Markdown."""
    columns: tuple[Capability, ...] = ((7, 5), (7, 0))
    lines = [
        "| checkpoint | quantization | Turing (7.5) | Volta (7.0) |",
        "| --- | --- | --- | --- |",
    ]
    for checkpoint_format in FORMATS:
        cells = []
        for capability in columns:
            answer = support(checkpoint_format, capability)
            cells.append(answer.how if answer.loads else f"no: {answer.how}")
        lines.append(
            f"| {checkpoint_format.name} | `{checkpoint_format.method}` | {' | '.join(cells)} |"
        )
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
