# SPDX-License-Identifier: Apache-2.0
"""Make a newer GPU answer, compile and refuse as a Volta or Turing card.

`VLLM_PRE_AMPERE_EMULATE=7.5` on a box with a newer card chooses `EmulatedCudaPlatform`, which
answers upstream's questions and calls `start` in every process. Here is what no platform hook
reaches: Triton and Inductor lower for the old card and assemble for the real one, a Triton launch
that needs more shared memory than the old card has fails as it fails there, PyTorch's questions are
answered as there, and what is compiled so is kept apart.

Each replacement of something in PyTorch or Triton says what is replaced and which hook is missing.
docs/emulation.md says what emulation shows and what it cannot show.
"""

import logging
import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs

from vllm.pre_ampere import environment
from vllm.pre_ampere.devices import Device

logger = logging.getLogger("vllm.pre_ampere.emulation")

_started_for: tuple[Device, ...] = ()


class _LowerForTheEmulatedCard:
    """Triton's stage hook: PTX, too, is made for the architecture that was lowered for.

    `TRITON_OVERRIDE_ARCH` (here its knob) lowers for another architecture, but from PTX on Triton
    goes back to the real one. The assembler takes PTX of an older architecture for a newer chip.
    """

    def __init__(self, previous: Any) -> None:
        self._previous = previous

    def __call__(
        self,
        backend: Any = None,
        stages: dict[str, Any] | None = None,
        options: Any = None,
        language: Any = None,
        capability: int | None = None,
    ) -> tuple[str, str] | None:
        if stages is None:
            # Triton asks for a part of its cache keys; the architecture is in them already.
            return self._previous() if self._previous is not None else ("", "")
        if self._previous is not None:
            self._previous(backend, stages, options, language, capability)
        stages["ptx"] = lambda source, metadata: backend.make_ptx(
            source, metadata, options, capability
        )
        return None


_hook: _LowerForTheEmulatedCard | None = None


def start(cards: Sequence[Device], real: Sequence[Device]) -> None:
    """Begin to emulate in this process; a second call with the same cards changes nothing.

    Call it before anything is compiled.

    Args:
        cards: the emulated card for each visible device, or one for all of them.
        real: the visible devices.

    Raises:
        RuntimeError: a real card is missing or older than what it is to emulate.
    """
    global _started_for
    cards = tuple(cards)
    if cards == _started_for:
        return
    _check(cards, real)
    _keep_caches_apart(cards)
    # Before PyTorch's answers change: Triton's driver keeps PyTorch's function for the capability,
    # which is that of the chip to assemble for.
    driver = triton.runtime.driver.active
    limit_shared_memory(driver, cards)
    _answer_for_torch(cards)
    lower_for(cards[0])
    _set_inductor_up()
    _started_for = cards
    if multiprocessing.parent_process() is None:
        logger.warning(banner(cards, real))


def lower_for(card: Device) -> None:
    """Let Triton lower for this card from now on; a worker calls it for its own."""
    global _hook
    knobs.runtime.override_arch = card.architecture
    if _hook is None:
        # Once: a hook that was set since (the tensor-core lowering) builds on this one.
        _hook = _LowerForTheEmulatedCard(knobs.runtime.add_stages_inspection_hook)
        knobs.runtime.add_stages_inspection_hook = _hook


def limit_shared_memory(driver: Any, cards: Sequence[Device]) -> None:
    """Answer Triton's question how much shared memory a block can have as the old cards would.

    Triton then refuses a larger kernel with `OutOfResources`, which names both numbers, and
    launchers that choose a configuration by this number choose as there. Replaces the driver's
    `utils.get_device_properties`; Triton has no setting for the limit.
    """
    ask = driver.utils.get_device_properties

    def limited(index: int) -> dict[str, Any]:
        properties = ask(index)
        limit = min(properties["max_shared_mem"], _card(cards, index).shared_memory_per_block)
        return {**properties, "max_shared_mem": limit}

    driver.utils.get_device_properties = limited


