# SPDX-License-Identifier: Apache-2.0
"""`torch.cuda` is asked only where nothing else can answer.

Most of it answers for device 0 or for whatever device happens to be current, and none of it exists
for an emulated card. `torch.accelerator` knows the current device, `vllm.pre_ampere.devices` knows
what a card can do, and the platform knows which cards take part.
"""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from checks import Finding, dotted_name, nodes_by_function, parse

# What has no counterpart elsewhere and asks nothing about a device.
GRAPHS = {"torch.cuda.CUDAGraph", "torch.cuda.graph"}

_NO_NAMES = "torch.accelerator knows no names"
_POSES = "asks nothing: it makes these functions answer for a card that is not there"
_CONTEXT = "whether this process has a CUDA context; torch.accelerator does not say"

# (file, function around it) -> why nothing else can answer there.
ALLOWED = {
    ("tools/train_tiny_model.py", "main"): _NO_NAMES,
    ("vllm/pre_ampere/emulation.py", "_answer_for_torch"): _POSES,
    ("vllm/pre_ampere/kernels/triton/turing_mma.py", "_devices_without_tensor_cores"): (
        f"works without vLLM and so without the platform; {_NO_NAMES}"
    ),
    ("vllm/pre_ampere/platform/cuda.py", "PreAmpereCudaPlatform.answering_device"): _CONTEXT,
    ("vllm/pre_ampere/platform/cuda.py", "PreAmpereCudaPlatform.worker_device"): _CONTEXT,
    ("vllm/pre_ampere/preflight/card.py", "_answer_for_torch"): _POSES,
}


def check(files: Sequence[Path]) -> Iterator[Finding]:
    """Find uses of `torch.cuda` without an entry in `ALLOWED`, and entries without a use."""
    for path in files:
        allowed = {scope for file, scope in ALLOWED if file == path.as_posix()}
        unused = set(allowed)
        for scope, node in nodes_by_function(parse(path)):
            name = _device_call(node)
            if not name or name in GRAPHS:
                continue
            holding = {entry for entry in allowed if f"{scope}.".startswith(f"{entry}.")}
            unused -= holding
            if not holding:
                yield Finding(
                    path,
                    getattr(node, "lineno", 1),
                    f"{name}: ask torch.accelerator, vllm.pre_ampere.devices or the platform; "
                    f"where none of them can answer, say why in {Path(__file__).name}",
                )
        for scope in sorted(unused):
            yield Finding(path, 1, f"{scope} no longer uses torch.cuda: remove it from ALLOWED")


def _device_call(node: ast.AST) -> str:
    """The name under `torch.cuda` that this node uses; "" for none."""
    match node:
        case ast.Attribute(value=ast.Attribute()) if dotted_name(node.value) == "torch.cuda":
            return f"torch.cuda.{node.attr}"
        case ast.Import(names=names):
            found = [alias.name for alias in names if alias.name.startswith("torch.cuda")]
            return found[0] if found else ""
        case ast.ImportFrom(module="torch", names=names):
            return "torch.cuda" if any(alias.name == "cuda" for alias in names) else ""
        case ast.ImportFrom(module=str(module)) if module.startswith("torch.cuda"):
            return module
    return ""
