# SPDX-License-Identifier: Apache-2.0
"""What would serve a model on this box: every choice with its reason, and the ones passed over.

The configuration is made for real, by upstream and the platform, in this process; the weights are
looked for, nothing is loaded and no card is touched.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.pre_ampere import environment
from vllm.pre_ampere.baseline import BaselineRecord
from vllm.pre_ampere.cli import UserError, engine_options
from vllm.pre_ampere.cli.checkpoint import Checkpoint
from vllm.pre_ampere.cli.diagnosis import weights
from vllm.pre_ampere.devices import Device
from vllm.pre_ampere.guards.action import Action
from vllm.pre_ampere.kernels.registry import KernelUnavailableError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.selector import AttentionSelectorConfig

_OPERATIONS = {
    "gdn_prefill": "GDN prefill",
    "gdn_decode": "GDN decode and verification",
    "gdn_post_convolution": "GDN gating",
    "convolution_prefill": "convolution, prefill",
    "convolution_update": "convolution, decode",
}
_UPSTREAMS = "by upstream's choice"
_BETTER_THAN_PICKLES = (
    "preferred: they cannot hold code, their headers say before a start which tensors are there, and "
    "they are mapped where each rank would hold a whole pickle in memory"
)


@dataclass(frozen=True)
class Choice:
    """One thing that was chosen.

    Attributes:
        subject: what it is about.
        chosen: what runs.
        reason: why.
        passed_over: what could have run, each with why it does not.
    """

    subject: str
    chosen: str
    reason: str
    passed_over: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Serving:
    """How a model would be served.

    Attributes:
        model: the checkpoint's name.
        refusal: why it would not be; None where it would.
        choices: for the whole box, and for each kind of card in it; empty where no configuration
            could be made.
        baseline: the baseline's own record; None where our platform is not in use.
        guards: what the guards did.
    """

    model: str
    refusal: str | None
    choices: tuple[Choice, ...] = ()
    baseline: BaselineRecord | None = None
    guards: tuple[Action, ...] = ()


def look(checkpoint: Checkpoint, options: Sequence[str]) -> Serving:
    """Configure an engine for a model and say what it would use.

    Args:
        checkpoint: the model.
        options: engine options, as `vllm serve` takes them.

    Raises:
        UserError: an option is not upstream's.
    """
    with _quiet() as log:
        try:
            arguments = engine_options.parse(str(checkpoint.path), options)
            if (fault := weights.unreadable(checkpoint.path, arguments.load_format)) is not None:
                return Serving(checkpoint.name, fault)
            config = arguments.create_engine_config()
        except SystemExit:
            last = log.read_text().strip().splitlines()[-1:]
            raise UserError("; ".join(last) or "upstream does not know an engine option") from None
        except ValueError as error:
            return Serving(checkpoint.name, engine_options.first_reason(error))
        try:
            choices = tuple(_choices(config, checkpoint))
        except KernelUnavailableError as error:
            return Serving(checkpoint.name, str(error))
        refusal = weights.missing(checkpoint.path, config.load_config.load_format)
    from vllm.platforms import current_platform

    from vllm.pre_ampere.platform.hooks import PreAmperePlatform

    if not isinstance(current_platform, PreAmperePlatform):
        return Serving(checkpoint.name, refusal, choices)
    record, guards = current_platform.baseline_record, current_platform.guard_actions
    return Serving(checkpoint.name, refusal, choices, record, guards)


@contextlib.contextmanager
def _quiet() -> Iterator[Path]:
    """Keep what upstream prints off the screen; yields the file that it goes to."""
    with tempfile.NamedTemporaryFile("w", suffix=".log") as log:
        saved = [os.dup(stream) for stream in (1, 2)]
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
        try:
            yield Path(log.name)
        finally:
            for stream, original in zip((1, 2), saved, strict=True):
                os.dup2(original, stream)
                os.close(original)


def _choices(config: "VllmConfig", checkpoint: Checkpoint) -> Iterator[Choice]:
    from vllm.platforms import current_platform

    from vllm.pre_ampere.platform.hooks import PreAmperePlatform

    yield from _weights(config, checkpoint)
    yield _dtype(config, checkpoint)
    yield _attention(config)
    yield _graphs(config)
    if not isinstance(current_platform, PreAmperePlatform):
        return
    devices = current_platform.participating_devices(config.parallel_config)
    kinds = list({(d.architecture, d.has_tensor_cores): d for d in devices}.values())
    for device in kinds:
        on = f", {device.architecture}" if len(kinds) > 1 else ""
        for choice in _of_card(config, device):
            yield Choice(choice.subject + on, choice.chosen, choice.reason, choice.passed_over)


def _weights(config: "VllmConfig", checkpoint: Checkpoint) -> Iterator[Choice]:
    load = config.load_config
    found = weights.taken(checkpoint.path, load.load_format)
    if found is None or not found.files:
        return
    asked = load.load_format not in ("auto", "hf")
    subject, chosen = "weights", weights.summary(found.files)
    if not found.pickled:
        reason = "asked for" if asked else "safetensors come first in upstream's loader"
        yield Choice(subject, chosen, reason)
        return
    threads = load.model_loader_extra_config.get("enable_multithread_load")
    reader = "multi_thread_pt_weights_iterator" if threads else "pt_weights_iterator"
    yield Choice(
        subject,
        chosen,
        f"pickled, and {'asked for' if asked else 'no *.safetensors is there'}; upstream's {reader} "
        "reads by torch.load(weights_only=True), and what it will find was not looked at",
        (("safetensors", _BETTER_THAN_PICKLES),),
    )


def _dtype(config: "VllmConfig", checkpoint: Checkpoint) -> Choice:
    stored = checkpoint.text_config.get("dtype") or checkpoint.config.get("torch_dtype")
    used = str(config.model_config.dtype).removeprefix("torch.")
    if stored in (None, used):
        return Choice("dtype", used, "as the checkpoint is stored")
    if stored == "bfloat16":
        reason = "the checkpoint is in bfloat16, which cards before 8.0 do not compute"
        return Choice("dtype", used, reason, (("bfloat16", "needs sm80"),))
    return Choice("dtype", used, f"asked for; the checkpoint is in {stored}")


def _attention(config: "VllmConfig") -> Choice:
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.v1.attention.selector import AttentionSelectorConfig

    model = config.model_config
    asked = config.attention_config.backend
    question = AttentionSelectorConfig(
        head_size=model.get_head_size(),
        dtype=model.dtype,
        kv_cache_dtype=config.cache_config.cache_dtype,
        block_size=None,
    )
    with set_current_vllm_config(config):
        path = current_platform.get_attn_backend_cls(asked, question)
        passed_over = _attention_passed_over(question, path)
    reason = "asked for" if asked is not None else "the first that takes the card and the model"
    return Choice("attention", path.rsplit(".", 1)[-1], reason, passed_over)


def _attention_passed_over(
    question: "AttentionSelectorConfig", chosen: str
) -> tuple[tuple[str, str], ...]:
    """Upstream's backends that stand before the chosen one or beside it, with upstream's reasons."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    capability = current_platform.get_device_capability()
    found: list[tuple[str, str]] = []
    for name in ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION"):
        try:
            backend = AttentionBackendEnum[name].get_class()
            reasons = backend.validate_configuration(
                device_capability=capability, **question._asdict()
            )
        except (ImportError, OSError) as error:
            found.append((name, f"cannot be imported here: {error}"))
            continue
        if f"{backend.__module__}.{backend.__qualname__}" == chosen:
            continue
        if not reasons and current_platform.is_cpu():
            reasons = ["takes the card; this box computes on its CPU"]
        found.append((name, ", ".join(reasons) or "comes after it"))
    return tuple(found)


