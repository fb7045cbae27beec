# SPDX-License-Identifier: Apache-2.0
"""The doctor looks for the weights: a description alone is not served."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_process import START_SECONDS, TINY_MODEL, clean_environment

from vllm.pre_ampere.cli.diagnosis.weights import missing, unreadable

INDEX = "model.safetensors.index.json"


def folder_with(folder: Path, *names: str, index: object = None) -> Path:
    """A checkpoint's folder, named model, whose files are empty."""
    model = folder / "model"
    model.mkdir()
    for name in names:
        (model / name).touch()
    if index is not None:
        (model / INDEX).write_text(json.dumps(index))
    return model


def shards(*names: str) -> dict[str, Any]:
    return {"metadata": {}, "weight_map": {f"layers.{i}.weight": n for i, n in enumerate(names)}}


def test_one_file_is_enough(tmp_path: Path) -> None:
    assert missing(folder_with(tmp_path, "config.json", "model.safetensors"), "auto") is None


def test_every_shard_of_the_index_is_enough(tmp_path: Path) -> None:
    model = folder_with(tmp_path, "a.safetensors", "b.safetensors")
    (model / INDEX).write_text(json.dumps(shards("b.safetensors", "a.safetensors")))
    assert missing(model, "auto") is None


@pytest.mark.parametrize("names", [(), ("config.json", "optimizer.pt", "training_args.bin")])
def test_no_weights(names: tuple[str, ...], tmp_path: Path) -> None:
    message = missing(folder_with(tmp_path, *names), "auto")
    assert message == (
        "the folder model has no weights: no file *.safetensors; download those of the checkpoint "
        "into it"
    )


@pytest.mark.parametrize(
    ("names", "named"),
    [
        (("pytorch_model.bin",), "(pytorch_model.bin)"),
        (("model.pt", "optimizer.pt"), "(model.pt)"),
        (("b.bin", "a.bin", "c.pt"), "(a.bin and 2 more)"),
    ],
)
def test_pickles_are_not_enough(names: tuple[str, ...], named: str, tmp_path: Path) -> None:
    message = missing(folder_with(tmp_path, *names), "auto")
    assert message is not None
    assert message.startswith(f"the folder model has pickled weights {named} and no *.safetensors;")
    assert "only safetensors are supported" in message


def test_pickles_beside_safetensors_are_left_alone(tmp_path: Path) -> None:
    assert missing(folder_with(tmp_path, "model.safetensors", "pytorch_model.bin"), "auto") is None


@pytest.mark.parametrize("there", [(), ("c.safetensors",), ("c.safetensors", "other.safetensors")])
def test_the_first_missing_shard_and_their_number(there: tuple[str, ...], tmp_path: Path) -> None:
    names = ("c.safetensors", "b.safetensors", "a.safetensors")
    message = missing(folder_with(tmp_path, *there, index=shards(*names)), "auto")
    absent = 3 - ("c.safetensors" in there)
    assert message == (
        f"the folder model: a.safetensors is not there, and {absent} of the 3 shards that {INDEX} "
        "names are missing; download them"
    )


def test_a_link_into_a_cache_that_was_cleared_is_missing(tmp_path: Path) -> None:
    model = folder_with(tmp_path)
    (model / "model.safetensors").symlink_to(tmp_path / "blob")
    assert "has no weights" in str(missing(model, "auto"))


@pytest.mark.parametrize("index", [[], {}, {"weight_map": []}, {"weight_map": None}, "text"])
def test_an_index_that_is_none(index: object, tmp_path: Path) -> None:
    model = folder_with(tmp_path, "model.safetensors", index=index)
    assert missing(model, "auto") == (
        f"the folder model: {INDEX} is no index of shards; download it again"
    )
    (model / INDEX).write_bytes(b"\xff{")
    assert "is no index of shards" in str(missing(model, "auto"))


def test_weights_that_come_from_elsewhere_are_not_looked_for(tmp_path: Path) -> None:
    model = folder_with(tmp_path, index="text")
    (model / "model.safetensors").touch()
    assert missing(model, "dummy") is None
    assert unreadable(model, "dummy") is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 5\n",
        (TINY_MODEL / "model.safetensors").read_bytes()[:-1],
    ],
    ids=["empty", "a pointer", "cut off"],
)
def test_a_file_that_is_not_whole_is_named(content: bytes, tmp_path: Path) -> None:
    model = folder_with(tmp_path)
    (model / "a.safetensors").write_bytes((TINY_MODEL / "model.safetensors").read_bytes())
    assert unreadable(model, "auto") is None
    (model / "b.safetensors").write_bytes(content)
    fault = unreadable(model, "auto")
    assert fault is not None
    assert fault.startswith("the folder model: b.safetensors cannot be read (")
    assert fault.endswith("; download it again")
    assert str(tmp_path) not in fault


def doctor(model: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    program = Path(sys.executable).with_name("vllm-pre-ampere")
    return subprocess.run(
        [program, "doctor", "--json", "--model", model, *options],
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        env=clean_environment("7.5"),
        check=False,
    )


def test_a_folder_with_nothing_but_a_description_would_not_be_served(tmp_path: Path) -> None:
    model = tmp_path / "described"
    model.mkdir()
    for path in TINY_MODEL.glob("*.json"):
        shutil.copy(path, model)
    done = doctor(model)
    found = json.loads(done.stdout)
    assert done.returncode == 1, done.stderr
    assert not found["serves"]
    assert found["first_change"].startswith("the folder described has no weights")
    assert str(tmp_path) not in done.stdout
    assert found["serving"]["choices"], "what would be chosen does not depend on the weights"

    done = doctor(model, "--", "--load-format", "dummy")
    assert done.returncode == 0, done.stderr


def test_a_download_that_was_cut_off_would_not_be_served(tmp_path: Path) -> None:
    model = tmp_path / "cut-off"
    shutil.copytree(TINY_MODEL, model)
    (model / "model.safetensors").write_bytes(b"cut off")
    done = doctor(model)
    assert done.returncode == 1, done.stderr
    change = json.loads(done.stdout)["first_change"]
    assert change.startswith("the folder cut-off: model.safetensors cannot be read (")
