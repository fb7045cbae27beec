# SPDX-License-Identifier: Apache-2.0
"""Which kernel runs an operation on a card, and why not the others."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm.pre_ampere import environment
from vllm.pre_ampere.devices import PRE_AMPERE, Device
from vllm.pre_ampere.kernels.kernel import Kernel, Problem

_HALF = frozenset({torch.float16})
_SIXTEEN_BIT = frozenset({torch.float16, torch.bfloat16})
_ANY_FLOAT = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})

# What the user sets to name a kernel of the operation.
_SETTINGS = {"gdn_prefill": "--gdn-prefill-backend"}


# The variable that switches a kernel on; without it the kernel is left out of the choice.
SWITCHES: Mapping[str, environment.Variable[bool]] = {
    "flashqla": environment.GDN_DECODE_FLASHQLA,
    "packed_triton": environment.PACKED_RECURRENT_DECODE,
}


class KernelUnavailableError(ValueError):
    """No kernel for the operation, or not the one asked for: why, and what works."""


@dataclass(frozen=True)
class Selection:
    """The outcome of a choice.

    Attributes:
        kernel: what runs.
        passed_over: the kernels that stand before it in the order, each with the need that was not
            met (see `Kernel.unmet`).
        requested: the name the user gave; None where the choice was ours.
    """

    kernel: Kernel
    passed_over: tuple[tuple[Kernel, str], ...]
    requested: str | None


def _not_built() -> Callable[..., Any]:
    raise KernelUnavailableError("this kernel does not exist in this release")


def _triton(name: str) -> Callable[[], Callable[..., Any]]:
    def load() -> Callable[..., Any]:
        from vllm.pre_ampere.kernels import upstream

        function: Callable[..., Any] = getattr(upstream, name)
        return function

    return load


def _packed_delta_rule_update() -> Callable[..., Any]:
    from vllm.pre_ampere.kernels.triton.packed_delta_rule import packed_delta_rule_update

    return packed_delta_rule_update


def _reference(operation: str, name: str) -> Kernel:
    def load() -> Callable[..., Any]:
        from vllm.pre_ampere.kernels import host

        function: Callable[..., Any] = getattr(host, name)
        return function

    return Kernel("reference", operation, load, runs_on="cpu", dtypes=_ANY_FLOAT)


# In each operation the first kernel whose needs are met is taken.
_TABLE: dict[str, tuple[Kernel, ...]] = {
    "gdn_prefill": (
        Kernel(
            "flashqla_sm70",
            "gdn_prefill",
            _not_built,
            # TileLang compiles its matrix products for Turing, too; there the memory decides.
            architectures=frozenset(PRE_AMPERE),
            dtypes=_HALF,
            shared_memory={(128, 128): 86016},
            needs_tensor_cores=True,
            missing="is not part of this release",
        ),
        # The autotuner drops the configurations that do not fit the card.
        Kernel(
            "triton",
            "gdn_prefill",
            _triton("chunk_gated_delta_rule"),
            dtypes=_SIXTEEN_BIT,
            max_head_dim_k=256,
        ),
        Kernel(
            "vlk",
            "gdn_prefill",
            _not_built,
            architectures=frozenset(PRE_AMPERE),
            dtypes=_HALF,
            shared_memory={(128, 128): 65536},
            needs_tensor_cores=True,
            missing="is not part of this release",
            by_request=(
                "in the report that describes it, on a Quadro RTX 8000, it ran 1.32 times as fast "
                "as triton at 512 tokens, but 15 % slower at 2048 and 21 % slower at 8192"
            ),
        ),
        _reference("gdn_prefill", "chunk_gated_delta_rule"),
    ),
    # A token a request, or a token and its drafts: one choice for both, so that one order of
    # arithmetic gives a token with speculation and without.
    "gdn_decode": (
        Kernel(
            "flashqla",
            "gdn_decode",
            _not_built,
            architectures=frozenset(PRE_AMPERE),
            dtypes=_HALF,
            missing="is not part of this release",
        ),
        Kernel("packed_triton", "gdn_decode", _packed_delta_rule_update, max_head_dim_k=256),
        Kernel("triton", "gdn_decode", _triton("packed_delta_rule_update")),
        _reference("gdn_decode", "packed_delta_rule_update"),
    ),
    "gdn_post_convolution": (
        Kernel("triton", "gdn_post_convolution", _triton("post_convolution")),
        _reference("gdn_post_convolution", "post_convolution"),
    ),
    "convolution_prefill": (
        Kernel("triton", "convolution_prefill", _triton("causal_conv1d_prefill")),
        _reference("convolution_prefill", "causal_conv1d_prefill"),
    ),
    "convolution_update": (
        Kernel("triton", "convolution_update", _triton("causal_conv1d_update")),
        _reference("convolution_update", "causal_conv1d_update"),
    ),
}


def kernels(operation: str) -> tuple[Kernel, ...]:
    """The operation's kernels in the order in which they are tried.

    Raises:
        KeyError: there is no such operation.
    """
    return _TABLE[operation]


def names(operation: str) -> tuple[str, ...]:
    """The names of the operation's kernels, in the order in which they are tried."""
    return tuple(kernel.name for kernel in kernels(operation))


def switched_off() -> frozenset[str]:
    """The names of the kernels whose variable is not on, for `select`'s `excluded`."""
    return frozenset(name for name, switch in SWITCHES.items() if not switch.get())


def select(
    operation: str,
    problem: Problem,
    device: Device,
    preferred: str | None = None,
    *,
    on_cpu: bool = False,
    excluded: Collection[str] = (),
) -> Selection:
    """Choose the kernel for one operation on one card.

    Args:
        operation: a key of the table.
        problem: what the model asks.
        device: the card that will run it, or that is emulated.
        preferred: the kernel that the user named; None leaves the choice to the order of the table.
        on_cpu: whether the box computes on its CPU.
        excluded: names of kernels that a setting has switched off; they are not considered.

    Raises:
        KernelUnavailableError: the preferred kernel is unknown or cannot run, or no kernel can.
    """
    candidates = [kernel for kernel in kernels(operation) if kernel.name not in excluded]
    if preferred is not None:
        kernel = next((kernel for kernel in candidates if kernel.name == preferred), None)
        reason = (
            f"is no kernel for {operation}; there are {', '.join(k.name for k in candidates)}"
            if kernel is None
            else kernel.unmet(problem, device, on_cpu)
        )
        if kernel is None or reason is not None:
            setting = _SETTINGS.get(operation, f"kernel for {operation}:")
            raise KernelUnavailableError(
                f"{setting} {preferred}: {preferred} {reason}. "
                f"{_remedy(candidates, problem, device, on_cpu)}"
            )
        return Selection(kernel, (), preferred)

    passed_over: list[tuple[Kernel, str]] = []
    for kernel in candidates:
        if kernel.by_request is not None:
            continue
        reason = kernel.unmet(problem, device, on_cpu)
        if reason is None:
            return Selection(kernel, tuple(passed_over), None)
        passed_over.append((kernel, reason))
    reasons = "; ".join(f"{kernel.name} {reason}" for kernel, reason in passed_over)
    raise KernelUnavailableError(f"no kernel for {operation} can run: {reasons}")


def _remedy(candidates: Sequence[Kernel], problem: Problem, device: Device, on_cpu: bool) -> str:
    usable = [k.name for k in candidates if k.unmet(problem, device, on_cpu) is None]
    if not usable:
        return "None of the others can run here either"
    return f"On this card use {' or '.join(usable)}, or leave the setting out"
