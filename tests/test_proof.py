# SPDX-License-Identifier: Apache-2.0
"""What the project says is proven is said once, and rests on files that exist."""

import json
import re
from pathlib import Path
from typing import Any

import launch_tables
import pytest

from vllm.pre_ampere import proof
from vllm.pre_ampere.proof import Claim, Level

ROOT = Path(__file__).parents[1]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
# What a GPU rounds otherwise; the result says beside it whether by ties alone.
UNEQUAL = "equals k=0 at all 10 lengths"


def read(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
    return result


def test_the_document_holds_the_table_and_the_levels() -> None:
    document = (ROOT / "docs" / "proof.md").read_text()
    assert proof.table() in document
    for level in Level:
        assert f"{int(level)}. {level.meaning}\n" in document


@pytest.mark.parametrize("claim", proof.CLAIMS, ids=lambda claim: claim.shown_by)
def test_a_claim_rests_on_a_file_that_exists(claim: Claim) -> None:
    assert (ROOT / claim.shown_by).is_file()


def test_a_claim_above_the_second_level_rests_on_a_recorded_run() -> None:
    above = [claim for claim in proof.CLAIMS if claim.level > Level.COMPILED]
    assert [claim for claim in above if "results/" not in claim.shown_by] == []


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_can_be_repeated(path: Path) -> None:
    result = read(path.name)
    assert all(result[fact] for fact in ("command", "commit", "date", "device"))
    assert re.search(r'["= ](/(?!tmp/emulated-serve/)\w+/[\w./-]*)', path.read_text()) is None


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_shows_what_it_is_cited_for(path: Path) -> None:
    passed = read(path.name).get("passed", {})
    failed = {name for name, value in passed.items() if not value}
    assert {name for name in failed if UNEQUAL not in name} == set()


@pytest.mark.parametrize("card", ["sm75", "sm70"])
def test_speculation_on_a_gpu_differed_by_ties_alone(card: str) -> None:
    result = read("emulated_serve.json")
    assert result["passed"][f"{card}-k3 differs from k=0 by rounding ties alone"]
    judged = result["judged"][f"{card}-k3"]
    assert 0 < judged["error"] < 0.02
    gaps = [divergence["float64_gap"] for divergence in judged["divergences"]]
    assert all(gap <= 2 * judged["error"] for gap in gaps)
    answers = {run["name"]: run.get("answers", []) for run in result["runs"]}
    pairs = zip(answers[f"{card}-k0"], answers[f"{card}-k3"], strict=True)
    assert sum(a["tokens"] != b["tokens"] for a, b in pairs) == len(gaps)


@pytest.mark.parametrize(
    ("name", "engines"),
    [
        (
            "verification_graphs_sm75.json",
            {"mixed-k3-eager", "mixed-k3-piecewise", "mixed-k3-full"},
        ),
        ("verification_graphs_sm70.json", {"mixed-k3-eager", "mixed-k3-full"}),
        ("cached_prefixes_sm75.json", {"prefixes-k1", "prefixes-k3", "prefixes-k3-preempted"}),
        ("cached_prefixes_full_graphs_sm75.json", {"prefixes-k3-full"}),
    ],
)
def test_every_answer_was_compared_and_differed_by_ties_alone(name: str, engines: set[str]) -> None:
    found = read(name)["engines"]
    assert found.keys() == engines
    for engine in found.values():
        assert engine["compared"] == engine["answers"] > 10
        assert engine["equal_but_for_ties"]
        assert all(difference["gap"] <= 4 for difference in engine["differences"])


@pytest.mark.parametrize("card", ["sm75", "sm70"])
def test_with_batch_invariance_speculation_changed_no_log_probability(card: str) -> None:
    """Neither tokens nor the logarithms of their chances, which have five decimal places."""
    runs = {run["name"]: run for run in read("emulated_serve.json")["runs"]}
    without, with_drafts = (runs[f"{card}-k{k}-batch-invariant"] for k in (0, 3))
    assert with_drafts["acceptance_length"] > 2
    assert len(without["answers"]) == 10
    assert all(len(answer["tokens"]) == 256 for answer in without["answers"])
    assert with_drafts["answers"] == without["answers"]
    assert all("--no-enable-prefix-caching" in run["command"] for run in (without, with_drafts))


def test_no_layer_is_said_to_launch_nothing() -> None:
    """Where Triton multiplied, the recorded trace did not show where a layer begins."""
    launched = read("emulated_serve.json")["launches_a_gdn_layer"]
    assert len(launched) == 7
    assert all(count > 4 for count in launched.values())


def test_the_tables_of_launches_are_those_of_the_results() -> None:
    document = (ROOT / "docs" / "triton-on-turing.md").read_text()
    assert launch_tables.gdn_table() in document
    assert launch_tables.attention_table() in document


def test_the_tests_that_need_a_gpu_ran_and_passed() -> None:
    passed = read("triton_turing_tests.json")["passed"]
    assert len(passed) >= 49
    assert all(passed.values())


def test_the_pinned_launches_are_the_fastest_that_were_measured() -> None:
    """Of batch-invariant products and of the attention of prompts."""
    launches: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in read("triton_turing.json")["launch_configurations"]:
        if row["kernel"] in ("unified_attention", "batch_invariant_linear"):
            launches.setdefault((row["kernel"], row["shape"]), []).append(row)
    assert len(launches) == 8
    for (kernel, shape), rows in launches.items():
        fastest = min(row["ms"] for row in rows)
        # A tile for fewer rows may be measured for more rows, too.
        pinned = min(row["ms"] for row in rows if row["pinned"])
        assert pinned <= 1.1 * fastest, (kernel, shape)
        assert all(row.get("same_bits_as_first", True) for row in rows)


def test_the_all_reduce_was_tried_on_cards() -> None:
    result = read("all_reduce.json")
    assert (result["veto"], result["reason"]) == (False, "its sums were right")
    assert result["cards"] == 2