def _graphs(config: "VllmConfig") -> Choice:
    from vllm.platforms import current_platform

    compilation = config.compilation_config
    mode = compilation.cudagraph_mode
    assert mode is not None, "upstream leaves it open only before the platform has seen it"
    sizes = compilation.cudagraph_capture_sizes or ()
    chosen = mode.name + (f", sizes {', '.join(map(str, sizes))}" if sizes else "")
    compiled = "compiled" if compilation.mode else "not compiled"
    where = "; a CPU has no CUDA graphs" if current_platform.is_cpu() else ""
    return Choice("CUDA graphs", chosen, f"the model is {compiled}{where}")


def _of_card(config: "VllmConfig", device: Device) -> Iterator[Choice]:
    for operation, subject in _OPERATIONS.items():
        yield _kernel(config, device, operation, subject)
    yield _lowering(device)
    yield _wrapper(device, config.speculative_config is not None)
    yield _products(config, device)


def _kernel(config: "VllmConfig", device: Device, operation: str, subject: str) -> Choice:
    from vllm.pre_ampere.gdn import prefill
    from vllm.pre_ampere.kernels import registry
    from vllm.pre_ampere.kernels.kernel import Problem

    shape = prefill.prefill_problem(config)
    assert shape is not None, "the checkpoint was seen to have GDN layers"
    problem = Problem(operation, shape.dtype, shape.head_dim_k, shape.head_dim_v)
    asked = prefill.requested_backend(config) if operation == prefill.OPERATION else None
    on_cpu = asked == "reference"
    switched_off = registry.switched_off()
    selection = registry.select(
        operation, problem, device, asked, on_cpu=on_cpu, excluded=switched_off
    )
    passed_over = [(kernel.name, reason) for kernel, reason in selection.passed_over]
    passed_over += [
        (kernel.name, f"only by request: {kernel.by_request}")
        for kernel in registry.kernels(operation)
        if kernel.by_request is not None and kernel is not selection.kernel
    ]
    passed_over += [
        (kernel.name, f"switched off by {registry.SWITCHES[kernel.name].name}")
        for kernel in registry.kernels(operation)
        if kernel.name in switched_off
    ]
    reason = "asked for" if asked is not None else "the first whose needs the card meets"
    return Choice(subject, selection.kernel.name, reason, tuple(passed_over))


