# SPDX-License-Identifier: Apache-2.0
"""A checkpoint whose GDN tensors are missing or mis-shaped ends the start with their names."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_process import TINY_MODEL, serve
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.engine

Tensors = dict[str, torch.Tensor]
LAYER = "model.layers.1.linear_attn"


def damaged(directory: Path, damage: Callable[[Tensors], None]) -> Path:
    model = directory / "model"
    shutil.copytree(TINY_MODEL, model)
    tensors = load_file(model / "model.safetensors")
    damage(tensors)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return model


def start(directory: Path, model: Path) -> str:
    """The error with which the server ends."""
    arguments = ["--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "1"]
    started = serve(directory, arguments, model=model)
    with pytest.raises(RuntimeError, match="exit status") as failure, started:
        pass
    return str(failure.value)


def test_a_tensor_that_is_too_long_is_refused_with_both_shapes(tmp_path: Path) -> None:
    """Upstream's loader would take the first entries of it and answer with garbage."""

    def lengthen(tensors: Tensors) -> None:
        tensors[f"{LAYER}.A_log"] = torch.cat([tensors[f"{LAYER}.A_log"]] * 2)

    error = start(tmp_path, damaged(tmp_path, lengthen))
    assert f"{LAYER}.A_log: the checkpoint holds shape (8,), but config.json asks for (4,)" in error


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    def remove(tensors: Tensors) -> None:
        del tensors[f"{LAYER}.dt_bias"]

    error = start(tmp_path, damaged(tmp_path, remove))
    assert f"{LAYER}.dt_bias" in error
    assert "not initialized from checkpoint" in error
