# SPDX-License-Identifier: Apache-2.0
"""What the commands read from a checkpoint's folder before they start anything."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.pre_ampere.cli import UserError


@dataclass(frozen=True)
class Checkpoint:
    """A folder with a model in it.

    Attributes:
        path: the folder.
        config: its config.json.
        text_config: the part of it that describes the language model.
    """

    path: Path
    config: dict[str, Any]
    text_config: dict[str, Any]

    @property
    def name(self) -> str:
        """The folder's name: it says what the model is and nothing about the machine."""
        return self.path.resolve().name

    @property
    def has_mtp(self) -> bool:
        """Whether the checkpoint has layers that draft tokens for speculation."""
        keys = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
        return any(self.text_config.get(key, 0) for key in keys)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint's description.

    Raises:
        UserError: there is no such folder, no readable config.json in it, or the model has no
            gated-delta-net layers.
    """
    if not path.is_dir():
        raise UserError(f"--model {path}: there is no such folder")
    description = path / "config.json"
    if not description.is_file():
        raise UserError(f"--model {path}: the folder has no config.json, so it holds no checkpoint")
    try:
        config = json.loads(description.read_text())
    except OSError as error:
        raise UserError(f"--model {path}: config.json cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"--model {path}: config.json is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"--model {path}: config.json holds no object")
    text_config = config.get("text_config", config)
    for name, part in (("text_config", text_config), *_quantization_of(config, text_config)):
        if not isinstance(part, dict):
            raise UserError(f"--model {path}: {name} in config.json is no object: {part!r}")
    if "linear_key_head_dim" not in text_config:
        kind = config.get("model_type", "unnamed")
        raise UserError(
            f"--model {path}: the model (model_type {kind}) has no gated-delta-net layers; this "
            "command is for Qwen3-Next, Qwen3.5 and their successors"
        )
    return Checkpoint(path, config, text_config)


def _quantization_of(config: dict[str, Any], text_config: Any) -> list[tuple[str, Any]]:
    name = "quantization_config"
    parts = [part for part in (config, text_config) if isinstance(part, dict)]
    return [(name, part[name]) for part in parts if part.get(name) is not None]
