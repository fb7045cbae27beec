# SPDX-License-Identifier: Apache-2.0
"""The command line as typer sees it: the commands of `COMMANDS`, each imported when asked for."""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperGroup

from vllm.pre_ampere import environment

# Name of the command -> module that holds it.
COMMANDS = {
    "doctor": "vllm.pre_ampere.cli.doctor",
    "preflight": "vllm.pre_ampere.cli.preflight",
    "lossless": "vllm.pre_ampere.cli.lossless",
    "census": "vllm.pre_ampere.cli.census",
}


class _Commands(TyperGroup):
    """Commands that are imported when they are asked for; those that this release has."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name, module in COMMANDS.items() if importlib.util.find_spec(module)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        # The return type is click's Command, whose home differs between typer's releases.
        if cmd_name not in self.list_commands(ctx):
            return None
        single = typer.Typer(add_completion=False)
        command = importlib.import_module(COMMANDS[cmd_name]).command
        single.command(cmd_name)(_after_the_environment(command))
        return typer.main.get_command(single)


def _after_the_environment(command: Callable[..., None]) -> Callable[..., None]:
    """The command, run only where each variable that is read has a value that it can take.

    Most are read while upstream makes a configuration, where a mistake in one would look like an
    answer about the model.
    """

    @functools.wraps(command)
    def checked(*arguments: Any, **options: Any) -> None:
        for variable in vars(environment).values():
            if isinstance(variable, environment.Variable):
                variable.get()
        command(*arguments, **options)

    return checked


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
