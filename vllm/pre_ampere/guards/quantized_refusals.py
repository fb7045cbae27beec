# SPDX-License-Identifier: Apache-2.0
"""Refuse a quantised checkpoint that does not load on the cards, and say what to do about it.

`quantization` has the answers, which are upstream's; here they become one line for the user.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.pre_ampere import environment
from vllm.pre_ampere.devices import Capability, Device
from vllm.pre_ampere.guards.quantization import LAYERS, Answer, Layer, answer, support, why_no_int8
from vllm.pre_ampere.guards.quantized_formats import FORMATS

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def refuse_layers(vllm_config: "VllmConfig", devices: Sequence[Device]) -> None:
    """Refuse a checkpoint of a row of which no layer loads on one of the pre-Ampere cards.

    Upstream would refuse it while it builds the model. One with experts of which a kind of layer
    loads is left to upstream, for it may have quantised nothing else, unless its weights show that
    it has the other kind, too, and upstream would make that of a kernel which does not compile. One
    of no row is left to upstream as well.

    Raises:
        ValueError: why, and what to leave out for it to load, or the formats that load on the cards.
    """
    cards = _kinds(devices)
    for card in cards:
        asked = answer(vllm_config, card)
        refusal = _refusal(vllm_config, asked)
        if asked.row is not None and refusal is not None:
            raise ValueError(
                f"quantization {vllm_config.model_config.quantization} ({asked.row.name}) does not "
                f"load on {card.name} ({card.architecture}): {refusal}. "
                f"{_remedy(vllm_config, cards, tuple(asked.layers))}"
            )


def _kinds(devices: Sequence[Device]) -> tuple[Device, ...]:
    """The first pre-Ampere card of each kind that `answer` tells apart, the oldest kind first."""
    first: dict[tuple[Capability, bool], Device] = {}
    for device in devices:
        if device.is_pre_ampere:
            first.setdefault((device.capability, device.has_tensor_cores), device)
    return tuple(device for _, device in sorted(first.items(), key=lambda item: item[0]))


def _refusal(vllm_config: "VllmConfig", asked: Answer) -> str | None:
    """Why a checkpoint is refused on a card; None where it is not."""
    if asked.refusal is not None:
        return asked.refusal
    failing = [layer for layer, support in asked.layers.items() if not support.compiles]
    if not failing:
        return None
    stored = _in_int8(vllm_config)
    reasons = [f"{layer}: {asked.layers[layer].how}" for layer in failing if layer in stored]
    return "; ".join(reasons) or None


def _in_int8(vllm_config: "VllmConfig") -> set[Layer]:
    """The kinds of layers that the weights' headers show in int8; none where there are no headers."""
    from vllm.transformers_utils.config import get_safetensors_params_metadata

    model = vllm_config.model_config
    headers = get_safetensors_params_metadata(model.model, revision=model.revision)
    return {
        "experts" if ".experts." in name else "linear"
        for name, header in headers.items()
        if header.get("dtype") == "I8"
    }


def _remedy(
    vllm_config: "VllmConfig", cards: Sequence[Device], quantised: tuple[Layer, ...]
) -> str:
    """What to leave out so that no card refuses the checkpoint; else the formats that all load."""
    ways: list[str] = []
    for words, asked in (
        (
            f"leave {environment.TURING_MMA.name} out",
            [answer(vllm_config, card, lowering=True) for card in cards],
        ),
        (
            "leave the kernels to upstream: --linear-backend auto, --moe-backend auto",
            [answer(vllm_config, card, as_asked=False) for card in cards],
        ),
    ):
        loading = [x for x in quantised if all(each.layers[x].loads for each in asked)]
        if not loading or any(_refusal(vllm_config, each) is not None for each in asked):
            continue
        where = "" if len(loading) == len(quantised) else f" ({_only(loading)})"
        ways.append(words + where)
    if not ways:
        return _formats_that_load(cards, quantised)
    remedy = ", or ".join(ways)
    return remedy[0].upper() + remedy[1:]


def refuse_unsupported(method: str, device: Device) -> None:
    """Refuse a quantisation method whose needs a card does not meet, and name those that load.

    Raises:
        ValueError: the method, the two capabilities, and the formats that load on the card.
    """
    from vllm.model_executor.layers.quantization import get_quantization_config

    needed = get_quantization_config(method).get_min_capability()
    major, minor = device.capability
    if needed <= 10 * major + minor:
        return
    raise ValueError(
        f"quantization {method} needs capability {needed // 10}.{needed % 10}; {device.name} has "
        f"{major}.{minor}. {_formats_that_load([device])}"
    )


def _formats_that_load(cards: Sequence[Device], quantised: tuple[Layer, ...] = LAYERS) -> str:
    usable: list[str] = []
    for each in FORMATS:
        layers = [
            layer
            for layer in quantised
            if all(
                support(each, card.capability, layer, without_int8=why_no_int8(card)).loads
                for card in cards
            )
        ]
        if layers:
            where = "" if len(layers) == len(quantised) else f", {_only(layers)}"
            usable.append(f"{each.name} ({each.method}{where})")
    return f"Use a checkpoint in one of these formats: {'; '.join(usable)}"


def _only(layers: Sequence[Layer]) -> str:
    names = {"linear": "linear layers", "experts": "experts"}
    return f"nothing but {' and '.join(names[layer] for layer in layers)} quantised"
