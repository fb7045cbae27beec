# SPDX-License-Identifier: Apache-2.0
"""`doctor --probe` and guard 5 on a real engine: a model that overflows float16 is found out."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_process import START_SECONDS, TINY_MODEL, clean_environment, serve
from safetensors.torch import load_file, save_file

from vllm.pre_ampere.cli.diagnosis.probe import FLOAT16_LARGEST

LAYER = 2
# Weights stay below 65504 and so finite in float16; their products with the activations do not.
FACTOR = 2.0**18


def overflowing_model(directory: Path) -> Path:
    """The small model with one layer whose output needs bfloat16's range."""
    model = directory / "overflowing"
    shutil.copytree(TINY_MODEL, model)
    weights = load_file(model / "model.safetensors")
    (name,) = (
        n for n in weights if n.endswith(f"layers.{LAYER}.mlp.down_proj.weight") and "mtp" not in n
    )
    weights[name] = weights[name] * FACTOR
    assert weights[name].abs().max() < FLOAT16_LARGEST
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    return model


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model = overflowing_model(tmp_path_factory.mktemp("model"))
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from vllm.pre_ampere.cli import main; main()",
            "doctor",
            "--model",
            str(model),
            "--probe",
            "--json",
            "--",
            "--max-model-len",
            "512",
            "--max-num-seqs",
            "2",
        ],
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        env=clean_environment("7.5"),
        check=False,
    )
    assert done.returncode == 1, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.engine
def test_the_first_module_that_overflows_is_named(probed: dict[str, Any]) -> None:
    assert probed["probe"]["first_overflow"].endswith(f"layers.{LAYER}.mlp.down_proj")
    assert not probed["serves"]
    assert f"overflows float16 in {probed['probe']['first_overflow']}" in probed["first_change"]


@pytest.mark.engine
def test_layers_before_it_are_finite_and_have_their_largest_activation(
    probed: dict[str, Any],
) -> None:
    layers = [layer for layer in probed["probe"]["layers"] if ".layers." in layer["layer"]]
    assert [layer["finite"] for layer in layers] == [index < LAYER for index in range(4)]
    for layer in layers[:LAYER]:
        assert 0.0 < layer["largest"] < FLOAT16_LARGEST


@pytest.mark.engine
def test_the_request_failed_instead_of_answering_with_token_0(probed: dict[str, Any]) -> None:
    assert probed["probe"]["nan_logits"]


@pytest.mark.engine
def test_a_probe_that_cannot_start_names_the_first_error(tmp_path: Path) -> None:
    """Not those of the processes that waited for the one that failed."""
    model = tmp_path / "without-a-norm"
    shutil.copytree(TINY_MODEL, model)
    weights = load_file(model / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    command = "from vllm.pre_ampere.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", command, "doctor", "--model", str(model), "--probe"],
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        env=clean_environment("7.5"),
        check=False,
    )
    assert done.returncode == 2
    assert "not initialized from checkpoint: {'model.norm.weight'}" in done.stderr.splitlines()[0]


@pytest.mark.engine
def test_a_client_is_told_of_the_probe_whether_it_streams_or_not(tmp_path: Path) -> None:
    model = overflowing_model(tmp_path)
    arguments = ["--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "2"]
    with serve(tmp_path, arguments, model=model) as server:
        body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        streamed = httpx.post(
            f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=60
        )
        assert httpx.get(f"{server.url}/health").status_code == 200, "the server goes on"
    assert answer.status_code == 500
    assert "doctor --model MODEL --probe" in answer.json()["error"]["message"]
    assert "doctor --model MODEL --probe" in streamed.text
    assert "logits are NaN" in server.log
