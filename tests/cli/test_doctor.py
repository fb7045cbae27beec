# SPDX-License-Identifier: Apache-2.0
"""`vllm-pre-ampere doctor`: honest about the box, and about what it cannot see."""

import getpass
import json
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_process import START_SECONDS, TINY_MODEL, clean_environment
from hypothesis import given
from hypothesis import strategies as st

from vllm.pre_ampere import environment
from vllm.pre_ampere.cli import main
from vllm.pre_ampere.cli.diagnosis import box, serving, software
from vllm.pre_ampere.cli.diagnosis.box import Box, Link, without_identity
from vllm.pre_ampere.cli.diagnosis.diagnosis import Diagnosis, as_json
from vllm.pre_ampere.cli.diagnosis.fat_binary import GpuCode
from vllm.pre_ampere.cli.diagnosis.probe import Activation, Probe, by_layer
from vllm.pre_ampere.cli.diagnosis.serving import Choice, Serving
from vllm.pre_ampere.cli.diagnosis.software import Package
from vllm.pre_ampere.cli.doctor import as_report
from vllm.pre_ampere.devices import Device
from vllm.pre_ampere.proof import CLAIMS

T4 = Device(0, "Tesla T4", (7, 5), "GPU-01234567-89ab-cdef-0123-456789abcdef", "", 16 * 1024**3)
V100 = replace(T4, index=1, name="Tesla V100-SXM2-32GB", capability=(7, 0))
H200 = replace(T4, name="NVIDIA H200", capability=(9, 0))

CUDA_13 = GpuCode(frozenset({(7, 5), (8, 0), (9, 0)}), frozenset({(12, 0)}))
TORCH = Package("torch", "2.13.0+cu130", CUDA_13, "", needed=True)
VLLM = Package("vllm", "0.32.0", CUDA_13, "", needed=True)


def diagnosis(*cards: Device, packages: Sequence[Package] = (TORCH, VLLM)) -> Diagnosis:
    return Diagnosis(Box(cards, 0, (), "580.95, runs CUDA up to 13.0", False), "3.12.3", packages)


