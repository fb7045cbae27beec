# SPDX-License-Identifier: Apache-2.0
"""Every environment variable that the project reads or sets, typed, in one table.

A variable's value is read when asked for, never at import: the baseline sets some of them for the
processes that the engine starts later. docs/environment.md is the same table for readers; a check
of `make lint` holds the two together.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from vllm.pre_ampere.devices import PRE_AMPERE, Capability

T = TypeVar("T")


class EnvironmentVariableError(ValueError):
    """A variable has a value that it cannot take; the message names both and what it can take."""


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One environment variable.

    Attributes:
        name: as it stands in the environment.
        parse: value from text; raises ValueError with what would be right.
        description: what it does, in one sentence.
    """

    name: str
    parse: Callable[[str], T]
    description: str

    def get(self) -> T | None:
        """The parsed value; None where the variable is unset.

        Raises:
            EnvironmentVariableError: the text cannot be parsed.
        """
        text = os.environ.get(self.name)
        if text is None:
            return None
        try:
            return self.parse(text.strip())
        except ValueError as error:
            raise EnvironmentVariableError(f"{self.name}={text!r}: {error}") from None

    def is_set(self) -> bool:
        return self.name in os.environ

    def set(self, text: str) -> None:
        """Set it for this process and those it starts."""
        os.environ[self.name] = text


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("use 0 or 1")
    return text == "1"


def _upstreams_switch(text: str) -> bool:
    """As upstream reads its own: an integer, of which 0 is off."""
    try:
        return bool(int(text))
    except ValueError:
        raise ValueError("use 0 or 1") from None


def _capabilities(text: str) -> tuple[Capability, ...]:
    known = ", ".join(f"{major}.{minor}" for major, minor in PRE_AMPERE)
    capabilities = []
    for part in text.split(","):
        major, point, minor = part.strip().partition(".")
        capability = (int(major), int(minor)) if (major + minor).isdecimal() and point else None
        if capability not in PRE_AMPERE:
            raise ValueError(
                f"{part.strip()!r} is no pre-Ampere capability; use {known}, or one of them for "
                "each rank, separated by commas"
            )
        capabilities.append(capability)
    return tuple(capabilities)


