# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-pre-ampere`.

A command is a module of this folder with a typed function `command`, whose signature typer reads
and whose docstring is its help. Its module is imported only when it runs or when help lists it, and
imports at its top nothing that a box without a GPU may lack.
"""

import importlib
import sys
from collections.abc import Sequence

import typer
from typer.core import TyperGroup

# Name of the command -> module that holds it.
COMMANDS = {
    "doctor": "vllm.pre_ampere.cli.doctor",
    "preflight": "vllm.pre_ampere.cli.preflight",
    "lossless": "vllm.pre_ampere.cli.lossless",
    "census": "vllm.pre_ampere.cli.census",
}

# Exit status of a command that was asked for something it cannot do.
USAGE_ERROR = 2


class UserError(Exception):
    """What the user can mend: `main` prints the message without a traceback, exit status 2."""


class _Commands(TyperGroup):
    """Commands that are imported when they are asked for."""

    def list_commands(self, ctx: typer.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: typer.Context, cmd_name: str):  # type: ignore[no-untyped-def]
        # The return type is click's Command, whose home differs between typer's releases.
        if cmd_name not in COMMANDS:
            return None
        single = typer.Typer(add_completion=False)
        single.command(cmd_name)(importlib.import_module(COMMANDS[cmd_name]).command)
        return typer.main.get_command(single)


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    # Python's own traceback for what is our fault.
    pretty_exceptions_enable=False,
)


@app.callback()
def _about() -> None:
    """Look into, check and measure vLLM on Turing and Volta cards."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; `arguments` are those of the process where None.

    Raises:
        SystemExit: always, with the command's exit status.
    """
    try:
        app(args=arguments, prog_name="vllm-pre-ampere")
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        raise SystemExit(USAGE_ERROR) from None