def run(*arguments: str) -> int:
    """The exit status of a command line."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.usefixtures("clean_environment")
def test_a_box_without_a_gpu_is_told_how_to_emulate(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor") == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "Would not serve. First change: the box has no NVIDIA GPU" in shown
    assert "VLLM_PRE_AMPERE_EMULATE=7.5" in shown


def test_an_emulated_box_says_that_it_is(
    clean_environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clean_environment.setenv(environment.EMULATE.name, "7.5,7.0")
    assert run("doctor", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["emulated"]
    assert "emulated" in found["note"]
    assert [card["capability"] for card in found["cards"]] == ["7.5", "7.0"]
    assert [card["shared_memory_per_block_bytes"] for card in found["cards"]] == [65536, 98304]
    assert found["serving"] is None
    assert [entry["level"] for entry in found["proof"]] == [int(c.level) for c in CLAIMS]
    torch = next(package for package in found["packages"] if package["name"] == "torch")
    assert torch["version"].startswith("2.13.0")
    assert torch["code"] is None
    assert torch["note"] == "a CPU build"


@pytest.mark.parametrize(
    ("arguments", "emulate", "message"),
    [
        (["--model", "/no/such/folder"], "7.5", "--model /no/such/folder: there is no such folder"),
        (["--model", "{empty}"], "7.5", "has no config.json"),
        (["--model", "{broken}"], "7.5", "config.json is not JSON"),
        (["--model", "{llama}"], "7.5", "(model_type llama) has no gated-delta-net layers"),
        ([], "9.9", "VLLM_PRE_AMPERE_EMULATE='9.9': '9.9' is no pre-Ampere capability"),
        (["--probe"], "7.5", "--probe and engine options need a --model"),
    ],
)
def test_what_the_user_can_mend_is_one_line(
    arguments: list[str],
    emulate: str,
    message: str,
    tmp_path: Path,
    clean_environment: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    contents = {"empty": None, "broken": "{", "llama": '{"model_type": "llama"}'}
    for name, content in contents.items():
        (tmp_path / name).mkdir()
        if content is not None:
            (tmp_path / name / "config.json").write_text(content)
    places = {name: str(tmp_path / name) for name in contents}
    clean_environment.setenv(environment.EMULATE.name, emulate)
    assert run("doctor", *(argument.format(**places) for argument in arguments)) == 2
    error = capsys.readouterr().err
    assert error.startswith("Error: ")
    assert message in error
    assert len(error.splitlines()) == 1


@pytest.mark.usefixtures("clean_environment")
def test_help_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", "--help") == 0
    shown = " ".join(capsys.readouterr().out.split())
    for part in ("--model", "--probe", "--report", "Exit status: 0", "Example:"):
        assert part in shown


def test_torch_for_cuda_13_does_not_serve_a_volta_card() -> None:
    change = diagnosis(V100).first_change
    assert change is not None
    assert change.startswith("torch 2.13.0+cu130 has no code for Tesla V100-SXM2-32GB (sm70)")
    assert "CUDA 12.6" in change


def test_vllms_wheel_does_not_serve_a_volta_card() -> None:
    old = replace(TORCH, version="2.13.0+cu126", code=GpuCode(frozenset({(7, 0)}), frozenset()))
    change = diagnosis(V100, packages=(old, VLLM)).first_change
    assert change is not None
    assert change.startswith("vllm 0.32.0 has no code for Tesla V100-SXM2-32GB")
    assert "TORCH_CUDA_ARCH_LIST=7.0" in change


def test_a_cpu_build_does_not_serve_a_card() -> None:
    cpu = Package("vllm", "0.32.0+cpu", None, "a CPU build", needed=True)
    change = diagnosis(T4, packages=(TORCH, cpu)).first_change
    assert change == 'vllm 0.32.0+cpu is a CPU build; install the extra "cuda" of this project'


def test_one_card_without_code_is_enough() -> None:
    assert diagnosis(T4).first_change is None
    assert diagnosis(T4, V100).first_change is not None


def test_a_box_of_newer_cards_serves_without_us() -> None:
    found = diagnosis(H200)
    assert found.first_change is None
    assert found.note == "No card here is Volta or Turing: this project stays out of the way."


def test_what_holds_for_old_cards_is_not_said_of_a_newer_one_beside_them() -> None:
    newer = replace(T4, name="NVIDIA RTX A6000", capability=(8, 6))
    assert serving._lowering(newer).chosen == "tensor cores"
    assert serving._lowering(V100).chosen == "FMA"
    awq: Any = SimpleNamespace(model_config=SimpleNamespace(quantization="awq"))
    assert serving._products(awq, newer).chosen == "by upstream's choice"


def test_what_batch_invariance_changes_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    plain: Any = SimpleNamespace(model_config=SimpleNamespace(quantization=None))
    monkeypatch.setenv("VLLM_SM70_FLASH_V100_0DOT3_COMPILE_GRAPH", "1")
    monkeypatch.delenv("VLLM_SM70_QWEN_GDN_FULL_FORWARD", raising=False)
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    assert serving._products(plain, T4).chosen == "cuBLAS, float16"
    assert serving._wrapper(V100, speculative=False).chosen == "compiled"
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    products = serving._products(plain, T4)
    assert products.chosen == "Triton, in tiles by the number of rows"
    assert products.reason == "VLLM_BATCH_INVARIANT=1 was set"
    assert [name for name, _ in products.passed_over] == ["cuBLAS"]
    wrapper = serving._wrapper(V100, speculative=False)
    assert (wrapper.chosen, "VLLM_BATCH_INVARIANT=1" in wrapper.reason) == ("eager", True)
    assert serving._wrapper(T4, speculative=True).chosen == "compiled"


def test_hidden_cards_are_named_as_the_reason() -> None:
    hidden = Diagnosis(Box((), 2, (), "580", False), "3.12.3", (TORCH, VLLM))
    assert "CUDA_VISIBLE_DEVICES shows no card" in str(hidden.first_change)


def test_an_order_that_the_driver_would_not_tell_comes_first(
    clean_environment: pytest.MonkeyPatch,
) -> None:
    def refuse(*order: Any) -> Any:
        raise RuntimeError("Set CUDA_DEVICE_ORDER=PCI_BUS_ID to number the cards by bus")

    clean_environment.setattr(box, "nvml_devices", lambda: (T4,))
    clean_environment.setattr(box, "visible_devices", refuse)
    clean_environment.setattr(box, "_driver", lambda: "580")
    found = Diagnosis(box.look(), "3.12.3", (TORCH, VLLM))
    assert found.box.cards == (T4,)
    assert found.first_change == "Set CUDA_DEVICE_ORDER=PCI_BUS_ID to number the cards by bus"


def test_installed_libraries_are_told_from_missing_ones() -> None:
    found = {package.name: package for package in software.installed()}
    assert found["triton"].note == "compiles on the box"
    assert found["tilelang"].version is None
    assert found["tilelang"].note == "not installed"
    assert found["vllm-pre-ampere"].version == "0.1.0"


def with_everything() -> Diagnosis:
    """A diagnosis that holds what must not leave the machine wherever text can hold it."""
    secret = f"/home/{getpass.getuser()}/models on {socket.gethostname()} with hf_abcdefghijklmnop"
    served = Serving(
        "model",
        None,
        (Choice("attention", "TRITON_ATTN", secret, (("FLASHINFER", secret),)),),
    )
    both = Box((T4, V100), 1, (Link(0, 1, True, False),), "580", False)
    probe = Probe((Activation("layers.0", 70000.0, "layers.0.mlp", False),), "layers.0.mlp", True)
    return Diagnosis(both, "3.12.3", (replace(TORCH, note=secret), VLLM), served, probe)


def test_a_report_names_nobody() -> None:
    report = as_report(with_everything())
    for word in (getpass.getuser(), socket.gethostname(), "/home", "hf_", "GPU-0123"):
        assert word not in re.split(r"[\s/]+", report)
        assert f"/{word}" not in report
    assert "Tesla V100-SXM2-32GB" in report
    assert "0 and 1: peer access, no NVLink" in report
    assert "\x1b" not in report


@pytest.mark.parametrize(
    ("emulated", "said"),
    [
        (False, "1 more hidden by CUDA_VISIBLE_DEVICES."),
        (True, "NVIDIA cards that the box has: 1."),
    ],
)
def test_cards_that_are_not_shown_are_counted(emulated: bool, said: str) -> None:
    """Behind an emulated card there is a real one, which nothing hides."""
    report = as_report(Diagnosis(Box((T4,), 1, (), "580", emulated), "3.12.3", (TORCH, VLLM)))
    assert said in report
    assert ("hidden by" in report) is not emulated


def test_json_names_no_card_by_its_uuid() -> None:
    assert "GPU-0123" not in json.dumps(as_json(with_everything()), default=str)


@given(
    secret=st.sampled_from(
        [
            "/home/anna/models/Qwen3.5-4B",
            "~/models",
            "./here/there",
            "C:\\Users\\anna\\models",
            "hf_abcdefghijklmnop",
            "sk-0123456789abcdef",
            "GPU-01234567-89ab-cdef-0123-456789abcdef",
            "192.168.1.17:8000",
            "workstation-7",
            "Anna",
        ]
    ),
    before=st.sampled_from(["", "at ", "(", "'", "model="]),
    after=st.sampled_from(["", " failed", ")", "'", ", and"]),
)
def test_identities_are_taken_out_of_any_text(secret: str, before: str, after: str) -> None:
    cleaned = without_identity(f"{before}{secret}{after}", ["workstation-7", "anna"])
    assert secret.lower() not in cleaned.lower()
    assert "anna" not in cleaned.lower()
    assert cleaned.endswith(after)


@pytest.mark.parametrize(
    "text",
    ["43.6 tokens/s", "sm_70, sm_75, PTX 7.5", "gap 0.5/1.0", "2.13.0+cu130", "K=128, V=128"],
)
def test_plain_facts_are_left_as_they_are(text: str) -> None:
    assert without_identity(text, ["host", "user"]) == text


def test_modules_are_put_together_by_layer_in_the_order_of_the_model() -> None:
    seen = {
        "model.norm": (3.0, True),
        "model.layers.10.mlp.down_proj": (65000.0, True),
        "model.layers.10.mlp": (65000.0, False),
        "model.layers.2.mlp": (1.0, True),
        "model.embed_tokens": (0.5, True),
    }
    layers = by_layer(seen)
    assert [layer.layer for layer in layers] == [
        "model.embed_tokens",
        "model.layers.2",
        "model.layers.10",
        "model.norm",
    ]
    assert layers[2].largest == 65000.0
    assert not layers[2].finite
    assert layers[1].finite


def test_an_overflow_is_the_first_thing_to_change() -> None:
    change = with_everything().first_change
    assert change is not None
    change = replace(with_everything(), box=Box((T4,), 0, (), "580", False)).first_change
    assert change is not None
    assert "overflows float16 in layers.0.mlp" in change
    assert "--dtype float32" in change


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The doctor on the small model, as a Turing box with speculation and one setting of its own."""
    report = tmp_path_factory.mktemp("report") / "report.txt"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from vllm.pre_ampere.cli import main; main()",
            "doctor",
            "--model",
            str(TINY_MODEL),
            "--json",
            "--report",
            str(report),
            "--",
            "--speculative-config",
            '{"method": "mtp", "num_speculative_tokens": 3}',
        ],
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        env=clean_environment("7.5", VLLM_SM70_GDN_KKT_SCHEDULE="0"),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "report": report.read_text()}


