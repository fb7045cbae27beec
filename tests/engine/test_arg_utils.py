# SPDX-License-Identifier: Apache-2.0
"""What the command line and the engine's arguments become on a pre-Ampere box, and what is refused.

Refusals happen while the configuration is made: before a worker starts or a weight loads.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_process import START_SECONDS, TINY_MODEL, clean_environment, configure

from vllm.pre_ampere import environment

TURING_CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16-cache": {"kv_cache_dtype": "bfloat16"},
    "bfloat16-state": {"mamba_ssm_cache_dtype": "bfloat16"},
    "flashqla": {"gdn_prefill_backend": "flashqla_sm70"},
    "vlk": {"gdn_prefill_backend": "vlk"},
    "reference": {"gdn_prefill_backend": "reference"},
    "flashinfer": {"gdn_prefill_backend": "flashinfer"},
    "tp3": {"tensor_parallel_size": 3},
    "fp8-cache": {"kv_cache_dtype": "fp8"},
    "fp8-per-token-cache": {"kv_cache_dtype": "fp8_per_token_head"},
    "triton-attention": {"attention_backend": "TRITON_ATTN"},
}
VARIABLE_CASES = {
    f"variable-{variable.name}": {variable.name: "maybe"} for variable in environment.BASELINE
} | {"full-forward": {"VLLM_SM70_QWEN_GDN_FULL_FORWARD": "2"}}


def arguments(**changes: Any) -> dict[str, Any]:
    return {"model": str(TINY_MODEL), "max_model_len": 2048, **changes}


@pytest.fixture(scope="module")
def turing() -> dict[str, dict[str, Any]]:
    cases: dict[str, dict[str, Any]] = {
        name: {"arguments": arguments(**changes)} for name, changes in TURING_CASES.items()
    }
    cases |= {
        name: {"arguments": arguments(), "environment": settings}
        for name, settings in VARIABLE_CASES.items()
    }
    speculative = {"method": "mtp", "num_speculative_tokens": 3}
    cases["speculative"] = {"arguments": arguments(speculative_config=speculative)}
    cases["batch-invariant"] = {
        "arguments": arguments(),
        "environment": {"VLLM_BATCH_INVARIANT": "1"},
    }
    return dict(zip(cases, configure("7.5", list(cases.values())), strict=True))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    quantised = tmp_path_factory.mktemp("gptq") / "model"
    shutil.copytree(TINY_MODEL, quantised)
    config = json.loads((quantised / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 64,
        "desc_act": False,
        "sym": True,
    }
    (quantised / "config.json").write_text(json.dumps(config))
    cases = [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 1},
        {"tensor_parallel_size": 2, "model": str(quantised)},
    ]
    return configure("7.5,7.0", [{"arguments": arguments(**case)} for case in cases])


@pytest.fixture(scope="module")
def upstream() -> dict[str, Any]:
    return configure(None, [{"arguments": arguments()}])[0]


def test_a_bfloat16_checkpoint_is_served_in_float16(turing: dict[str, dict[str, Any]]) -> None:
    defaults = turing["defaults"]
    assert defaults["platform"] == "EmulatedCpuPlatform"
    assert defaults["dtype"] == "torch.float16"
    assert defaults["capability"] == [7, 5]
    assert defaults["mamba_ssm_cache_dtype"] == "float32"
    assert {variable.name for variable in environment.BASELINE} < set(defaults["set_variables"])


def test_float32_may_be_asked_for(turing: dict[str, dict[str, Any]]) -> None:
    assert turing["float32"]["dtype"] == "torch.float32"


@pytest.mark.parametrize(
    ("case", "option", "remedy"),
    [
        ("bfloat16", "--dtype bfloat16", "pass --dtype float16"),
        ("bfloat16-cache", "--kv-cache-dtype bfloat16", "pass --kv-cache-dtype float16"),
        ("bfloat16-state", "--mamba-ssm-cache-dtype bfloat16", "--mamba-ssm-cache-dtype float32"),
    ],
)
def test_bfloat16_is_refused_with_what_to_pass_instead(
    turing: dict[str, dict[str, Any]], case: str, option: str, remedy: str
) -> None:
    error = turing[case]["error"]
    assert option in error
    assert remedy in error
    assert "8.0" in error


@pytest.mark.parametrize("case", ["fp8-cache", "fp8-per-token-cache"])
def test_an_fp8_cache_is_refused_before_weights_load(
    turing: dict[str, dict[str, Any]], case: str
) -> None:
    """Upstream's own refusal comes while the model is built, and on CUDA alone."""
    error = turing[case]["error"]
    assert f"--kv-cache-dtype {TURING_CASES[case]['kv_cache_dtype']} was asked for" in error
    assert "8.9" in error
    assert "Tesla T4 has 7.5; pass --kv-cache-dtype float16" in error


