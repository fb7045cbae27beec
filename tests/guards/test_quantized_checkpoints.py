# SPDX-License-Identifier: Apache-2.0
"""Guard 7: which row of the table a checkpoint is of, and that guard and doctor answer by it."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from engine_process import TINY_MODEL, ask, clean_environment
from published_checkpoints import PUBLISHED, WITHOUT_A_ROW
from vllm.config import LoadConfig, ModelConfig
from vllm.model_executor.model_loader.weight_utils import get_quant_config

from vllm.pre_ampere.devices import Capability
from vllm.pre_ampere.guards.quantization import LAYERS, Support, support
from vllm.pre_ampere.guards.quantized_formats import FORMATS, Format, row_of

TURING, VOLTA = (7, 5), (7, 0)
EXPERTS = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}
# What the file calls a method of upstream's.
IN_THE_FILE = {
    "inc": "auto-round",
    "moe_wna16": "gptq",
    "modelopt_fp4": "modelopt",
    "modelopt_mixed": "modelopt",
}
Configuration = Mapping[str, Any]


def checkpoint(folder: Path, description: Configuration, **more: object) -> Path:
    """A folder with a description and no weights."""
    folder.mkdir(parents=True)
    config = json.loads((TINY_MODEL / "config.json").read_text()) | more
    if "producer" in description and "quantization" in description:
        (folder / "hf_quant_config.json").write_text(json.dumps(description))
    else:
        config["quantization_config"] = description
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def row(folder: Path, asked: str | None = None) -> Format | None:
    """The row by upstream's resolution, on a box that refuses no method."""
    model = ModelConfig(str(folder), quantization=asked, skip_tokenizer_init=True)
    return None if model.quantization is None else row_of(get_quant_config(model, LoadConfig()))


@pytest.mark.parametrize("kind", PUBLISHED)
def test_a_published_checkpoint_is_of_its_row(kind: str, tmp_path: Path) -> None:
    description, name, method = PUBLISHED[kind]
    found = row(checkpoint(tmp_path / "model", description))
    assert found is not None
    assert (found.name, found.method) == (name, method)


@pytest.mark.parametrize("kind", WITHOUT_A_ROW)
def test_what_upstream_makes_something_else_of_is_of_no_row(kind: str, tmp_path: Path) -> None:
    assert row(checkpoint(tmp_path / "model", WITHOUT_A_ROW[kind])) is None


def test_every_row_has_a_published_checkpoint_or_is_by_request() -> None:
    published = {(name, method) for _, name, method in PUBLISHED.values()}
    by_request = {(each.name, each.method) for each in FORMATS if each.method == "moe_wna16"}
    assert published | by_request == {(each.name, each.method) for each in FORMATS}


@pytest.mark.parametrize("bits", [4, 8])
def test_gptq_by_request_is_a_row_of_its_own(bits: int, tmp_path: Path) -> None:
    description = PUBLISHED["GPTQ, whole channels" if bits == 4 else "GPTQ, 8 bits"][0]
    found = row(checkpoint(tmp_path / "model", description), "moe_wna16")
    assert found is not None
    assert found.name == f"GPTQ, {bits} bits, by request"


@pytest.mark.parametrize("asked", ["gptq_marlin", "auto_gptq", "gptq"])
def test_upstreams_other_names_of_a_method_are_the_same_row(asked: str, tmp_path: Path) -> None:
    found = row(checkpoint(tmp_path / "model", PUBLISHED["GPTQ, 8 bits"][0]), asked)
    assert found is not None
    assert (found.name, found.method) == ("GPTQ, 8 bits", "gptq")


def test_without_quantisation_there_is_no_row() -> None:
    assert row(TINY_MODEL) is None
    assert row(TINY_MODEL, "fp8_per_tensor") is None


def answers(method: str, configuration: Configuration) -> list[Support]:
    asked = Format("", method, configuration)
    return [support(asked, card, layer) for card in (TURING, VOLTA) for layer in LAYERS]