def test_every_choice_has_its_reason(served: dict[str, Any]) -> None:
    choices = {choice["subject"]: choice for choice in served["serving"]["choices"]}
    assert choices["dtype"]["chosen"] == "float16"
    assert "bfloat16" in choices["dtype"]["reason"]
    prefill = choices["GDN prefill"]
    assert prefill["chosen"] == "triton"
    passed_over = dict(map(tuple, prefill["passed_over"]))
    assert "86016 B" in passed_over["flashqla_sm70"]
    assert "65536 B" in passed_over["flashqla_sm70"]
    assert "only by request" in passed_over["vlk"]
    attention = dict(map(tuple, choices["attention"]["passed_over"]))
    assert attention["FLASH_ATTN"] == "compute capability not supported"
    assert choices["Triton's matrix products"]["chosen"] == "m16n8k8 tensor cores"
    assert choices["GDN layers"]["chosen"] == "compiled"
    assert all(choice["reason"] for choice in choices.values())


def test_the_baselines_own_record_is_shown(served: dict[str, Any]) -> None:
    record = served["serving"]["baseline"]
    decisions = {entry["name"]: entry["decision"] for entry in record["variables"]}
    assert decisions.pop("VLLM_SM70_GDN_KKT_SCHEDULE") == "kept"
    assert len(decisions) == 8
    assert set(decisions.values()) == {"set"}


