# SPDX-License-Identifier: Apache-2.0
"""The recorded tables against a fresh compilation, and what a kernel over the limit looks like."""

import subprocess
import sys
from pathlib import Path

import pytest

from vllm.pre_ampere.devices import PRE_AMPERE
from vllm.pre_ampere.preflight import run
from vllm.pre_ampere.preflight.compile_for_card import Request
from vllm.pre_ampere.preflight.model import ModelShapes, known_models, load_shapes
from vllm.pre_ampere.preflight.report import Lowering, Results, Table

TURING, VOLTA = (7, 5), (7, 0)
EVERY_MODEL = tuple(load_shapes(path, size) for path in known_models() for size in (1, 2))
# What stays without tensor cores though it multiplies: fp32 products, which Turing has no
# instruction for.
SCALAR_ON_TENSOR_CORE_LOWERING = {"merge_16x16_to_64x64_inverse_kernel"}


def small_model() -> ModelShapes:
    return next(shapes for shapes in EVERY_MODEL if shapes.label == "Qwen3.5-4B TP1")


def run_program(program: list[str], request: Request, folder: Path) -> Results:
    (folder / "request.json").write_text(request.model_dump_json())
    command = [sys.executable, *program, str(folder / "request.json"), str(folder / "tables.json")]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return Results.model_validate_json((folder / "tables.json").read_text())


def request(capability: tuple[int, int], lowering: Lowering, folder: Path, *only: str) -> Request:
    return Request(
        capability=capability,
        lowering=lowering,
        models=(small_model(),),
        complete=False,
        cache=folder / "cache",
        only=only,
    )


@pytest.mark.parametrize(
    ("capability", "lowering", "only"),
    [
        (TURING, Lowering.TENSOR_CORES, ("GDN chunked prefill", "attention, decode")),
        (VOLTA, Lowering.TRITON, ("GDN update", "GDN convolution")),
    ],
)
def test_a_fresh_compilation_agrees_with_the_record(
    capability: tuple[int, int], lowering: Lowering, only: tuple[str, ...], tmp_path: Path
) -> None:
    found = run_program(
        ["-m", "vllm.pre_ampere.preflight.compile_for_card"],
        request(capability, lowering, tmp_path, *only),
        tmp_path,
    )
    launched = {finding.launch for table in found.tables for finding in table.findings}
    assert all(any(name.startswith(asked) for name in launched) for asked in only)
    assert run.changes(found, only) == [], f"record the change with: {run.UPDATE_COMMAND}"


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("complete", [False, True], ids=["as launched", "all configurations"])
@pytest.mark.parametrize("capability", [TURING, VOLTA], ids=["sm75", "sm70"])
def test_every_table_agrees_with_the_record(capability: tuple[int, int], complete: bool) -> None:
    plan = run.Plan((capability,), EVERY_MODEL)
    found = run.preflight(plan.completed() if complete else plan)
    assert run.changes(found) == [], f"record the change with: {run.UPDATE_COMMAND}"


def test_a_kernel_over_the_limit_is_found_with_both_numbers(tmp_path: Path) -> None:
    program = [str(Path(__file__).with_name("too_large.py"))]
    (table,) = run_program(program, request(TURING, Lowering.TRITON, tmp_path), tmp_path).tables
    fits, too_large = table.findings
    assert (fits.shared_memory, fits.over_the_limit) == (65536, False)
    assert (too_large.shared_memory, too_large.shared_memory_limit) == (131072, 65536)
    assert table.unlaunchable == (too_large,)


INT8_PRODUCT = [str(Path(__file__).with_name("int8_product.py"))]


@pytest.mark.parametrize("capability", [TURING, VOLTA], ids=["sm75", "sm70"])
def test_an_int8_product_does_not_compile_without_tensor_cores_and_the_rest_goes_on(
    capability: tuple[int, int], tmp_path: Path
) -> None:
    """Where it does, it is no longer to be left out of these tables."""
    asked = request(capability, Lowering.TRITON, tmp_path)
    (table,) = run_program(INT8_PRODUCT, asked, tmp_path).tables
    *failed, afterwards = table.findings
    assert len(failed) == 4
    for finding in failed:
        assert finding.launch.startswith("quantized, linear, INT8, ")
        assert (finding.kernel, finding.configuration) == ("scaled_mm_kernel", "4 warps")
        assert finding.failure == "PassManager::run failed"
    assert (afterwards.launch, afterwards.failure) == ("afterwards", None)
    assert table.unlaunchable == tuple(failed)


def test_an_int8_product_goes_to_turings_tensor_cores(tmp_path: Path) -> None:
    asked = request(TURING, Lowering.TENSOR_CORES, tmp_path)
    (table,) = run_program(INT8_PRODUCT, asked, tmp_path).tables
    *products, _ = table.findings
    assert all(f.tensor_core_instructions and not f.fma_instructions for f in products)
    assert table.unlaunchable == ()


