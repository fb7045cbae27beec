# SPDX-License-Identifier: Apache-2.0
"""Tests in Triton's interpreter: a process of their own, for Triton chooses it when it is imported."""

import os
import re
import subprocess
import sys
from pathlib import Path


def passed(cases: str) -> int:
    """Run a file of cases beside this one, all of which must pass; returns how many there are."""
    run = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            str(Path(__file__).with_name(cases)),
        ],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    (count,) = re.findall(r"^(\d+) passed", run.stdout, re.MULTILINE)
    return int(count)
