# SPDX-License-Identifier: Apache-2.0
"""Tables, how they compare and are recorded, and the shapes that a model's file gives."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from vllm.pre_ampere.cli import UserError
from vllm.pre_ampere.cli import preflight as cli
from vllm.pre_ampere.cli.application import app
from vllm.pre_ampere.preflight import run
from vllm.pre_ampere.preflight.model import known_models, load_shapes
from vllm.pre_ampere.preflight.report import Finding, Lowering, Results, Table, differences

FINDING = Finding(
    launch="GDN chunked prefill",
    kernel="chunk_fwd_kernel_o",
    configuration="4 warps, BK=64, BV=64",
    shared_memory=18432,
    shared_memory_limit=65536,
    registers=232,
    stack=0,
    products=3,
    tensor_core_instructions=192,
    fma_instructions=32,
    compile_seconds=1.7,
)
TABLE = Table(
    model="Qwen3.5-4B TP1",
    architecture="sm75",
    lowering=Lowering.TENSOR_CORES,
    triton="3.9.0",
    complete=False,
    findings=(FINDING,),
)


def with_finding(**changed: object) -> Table:
    return TABLE.model_copy(update={"findings": (FINDING.model_copy(update=changed),)})


@given(shared_memory=st.integers(0, 200_000))
def test_over_the_limit_means_more_than_the_limit(shared_memory: int) -> None:
    table = with_finding(shared_memory=shared_memory)
    assert bool(table.unlaunchable) == (shared_memory > 65536)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("shared_memory", 66560, "shared memory was 18432, is 66560"),
        ("registers", 255, "registers was 232, is 255"),
        ("tensor_core_instructions", 0, "tensor core instructions was 192, is 0"),
        ("failure", "no", "failure was None, is no"),
    ],
)
def test_a_changed_need_is_a_difference(field: str, value: object, said: str) -> None:
    (difference,) = differences(TABLE, with_finding(**{field: value}))
    assert difference == (
        f"chunk_fwd_kernel_o (4 warps, BK=64, BV=64) of GDN chunked prefill: {said}"
    )


def test_compile_time_is_none() -> None:
    assert differences(TABLE, with_finding(compile_seconds=100.0)) == []


def test_another_configuration_is_one_gone_and_one_new() -> None:
    said = differences(TABLE, with_finding(configuration="8 warps, BK=64, BV=64"))
    assert [difference.rsplit(" ", 1)[1] for difference in said] == ["gone", "new"]


def test_recording_replaces_tables_of_the_same_name_and_drops_times() -> None:
    changed = with_finding(registers=255)
    other = TABLE.model_copy(update={"complete": True})
    results = Results(tables=(TABLE, other)).updated([changed])
    assert len(results.tables) == 2
    kept = results.table(TABLE.name)
    assert kept is not None
    assert (kept.findings[0].registers, kept.findings[0].compile_seconds) == (255, 0.0)


def test_a_table_that_is_not_recorded_is_a_change(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "RECORDED", tmp_path / "kernels.json")
    run.record(Results(tables=(TABLE,)))
    assert run.changes(Results(tables=(TABLE,))) == []
    other = TABLE.model_copy(update={"architecture": "sm70"})
    (change,) = run.changes(Results(tables=(other,)))
    assert change.startswith("Qwen3.5-4B TP1 on sm70")
    newer = TABLE.model_copy(update={"triton": "3.10.0"})
    (change,) = run.changes(Results(tables=(newer,)))
    assert change.endswith("recorded with Triton 3.9.0, this is 3.10.0")


def test_a_whole_config_json_gives_the_same_shapes_as_its_text_part(tmp_path: Path) -> None:
    (path,) = (path for path in known_models() if "4b" in path.name)
    text = json.loads(path.read_text())
    text.pop("partial_rotary_factor")
    text["rope_parameters"] = {"partial_rotary_factor": 0.25}
    folder = tmp_path / "Qwen3.5-4B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"text_config": text}))
    assert load_shapes(folder / "config.json", 2) == load_shapes(path, 2)


def test_heads_that_cannot_be_split_are_refused() -> None:
    (path,) = (path for path in known_models() if "27b" in path.name)
    with pytest.raises(ValueError, match="num_attention_heads=24 cannot be split over 16 cards"):
        load_shapes(path, 16)


@pytest.mark.parametrize(
    ("name", "size", "block"), [("4b", 1, 544), ("27b", 1, 800), ("next", 1, 1072), ("4b", 2, 544)]
)
def test_an_attention_block_covers_a_gdn_page(name: str, size: int, block: int) -> None:
    (path,) = (path for path in known_models() if name in path.name)
    shapes = load_shapes(path, size)
    assert shapes.attention_block_size(3) == block
    page = 2 * shapes.convolution_dim * 6 + 4 * shapes.value_heads_per_rank * 128 * 128
    bytes_a_token = 4 * shapes.kv_heads_per_rank * shapes.head_dim
    assert block * bytes_a_token >= page > (block - 16) * bytes_a_token


def test_the_command_ends_1_and_names_both_numbers_over_the_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def found(plan: run.Plan, on_start: object) -> Results:
        assert [shapes.label for shapes in plan.models] == ["Qwen3.5-4B TP1"]
        return Results(tables=(with_finding(shared_memory=86016),))

    monkeypatch.setattr(run, "preflight", found)
    (path,) = (path for path in known_models() if "4b" in path.name)
    written = tmp_path / "tables.json"
    arguments = ["preflight", "--arch", "sm75", "--model", str(path), "--tp", "1"]
    answer = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*arguments, "--json", str(written)])
    assert answer.exit_code == 1
    assert "needs 86016 B of shared memory a block; the card has 65536 B" in answer.output
    tables = json.loads(written.read_text())["tables"]
    assert tables[0]["findings"][0]["shared_memory"] == 86016

    failed = Results(tables=(with_finding(failure="PassManager::run failed"),))
    monkeypatch.setattr(run, "preflight", lambda plan, on_start: failed)
    answer = CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments)
    assert answer.exit_code == 1
    said = "chunk_fwd_kernel_o of GDN chunked prefill does not compile: PassManager::run failed"
    assert said in answer.output

    monkeypatch.setattr(run, "preflight", lambda plan, on_start: Results(tables=(TABLE,)))
    assert CliRunner().invoke(app, arguments).exit_code == 0


def test_a_description_without_weights_is_enough(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (path,) = (path for path in known_models() if "4b" in path.name)
    description = tmp_path / "config.json"
    description.write_text(path.read_text())
    monkeypatch.setattr(run, "preflight", lambda plan, on_start: Results(tables=(TABLE,)))
    answer = CliRunner().invoke(app, ["preflight", "--model", str(description)])
    assert answer.exit_code == 0


@pytest.mark.parametrize("width", [80, 200])
def test_a_scalar_product_is_marked_at_any_width(width: int) -> None:
    console = Console(record=True, width=width)
    console.print(cli._rendered(with_finding(tensor_core_instructions=0, fma_instructions=2048)))
    text = console.export_text()
    assert "2048 FMA only" in text
    assert "18432" in text
    assert "may have 65536 B of shared memory" in text


def test_an_unknown_architecture_is_a_users_error() -> None:
    with pytest.raises(UserError, match="sm80 is none of sm70, sm72, sm75"):
        cli._capabilities("sm75,sm80")


def test_a_model_of_another_family_is_a_users_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match=r"for want of .*linear_num_key_heads"):
        cli._models([tmp_path / "config.json"], "1")