def test_an_error_of_a_launch_is_no_finding(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from vllm.pre_ampere.preflight import compile_for_card, launches\n"
        "def wrong(shapes):\n"
        "    raise RuntimeError('sizes differ')\n"
        "launches.launches = lambda shapes, tensor_cores: {'wrong': wrong}\n"
        "compile_for_card.main(*sys.argv[1:])\n"
    )
    with pytest.raises(subprocess.CalledProcessError) as ended:
        run_program(["-c", program], request(TURING, Lowering.TRITON, tmp_path), tmp_path)
    assert ended.value.stderr.splitlines()[-1] == "RuntimeError: sizes differ"


def recorded_tables(complete: bool) -> list[Table]:
    return [table for table in run.recorded().tables if table.complete is complete]


def test_every_card_model_and_lowering_is_recorded() -> None:
    names = {(t.model, t.architecture, t.lowering) for t in recorded_tables(complete=False)}
    assert names == {(shapes.label, "sm70", Lowering.TRITON) for shapes in EVERY_MODEL} | {
        (shapes.label, "sm75", lowering) for shapes in EVERY_MODEL for lowering in Lowering
    }


def test_every_configuration_is_recorded_for_the_model_that_was_measured() -> None:
    names = {(t.model, t.architecture, t.lowering) for t in recorded_tables(complete=True)}
    assert names == {("Qwen3.5-4B TP1", "sm70", Lowering.TRITON)} | {
        ("Qwen3.5-4B TP1", "sm75", lowering) for lowering in Lowering
    }
    (first,) = run.Plan((TURING,), EVERY_MODEL[:1]).completed().models
    assert first == EVERY_MODEL[0], "another model is completed where it is the only one"


def test_nothing_that_is_launched_is_over_the_limit() -> None:
    for table in recorded_tables(complete=False):
        assert table.unlaunchable == (), table.title


def test_on_turing_only_fp32_products_are_without_tensor_cores() -> None:
    for table in recorded_tables(complete=False):
        if table.lowering is Lowering.TENSOR_CORES:
            scalar = {finding.kernel for finding in table.findings if finding.scalar_product}
            assert scalar == SCALAR_ON_TENSOR_CORE_LOWERING, table.title
            assert any(finding.tensor_core_instructions for finding in table.findings)


def test_tritons_own_lowering_has_no_tensor_core_instruction_below_sm80() -> None:
    for table in recorded_tables(complete=False):
        if table.lowering is Lowering.TRITON:
            assert all(f.tensor_core_instructions == 0 for f in table.findings), table.title
            assert any(finding.scalar_product for finding in table.findings), table.title


def test_the_launches_are_those_of_every_part_of_a_step() -> None:
    for table in recorded_tables(complete=False):
        names = {finding.launch for finding in table.findings}
        parts = {name.split(",")[0].split(" ")[0] for name in names}
        experts = {"experts"} if "Qwen3-Next" in table.model else set()
        always = {"step", "GDN", "attention", "linear", "sampling", "LoRA", "quantized"}
        assert parts == always | experts, table.title
        for part in ("LoRA", "quantized"):
            has_experts = any(name.startswith(f"{part}, experts, ") for name in names)
            assert has_experts is bool(experts), (table.title, part)


def test_int8_products_are_launched_where_they_compile() -> None:
    for table in recorded_tables(complete=False):
        launched = {f.launch for f in table.findings if ", INT8, " in f.launch}
        kinds = {name.split(",")[1].strip() for name in launched}
        experts = {"experts"} if "Qwen3-Next" in table.model else set()
        tensor_cores = table.lowering is Lowering.TENSOR_CORES
        assert kinds == ({"linear"} | experts if tensor_cores else set()), table.title


def test_one_process_for_each_card_and_lowering(tmp_path: Path) -> None:
    plan = run.Plan(PRE_AMPERE, EVERY_MODEL)
    made = [(r.capability, r.lowering) for r in plan.requests(tmp_path)]
    assert made == [
        (VOLTA, Lowering.TRITON),
        ((7, 2), Lowering.TRITON),
        (TURING, Lowering.TENSOR_CORES),
        (TURING, Lowering.TRITON),
    ]


def test_a_failed_process_is_reported_with_its_own_words() -> None:
    broken = small_model().model_copy(update={"linear_key_head_dim": 512})
    with pytest.raises(
        run.PreflightError, match=r"for sm75 ended with status 1:[\s\S]*K up to 256"
    ):
        run.preflight(run.Plan((TURING,), (broken,), only=("GDN update, decode",)))
