# SPDX-License-Identifier: Apache-2.0
"""`tl.dot` on Turing's tensor cores, through Triton's own stage hook.

Triton 3.4 to 3.9 computes every `tl.dot` for sm_75 on the ordinary units (triton-lang/triton
PR 5066 gave up matrix instructions below compute capability 8.0). Turing has tensor cores all the
same, and Ampere's register layouts are made of Turing's: so a kernel for sm_75 is given the layouts
and the matrix-product pass of capability 8.0, without a software pipeline and so without
asynchronous copies; everything after that is lowered for sm_75; and each m16n8k16 in the PTX
becomes two m16n8k8. docs/triton-on-turing.md says why that is right.

    import vllm.pre_ampere.kernels.triton.turing_mma as turing_mma
    turing_mma.enable()

works in any Triton or torch.compile program; no vLLM is used, only `devices`. A kernel that cannot
go this way, or fails on it, is compiled by Triton's own stages, with one line in the log.
"""

import dataclasses
import functools
import hashlib
import inspect
import logging
import tempfile
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton._C.libtriton import ir
from triton.backends.compiler import Language
from triton.backends.nvidia.compiler import CUDABackend, CUDAOptions
from triton.runtime.errors import PTXASError

from vllm.pre_ampere.devices import Device
from vllm.pre_ampere.kernels.triton import turing_dots, turing_inductor, turing_ptx

logger = logging.getLogger(__name__)

# One stage of Triton's compiler: (what the stage before made, metadata to fill) -> what it makes.
Stage = Callable[[Any, MutableMapping[str, Any]], Any]

METADATA_KEY = "turing_mma"
"""Where a compiled kernel's metadata says which way it went: one of these two, or "refused: …"."""
ON_TENSOR_CORES = "tensor cores"
NOTHING_TO_GAIN = "no product of fp16 or int8"

_TURING = 75
_AMPERE = 80
_SHARED_MEMORY = Device(index=0, name="", capability=(7, 5)).shared_memory_per_block
_STAGES = ("ttir", "ttgir", "llir", "ptx", "cubin")


class _RefusedError(Exception):
    """The kernel stays on Triton's own path; the text says why."""


class _Kernel:
    """One kernel on its way through the compiler's stages.

    The first of our stages makes the whole kernel at once, down to the cubin, so that a failure in
    any step can still be answered with Triton's own path from the start. The later stages hand out
    what was made; to any other input (another hook's, an override of the user's, or that of a
    refused kernel) they apply the stage they replaced.
    """

    def __init__(self, backend: Any, options: Any, stages: Mapping[str, Stage]) -> None:
        self._backend = backend
        self._options = options
        self._stock = dict(stages)
        self._made: list[tuple[Any, Any]] = []

    def stages(self) -> dict[str, Stage]:
        later = {name: functools.partial(self._later, name) for name in ("llir", "ptx", "cubin")}
        return {"ttgir": self._ttgir, **later}

    def _ttgir(self, module: Any, metadata: MutableMapping[str, Any]) -> Any:
        text = str(module)
        products = turing_dots.read(text)
        if products.refusal is None and not products.gain:
            metadata[METADATA_KEY] = NOTHING_TO_GAIN
            return self._stock["ttgir"](module, metadata)
        try:
            if products.refusal is not None:
                raise _RefusedError(products.refusal)
            return self._make(text, module.context, metadata)
        except _RefusedError as refused:
            _log_refusal(products.kernel, str(refused))
            metadata[METADATA_KEY] = f"refused: {refused}"
            return self._stock["ttgir"](module, metadata)

    def _make(self, ttir: str, context: Any, metadata: MutableMapping[str, Any]) -> Any:
        """Compile the kernel, keep what each later stage will hand out, and return the TTGIR.

        Raises:
            _RefusedError: a step failed, or the result is not for this card.
        """
        trial = dict(metadata)
        one_stage = dataclasses.replace(self._options, num_stages=1)
        try:
            module = _parse(turing_dots.without_ampere_requests(ttir), context)
            module = self._backend.make_ttgir(module, trial, one_stage, _AMPERE)
            target = ir.builder(context).get_string_attr(f"cuda:{_TURING}")
            module.set_attr("ttg.target", target)
            ttgir = _parse(str(module), context)  # the next stage changes the module in place
            llir = self._stock["llir"](module, trial)
            ptx, instructions = turing_ptx.for_turing(self._stock["ptx"](llir, trial))
            if not instructions:
                raise _RefusedError("no tensor-core instruction came out of its products")
            newer = turing_ptx.first_beyond_turing(ptx)
            if newer is not None:
                raise _RefusedError(f"its PTX holds {newer}, which Turing does not have")
            if trial["shared"] > _SHARED_MEMORY:
                raise _RefusedError(
                    f"it would need {trial['shared']} bytes of shared memory on the tensor cores, "
                    f"and a block has {_SHARED_MEMORY}; a smaller tile would do"
                )
            cubin = self._stock["cubin"](ptx, trial)
        except (RuntimeError, PTXASError) as error:
            raise _RefusedError(
                f"compiling it for the tensor cores failed: {_first_line(error)}"
            ) from error
        metadata.update(trial)
        metadata[METADATA_KEY] = ON_TENSOR_CORES
        self._made = [(ttgir, llir), (llir, ptx), (ptx, cubin)]
        return ttgir

    def _later(self, name: str, source: Any, metadata: MutableMapping[str, Any]) -> Any:
        for given, made in self._made:
            if source is given:
                return made
        if name == "cubin" and self._made:
            # A hook over ours made the PTX once more, from our LLVM IR.
            source, _ = turing_ptx.for_turing(source)
        return self._stock[name](source, metadata)


