# SPDX-License-Identifier: Apache-2.0
"""What a user can mend is one line and exit status 2, before anything starts."""

import subprocess
import sys
from pathlib import Path

import pytest
from engine_process import START_SECONDS, TINY_MODEL, clean_environment

from vllm.pre_ampere import environment
from vllm.pre_ampere.cli import main

CONFIGS = {
    "list": b"[1, 2]",
    "null": b"null",
    "string": b'"abc"',
    "binary": b"\xff\xfe\x00\x81",
    "empty": b"",
    "text-config-null": b'{"model_type": "qwen3_5", "text_config": null}',
    "quantization-list": b'{"linear_key_head_dim": 128, "quantization_config": [1]}',
    "quantization-string": b'{"linear_key_head_dim": 128, "quantization_config": "awq"}',
}


def mistake(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("Error: ")
    return line


@pytest.mark.parametrize("command", ["doctor", "lossless", "census"])
@pytest.mark.parametrize("config", CONFIGS)
def test_a_folder_whose_description_is_none(
    command: str, config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_bytes(CONFIGS[config])
    assert "config.json" in mistake([command, "--model", str(tmp_path)], capsys)


@pytest.mark.parametrize("config", [name for name in CONFIGS if "quantization" not in name])
def test_preflight_of_a_file_that_describes_no_model(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(CONFIGS[config])
    assert "--model" in mistake(["preflight", "--model", str(path)], capsys)


@pytest.mark.parametrize("size", ["0", "-1", "abc", "", "1,"])
def test_a_number_of_cards_that_is_none(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is no number of cards" in mistake(["preflight", "--tp", size], capsys)


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (["doctor"], "--report"),
        (["lossless", "--model", str(TINY_MODEL)], "--json"),
        (["census", "--model", str(TINY_MODEL)], "--json"),
        (["census", "--model", str(TINY_MODEL)], "--chart"),
        (["preflight"], "--json"),
    ],
)
def test_a_file_that_could_not_be_written_is_refused_before_the_work(
    command: list[str], option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "missing" / "file")
    assert "there is no folder" in mistake([*command, option, missing], capsys)
    assert "this is a folder" in mistake([*command, option, str(tmp_path)], capsys)


COMMANDS = {
    "doctor": ["doctor"],
    "doctor of a model": ["doctor", "--model", str(TINY_MODEL)],
    "lossless": ["lossless", "--model", str(TINY_MODEL)],
    "census": ["census", "--model", str(TINY_MODEL)],
    "preflight": ["preflight"],
}
TAKING_ONLY_SOME = [
    variable.name
    for variable in vars(environment).values()
    if isinstance(variable, environment.Variable)
    and variable.parse is not str
    # A list of names, which any text is.
    and variable is not environment.BASELINE_SET
    # Upstream takes whatever is not 1 for off.
    and variable is not environment.BREAKABLE_CUDAGRAPH
]


@pytest.mark.parametrize("name", TAKING_ONLY_SOME)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_value_that_a_variable_cannot_take(
    command: str,
    name: str,
    clean_environment: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    clean_environment.setenv("VLLM_PRE_AMPERE_EMULATE", "7.5")
    clean_environment.setenv(name, "abc")
    assert f"{name}='abc': " in mistake(COMMANDS[command], capsys)


@pytest.mark.parametrize(
    ("name", "value"), [("VLLM_PRE_AMPERE_EMULATE", "9.9"), ("VLLM_SM70_GDN_KKT_SCHEDULE", "yes")]
)
def test_the_installed_doctor_ends_2_with_one_line(name: str, value: str) -> None:
    program = Path(sys.executable).with_name("vllm-pre-ampere")
    done = subprocess.run(
        [program, "doctor", "--model", TINY_MODEL],
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        env={**clean_environment("7.5"), name: value},
        check=False,
    )
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"Error: {name}={value!r}: ")
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("VLLM_USE_BREAKABLE_CUDAGRAPH", "false", False),
        ("VLLM_USE_BREAKABLE_CUDAGRAPH", "", False),
        ("VLLM_USE_BREAKABLE_CUDAGRAPH", "1", True),
        ("VLLM_COMPUTE_NANS_IN_LOGITS", "2", True),
        ("VLLM_COMPUTE_NANS_IN_LOGITS", "0", False),
        ("VLLM_BATCH_INVARIANT", "01", True),
        ("VLLM_BATCH_INVARIANT", "0", False),
    ],
)
def test_upstreams_variables_are_read_as_upstream_reads_them(
    name: str, value: str, read: bool, clean_environment: pytest.MonkeyPatch
) -> None:
    from vllm import envs

    clean_environment.setenv(name, value)
    assert getattr(envs, name) is read
    (variable,) = (
        each
        for each in vars(environment).values()
        if isinstance(each, environment.Variable) and each.name == name
    )
    assert variable.get() is read


def test_what_the_configuration_refuses_is_one_line(
    clean_environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine that refuses it is a process of its own, whose traceback tells a user nothing."""
    clean_environment.setenv("VLLM_PRE_AMPERE_EMULATE", "7.5")
    clean_environment.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(SystemExit) as ended:
        main(["lossless", "--model", str(TINY_MODEL), "-k", "1", "--lengths", "19"])
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("Error: VLLM_BATCH_INVARIANT=1 puts Triton kernels in place of CPU")


def test_help_needs_no_good_variable(
    clean_environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clean_environment.setenv("VLLM_SM70_GDN_KKT_SCHEDULE", "abc")
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--help"])
    assert ended.value.code == 0
    assert "Exit status" in capsys.readouterr().out
