# SPDX-License-Identifier: Apache-2.0
"""What a kernel asks of the card and the model, and what it says when it does not get it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from vllm.pre_ampere.devices import Capability, Device


@dataclass(frozen=True)
class Problem:
    """What a model's GDN layers ask of a kernel.

    Attributes:
        operation: a key of the registry's table, such as "gdn_prefill".
        dtype: of the activations.
        head_dim_k: K, the dimension of a key head.
        head_dim_v: V, the dimension of a value head.
    """

    operation: str
    dtype: torch.dtype
    head_dim_k: int
    head_dim_v: int


@dataclass(frozen=True)
class Kernel:
    """One implementation of one operation.

    Attributes:
        name: what the user calls it.
        operation: what it computes.
        load: imports the implementation and returns it; its signature is that of the function of
            `kernels.host` which the operation's reference loads.
        runs_on: "gpu", or "cpu" for an implementation that serves where there is no GPU.
        architectures: capabilities it has code for; None means any.
        dtypes: activations it takes.
        shared_memory: bytes of shared memory a block, by (K, V), for a kernel written for certain
            head dimensions; None for one that takes any and lets its compiler choose a launch that
            fits.
        max_head_dim_k: the largest K it takes; None means any.
        needs_tensor_cores: whether it issues matrix instructions.
        missing: why it cannot be loaded in this release; None for a kernel that exists.
        by_request: why it is used only if the user names it; None for one that is chosen by itself.
    """

    name: str
    operation: str
    load: Callable[[], Callable[..., Any]]
    runs_on: Literal["gpu", "cpu"] = "gpu"
    architectures: frozenset[Capability] | None = None
    dtypes: frozenset[torch.dtype] = frozenset({torch.float16, torch.bfloat16, torch.float32})
    shared_memory: Mapping[tuple[int, int], int] | None = None
    max_head_dim_k: int | None = None
    needs_tensor_cores: bool = False
    missing: str | None = None
    by_request: str | None = None

    def unmet(self, problem: Problem, device: Device, on_cpu: bool) -> str | None:
        """The first need that is not met, as the rest of a sentence that starts with the name.

        Limits of the card come before `missing`, so that the answer stays true when it is built.

        Args:
            problem: what the model asks.
            device: the card that would run it, or that is emulated.
            on_cpu: whether the box computes on its CPU.

        Returns:
            None where the kernel can run.
        """
        card = f"this card ({device.architecture}, {device.name})"
        head_dims = (problem.head_dim_k, problem.head_dim_v)
        if self.architectures is not None and device.capability not in self.architectures:
            has = ", ".join(_architecture(c) for c in sorted(self.architectures))
            return f"has code for {has}; {card} is {device.architecture}"
        if self.needs_tensor_cores and not device.has_tensor_cores:
            return f"needs tensor cores; {card} has none"
        if problem.dtype not in self.dtypes:
            takes = " or ".join(sorted(_short(dtype) for dtype in self.dtypes))
            return f"takes {takes}; the model runs in {_short(problem.dtype)}"
        if (
            self.runs_on == "gpu"
            and problem.dtype == torch.bfloat16
            and not device.supports_bfloat16
        ):
            return f"would compute in bfloat16, which needs sm80; {card} is {device.architecture}"
        if self.max_head_dim_k is not None and problem.head_dim_k > self.max_head_dim_k:
            return f"takes K up to {self.max_head_dim_k}; the model has K={problem.head_dim_k}"
        if self.shared_memory is not None:
            if head_dims not in self.shared_memory:
                takes = " or ".join(f"K={k}, V={v}" for k, v in sorted(self.shared_memory))
                return f"takes {takes}; the model has K={head_dims[0]}, V={head_dims[1]}"
            needed, available = self.shared_memory[head_dims], device.shared_memory_per_block
            if needed > available:
                return f"needs {needed} B of shared memory a block; {card} has {available} B"
        if self.missing is not None:
            return self.missing
        if (self.runs_on == "cpu") != on_cpu:
            where = "CPU" if on_cpu else "GPU"
            return f"runs on a {self.runs_on.upper()}; this box computes on its {where}"
        return None


def _architecture(capability: Capability) -> str:
    return f"sm{capability[0]}{capability[1]}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