def test_a_variant_has_the_answers_of_its_row() -> None:
    for each in FORMATS:
        expected = answers(each.method, each.configuration)
        for variant in each.variants:
            assert answers(each.method, variant) == expected, (each, variant)


@pytest.mark.parametrize("kind", [kind for kind in PUBLISHED if "mixed" not in kind])
def test_a_published_checkpoint_has_the_answers_of_its_row(kind: str) -> None:
    description, name, method = PUBLISHED[kind]
    # The names of the modules that are quantised are a model's, not those of the layers asked about.
    asked = {k: v for k, v in description.items() if k != "block_name_to_quantize"}
    (expected,) = (each for each in FORMATS if (each.name, each.method) == (name, method))
    given = answers(method, copy.deepcopy(asked))
    assert given == answers(method, expected.configuration)


def ask_on(card: Capability, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    program = Path(__file__).with_name("ask_about_checkpoints.py")
    return ask(program, cases, clean_environment(f"{card[0]}.{card[1]}"))


def case(folder: Path, each: Format, **more: object) -> dict[str, Any]:
    raw = IN_THE_FILE.get(each.method, each.method)
    options = ["--quantization", "moe_wna16"] if each.method == "moe_wna16" else []
    description = {**each.configuration, "quant_method": raw}
    return {"folder": str(checkpoint(folder, description, **more)), "options": options}


@pytest.mark.parametrize("card", [TURING, VOLTA], ids=["7.5", "7.0"])
def test_guard_and_doctor_give_the_answer_of_every_row(card: Capability, tmp_path: Path) -> None:
    rows = [(each, layers) for each in FORMATS for layers in (LAYERS[:1], LAYERS)]
    cases = [
        case(tmp_path / str(number), each, **(EXPERTS if layers == LAYERS else {}))
        for number, (each, layers) in enumerate(rows)
    ]
    for (each, layers), found in zip(rows, ask_on(card, cases), strict=True):
        expected = {layer: support(each, card, layer) for layer in layers}
        loads = {layer: answer.how for layer, answer in expected.items() if answer.loads}
        assert found["guard"] == found["doctor"], each
        if not loads:
            how = expected["linear"].how
            assert found["guard"] is not None, each
            said = (how, how.replace("needs ", "needs capability "))
            assert any(reason in found["guard"] for reason in said), each
            assert "Use a checkpoint in one of these formats: " in found["guard"]
            assert found["products"] == []
            continue
        assert found["guard"] is None, each
        (products,) = found["products"]
        assert products["chosen"] == "; ".join(f"{layer}: {how}" for layer, how in loads.items())
        assert f"{each.name} ({each.method})" in products["reason"]
        refused = [[layer, x.how] for layer, x in expected.items() if not x.loads]
        assert products["passed_over"] == refused
        assert ("loads where nothing but" in products["reason"]) is bool(refused)


def test_what_is_not_in_the_table_and_what_was_asked_for(tmp_path: Path) -> None:
    several = str(checkpoint(tmp_path / "several", WITHOUT_A_ROW["NVFP4 and FP8"]))
    awq = str(checkpoint(tmp_path / "awq", PUBLISHED["AWQ"][0]))
    left, taken, refused = ask_on(
        TURING,
        [
            {"folder": several, "options": []},
            {"folder": awq, "options": ["--linear-backend", "triton"]},
            {"folder": awq, "options": ["--linear-backend", "exllama"]},
        ],
    )
    assert (left["guard"], left["doctor"]) == (None, None)
    (products,) = left["products"]
    assert products["chosen"] == "by upstream's choice"
    assert "no row of docs/quantization.md has compressed-tensors" in products["reason"]

    assert taken["guard"] is None
    assert taken["products"][0]["chosen"] == "linear: TritonW4A16"

    assert "(AWQ, 4 bits) does not load on Tesla T4 (sm75): " in refused["guard"]
    remedy = "Leave the kernels to upstream: --linear-backend auto, --moe-backend auto"
    assert refused["guard"].endswith(remedy)
    assert refused["doctor"] == refused["guard"]
