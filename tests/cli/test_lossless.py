# SPDX-License-Identifier: Apache-2.0
"""`vllm-pre-ampere lossless`: tells equal answers from different ones, and a tie from a fault."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engine_process import START_SECONDS, TINY_MODEL, clean_environment
from hypothesis import given
from hypothesis import strategies as st

from vllm.pre_ampere.cli import UserError, lossless, main
from vllm.pre_ampere.cli.generation import Answer, Difference, Result
from vllm.pre_ampere.cli.lossless import compare, float16_step, parse_lengths
from vllm.pre_ampere.cli.prompts import draw_prompts


@given(st.floats(min_value=-65504.0, max_value=65504.0, width=16))
def test_a_step_is_the_distance_to_the_next_float16(value: float) -> None:
    here = torch.tensor(abs(value), dtype=torch.float16)
    above = torch.nextafter(here, torch.tensor(torch.inf, dtype=torch.float16))
    if torch.isfinite(above):
        assert float16_step(value) == float(above.double() - here.double())


def answer(*tokens: int, acceptance_length: float | None = None) -> Answer:
    return Answer(19, tokens, 10.0, acceptance_length)


def test_equal_answers_have_no_difference() -> None:
    plain = Result("a card", (answer(1, 2, 3),))
    (row,) = compare(plain, Result("a card", (answer(1, 2, 3, acceptance_length=2.5),)))
    assert row.equal
    assert row.acceptance_length == 2.5
    assert row.gap_in_steps is None
    assert not row.is_tie


@pytest.mark.parametrize(
    ("logits", "steps", "kind"),
    [((20.0, 19.984375), 1.0, "rounding tie"), ((20.0, 18.0), 128.0, "no tie")],
)
def test_a_difference_is_measured_in_steps(
    logits: tuple[float, float], steps: float, kind: str
) -> None:
    found = Difference(prompt=0, position=1, tokens=(2, 7), logits=logits)
    plain = Result("a card", (answer(1, 2, 3),), differences=(found,))
    (row,) = compare(plain, Result("a card", (answer(1, 7, 3),)))
    assert not row.equal
    assert row.gap_in_steps == steps
    assert row.is_tie is (kind == "rounding tie")
    assert f"({kind})" in lossless._verdict(row)
    assert "differs[/] at token 1: 2 against 7" in lossless._verdict(row)


@pytest.mark.parametrize("text", ["", "19,", "a", "0", "-3", "1.5"])
def test_lengths_that_are_none_are_named(text: str) -> None:
    with pytest.raises(UserError, match="is no number of tokens"):
        parse_lengths(text)


class Words:
    """A tokenizer of whole words."""

    def encode(self, text: str) -> list[int]:
        return [hash(word) % 1000 for word in text.split()]


@pytest.mark.parametrize("tokenizer", [None, Words()])
def test_prompts_have_their_lengths_repeat_and_begin_differently(tokenizer: Words | None) -> None:
    lengths = [19, 64, 513, 64]
    prompts = draw_prompts(tokenizer, 1000, lengths)
    assert [len(prompt) for prompt in prompts] == lengths
    assert prompts == draw_prompts(tokenizer, 1000, lengths)
    assert len({tuple(prompt[:19]) for prompt in prompts}) == len(lengths)
    assert all(0 <= token < 1000 for prompt in prompts for token in prompt)


@pytest.mark.usefixtures("clean_environment")
def test_a_box_without_a_gpu_is_told_how_to_emulate(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["lossless", "--model", str(TINY_MODEL)])
    assert ended.value.code == 2
    assert "VLLM_PRE_AMPERE_EMULATE=7.5" in capsys.readouterr().err


def test_a_checkpoint_without_a_draft_layer_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"linear_key_head_dim": 128}))
    with pytest.raises(SystemExit) as ended:
        main(["lossless", "--model", str(tmp_path)])
    assert ended.value.code == 2
    assert "has no MTP layers" in capsys.readouterr().err


@pytest.mark.engine
@pytest.mark.parametrize("batch", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_the_small_model_is_lossless(tmp_path: Path, batch: int) -> None:
    result = tmp_path / "result.json"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from vllm.pre_ampere.cli import main; main()",
            "lossless",
            "--model",
            str(TINY_MODEL),
            "-k",
            "3",
            "--lengths",
            "19,130,511",
            "--tokens",
            "32",
            "--batch",
            str(batch),
            "--json",
            str(result),
            "--",
            "--max-model-len",
            "1024",
            "--max-num-seqs",
            "4",
            "--enforce-eager",
        ],
        capture_output=True,
        text=True,
        timeout=2 * START_SECONDS,
        env=clean_environment("7.5", COLUMNS="160", PYTHONUNBUFFERED="1", PATH=os.environ["PATH"]),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(result.read_text())
    assert found["equal"]
    assert len(found["rows"]) == (batch or 3)
    assert all(row["tokens"] == 32 for row in found["rows"])
    assert all(1.0 <= row["acceptance_length"] <= 4.0 for row in found["rows"])
    assert done.stdout.count("equal") == (batch or 3)
