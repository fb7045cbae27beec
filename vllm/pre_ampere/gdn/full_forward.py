# SPDX-License-Identifier: Apache-2.0
"""Volta's eager wrapper: the whole GDN layer as one opaque operator.

`vllm::qwen_gdn_full_forward` is a boundary of the compiled graph, so what it holds runs in eager
order and Inductor neither fuses nor rewrites the projections and the gated norm. Volta needs that
with speculation, and with batch invariance then has it always; anywhere else it only costs fusions, so
it is armed by the device of the rank.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name, direct_register_custom_op

from vllm.pre_ampere import environment
from vllm.pre_ampere.devices import Device


@dataclass(frozen=True)
class FullForwardGate:
    """Whether the wrapper is armed for one rank.

    Attributes:
        volta: the rank's device is Volta.
        auto: the compile-graph policy and speculation are both active, which would arm the wrapper
            if the device were not asked.
        armed: the wrapper is used.
    """

    volta: bool
    auto: bool
    armed: bool


def full_forward_gate(device: Device, speculative: bool) -> FullForwardGate:
    """Decide for the device that will run the layer.

    Args:
        device: the current device of the rank, never device 0 for all of them.
        speculative: speculation is active.
    """
    policy = bool(environment.COMPILE_GRAPH.get())
    auto = policy and speculative
    # Eager operations round otherwise than compiled ones: where speculation is to change no bit, a layer
    # runs eagerly without it, too.
    eager = policy and (speculative or bool(environment.BATCH_INVARIANT.get()))
    forced = environment.QWEN_GDN_FULL_FORWARD.get()
    armed = (eager and device.is_volta) if forced is None else forced
    return FullForwardGate(volta=device.is_volta, auto=auto, armed=armed)


def write_rank_record(device: Device, gate: FullForwardGate, rank: int) -> None:
    """Write rank<N>.json into `VLLM_PRE_AMPERE_RANK_RECORD_DIR`, where that is set."""
    directory = environment.RANK_RECORD_DIR.get()
    if directory is None:
        return
    record = {
        "rank": rank,
        "device": device.index,
        "name": device.name,
        "capability": list(device.capability),
        "volta": gate.volta,
        "auto": gate.auto,
        "maybe": gate.armed,
    }
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    (path / f"rank{rank}.json").write_text(json.dumps(record) + "\n")


def qwen_gdn_full_forward(
    hidden_states: torch.Tensor, output: torch.Tensor, layer_name: LayerNameType
) -> None:
    """Run a whole GDN layer eagerly.

    Args:
        hidden_states: [num_tokens, hidden_size].
        output: [num_tokens, hidden_size], written.
        layer_name: the layer's key in the forward context.
    """
    layer = get_forward_context().no_compile_layers[_resolve_layer_name(layer_name)]
    output.copy_(layer.forward_stages(hidden_states))


def register() -> None:
    """Make the operator known to torch, as `torch.ops.vllm.qwen_gdn_full_forward`."""
    direct_register_custom_op(
        op_name="qwen_gdn_full_forward", op_func=qwen_gdn_full_forward, mutates_args=["output"]
    )