def _names(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


EMULATE = Variable(
    "VLLM_PRE_AMPERE_EMULATE",
    _capabilities,
    "Answer as a card of this capability (7.5, 7.0 or 7.2; or a list, one a rank) on a machine "
    "that has none.",
)
RANK_RECORD_DIR = Variable(
    "VLLM_PRE_AMPERE_RANK_RECORD_DIR",
    str,
    "Directory in which each rank writes rank<N>.json: its device and what it armed. The logs of "
    "ranks other than the first are filtered, so a missing line proves nothing.",
)
BASELINE_SET = Variable(
    "VLLM_PRE_AMPERE_BASELINE_SET",
    _names,
    "Written by the baseline for the processes it starts: which of its variables it set itself, so "
    "that they do not take them for the user's. Not meant to be set by hand.",
)
TURING_MMA = Variable(
    "VLLM_PRE_AMPERE_TURING_MMA",
    _switch,
    "0 keeps Triton's own lowering of matrix products on Turing; unset or 1 puts them on the "
    "tensor cores where the card has them.",
)
QWEN_GDN_FULL_FORWARD = Variable(
    "VLLM_SM70_QWEN_GDN_FULL_FORWARD",
    _switch,
    "1 runs whole GDN layers eagerly on any device, 0 never; unset arms that on Volta only, with "
    "the compile-graph policy and speculation, or with batch invariance.",
)

PACKED_RECURRENT_DECODE = Variable(
    "VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE",
    _switch,
    "Our packed kernel for GDN decode and verification in place of upstream's.",
)
KKT_SCHEDULE = Variable(
    "VLLM_SM70_GDN_KKT_SCHEDULE",
    _switch,
    "One measured launch configuration for chunk_scaled_dot_kkt, and for the small kernels of the "
    "prefill chain beside it, in place of autotuning.",
)
DELTA_H_SCHEDULE = Variable(
    "VLLM_SM70_GDN_DELTA_H_SCHEDULE",
    _switch,
    "One measured launch configuration for chunk_gated_delta_rule_fwd_h in place of autotuning.",
)
CHUNK_O_SCHEDULE = Variable(
    "VLLM_SM70_GDN_CHUNK_O_SCHEDULE",
    _switch,
    "One measured launch configuration for chunk_fwd_o in place of autotuning.",
)
RECURRENT_SCHEDULE = Variable(
    "VLLM_SM70_FLA_RECURRENT_SCHEDULE",
    _switch,
    "One launch configuration for fused_recurrent_gated_delta_rule, which vLLM 0.32 has anyway.",
)
SIGMOID_GATING_SCHEDULE = Variable(
    "VLLM_SM70_FUSED_SIGMOID_GATING_SCHED",
    _switch,
    "One launch configuration for fused_sigmoid_gating_delta_rule_update, which vLLM 0.32 has "
    "anyway.",
)
GEMMA_RMS_NORM_COMPILE_NATIVE = Variable(
    "VLLM_SM70_GEMMA_RMS_NORM_COMPILE_NATIVE",
    _switch,
    "The (1+w) RMSNorm is left to Inductor.",
)
GDN_DECODE_FLASHQLA = Variable(
    "VLLM_SM70_GDN_DECODE_FLASHQLA",
    _switch,
    "Our fused GDN decode route where one of its kernels fits the card.",
)
COMPILE_GRAPH = Variable(
    "VLLM_SM70_FLASH_V100_0DOT3_COMPILE_GRAPH", _switch, "The compile-graph policy."
)

BASELINE: tuple[Variable[bool], ...] = (
    PACKED_RECURRENT_DECODE,
    KKT_SCHEDULE,
    DELTA_H_SCHEDULE,
    CHUNK_O_SCHEDULE,
    RECURRENT_SCHEDULE,
    SIGMOID_GATING_SCHEDULE,
    GEMMA_RMS_NORM_COMPILE_NATIVE,
    GDN_DECODE_FLASHQLA,
    COMPILE_GRAPH,
)

# Other projects' variables that decide something here.
CUDA_DEVICE_ORDER = Variable("CUDA_DEVICE_ORDER", str, "How CUDA numbers the cards.")
CUDA_VISIBLE_DEVICES = Variable("CUDA_VISIBLE_DEVICES", str, "Which cards CUDA shows.")
TRITON_CACHE_DIR = Variable("TRITON_CACHE_DIR", str, "Where Triton keeps compiled kernels.")
TORCHINDUCTOR_CACHE_DIR = Variable(
    "TORCHINDUCTOR_CACHE_DIR", str, "Where Inductor keeps compiled graphs."
)
VLLM_CACHE_ROOT = Variable("VLLM_CACHE_ROOT", str, "Where vLLM keeps what it compiled.")
TORCH_COMPILE_DISABLE = Variable("TORCH_COMPILE_DISABLE", str, "1 turns torch.compile off.")
BREAKABLE_CUDAGRAPH = Variable(
    "VLLM_USE_BREAKABLE_CUDAGRAPH",
    lambda text: text == "1",
    "1 chooses upstream's breakable CUDA graphs.",
)
COMPUTE_NANS_IN_LOGITS = Variable(
    "VLLM_COMPUTE_NANS_IN_LOGITS",
    _upstreams_switch,
    "1 has upstream count NaN logits. A guard sets it for float16 models; 0 turns that guard off.",
)
BATCH_INVARIANT = Variable(
    "VLLM_BATCH_INVARIANT",
    _upstreams_switch,
    "1 has upstream compute each request's bits whatever else is in the batch, speculation included.",
)

OURS: tuple[Variable[Any], ...] = (
    EMULATE,
    RANK_RECORD_DIR,
    BASELINE_SET,
    TURING_MMA,
    QWEN_GDN_FULL_FORWARD,
    *BASELINE,
)
