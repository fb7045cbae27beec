# SPDX-License-Identifier: Apache-2.0
"""Engine options after `--`, as `vllm serve` takes them, and why upstream refuses some."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs


def parse(model: str, options: Sequence[str]) -> "EngineArgs":
    """The engine's arguments.

    Raises:
        SystemExit: an option is not upstream's; upstream prints which.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="engine options"))
    # As upstream's server does: the platform adds choices of its own.
    current_platform.pre_register_and_update(parser)
    return EngineArgs.from_cli_args(parser.parse_args(["--model", model, *options]))


def first_reason(error: ValueError) -> str:
    """What is wrong, without the wrapping that pydantic gives an error of a validator."""
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        return str(error.errors()[0]["msg"]).removeprefix("Value error, ")
    return str(error)
