# SPDX-License-Identifier: Apache-2.0
"""Lets PyPI's torchvision be imported beside a CPU build of torch.

PyPI's torchvision for Linux is a CUDA build. Beside a CPU build of torch its library of operators
does not load, and `import torchvision` ends in "operator torchvision::nms does not exist", because
it registers shape functions for operators that nobody declared. Declaring them is enough; they
stay without an implementation, and calling one fails as it should. To be removed on the day a CPU
build of torchvision can be had from PyPI.

torch calls `declare` at the end of its own import (entry point `torch.backends`), so it runs before
any import of torchvision. Schemas: torchvision/csrc/ops/nms.cpp and quantized/cpu/qnms_kernel.cpp.
"""

import importlib.util
from pathlib import Path

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_library: torch.library.Library | None = None


def declare() -> None:
    """Declare the operators where torchvision's own library cannot: on a CPU build of torch."""
    global _library
    if torch.version.cuda is not None or _library is not None or not _needs_cuda():
        return
    _library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        _library.define(schema)


def _needs_cuda() -> bool:
    """Whether the installed torchvision is a CUDA build: its library names libtorch_cuda."""
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return False
    libraries = Path(found.origin).parent.glob("_C*.so")
    return any(b"libtorch_cuda.so" in library.read_bytes() for library in libraries)