def banner(cards: Sequence[Device], real: Sequence[Device]) -> str:
    """What is said at the start: what stands for what, and what cannot be concluded."""
    shown = ", ".join(
        dict.fromkeys(
            f"{card.name} ({card.architecture}, {card.shared_memory_per_block} B of shared memory "
            "a block)"
            for card in cards
        )
    )
    chips = ", ".join(dict.fromkeys(f"{card.name} ({card.architecture})" for card in real))
    line = "=" * 78
    return (
        f"\n{line}\n"
        f"EMULATION, NOT A {cards[0].name.upper()}: {chips} answers, compiles and refuses as\n"
        f"{shown}.\n"
        "It cannot show: speed; how machine code of the old card is scheduled; rounding inside\n"
        "a tensor-core step; upstream's C++ operators, cuBLAS and PyTorch's own kernels, which\n"
        "see the real card; its memory size and number of multiprocessors.\n"
        f"{line}"
    )


def _check(cards: Sequence[Device], real: Sequence[Device]) -> None:
    wanted = ",".join(f"{c.capability[0]}.{c.capability[1]}" for c in cards)
    setting = f"{environment.EMULATE.name}={wanted}"
    if not real:
        raise RuntimeError(f"{setting} needs a newer NVIDIA card to run on; none is visible")
    for device in real:
        card = _card(cards, device.index)
        if device.capability < card.capability:
            raise RuntimeError(
                f"{setting} needs a newer card: device {device.index} ({device.name}) is "
                f"{device.architecture} and cannot stand for {card.architecture}"
            )


def _card(cards: Sequence[Device], index: int) -> Device:
    return cards[min(index, len(cards) - 1)]


def _keep_caches_apart(cards: Sequence[Device]) -> None:
    """Give Triton, Inductor and vLLM compile caches of their own; child processes inherit them."""
    import vllm.envs
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    folder = "emulated-" + "-".join(dict.fromkeys(card.architecture for card in cards))
    defaults = (
        (environment.TRITON_CACHE_DIR, knobs.cache.dir),
        (environment.TORCHINDUCTOR_CACHE_DIR, default_cache_dir()),
        (environment.VLLM_CACHE_ROOT, vllm.envs.VLLM_CACHE_ROOT),
    )
    for variable, default in defaults:
        path = Path(variable.get() or default)
        if path.name != folder:
            variable.set(str(path / folder))


def _answer_for_torch(cards: Sequence[Device]) -> None:
    """Replace PyTorch's answers about capability, name and bfloat16; it has no device to subclass.

    Asked by FLA's kernels at import, by Triton's frontend and by PyTorch's own choices. Inductor's
    question is the exception: its answer is the chip to assemble for, so it stays true.
    """
    from torch._dynamo.device_interface import CudaInterface

    real_capability = torch.cuda.get_device_capability

    def card(device: Any = None) -> Device:
        if len(cards) == 1:
            return cards[0]
        return _card(cards, torch.cuda._utils._get_device_index(device, optional=True))

    def real_architecture(device: Any = None) -> int:
        major, minor = real_capability(device)
        return 10 * major + minor

    CudaInterface.get_compute_capability = staticmethod(real_architecture)  # type: ignore[method-assign]
    torch.cuda.get_device_capability = lambda device=None: card(device).capability
    torch.cuda.get_device_name = lambda device=None: card(device).name
    torch.cuda.is_bf16_supported = lambda including_emulation=True: including_emulation


def _set_inductor_up() -> None:
    """Inductor compiles and launches where Triton's hook and limit are: in this process, by Triton.

    Its pool's processes start without the hook, and its own launcher does not ask Triton's driver
    for the limit.
    """
    import torch._inductor.config as inductor

    inductor.compile_threads = 1
    inductor.use_static_cuda_launcher = False
