# SPDX-License-Identifier: Apache-2.0
"""The doctor looks for the weights: a description alone is not served."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_process import START_SECONDS, TINY_MODEL, clean_environment, serve
from safetensors.torch import load_file
from vllm.model_executor.model_loader.weight_utils import pt_weights_iterator

from vllm.pre_ampere.cli.diagnosis.weights import Weights, missing, taken, unreadable

INDEX = "model.safetensors.index.json"
PICKLES_INDEX = "pytorch_model.bin.index.json"
SAFETENSORS_ONLY = ("safetensors", "fastsafetensors", "instanttensor")


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
        "the folder model has no weights: no file *.safetensors, *.bin or *.pt; download those of the "
        "checkpoint into it"
    )


@pytest.mark.parametrize("load_format", ["auto", "hf"])
@pytest.mark.parametrize(
    ("names", "files"),
    [
        (("pytorch_model.bin",), ("pytorch_model.bin",)),
        (("model.pt", "optimizer.pt"), ("model.pt",)),
        # Upstream takes the first suffix of which there is a file.
        (("b.bin", "a.bin", "c.pt", "training_args.bin"), ("a.bin", "b.bin")),
    ],
)
def test_pickles_are_enough(
    names: tuple[str, ...], files: tuple[str, ...], load_format: str, tmp_path: Path
) -> None:
    model = folder_with(tmp_path, *names)
    assert taken(model, load_format) == Weights(files, pickled=True)
    assert missing(model, load_format) is None


@pytest.mark.parametrize("load_format", SAFETENSORS_ONLY)
def test_pickles_are_not_enough_where_safetensors_are_asked_for(
    load_format: str, tmp_path: Path
) -> None:
    model = folder_with(tmp_path, "b.bin", "a.bin", "training_args.bin")
    assert missing(model, load_format) == (
        f"the folder model has a.bin and 1 more, and nothing that --load-format {load_format} loads; "
        "pass --load-format auto"
    )


def test_safetensors_are_not_enough_where_pickles_are_asked_for(tmp_path: Path) -> None:
    model = folder_with(tmp_path, "model.safetensors", "model.bin")
    assert missing(model, "pt") == (
        "the folder model has model.safetensors and 1 more, and nothing that --load-format pt loads; "
        "pass --load-format auto"
    )
    (model / "model.pt").touch()
    assert missing(model, "PT") is None


def test_a_file_that_upstream_takes_first_and_then_throws_away(tmp_path: Path) -> None:
    """Its loader stops at the suffix of a trainer's arguments, and has no weights then."""
    model = folder_with(tmp_path, "training_args.bin", "model.pt")
    assert missing(model, "auto") == (
        "the folder model has model.pt, and nothing that --load-format auto loads; "
        "pass --load-format pt"
    )


def test_an_index_of_pickles_that_are_not_all_there(tmp_path: Path) -> None:
    model = folder_with(tmp_path, "a.bin")
    (model / PICKLES_INDEX).write_text(json.dumps(shards("a.bin", "b.bin")))
    assert missing(model, "auto") == (
        f"the folder model: b.bin is not there, and 1 of the 2 shards that {PICKLES_INDEX} names are "
        "missing; download them"
    )
    (model / "b.bin").touch()
    assert missing(model, "auto") is None


@pytest.mark.parametrize("name", [INDEX, PICKLES_INDEX])
def test_an_index_that_upstream_does_not_read_of_pickles(name: str, tmp_path: Path) -> None:
    model = folder_with(tmp_path, "model.bin")
    for text in (json.dumps(shards("other.bin")), "no JSON"):
        (model / name).write_text(text)
        assert missing(model, "auto") is None


def test_pickles_beside_safetensors_are_left_alone(tmp_path: Path) -> None:
    model = folder_with(tmp_path, "model.safetensors", "pytorch_model.bin")
    assert taken(model, "auto") == Weights(("model.safetensors",), pickled=False)
    assert missing(model, "auto") is None
    assert "pytorch_model.bin" not in str(unreadable(model, "auto"))


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
    assert taken(model, "dummy") is None
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


def save_pickled(path: Path, **options: Any) -> None:
    """The small model's weights as PyTorch pickles them."""
    torch.save(load_file(TINY_MODEL / "model.safetensors"), path, **options)