class _Hook:
    """What Triton calls for each kernel it compiles, and (since 3.7) for its cache keys.

    Triton's convention: with arguments, change `stages` in place; with none, answer two strings
    that stand for what the hook does, for the key of the cache on disk and of that in memory.
    """

    def __init__(self, previous: Callable[..., Any] | None) -> None:
        self.previous = previous

    def __call__(
        self,
        backend: Any = None,
        stages: dict[str, Stage] | None = None,
        options: Any = None,
        language: Any = None,
        capability: int | None = None,
    ) -> tuple[str, str] | None:
        if stages is None:
            key, digest = self.previous() if self.previous is not None else ("", "")
            return key + cache_factor(), digest + cache_factor()
        own_ttgir = stages.get("ttgir")
        if self.previous is not None:
            self.previous(backend, stages, options, language, capability)
        if capability != _TURING or language != Language.TRITON or not cache_factor():
            return None
        if tuple(stages) != _STAGES:
            _log_refusal("every kernel", f"this Triton has other stages: {', '.join(stages)}")
        elif stages["ttgir"] is not own_ttgir:
            _log_refusal("every kernel", "another stage hook replaced the TTGIR stage")
        else:
            stages.update(_Kernel(backend, options, stages).stages())
        return None


_hook: _Hook | None = None
_hash_of_backend = CUDABackend.hash


def enable() -> bool:
    """Compile kernels for Turing to its tensor cores from now on; a second call changes nothing.

    Call it before the first kernel is launched. Other targets (and Turing cards that were built
    without tensor cores) keep Triton's own path. It also keeps the two apart in the caches of
    Triton and of Inductor, and makes Inductor compile in this process: its worker processes start
    afresh and would not have the hook.

    Returns:
        Whether it is on; False where this release of Triton is not one it was made for, which the
        log then says.
    """
    global _hook
    if _hook is not None:
        return True
    breach = contract_breach()
    if breach is not None:
        logger.warning(
            "Matrix products of Triton kernels stay off Turing's tensor cores: Triton %s %s. "
            "Use a release from 3.6 to 3.9.",
            triton.__version__,
            breach,
        )
        return False
    _hook = _Hook(knobs.runtime.add_stages_inspection_hook)
    knobs.runtime.add_stages_inspection_hook = _hook
    CUDABackend.hash = _identity_of_backend
    turing_inductor.enter(cache_factor())
    _forget_loaded_kernels()
    return True


