# SPDX-License-Identifier: Apache-2.0
"""A file that is too long to be read in one sitting holds more than one thing."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from checks import Finding

LIMIT = 500


def check(files: Sequence[Path]) -> Iterator[Finding]:
    """Find files of more than `LIMIT` lines."""
    for path in files:
        lines = len(path.read_text().splitlines())
        if lines > LIMIT:
            yield Finding(
                path, LIMIT + 1, f"{lines} lines, at most {LIMIT}: split it by what it does"
            )
