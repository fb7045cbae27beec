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


# Milliseconds are of 8192 tokens and 16 key and 32 value heads of 128, of code for sm_75 on an H200
# (benchmarks/results/triton_turing.json); what spills is of ptxas for the card itself
# (preflight/results/kernels.json). Of the configurations that do not spill the fastest is pinned.
_CUMSUM = Launch(2, "no matrix product; 0.010 ms at 1, 2 and 4 warps")
_KKT = Launch(2, "0.23 ms, 0.35 with 4 warps, 0.62 with 8; a larger tile spills", {"BK": 32})
_SOLVE_TRIL = Launch(
    2, "0.17 ms, 0.25 with 4 warps, 0.27 with 8; its products are of fp32 anywhere"
)

_SCALAR: Mapping[str, Launch] = {
    "chunk_local_cumsum": _CUMSUM,
    "chunk_scaled_dot_kkt": _KKT,
    "solve_tril": _SOLVE_TRIL,
    "recompute_w_u": Launch(
        8, "0.28 ms; at most 88 bytes a thread spill, over 280 with 4 warps, over 7 KB with 2"
    ),
    "chunk_delta_h": Launch(4, "18.2 ms, 49.7 with BV 64; 2 warps spill 5 KB a thread", {"BV": 32}),
    "chunk_o": Launch(
        8,
        "2.6 ms, 2.8 to 4.4 with other tiles at 8 warps, of which all spill; fewer warps spill more",
        {"BK": 32, "BV": 64},
    ),
}

TABLE: Mapping[Lowering, Mapping[str, Launch]] = {
    "sm75 tensor cores": {
        "chunk_local_cumsum": _CUMSUM,
        "chunk_scaled_dot_kkt": _KKT,
        "solve_tril": _SOLVE_TRIL,
        "recompute_w_u": Launch(2, "0.10 ms, 0.12 with 4 warps, 0.14 with 8; nothing spills"),
        "chunk_delta_h": Launch(4, "0.63 ms, 0.66 with 2 warps; BV 64 spills", {"BV": 32}),
        "chunk_o": Launch(
            2,
            "0.23 ms, 0.25 with BV 64 and 4 warps; BV 64 and 2 warps take 0.19 and spill 168 bytes a "
            "thread on sm_75",
            {"BK": 64, "BV": 32},
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