def disable() -> None:
    """Go back to Triton's own path; the caches know the two apart.

    A hook that was installed over ours stays; ours below it then does nothing.
    """
    global _hook
    if _hook is None:
        return
    if knobs.runtime.add_stages_inspection_hook is _hook:
        knobs.runtime.add_stages_inspection_hook = _hook.previous
    _hook = None
    CUDABackend.hash = _hash_of_backend
    turing_inductor.leave()
    _forget_loaded_kernels()


def is_enabled() -> bool:
    """Whether `enable` was called, with success, and `disable` was not since."""
    return _hook is not None


def cache_factor() -> str:
    """What a cache of compiled code has to add to its key: "" where nothing is changed.

    It changes with the source of this lowering, and is "" on a card without tensor cores.
    """
    if _hook is None or _current_device_has_no_tensor_cores():
        return ""
    return _source_digest()


def contract_breach() -> str | None:
    """What this module needs of Triton and this release does not give; None where it gives all.

    The names of the stages are seen only when a kernel is compiled, and are checked then.
    """
    if not hasattr(type(knobs.runtime), "add_stages_inspection_hook"):
        return "has no stage inspection hook"
    parameters = list(inspect.signature(CUDABackend.make_ttgir).parameters)
    if parameters != ["mod", "metadata", "opt", "capability"]:
        return f"makes TTGIR from ({', '.join(parameters)})"
    if "num_stages" not in {field.name for field in dataclasses.fields(CUDAOptions)}:
        return "has no option num_stages"
    if not hasattr(ir, "parse_mlir_module"):
        return "cannot parse a module from its text"
    return None


def _identity_of_backend(backend: CUDABackend) -> str:
    """In place of `CUDABackend.hash`, which names the compiler in every cache key on disk.

    Triton 3.6 asks the hook for no key, and later ones only beside this.
    """
    return _hash_of_backend(backend) + cache_factor()


@functools.cache
def _source_digest() -> str:
    digest = hashlib.sha256()
    for module in (__file__, turing_dots.__file__, turing_ptx.__file__):
        digest.update(Path(module).read_bytes())
    return f"-turing-mma-{digest.hexdigest()[:16]}"


def _current_device_has_no_tensor_cores() -> bool:
    without = _devices_without_tensor_cores()
    return bool(without) and triton.runtime.driver.active.get_current_device() in without


@functools.cache
def _devices_without_tensor_cores() -> frozenset[int]:
    """CUDA's ordinals of the visible cards that have none; empty where no card is visible.

    PyTorch is asked, for it numbers the cards as the kernel's launch does.
    """
    import torch

    if not torch.cuda.is_available():
        return frozenset()
    cards = (
        Device(
            index=index,
            name=torch.cuda.get_device_name(index),
            capability=torch.cuda.get_device_capability(index),
        )
        for index in range(torch.cuda.device_count())
    )
    return frozenset(card.index for card in cards if not card.has_tensor_cores)


def _forget_loaded_kernels() -> None:
    """Make kernels that this process has loaded be looked up again.

    Triton 3.6 alone needs it: it does not ask the hook for the key of its cache in memory, and
    keeps no list of its kernels.
    """
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 7):
        return
    import gc

    for kernel in gc.get_objects():
        if issubclass(type(kernel), triton.runtime.JITFunction):
            kernel.device_caches.clear()


def _parse(text: str, context: Any) -> Any:
    """A module from its text; Triton offers that for files only."""
    with tempfile.NamedTemporaryFile("w", suffix=".mlir") as file:
        file.write(text)
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    module.context = context  # as Triton does, for its stages ask the module for it
    return module


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")


@functools.cache
def _log_refusal(kernel: str, reason: str) -> None:
    """Once for each kernel and reason, however many configurations are compiled."""
    logger.warning(
        "Triton kernel %s keeps Triton's own lowering for Turing, without tensor cores: %s.",
        kernel,
        reason,
    )
