# SPDX-License-Identifier: Apache-2.0
"""The defaults that a pre-Ampere box gets: what was set, what the user had set, and why.

Two layers. Nine environment variables are set for this process and those it starts; one of them,
`VLLM_SM70_FLASH_V100_0DOT3_COMPILE_GRAPH`, is the compile-graph policy, which then fills in the
compilation settings that the user left open. Everything decided is kept in a `BaselineRecord`,
which the log, the doctor and the tests read.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm.pre_ampere import environment
from vllm.pre_ampere.devices import Device, any_pre_ampere

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.pre_ampere.baseline")

# Capture sizes, in tokens. With speculation `capture_sizes` adds the steps of the k in use, whatever
# k is; of those below, 9 is one step of k=8, and 18, for four cards and more, is two of them.
_CAPTURE_SIZES = (1, 2, 4, 8, 16)
_CAPTURE_SIZES_SPECULATIVE = (1, 2, 4, 8, 9)
_CAPTURE_SIZE_WIDE = 18
_WIDE_TENSOR_PARALLEL_SIZE = 4
_WIDE_REQUESTS = 4


class Decision(StrEnum):
    """What the baseline did about one setting."""

    SET = "set"
    KEPT = "kept"
    LEFT = "left"


@dataclass(frozen=True)
class Entry:
    """One setting: its name, the value it has now, what was decided and why."""

    name: str
    value: str
    decision: Decision
    reason: str


@dataclass(frozen=True)
class BaselineRecord:
    """What the baseline did on this box.

    Attributes:
        active: whether the baseline applies at all.
        reason: why it does, or does not.
        variables: one entry for each of the nine variables; empty where the baseline is not active.
        policy: one entry for each setting of the compile-graph policy; empty where it is off.
    """

    active: bool
    reason: str
    variables: tuple[Entry, ...] = ()
    policy: tuple[Entry, ...] = ()


def _any_participating_device_is_pre_ampere(devices: Sequence[Device]) -> bool:
    """Whether one old card among those that take part is enough for the baseline: it is.

    A box that mixes generations inherits the baseline through its oldest card, and a box of Turing
    cards alone needs it as much as one of Volta cards.
    """
    return any_pre_ampere(devices)


def apply(
    vllm_config: "VllmConfig", devices: Sequence[Device], own_attention_backends: Collection[str]
) -> BaselineRecord:
    """Set the defaults for this configuration and the processes started from here.

    Idempotent: upstream runs the hook that calls this more than once, in more than one process.

    Args:
        vllm_config: modified in place, only where the user left a setting open.
        devices: the cards that take part.
        own_attention_backends: names of the attention backends that the platform itself would
            choose; asking for one of them by name does not turn the baseline off.

    Raises:
        environment.EnvironmentVariableError: one of the nine has a value that is neither 0 nor 1.
    """
    backend = vllm_config.attention_config.backend
    if not _any_participating_device_is_pre_ampere(devices):
        return BaselineRecord(False, "no participating device is pre-Ampere")
    if backend is not None and backend.name not in own_attention_backends:
        return BaselineRecord(False, f"the attention backend {backend.name} was asked for")

    oldest = min(devices, key=lambda device: device.capability)
    variables = _set_variables(_compilation_disabled_by(vllm_config))
    policy: tuple[Entry, ...] = ()
    if environment.GEMMA_RMS_NORM_COMPILE_NATIVE.get():
        _leave_gemma_rms_norm_to_inductor(vllm_config.compilation_config.custom_ops)
    if environment.COMPILE_GRAPH.get():
        policy = _apply_compile_graph_policy(vllm_config)
    return BaselineRecord(
        True, f"device {oldest.index} ({oldest.name}) is {oldest.architecture}", variables, policy
    )


def _set_variables(compilation_disabled_by: str | None) -> tuple[Entry, ...]:
    set_before = environment.BASELINE_SET.get() or ()
    entries: list[Entry] = []
    for variable in environment.BASELINE:
        value = variable.get()
        if variable.name in set_before:
            entries.append(Entry(variable.name, "1", Decision.SET, "not set by the user"))
        elif value is not None:
            logger.info_once("Keeping %s=%d, set by the user.", variable.name, value)
            entries.append(Entry(variable.name, str(int(value)), Decision.KEPT, "set by the user"))
        elif variable is environment.COMPILE_GRAPH and compilation_disabled_by is not None:
            reason = f"compilation is disabled by {compilation_disabled_by}"
            entries.append(Entry(variable.name, "unset", Decision.LEFT, reason))
        else:
            variable.set("1")
            logger.info("Auto-setting %s=1 for a pre-Ampere device.", variable.name)
            entries.append(Entry(variable.name, "1", Decision.SET, "not set by the user"))
    names = [entry.name for entry in entries if entry.decision is Decision.SET]
    environment.BASELINE_SET.set(",".join(names))
    return tuple(entries)


def _compilation_disabled_by(vllm_config: "VllmConfig") -> str | None:
    """The user's setting that disables compilation, or None."""
    from vllm.config import CompilationMode

    if vllm_config.model_config is not None and vllm_config.model_config.enforce_eager:
        return "enforce_eager"
    if environment.TORCH_COMPILE_DISABLE.get() == "1":
        return "TORCH_COMPILE_DISABLE=1"
    if environment.BREAKABLE_CUDAGRAPH.get():
        return "VLLM_USE_BREAKABLE_CUDAGRAPH=1"
    if vllm_config.compilation_config.mode == CompilationMode.NONE:
        return "compilation mode NONE"
    return None


