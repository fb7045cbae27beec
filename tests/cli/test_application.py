# SPDX-License-Identifier: Apache-2.0
"""The command line as a whole."""

import pytest

from vllm.pre_ampere.cli import UserError, lossless, main


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_help_lists_the_commands_with_what_they_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    shown = " ".join(capsys.readouterr().out.split())
    for part in ("doctor", "Look at the box's cards", "lossless", "Answer the same prompts"):
        assert part in shown


@pytest.mark.parametrize("arguments", [("frobnicate",), ("doctor", "--frobnicate"), ("lossless",)])
def test_a_command_line_that_makes_no_sense_ends_with_2(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_our_own_faults_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(lossless, "read_checkpoint", fail)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        main(["lossless", "--model", "anything"])


def test_what_the_user_can_mend_does_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: object) -> None:
        raise UserError("mend this")

    monkeypatch.setattr(lossless, "read_checkpoint", refuse)
    assert run("lossless", "--model", "anything") == 2
    assert capsys.readouterr().err == "Error: mend this\n"