def test_naming_the_cards_attention_changes_nothing(turing: dict[str, dict[str, Any]]) -> None:
    assert turing["triton-attention"]["set_variables"] == turing["defaults"]["set_variables"]


@pytest.mark.parametrize("case", ["flashqla", "vlk", "flashinfer"])
def test_a_backend_the_card_cannot_run_is_refused_by_name(
    turing: dict[str, dict[str, Any]], case: str
) -> None:
    name = TURING_CASES[case]["gdn_prefill_backend"]
    assert f"--gdn-prefill-backend {name}" in turing[case]["error"]
    if case == "flashqla":
        assert "86016 B" in turing[case]["error"]
        assert "65536 B" in turing[case]["error"]


def test_a_backend_that_runs_here_may_be_asked_for(turing: dict[str, dict[str, Any]]) -> None:
    assert "error" not in turing["reference"]


@pytest.mark.parametrize("case", VARIABLE_CASES)
def test_a_variable_with_another_value_than_0_or_1_is_refused_by_name(
    turing: dict[str, dict[str, Any]], case: str
) -> None:
    (name, value), *_ = VARIABLE_CASES[case].items()
    assert turing[case]["error"] == (f"EnvironmentVariableError: {name}={value!r}: use 0 or 1")


def test_batch_invariance_is_refused_on_a_cpu(turing: dict[str, dict[str, Any]]) -> None:
    """Upstream's switch would put Triton kernels in place of CPU operators."""
    assert "VLLM_BATCH_INVARIANT=1" in turing["batch-invariant"]["error"]
    assert "there is no GPU to run them; unset it" in turing["batch-invariant"]["error"]


def test_one_emulated_card_stands_for_every_rank(turing: dict[str, dict[str, Any]]) -> None:
    assert "VLLM_PRE_AMPERE_EMULATE" not in turing["tp3"].get("error", "")


def test_draft_layers_get_the_positions_of_the_others(turing: dict[str, dict[str, Any]]) -> None:
    """With three-part positions in the draft's configuration alone, upstream's CPU drafter corrupts
    its memory; the checkpoint names them, as released ones do."""
    assert (
        "mrope_section" in json.loads((TINY_MODEL / "config.json").read_text())["rope_parameters"]
    )
    assert turing["defaults"]["uses_mrope"] == {"model": False}
    assert turing["speculative"]["uses_mrope"] == {"model": False, "draft": False}


def test_a_list_of_cards_needs_as_many_ranks(mixed: list[dict[str, Any]]) -> None:
    two, one, _ = mixed
    assert two["capability"] == [7, 0], "the oldest card answers for all"
    assert "VLLM_PRE_AMPERE_EMULATE names 2 cards, but there are 1 ranks" in one["error"]


def test_a_dense_checkpoint_that_volta_cannot_load_is_refused_for_one_such_rank(
    mixed: list[dict[str, Any]],
) -> None:
    """Upstream would refuse it while it builds the model, without a way out."""
    error = mixed[2]["error"]
    assert "quantization auto_gptq (GPTQ, 4 bits) does not load on Tesla V100" in error
    assert "Marlin does not support weight_bits = uint4b8" in error
    formats = "INT4 weights (W4A16) (quark); INT4 weights with zero points (W4A16) (quark)"
    assert f"Use a checkpoint in one of these formats: {formats} [" in error


def test_without_a_card_and_without_emulation_nothing_of_ours_is_active(
    upstream: dict[str, Any],
) -> None:
    assert upstream["platform"] == "CpuPlatform"
    assert upstream["dtype"] == "torch.bfloat16"
    assert not [n for n in upstream["set_variables"] if "SM70" in n or "PRE_AMPERE" in n]


@pytest.mark.parametrize("value", ["8.0", "seven", "7.5,", "75", "7.5;7.0", "7.5 7.0", ""])
def test_an_unknown_card_is_refused_with_those_that_are_known(value: str) -> None:
    with pytest.raises(ValueError, match=r"use 7\.0, 7\.2, 7\.5"):
        environment.EMULATE.parse(value)


def test_vllm_serve_ends_on_an_unknown_card_with_one_line_that_names_the_variable() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("vllm")), "serve", str(TINY_MODEL)],
        env=clean_environment("8.0"),
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        check=False,
    )
    assert done.returncode == 1
    assert "VLLM_PRE_AMPERE_EMULATE='8.0'" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_the_model_is_what_the_cases_are_about() -> None:
    config = json.loads((TINY_MODEL / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
