# SPDX-License-Identifier: Apache-2.0
"""Every file of ours begins with its licence."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from checks import Finding

_LICENCE = "SPDX-License-Identifier: Apache-2.0"
_SLASHED = {".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp"}


def check(files: Sequence[Path]) -> Iterator[Finding]:
    """Find files whose first line, or the one after `#!`, is not the licence."""
    for path in files:
        lines = path.read_text().splitlines()
        number = 1 if lines and lines[0].startswith("#!") else 0
        expected = f"{'//' if path.suffix in _SLASHED else '#'} {_LICENCE}"
        if lines[number : number + 1] != [expected]:
            yield Finding(path, number + 1, f"this line must be {expected!r}")
