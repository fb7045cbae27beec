# SPDX-License-Identifier: Apache-2.0
"""The count of a step's launches, from a trace, to its tables and its chart."""

import gzip
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from vllm.pre_ampere import devices
from vllm.pre_ampere.census import Census, KernelClass, classify, count_events, read_trace
from vllm.pre_ampere.cli import UserError
from vllm.pre_ampere.cli import census as cli
from vllm.pre_ampere.cli.application import app

TINY_MODEL = Path(__file__).parent / "models" / "tiny-qwen3_5"
OWN = frozenset({"packed_delta_rule_kernel"})

# Names as PyTorch's profiler writes them.
NAMES = {
    "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0": KernelClass.INDUCTOR,
    "packed_delta_rule_kernel": KernelClass.OURS,
    "void pre_ampere::verify<128, 128>(float const*)": KernelClass.OURS,
    "_causal_conv1d_update_kernel": KernelClass.TRITON,
    "kernel_unified_attention": KernelClass.TRITON,
    "nvjet_hsh_64x8_64x16_4x1_v_bz_TNT": KernelClass.PRODUCT,
    "void gemv2T_kernel_val<int, int, __half, __half, __half, float, 128>()": KernelClass.PRODUCT,
    "void cublasLt::splitKreduce_kernel<32, 16, int, float>()": KernelClass.PRODUCT,
    "void at::native::elementwise_kernel<128, 4, at::native::direct_copy>(int)": (
        KernelClass.ELEMENTWISE
    ),
    "void at::native::vectorized_elementwise_kernel<4, at::native::Fill>(int)": (
        KernelClass.VECTORIZED
    ),
    "void at::native::unrolled_elementwise_kernel<at::native::copy>(int)": KernelClass.UNROLLED,
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp>(int)": KernelClass.REDUCE,
    "Memcpy DtoD (Device -> Device)": KernelClass.COPY,
    "Memset (Device)": KernelClass.COPY,
    "void vllm::rms_norm_kernel<c10::Half>(c10::Half*)": KernelClass.OTHER,
}
PRODUCT = "nvjet_hsh_64x8_64x16_4x1_v_bz_TNT"
NORM = "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0"
COPY = "void at::native::elementwise_kernel<128, 4, at::native::direct_copy>(int)"


def step(number: int, generated: int = 1, prefilled: int = 0) -> dict[str, Any]:
    name = f"execute_1_context_{prefilled}(sq0sk0)_generation_{generated}(sq4sk{number})"
    return {"name": name, "cat": "user_annotation", "ph": "X", "ts": number * 1000, "dur": 900}


def launches(number: int, *names: str) -> list[dict[str, Any]]:
    start = number * 1000
    return [
        {"name": name, "cat": "kernel", "ph": "X", "ts": start + place, "dur": 2.5}
        for place, name in enumerate(names)
    ]


def two_steps() -> list[dict[str, Any]]:
    gdn = (PRODUCT, NORM, "packed_delta_rule_kernel", COPY, NORM, PRODUCT)
    return [step(1), *launches(1, *gdn), step(2), *launches(2, *gdn)]


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_is_classed_by_its_name(name: str) -> None:
    assert classify(name, OWN) is NAMES[name]


@given(st.text(max_size=80))
def test_every_name_has_one_class(name: str) -> None:
    assert classify(name) in KernelClass


def test_launches_and_times_are_means_over_the_steps() -> None:
    census = count_events(two_steps(), OWN, "trace")
    classes = census.by_class()
    assert census.steps == 2
    assert classes[KernelClass.PRODUCT] == (2.0, 5.0)
    assert classes[KernelClass.INDUCTOR] == (2.0, 5.0)
    assert classes[KernelClass.OURS] == (1.0, 2.5)
    assert classes[KernelClass.ELEMENTWISE] == (1.0, 2.5)
    assert sum(launched for launched, _ in classes.values()) == 6.0


def test_a_gdn_layer_lies_between_two_products() -> None:
    census = count_events(two_steps(), OWN, "trace")
    assert census.gdn_layer == {
        KernelClass.INDUCTOR: 2.0,
        KernelClass.OURS: 1.0,
        KernelClass.ELEMENTWISE: 1.0,
    }


def test_the_order_of_the_events_does_not_matter() -> None:
    events = two_steps()
    assert count_events(events[::-1], OWN, "trace") == count_events(events, OWN, "trace")


@pytest.mark.parametrize(
    ("events", "said"),
    [
        (launches(1, PRODUCT), "holds 0 steps"),
        ([*two_steps(), step(3, prefilled=1)], "holds 2 steps of generation alone, or others"),
        ([step(1)], "holds no kernel"),
    ],
)
def test_a_trace_that_cannot_be_counted_is_refused(events: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        count_events(events, OWN, "trace")


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_trace_is_read_as_it_is_written(tmp_path: Path, suffix: str) -> None:
    text = json.dumps({"traceEvents": two_steps()}).encode()
    path = tmp_path / f"rank0.pt.trace.json{suffix}"
    path.write_bytes(gzip.compress(text) if suffix else text)
    assert read_trace(path, OWN) == count_events(two_steps(), OWN, "trace")


def test_a_census_survives_its_file(tmp_path: Path) -> None:
    census = count_events(two_steps(), OWN, "trace")
    assert Census.from_json(json.loads(json.dumps(census.to_json()))) == census


@pytest.mark.parametrize("width", [80, 200])
def test_the_tables_hold_what_was_counted_at_any_width(width: int) -> None:
    census = count_events(two_steps(), OWN, "trace")
    console = Console(record=True, width=width)
    console.print(cli.class_table({"one": census, "two": census}))
    console.print(cli.kernel_table(census, "one"))
    lines = [line.replace("│", " ").split() for line in console.export_text().splitlines()]
    assert ["all", "one", "6.0", "15", "4.0"] in lines
    assert ["two", "6.0", "15", "4.0"] in lines
    assert ["matrix", "products", "one", "2.0", "5", "0.0"] in lines
    assert any("packed_delta" in " ".join(line) for line in lines)


def test_the_chart_is_a_png_that_shows_every_run(tmp_path: Path) -> None:
    census = count_events(two_steps(), OWN, "trace")
    path = tmp_path / "launches.png"
    cli.draw({"one": census, "two": census}, path)
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert (width, height) == (1200, 600)
    cli.draw({"one": census}, path)
    assert path.read_bytes() != data


def test_a_record_is_read_back(tmp_path: Path) -> None:
    census = count_events(two_steps(), OWN, "trace")
    path = tmp_path / "k0.json"
    path.write_text(json.dumps({"title": "k=0", "census": census.to_json()}))
    assert cli.read_record(path) == ("k=0", census)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"title": "k=0", "census": {"steps": 1}}'])
def test_another_file_is_no_record(tmp_path: Path, text: str) -> None:
    path = tmp_path / "k0.json"
    path.write_text(text)
    with pytest.raises(UserError, match="not written by census --json"):
        cli.read_record(path)
    with pytest.raises(UserError, match="No such file"):
        cli.read_record(tmp_path / "missing.json")


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "nvml_devices", tuple)
    answer = CliRunner().invoke(app, ["census", "--model", str(TINY_MODEL)])
    assert isinstance(answer.exception, UserError)
    assert "no NVIDIA GPU" in str(answer.exception)


def test_a_folder_without_a_model_is_refused_first(tmp_path: Path) -> None:
    answer = CliRunner().invoke(app, ["census", "--model", str(tmp_path)])
    assert isinstance(answer.exception, UserError)
    assert "config.json" in str(answer.exception)
