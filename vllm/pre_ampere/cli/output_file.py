# SPDX-License-Identifier: Apache-2.0
"""Files that a command writes at its end are looked at before it starts its work."""

from pathlib import Path

from vllm.pre_ampere.cli import UserError


def check(option: str, path: Path | None) -> None:
    """Refuse a path that could not be written.

    Raises:
        UserError: its folder does not exist, or it is a folder itself.
    """
    if path is None:
        return
    if not path.parent.is_dir():
        raise UserError(f"{option} {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise UserError(f"{option} {path}: this is a folder; name a file")
