# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-pre-ampere`.

A command is a module of this folder with a typed function `command`, whose signature typer reads
and whose docstring is its help. Its module is imported only when it runs or when help lists it, and
imports at its top nothing that a box without a GPU may lack.
"""

import sys
from collections.abc import Sequence

# Exit status of a command that was asked for something it cannot do.
USAGE_ERROR = 2


class UserError(Exception):
    """What the user can mend: `main` prints the message without a traceback, exit status 2."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; `arguments` are those of the process where None.

    Raises:
        SystemExit: always, with the command's exit status.
    """
    from vllm.pre_ampere.cli.application import app
    from vllm.pre_ampere.environment import EnvironmentVariableError

    try:
        app(args=arguments, prog_name="vllm-pre-ampere")
    except (UserError, EnvironmentVariableError) as error:
        print(f"Error: {error}", file=sys.stderr)
        raise SystemExit(USAGE_ERROR) from None
