# SPDX-License-Identifier: Apache-2.0
"""What a GPU launches in a step, by class, from a trace of PyTorch's profiler.

Upstream writes the trace (`--profiler-config`, then /start_profile and /stop_profile), with the
engine in its own processes and CUDA graphs in use. A step is one of upstream's annotations in it,
`execute_context_…_generation_…`; launches from a CUDA graph are in the trace one by one.
"""

import bisect
import gzip
import importlib
import json
import pkgutil
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any


class KernelClass(StrEnum):
    """What launched a kernel; ATen's three elementwise forms go by the names of their kernels."""

    INDUCTOR = "Inductor-fused"
    OURS = "ours"
    TRITON = "other Triton"
    PRODUCT = "matrix products"
    ELEMENTWISE = "elementwise"
    VECTORIZED = "vectorized elementwise"
    UNROLLED = "unrolled elementwise"
    REDUCE = "reduce"
    COPY = "copies"
    OTHER = "other"


ATEN_ELEMENTWISE = (KernelClass.ELEMENTWISE, KernelClass.VECTORIZED, KernelClass.UNROLLED)

_STEP = re.compile(r"execute_(?:\d+_)?context_(\d+)\(.*\)_generation_(\d+)\(")
# Tried in this order. "unrolled" and "vectorized" come before the name that they contain.
_BY_NAME = (
    (KernelClass.COPY, re.compile(r"^Mem(?:cpy|set)|CatArrayBatchedCopy")),
    (KernelClass.INDUCTOR, re.compile(r"^triton_")),
    (
        KernelClass.PRODUCT,
        re.compile(r"gemm|gemv|matmul|nvjet|cutlass|xmma|splitk|cublas", re.IGNORECASE),
    ),
    (KernelClass.VECTORIZED, re.compile(r"\bvectorized_elementwise_kernel")),
    (KernelClass.UNROLLED, re.compile(r"\bunrolled_elementwise_kernel")),
    (KernelClass.ELEMENTWISE, re.compile(r"\belementwise_kernel")),
    (KernelClass.REDUCE, re.compile(r"\breduce_kernel")),
    (KernelClass.OURS, re.compile(r"\bpre_ampere(?:_|::)")),
)
# A Triton kernel has the name of its Python function; one of C++ shows its namespace or arguments.
_TRITON = re.compile(r"^\w+$")
_DELTA_RULE = re.compile(r"delta_rule|flashqla")


@dataclass(frozen=True)
class KernelCount:
    """One kernel's part of a step: launches and GPU microseconds, both means over the steps."""

    name: str
    kind: KernelClass
    launches: float
    microseconds: float


@dataclass(frozen=True)
class Census:
    """What a step launches.

    Attributes:
        steps: how many were counted.
        kernels: most launches first.
        gdn_layer: launches by class in one GDN layer, between its last input projection and its
            output projection; empty where the trace holds no delta-rule kernel.
    """

    steps: int
    kernels: tuple[KernelCount, ...]
    gdn_layer: dict[KernelClass, float]

    def by_class(self) -> dict[KernelClass, tuple[float, float]]:
        """Launches and microseconds a step of each class, in the order of `KernelClass`."""
        totals: dict[KernelClass, tuple[float, float]] = dict.fromkeys(KernelClass, (0.0, 0.0))
        for kernel in self.kernels:
            launches, microseconds = totals[kernel.kind]
            totals[kernel.kind] = (launches + kernel.launches, microseconds + kernel.microseconds)
        return totals

    def to_json(self) -> dict[str, Any]:
        """For json.dump; "classes" repeats `by_class` for readers."""
        return {**asdict(self), "classes": self.by_class()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Census":
        """The inverse of `to_json`."""
        kernels = tuple(
            KernelCount(**{**kernel, "kind": KernelClass(kernel["kind"])})
            for kernel in data["kernels"]
        )
        layer = {KernelClass(kind): count for kind, count in data["gdn_layer"].items()}
        return cls(data["steps"], kernels, layer)


def classify(name: str, own: Iterable[str] = ()) -> KernelClass:
    """The class of a kernel by its name in the trace.

    Args:
        name: demangled.
        own: names of this project's Triton kernels.
    """
    if name in own:
        return KernelClass.OURS
    for kind, pattern in _BY_NAME:
        if pattern.search(name):
            return kind
    return KernelClass.TRITON if _TRITON.match(name) else KernelClass.OTHER


def own_triton_kernels() -> frozenset[str]:
    """Names of this project's Triton kernels; imports their modules, which need Triton and vLLM."""
    from vllm.pre_ampere.kernels import triton as package

    names = set()
    for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        for kernel in vars(importlib.import_module(found.name)).values():
            while hasattr(kernel, "arg_names") and hasattr(kernel, "fn"):
                kernel = kernel.fn
                if getattr(kernel, "__module__", None) == found.name:
                    names.add(kernel.__name__)
    return frozenset(names)


def read_trace(path: Path, own: Iterable[str] = ()) -> Census:
    """Count the decode and verify steps of one worker's trace; steps with a prefill are left out.

    Raises:
        ValueError: the trace holds no such step, or no kernel.
    """
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events = json.loads(text)["traceEvents"]
    return count_events(events, frozenset(own), str(path))


def count_events(events: Sequence[dict[str, Any]], own: frozenset[str], source: str) -> Census:
    """`read_trace` of events that are in memory.

    Args:
        events: Chrome's trace events, times in microseconds.
        own: names of this project's Triton kernels.
        source: what to call them in an error.
    """
    steps = [_STEP.match(event.get("name", "")) for event in events if _is_annotation(event)]
    counted = sum(1 for step in steps if step and step[1] == "0" and step[2] != "0")
    if not counted or counted != sum(1 for step in steps if step):
        raise ValueError(f"{source} holds {counted} steps of generation alone, or others beside")
    launched = sorted(
        (event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")),
        key=lambda event: event["ts"],
    )
    if not launched:
        raise ValueError(f"{source} holds no kernel: was it recorded on a GPU?")
    kinds = {name: classify(name, own) for name in {event["name"] for event in launched}}
    launches = Counter(event["name"] for event in launched)
    times: defaultdict[str, float] = defaultdict(float)
    for event in launched:
        times[event["name"]] += event.get("dur", 0)
    kernels = tuple(
        KernelCount(name, kinds[name], count / counted, times[name] / counted)
        for name, count in launches.most_common()
    )
    return Census(counted, kernels, _gdn_layer([e["name"] for e in launched], kinds))


def _is_annotation(event: dict[str, Any]) -> bool:
    return event.get("cat") == "user_annotation" and event.get("ph") == "X"


def _gdn_layer(names: Sequence[str], kinds: dict[str, KernelClass]) -> dict[KernelClass, float]:
    layers: list[Counter[KernelClass]] = []
    products = [i for i, name in enumerate(names) if kinds[name] is KernelClass.PRODUCT]
    for position, name in enumerate(names):
        if not _DELTA_RULE.search(name) or kinds[name] is KernelClass.INDUCTOR:
            continue
        after = bisect.bisect(products, position)
        if 0 < after < len(products):
            between = names[products[after - 1] + 1 : products[after]]
            layers.append(Counter(kinds[other] for other in between))
    return {
        kind: sum(layer[kind] for layer in layers) / len(layers)
        for kind in KernelClass
        if any(layer[kind] for layer in layers)
    }
