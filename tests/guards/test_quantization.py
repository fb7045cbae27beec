# SPDX-License-Identifier: Apache-2.0
"""Guard 7: which quantised checkpoints load, by upstream's rules, and what the refusal says."""

from pathlib import Path

import pytest
from vllm.platforms import current_platform
from vllm.platforms.interface import PlatformEnum

from vllm.pre_ampere.guards import quantization
from vllm.pre_ampere.guards.quantization import FORMATS, Support, support

DOCUMENT = Path(__file__).parents[2] / "docs" / "quantization.md"


def test_the_document_holds_the_table_that_upstreams_rules_give() -> None:
    """Where it fails: `python -m vllm.pre_ampere.guards.quantization docs/quantization.md`."""
    assert quantization.table() in DOCUMENT.read_text()


def test_a_changed_document_is_written_back(tmp_path: Path) -> None:
    document = tmp_path / "quantization.md"
    document.write_text("Before.\n\n| checkpoint | old |\n| --- | --- |\n| x | y |\n\nAfter.\n")
    quantization.update(document)
    assert document.read_text() == f"Before.\n\n{quantization.table()}\nAfter.\n"


def test_both_answers_occur_on_both_cards() -> None:
    for capability in ((7, 5), (7, 0)):
        assert {support(each, capability).loads for each in FORMATS} == {True, False}


def test_what_a_volta_card_has_left_is_gptq() -> None:
    loading = [each.name for each in FORMATS if support(each, (7, 0)).loads]
    assert loading == ["GPTQ, 4 bits", "GPTQ, 8 bits"]


def test_turing_takes_no_mxfp4() -> None:
    answers = [support(each, (7, 5)) for each in FORMATS if each.name == "MXFP4"]
    assert answers == [Support(False, "needs 8.0")] * 2


def test_the_refusal_names_the_capabilities_and_the_formats_that_load() -> None:
    with pytest.raises(
        ValueError, match=r"modelopt needs capability 8\.0; Tesla T4 has 7\.5"
    ) as info:
        quantization.refuse_unsupported("modelopt", (7, 5), "Tesla T4")
    loading = [each for each in FORMATS if support(each, (7, 5)).loads]
    for each in loading:
        assert f"{each.name} ({each.method})" in str(info.value)
    assert str(info.value).count(";") == len(loading)
    with pytest.raises(ValueError, match=r"awq needs capability 7\.5; Tesla V100 has 7\.0"):
        quantization.refuse_unsupported("awq", (7, 0), "Tesla V100")


def test_what_loads_is_not_refused() -> None:
    quantization.refuse_unsupported("gptq", (7, 0), "Tesla V100")
    quantization.refuse_unsupported("awq", (7, 5), "Tesla T4")


def test_the_platform_is_itself_again_after_the_question() -> None:
    before = (current_platform._enum, current_platform.get_device_capability())
    support(FORMATS[0], (7, 5))
    assert (current_platform._enum, current_platform.get_device_capability()) == before
    assert before[0] is PlatformEnum.CPU