def _lowering(device: Device) -> Choice:
    subject = "Triton's matrix products"
    if not device.is_pre_ampere:
        return Choice(subject, "tensor cores", f"Triton knows those of {device.architecture}")
    if not device.is_turing:
        return Choice(subject, "FMA", f"no way is known onto {device.architecture}'s tensor cores")
    if not device.has_tensor_cores:
        return Choice(subject, "FMA", f"{device.name} has no tensor cores")
    if environment.TURING_MMA.get() is False:
        return Choice(subject, "FMA", f"{environment.TURING_MMA.name}=0 was set")
    return Choice(subject, "m16n8k8 tensor cores", "our hook replaces Triton's lowering to FMA")


def _wrapper(device: Device, speculative: bool) -> Choice:
    from vllm.pre_ampere.gdn.full_forward import full_forward_gate

    gate = full_forward_gate(device, speculative)
    forced = environment.QWEN_GDN_FULL_FORWARD.get()
    if forced is not None:
        reason = f"{environment.QWEN_GDN_FULL_FORWARD.name}={int(forced)} was set"
    elif gate.armed and not speculative:
        reason = f"as with speculation, for {environment.BATCH_INVARIANT.name}=1 was set"
    elif gate.armed:
        reason = "Volta needs eager order with speculation"
    else:
        reason = "only Volta needs eager order, with the compile-graph policy and speculation"
    return Choice("GDN layers", "eager" if gate.armed else "compiled", reason)


def _products(config: "VllmConfig", device: Device) -> Choice:
    subject = "matrix products"
    method = config.model_config.quantization
    if method is None:
        if environment.BATCH_INVARIANT.get() and device.is_pre_ampere:
            return Choice(
                subject,
                "Triton, in tiles by the number of rows",
                f"{environment.BATCH_INVARIANT.name}=1 was set",
                (("cuBLAS", "sums in an order that depends on the number of rows"),),
            )
        if device.is_turing and not device.has_tensor_cores:
            return Choice(
                subject, "cuBLAS, float32", "several float16 rows are slow without tensor cores"
            )
        return Choice(subject, "cuBLAS, float16", "the weights are not quantised")
    if not device.is_pre_ampere:
        return Choice(subject, _UPSTREAMS, f"upstream knows {device.architecture} for {method}")
    from vllm.pre_ampere.guards import quantization

    answer = quantization.answer(config, device)
    if answer.row is None:
        reason = f"no row of docs/quantization.md has {method} as this checkpoint has it"
        return Choice(subject, _UPSTREAMS, reason)
    loading = {layer: support.how for layer, support in answer.layers.items() if support.loads}
    refused = tuple(
        (layer, support.how) for layer, support in answer.layers.items() if not support.loads
    )
    reason = f"upstream's kernels for {answer.row.name} ({answer.row.method})"
    if refused:
        reason += f", which loads where nothing but {' and '.join(loading)} is quantised"
    chosen = "; ".join(f"{layer}: {how}" for layer, how in loading.items())
    return Choice(subject, chosen, reason, refused)
