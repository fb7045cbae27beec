# SPDX-License-Identifier: Apache-2.0
"""Our defaults leave upstream's sliding-window settings as they are."""

import json
from pathlib import Path
from typing import Any

import pytest
from engine_process import configure

SLIDING_MODEL = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "dtype": "float16",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "sliding_window": 256,
}
WINDOW_SETTINGS = (
    "sliding_window",
    "cache_sliding_window",
    "disable_sliding_window",
    "attention",
)


@pytest.fixture(scope="module")
def configurations(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """Upstream's and ours, of the same two requests: the window on, and disabled by the user."""
    model = tmp_path_factory.mktemp("sliding")
    (Path(model) / "config.json").write_text(json.dumps(SLIDING_MODEL))
    arguments = {"model": str(model), "skip_tokenizer_init": True, "dtype": "float16"}
    cases = [
        {"arguments": arguments},
        {"arguments": {**arguments, "disable_sliding_window": True, "max_model_len": 128}},
    ]
    return [configure(None, cases), configure("7.5", cases)]


@pytest.mark.parametrize("name", WINDOW_SETTINGS)
@pytest.mark.parametrize("case", [0, 1], ids=["window", "window-disabled"])
def test_sliding_window_settings_are_upstreams(
    configurations: list[list[dict[str, Any]]], case: int, name: str
) -> None:
    upstream, ours = (cases[case] for cases in configurations)
    assert upstream["platform"] == "CpuPlatform"
    assert ours["platform"] == "EmulatedCpuPlatform"
    assert ours[name] == upstream[name]


def test_the_model_has_a_window(configurations: list[list[dict[str, Any]]]) -> None:
    upstream, _ = configurations
    assert upstream[0]["sliding_window"] == 256
    assert upstream[1]["sliding_window"] is None
