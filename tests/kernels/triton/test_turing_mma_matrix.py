# SPDX-License-Identifier: Apache-2.0
"""The same tests with the other releases of Triton that the lowering is made for.

`make triton-matrix` puts each into build/triton/<release> and runs this; torch 2.13 has 3.7.1.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.mark.triton_matrix
@pytest.mark.parametrize("release", ["3.6.0", "3.7.1", "3.8.0", "3.9.0"])
def test_the_lowering_with(release: str) -> None:
    folder = REPOSITORY / "build" / "triton" / release
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    python = [sys.executable, "-c", "import triton; print(triton.__version__, triton.__file__)"]
    found = subprocess.run(python, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.split() == [release, str(folder / "triton" / "__init__.py")]
    tests = [str(path) for path in sorted(Path(__file__).parent.glob("test_*.py"))]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout
