# SPDX-License-Identifier: Apache-2.0
"""torchvision can be imported beside a CPU build of torch; its own operators are never hidden."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torchvision_cpu_ops

DIES = "operator torchvision::nms does not exist"


def run(program: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_torchvision_can_be_imported() -> None:
    done = run("import torchvision, torch; print(torch.ops.torchvision.nms.default)")
    assert (done.returncode, done.stdout) == (0, "torchvision.nms.default\n"), done.stderr


def test_without_the_declarations_a_cuda_build_cannot_be_imported() -> None:
    """The day this package is no longer needed: a CPU build of torchvision imports by itself."""
    done = run("import torchvision", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert (DIES in done.stderr) is torchvision_cpu_ops._needs_cuda()


@pytest.mark.parametrize(
    ("library", "declared"),
    [(b"\x7fELF libtorch_cuda.so", True), (b"\x7fELF libtorch_cpu.so", False)],
)
def test_declares_only_what_a_library_cannot_provide(
    tmp_path: Path, library: bytes, declared: bool
) -> None:
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "_C.so").write_bytes(library)
    done = run(
        "import torch; print([hasattr(torch.ops.torchvision, name) for name in ('nms', 'qnms')])",
        PYTHONPATH=str(tmp_path),
    )
    assert done.stdout == f"{[declared, declared]}\n", done.stderr
