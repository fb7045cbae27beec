# SPDX-License-Identifier: Apache-2.0
"""What the project says is proven is said once, and rests on files that exist."""

from pathlib import Path

import pytest

from vllm.pre_ampere import proof
from vllm.pre_ampere.proof import Claim, Level

ROOT = Path(__file__).parents[1]


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