def _leave_gemma_rms_norm_to_inductor(custom_ops: list[str]) -> None:
    if "+gemma_rms_norm" not in custom_ops and "-gemma_rms_norm" not in custom_ops:
        custom_ops.append("-gemma_rms_norm")


def capture_sizes(
    max_num_seqs: int,
    num_speculative_tokens: int,
    tensor_parallel_size: int,
    max_num_batched_tokens: int,
) -> list[int]:
    """The CUDA-graph capture sizes of the policy, in tokens, ascending, never empty.

    Args:
        max_num_seqs: requests a step can hold.
        num_speculative_tokens: k; 0 without speculation.
        tensor_parallel_size: cards a layer is split over.
        max_num_batched_tokens: tokens a step can hold; upstream drops larger sizes.
    """
    if num_speculative_tokens == 0:
        sizes = {size for size in _CAPTURE_SIZES if size <= max_num_seqs}
    else:
        wide = tensor_parallel_size >= _WIDE_TENSOR_PARALLEL_SIZE
        step = num_speculative_tokens + 1
        sizes = set(_CAPTURE_SIZES_SPECULATIVE)
        sizes.update({_CAPTURE_SIZE_WIDE} if wide else ())
        requests = min(max_num_seqs, _WIDE_REQUESTS if wide else 1)
        sizes.update(step * count for count in range(1, requests + 1))
    return sorted(size for size in sizes if size <= max_num_batched_tokens)


def _apply_compile_graph_policy(vllm_config: "VllmConfig") -> tuple[Entry, ...]:
    from vllm.config import CompilationMode, CUDAGraphMode
    from vllm.platforms import current_platform

    compilation = vllm_config.compilation_config
    speculative = vllm_config.speculative_config
    sizes = capture_sizes(
        vllm_config.scheduler_config.max_num_seqs,
        speculative.num_speculative_tokens if speculative is not None else 0,
        vllm_config.parallel_config.tensor_parallel_size,
        vllm_config.scheduler_config.max_num_batched_tokens,
    )
    disabled = _compilation_disabled_by(vllm_config) is not None
    entries: list[Entry] = []
    filled = _filled_before(vllm_config)

    def fill(
        name: str, holder: Any, field: str, wanted: Any, is_open: Callable[[Any], bool]
    ) -> None:
        if is_open(getattr(holder, field)):
            setattr(holder, field, wanted)
            if name not in filled:
                filled.append(name)
        value = str(getattr(holder, field))
        if name in filled:
            entries.append(Entry(name, value, Decision.SET, "compile-graph policy"))
        else:
            entries.append(Entry(name, value, Decision.KEPT, "set by the user"))

    def is_none(value: Any) -> bool:
        return value is None

    if not disabled:
        fill("mode", compilation, "mode", CompilationMode.VLLM_COMPILE, is_none)
        graphs = CUDAGraphMode.FULL_AND_PIECEWISE
        fill("cudagraph_mode", compilation, "cudagraph_mode", graphs, is_none)
        if compilation.max_cudagraph_capture_size is None:
            name = "cudagraph_capture_sizes"
            fill(name, compilation, name, sizes, is_none)
    if not current_platform.is_cpu():
        # Upstream's C++ norms exist for GPUs only, and so do Inductor's combo kernels.
        priority = vllm_config.kernel_config.ir_op_priority
        for operation in ("rms_norm", "fused_add_rms_norm"):
            fill(f"ir_op_priority.{operation}", priority, operation, ["vllm_c"], lambda v: not v)
        on = compilation.inductor_compile_config.setdefault("combo_kernels", True)
        entries.append(_switched_on("combo_kernels", on))
    entries.append(_switched_on("eliminate_noops", compilation.pass_config.eliminate_noops))
    return tuple(entries)


def _filled_before(vllm_config: "VllmConfig") -> list[str]:
    """Names of the settings that the policy has filled in this configuration, to be added to.

    Kept in the configuration itself, so that a later call, in whatever process, does not take them
    for the user's, nor the user's for the policy's where both are the same.
    """
    additional = vllm_config.additional_config
    if not isinstance(additional, dict):
        return []
    names: list[str] = additional.setdefault("pre_ampere_compile_graph_policy", [])
    return names


def _switched_on(name: str, on: bool) -> Entry:
    """The entry of a switch that upstream's own default turns on, too."""
    if on:
        return Entry(name, "True", Decision.SET, "compile-graph policy")
    return Entry(name, "False", Decision.KEPT, "set by the user")
