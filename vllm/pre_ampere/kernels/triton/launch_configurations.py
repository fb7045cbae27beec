# SPDX-License-Identifier: Apache-2.0
"""One launch configuration for each autotuned kernel of the GDN route, in place of autotuning.

Upstream tries up to 36 configurations of a kernel when it first meets a shape. On sm_75 and sm_70
one of them takes 1 to 24 s to compile, and the same code comes out for every pipeline depth, for
these cards have no asynchronous copies. The table names one for each kernel and way of compiling,
with what decided; benchmarks/triton_turing.py measures all of them.
"""

import importlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import triton
from triton.runtime.autotuner import Autotuner

# How matrix products are compiled: on Turing's tensor cores, or as scalar FMA for either card.
Lowering = Literal["sm75 tensor cores", "sm75", "sm70"]

_FLA = "vllm.third_party.flash_linear_attention.ops"

KERNELS: Mapping[str, str] = {
    "chunk_local_cumsum": f"{_FLA}.cumsum:chunk_local_cumsum_scalar_kernel",
    "chunk_scaled_dot_kkt": f"{_FLA}.chunk_scaled_dot_kkt:chunk_scaled_dot_kkt_fwd_kernel",
    "solve_tril": f"{_FLA}.solve_tril:merge_16x16_to_64x64_inverse_kernel",
    "recompute_w_u": f"{_FLA}.wy_fast:recompute_w_u_fwd_kernel",
    "chunk_delta_h": f"{_FLA}.chunk_delta_h:chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
    "chunk_o": f"{_FLA}.chunk_o:chunk_fwd_kernel_o",
}
"""Where upstream keeps each kernel: module and name in it."""

LAUNCHED_AS_ONE = ("fused_recurrent", "fused_sigmoid_gating", "unified_attention")
"""Kernels that upstream launches in one configuration as it is; there is nothing to pin."""


@dataclass(frozen=True)
class Launch:
    """One configuration.

    Attributes:
        num_warps: warps a block.
        blocks: tile sizes by the kernel's own names for them.
        reason: what decided.
    """

    num_warps: int
    reason: str
    blocks: Mapping[str, int] = field(default_factory=dict)


_NO_PRODUCT = "no matrix product; registers do not spill at any number of warps"

_SCALAR: Mapping[str, Launch] = {
    "chunk_local_cumsum": Launch(2, _NO_PRODUCT),
    "chunk_scaled_dot_kkt": Launch(
        8, "the only tile that does not spill at 8 warps with half the shared memory", {"BK": 32}
    ),
    "solve_tril": Launch(4, "its products are of fp32 on every card"),
    "recompute_w_u": Launch(
        8, "at most 88 bytes a thread spill; over 280 with 4 warps, over 7 KB with 2"
    ),
    "chunk_delta_h": Launch(
        4, "1.3 to 1.7 KB a thread spill; over 5 KB with 2 warps or with BV 64", {"BV": 32}
    ),
    "chunk_o": Launch(
        8, "112 bytes a thread spill; at least twice that with a larger tile", {"BK": 32, "BV": 32}
    ),
}

TABLE: Mapping[Lowering, Mapping[str, Launch]] = {
    "sm75 tensor cores": {
        "chunk_local_cumsum": Launch(2, _NO_PRODUCT),
        "chunk_scaled_dot_kkt": _SCALAR["chunk_scaled_dot_kkt"],
        "solve_tril": _SCALAR["solve_tril"],
        "recompute_w_u": Launch(4, "168 registers, nothing spills"),
        "chunk_delta_h": Launch(
            4, "168 registers, nothing spills, twice the blocks of BV 64", {"BV": 32}
        ),
        "chunk_o": Launch(
            4, "the fewest loads for a product that does not spill", {"BK": 64, "BV": 64}
        ),
    },
    "sm75": _SCALAR,
    "sm70": _SCALAR,
}


def pin(lowering: Lowering, names: Collection[str] = tuple(KERNELS)) -> dict[str, Launch]:
    """Leave each named kernel one configuration. A second call changes nothing.

    Args:
        lowering: how the current card's matrix products are compiled.
        names: keys of `KERNELS`, or members of `LAUNCHED_AS_ONE`, which are passed over.

    Returns:
        What was pinned.

    Raises:
        ValueError: a name is unknown, or upstream's kernel takes other tile sizes than the table
            has, which then is for another release of upstream.
    """
    unknown = set(names) - set(KERNELS) - set(LAUNCHED_AS_ONE)
    if unknown:
        raise ValueError(
            f"no launch configuration for {', '.join(sorted(unknown))}; "
            f"there is one for {', '.join(KERNELS)}"
        )
    pinned = {name: TABLE[lowering][name] for name in KERNELS if name in names}
    for name, launch in pinned.items():
        restrict(load(name), launch)
    return pinned


def load(name: str) -> Any:
    """Upstream's kernel of that name in `KERNELS`, as its launcher calls it."""
    module, attribute = KERNELS[name].split(":")
    return getattr(importlib.import_module(module), attribute)


def restrict(kernel: Any, launch: Launch) -> None:
    """Leave an autotuned kernel one configuration.

    Args:
        kernel: an `Autotuner`, or what `triton.heuristics` made of one.
        launch: the configuration.

    Raises:
        ValueError: it is not autotuned, or its tile sizes have other names.
    """
    tuned = autotuner(kernel)
    names = set(tuned.configs[0].kwargs)
    if names != set(launch.blocks):
        raise ValueError(
            f"{tuned.base_fn.__name__} is tuned over ({', '.join(sorted(names))}), but the launch "
            f"configuration sets ({', '.join(sorted(launch.blocks))}): it was chosen for another "
            "release of the kernel"
        )
    tuned.configs = [triton.Config(dict(launch.blocks), num_warps=launch.num_warps, num_stages=1)]
    tuned.cache.clear()


def autotuner(kernel: Any) -> Autotuner:
    """The autotuner in a kernel.

    Raises:
        ValueError: it has none.
    """
    inner = kernel
    while not isinstance(inner, Autotuner):
        if not hasattr(inner, "fn"):
            raise ValueError(f"{kernel!r} is not autotuned: it has no configurations to choose of")
        inner = inner.fn
    return inner