def test_the_guards_that_act_are_shown(served: dict[str, Any]) -> None:
    assert [action["guard"] for action in served["serving"]["guards"]] == ["nan-logits"]


def test_the_report_holds_the_screen_without_paths(served: dict[str, Any]) -> None:
    assert "Would serve tiny-qwen3_5." in served["report"]
    assert str(TINY_MODEL.parent) not in served["report"]
    assert "These cards are emulated" in served["report"]


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        (["--dtype", "float32"], 1, "triton takes bfloat16 or float16; the model runs in float32"),
        (["--kv-cache-dtype", "fp8"], 1, "Tesla T4 has 7.5; pass --kv-cache-dtype float16"),
        (["--gdn-prefill-backend", "flashqla_sm70"], 1, "needs 86016 B of shared memory a block"),
        (["--gdn-prefill-backend", "reference"], 0, "Would serve tiny-qwen3_5."),
    ],
    ids=["float32", "fp8", "flashqla", "reference"],
)
def test_options_are_those_of_vllm_serve_and_judged_for_the_card(
    options: list[str], status: int, said: str
) -> None:
    program = Path(sys.executable).with_name("vllm-pre-ampere")
    done = subprocess.run(
        [program, "doctor", "--model", TINY_MODEL, "--", *options],
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        env=clean_environment("7.5"),
        check=False,
    )
    assert (done.returncode, done.stderr) == (status, "")
    assert said in " ".join(done.stdout.split())
