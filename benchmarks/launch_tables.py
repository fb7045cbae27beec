# SPDX-License-Identifier: Apache-2.0
"""The tables of launches in docs/triton-on-turing.md, from the recorded results.

    python3 benchmarks/launch_tables.py

prints them; a test holds the document to them. Milliseconds are of triton_turing.json, bytes that
spill of preflight's kernels.json; pinned launches are in bold.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm.pre_ampere.kernels.triton.launch_configurations import KERNELS
from vllm.pre_ampere.preflight import run
from vllm.pre_ampere.preflight.report import Lowering

RESULT = Path(__file__).parent / "results" / "triton_turing.json"
WARPS = (2, 4, 8)
# Kernel and what is said of it; the key products are upstream's.
GDN = {
    "recompute_w_u": "recompute_w_u",
    "chunk_delta_h": "chunk_delta_h",
    "chunk_o": "chunk_o",
    "solve_tril": "solve_tril, scalar everywhere",
    "chunk_scaled_dot_kkt": "upstream's key products, scalar everywhere",
}


def launches() -> list[dict[str, Any]]:
    """The measured launches on the tensor cores."""
    rows: list[dict[str, Any]] = json.loads(RESULT.read_text())["launch_configurations"]
    return [row for row in rows if row["lowering"] == "mma"]


def gdn_table() -> str:
    """Kernels of GDN's prefill, at 8192 tokens."""
    spilled = _spilled()
    lines = [_header("kernel", "tile")]
    for kernel, label in GDN.items():
        rows = [row for row in launches() if row["kernel"] == kernel and row["T"] == 8192]
        for tile in _distinct(rows):
            cells = []
            for warps in WARPS:
                found = [r for r in rows if r["blocks"] == tile and r["num_warps"] == warps]
                if not found:
                    cells.append("")
                    continue
                name = KERNELS[kernel].split(":")[1]
                blocks = "".join(f", {key}={value}" for key, value in sorted(tile.items()))
                stack = spilled.get((name, f"{warps} warps{blocks}"), 0)
                cells.append(_cell(f"{found[0]['ms']:.3f}", stack, found[0]["pinned"]))
            what = ", ".join(f"{key} {value}" for key, value in sorted(tile.items()))
            lines.append(f"| {label} | {what} | {' | '.join(cells)} |")
            label = ""
    return "\n".join(lines) + "\n"


def attention_table() -> str:
    """Paged attention of prompts of 2048 and 8192 tokens."""
    rows = [row for row in launches() if row["kernel"] == "unified_attention"]
    lines = [_header("rows", "keys")]
    for tile in _distinct(rows):
        cells = []
        for warps in WARPS:
            found = [r for r in rows if r["blocks"] == tile and r["num_warps"] == warps]
            times = " / ".join(f"{row['ms']:.2f}" for row in found)
            cells.append(_cell(times, 0, bool(found) and found[0]["pinned"]))
        lines.append(f"| {tile['rows']} | {tile['keys']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _spilled() -> dict[tuple[str, str], int]:
    (table,) = (
        table
        for table in run.recorded().tables
        if table.complete
        and table.architecture == "sm75"
        and table.lowering is Lowering.TENSOR_CORES
    )
    return {(each.kernel, each.configuration): each.stack or 0 for each in table.findings}


def _distinct(rows: list[dict[str, Any]]) -> Iterator[dict[str, int]]:
    seen: list[dict[str, int]] = []
    for row in rows:
        if row["blocks"] not in seen:
            seen.append(row["blocks"])
            yield row["blocks"]


def _header(*first: str) -> str:
    columns = [*first, *(f"{warps} warps" for warps in WARPS)]
    return f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}"


def _cell(text: str, stack: int, pinned: bool) -> str:
    spill = f", {stack} B" if stack else ""
    return f"**{text}**{spill}" if pinned else f"{text}{spill}"


if __name__ == "__main__":
    print(f"{gdn_table()}\n{attention_table()}")
