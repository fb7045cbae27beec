# SPDX-License-Identifier: Apache-2.0
"""Runs one of the project's own checks: `python tools/check.py NAME [FILE ...]`, from the root.

Without files, a check looks at the product, all of `vllm/pre_ampere/`. Ends 1 where something was
found.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from checks import (
    Finding,
    device_calls,
    environment_variables,
    file_length,
    imports,
    serialization,
    spdx_header,
)

CHECKS: dict[str, Callable[[Sequence[Path]], Iterator[Finding]]] = {
    "device-calls": device_calls.check,
    "environment-variables": environment_variables.check,
    "file-length": file_length.check,
    "imports": imports.check,
    "serialization": serialization.check,
    "spdx-header": spdx_header.check,
}


def main(arguments: Sequence[str]) -> int:
    """Run the check that the first argument names on the files that follow; the exit status."""
    if not arguments or arguments[0] not in CHECKS:
        print(f"name one of {', '.join(CHECKS)}", file=sys.stderr)
        return 2
    name, *given = arguments
    files = [Path(path) for path in given] or sorted(Path("vllm/pre_ampere").rglob("*.py"))
    findings = sorted(CHECKS[name](files))
    for finding in findings:
        print(finding)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