@pytest.mark.parametrize("archive", [True, False], ids=["since 1.6", "before 1.6"])
def test_a_pickle_is_whole_as_upstream_reads_it(archive: bool, tmp_path: Path) -> None:
    model = folder_with(tmp_path)
    path = model / "model.bin"
    save_pickled(path, _use_new_zipfile_serialization=archive)
    assert unreadable(model, "auto") is None
    read = dict(pt_weights_iterator([str(path)], use_tqdm_on_load=False))
    stored = load_file(TINY_MODEL / "model.safetensors")
    assert read.keys() == stored.keys()
    assert all(torch.equal(read[name], stored[name]) for name in stored)


@pytest.mark.parametrize(
    ("kind", "reason", "upstreams"),
    [
        ("empty", "not what torch.save writes", "^$"),
        ("a pointer", "not what torch.save writes", "Weights only load failed"),
        ("cut off", "an archive without its end", "failed finding central directory"),
    ],
)
def test_a_pickle_that_is_not_whole_is_named(
    kind: str, reason: str, upstreams: str, tmp_path: Path
) -> None:
    """As test_a_file_that_is_not_whole_is_named; upstream does not read it either."""
    model = folder_with(tmp_path)
    save_pickled(model / "a.bin")
    path = model / "b.bin"
    content = {
        "empty": b"",
        "a pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 5\n",
        "cut off": (model / "a.bin").read_bytes()[:-1000],
    }
    path.write_bytes(content[kind])
    assert unreadable(model, "auto") == (
        f"the folder model: b.bin cannot be read ({reason}); download it again"
    )
    with pytest.raises(Exception, match=upstreams):
        dict(pt_weights_iterator([str(path)], use_tqdm_on_load=False))


def test_upstream_reads_no_pickle_that_holds_more_than_tensors(tmp_path: Path) -> None:
    """What the doctor says of `weights_only` is so: the file's code is not run."""
    torch.save({"weight": Path("code")}, tmp_path / "model.bin")
    with pytest.raises(Exception, match="Weights only load failed"):
        dict(pt_weights_iterator([str(tmp_path / "model.bin")], use_tqdm_on_load=False))


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


@pytest.fixture(scope="module")
def pickled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model with its weights pickled."""
    model = tmp_path_factory.mktemp("checkpoints") / "pickled"
    shutil.copytree(TINY_MODEL, model, ignore=shutil.ignore_patterns("*.safetensors"))
    save_pickled(model / "pytorch_model.bin")
    return model


def test_a_folder_with_pickles_would_be_served_and_is_told_of_safetensors(pickled: Path) -> None:
    done = doctor(pickled)
    found = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert found["serves"]
    (row,) = (each for each in found["serving"]["choices"] if each["subject"] == "weights")
    assert row["chosen"] == "pytorch_model.bin"
    assert row["reason"] == (
        "pickled, and no *.safetensors is there; upstream's pt_weights_iterator reads by "
        "torch.load(weights_only=True), and what it will find was not looked at"
    )
    ((other, why),) = row["passed_over"]
    assert other == "safetensors"
    assert why.startswith("preferred: they cannot hold code, ")
    assert str(pickled.parent) not in done.stdout


def test_a_folder_with_pickles_would_not_be_served_where_safetensors_are_asked_for(
    pickled: Path,
) -> None:
    done = doctor(pickled, "--", "--load-format", "safetensors")
    found = json.loads(done.stdout)
    assert done.returncode == 1, done.stderr
    assert found["first_change"] == (
        "the folder pickled has pytorch_model.bin, and nothing that --load-format safetensors loads; "
        "pass --load-format auto"
    )
    assert "weights" not in {each["subject"] for each in found["serving"]["choices"]}


@pytest.mark.engine
def test_a_folder_with_pickles_is_served_as_one_with_safetensors(
    pickled: Path, tmp_path: Path
) -> None:
    arguments = ["--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "1"]
    answers = []
    for model in (pickled, TINY_MODEL):
        with serve(tmp_path, arguments, model=model) as server:
            answers.append(server.complete([range(5, 60)], 16)[0].tokens)
    assert len(answers[0]) == 16
    assert answers[0] == answers[1]
