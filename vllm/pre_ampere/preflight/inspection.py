# SPDX-License-Identifier: Apache-2.0
"""Read what Triton compiled: resources from the machine code, instructions from the PTX."""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.runtime.autotuner import Autotuner

from vllm.pre_ampere.devices import Device
from vllm.pre_ampere.preflight.report import Finding

_PRODUCT = re.compile(r"\btt\.dot(?:_scaled)?\b")
_TENSOR_CORE = re.compile(r"\b(?:mma\.sync|wmma\.mma)\b")
_FMA = re.compile(r"\bfma\.rn(?:\.ftz)?\.(?:f32|f16|f16x2)\b")
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")


class CompilationObserver:
    """Collects a finding for every kernel that is compiled while a launch is made.

    It is Triton's compilation listener, and hears of each kernel before, too; `watch` installs it.
    """

    def __init__(self, device: Device, tuned: Mapping[str, frozenset[str]]) -> None:
        """`tuned` names, for each autotuned kernel, the arguments that its configurations set."""
        self._device = device
        self._tuned = tuned
        self._launch = ""
        self._compiling: tuple[str, str] | None = None
        self._findings: list[Finding] = []
        self._seen: Counter[tuple[str, str, str]] = Counter()

    def watch(self, launch: str) -> None:
        """Note what is compiled from now on under the name of this launch."""
        self._launch = launch
        self._compiling = None
        knobs.compilation.listener = self
        knobs.runtime.jit_cache_hook = self._begin

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings so far, in the order of compilation."""
        return tuple(self._findings)

    @property
    def is_compiling(self) -> bool:
        """Whether a kernel's compilation has begun and has not ended."""
        return self._compiling is not None

    def failed(self, reason: str) -> None:
        """Note that the kernel whose compilation has begun does not compile."""
        assert self._compiling is not None, "no compilation has begun"
        self._add(*self._compiling, failure=reason)

    def _begin(self, *, fn: Any, **more: Any) -> None:
        """Note whose compilation begins; Triton's interface, in which None has it go on."""
        self._compiling = fn.jit_function.__name__, _warps(more["compile"]["num_warps"])

    def __call__(  # Triton's interface.
        self,
        *,
        src: Any,
        metadata: dict[str, Any],
        metadata_group: dict[str, str],
        times: Any,
        cache_hit: bool,
    ) -> None:
        self._compiling = None
        files = {Path(name).suffix: Path(path) for name, path in metadata_group.items()}
        registers, stack = _resources(files[".cubin"])
        ttir, ptx = files[".ttir"].read_text(), files[".ptx"].read_text()
        products = len(_PRODUCT.findall(ttir))
        self._add(
            src.fn.__name__,
            self._configuration(src, metadata),
            shared_memory=metadata["shared"],
            registers=registers,
            stack=stack,
            products=products,
            tensor_core_instructions=len(_TENSOR_CORE.findall(ptx)),
            fma_instructions=len(_FMA.findall(ptx)) if products else 0,
            compile_seconds=0.0 if cache_hit else round(times.total / 1e6, 2),
        )

    def _add(self, kernel: str, configuration: str, **facts: Any) -> None:
        key = (self._launch, kernel, configuration)
        self._seen[key] += 1
        if self._seen[key] > 1:
            configuration = f"{configuration}, {self._seen[key]}"
        unknown = dict.fromkeys(
            (
                "shared_memory",
                "registers",
                "stack",
                "products",
                "tensor_core_instructions",
                "fma_instructions",
            ),
            0,
        )
        self._findings.append(
            Finding(
                launch=self._launch,
                kernel=kernel,
                configuration=configuration,
                shared_memory_limit=self._device.shared_memory_per_block,
                **{**unknown, **facts},
            )
        )

    def _configuration(self, src: Any, metadata: dict[str, Any]) -> str:
        parts = [_warps(metadata["num_warps"])]
        tuned = self._tuned.get(src.fn.__name__, frozenset())
        values = {src.fn.arg_names[path[0]]: value for path, value in src.constants.items()}
        parts += [f"{name}={values[name]}" for name in sorted(tuned)]
        return ", ".join(parts)


def drop_pipeline_depths(tuner: Autotuner) -> None:
    """Leave one configuration of those that differ in `num_stages` alone.

    Below sm80 there are no asynchronous copies to pipeline: the same code comes out for each.
    """
    kept: dict[tuple[Any, ...], triton.Config] = {}
    for config in tuner.configs:
        kept.setdefault((tuple(sorted(config.kwargs.items())), config.num_warps), config)
    tuner.configs = list(kept.values())


def _warps(number: int) -> str:
    return f"{number} warp{'s' if number > 1 else ''}"


def _resources(cubin: Path) -> tuple[int, int]:
    """Registers a thread, and bytes of stack a thread."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as copy:
        copy.write(cubin.read_bytes())
        copy.flush()
        command = [str(tools / "cuobjdump"), "-res-usage", copy.name]
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
    found = _RESOURCES.search(answer.stdout)
    if found is None:
        raise RuntimeError(f"cuobjdump named no registers of {cubin}: {answer.stdout!r}")
    return int(found[1]), int(found[2])
