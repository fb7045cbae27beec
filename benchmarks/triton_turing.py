# SPDX-License-Identifier: Apache-2.0
"""Triton kernels on Turing's tensor cores against Triton's own lowering, on one GPU in one run.

    python3 benchmarks/triton_turing.py --out results/ --commit $(git rev-parse HEAD)

On a GPU newer than Turing, "stock" and "mma" are lowered for sm_75 (Triton's own way, and ours) and
assembled for the real chip; "native" is that chip's own lowering. Ratios of the three are what it
shows; the times are not a Turing card's. One process for each lowering and group of cases compiles
and checks its results against float64; when all are done they are timed one after the other. Two
more time the launch configurations that the launch table chooses from. "ms" is the GPU's time, of a
CUDA graph, and "launched_ms" includes the host's for each launch. Writes triton_turing.json and ends
1 where a ratio that is promised is not reached.
"""

import argparse
import fcntl
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from provenance import provenance

LOWERINGS = ("stock", "mma", "native")
GROUPS = ("products", "linear", "gdn", "attention")
# Stock is compared in the configurations that are best for it.
TABLE_OF: dict[str, Any] = {
    "stock": "sm75",
    "mma": "sm75 tensor cores",
    "native": "sm75 tensor cores",
}
# (name, beginning of the shape, how many times stock's speed)
PROMISED = (
    ("fp16 matmul", "", 5.0),
    ("GDN prefill, our key products", "Hk/Hv 8/24, T=2048", 10.0),
    ("GDN prefill, our key products", "Hk/Hv 8/24, T=8192", 10.0),
    ("GDN prefill, our key products", "Hk/Hv 16/32, T=2048", 10.0),
    ("GDN prefill, our key products", "Hk/Hv 16/32, T=8192", 10.0),
    ("attention, prefill", "", 4.0),
)


def lower(lowering: str) -> None:
    """Make this process compile Triton kernels so; `emulating` chose the emulated card.

    Raises:
        RuntimeError: a process that is to lower for sm_75 does not.
    """
    import triton
    from vllm.platforms import current_platform

    from vllm.pre_ampere.kernels.triton import turing_mma

    # The first question makes the platform, and with it emulation.
    capability = current_platform.get_device_capability()
    lowered_for = triton.knobs.runtime.override_arch
    if lowering != "native" and (tuple(capability or ()), lowered_for) != ((7, 5), "sm75"):
        raise RuntimeError(f"kernels would be lowered for {lowered_for} on {capability}, not sm75")
    if lowering == "mma":
        turing_mma.enable()


class Meeting:
    """Where the processes wait until all of them have compiled, and then take turns.

    Timing while others compile would measure them too.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name

    def ready(self) -> None:
        (self._folder / f"{self._name}.ready").touch()
        while not (self._folder / "go").exists():
            time.sleep(0.2)

    def turn(self) -> Any:
        lock = (self._folder / "turn").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        return lock


def measure(lowering: str, group: str, meeting: Meeting) -> list[dict[str, Any]]:
    import torch
    import triton
    import turing_cases

    from vllm.pre_ampere.kernels.triton import launch_configurations

    lower(lowering)
    launch_configurations.pin(TABLE_OF[lowering])
    rows, cases = [], turing_cases.GROUPS[group]()
    for case in cases:
        start = time.monotonic()
        out = case.run()
        torch.accelerator.synchronize()
        row: dict[str, Any] = {
            "name": case.name,
            "shape": case.shape,
            "lowering": lowering,
            "first_call_s": round(time.monotonic() - start, 2),
        }
        if case.reference is not None:
            # Copied: the case may give the same memory again.
            row["relative_error"] = turing_cases.relative_error(out.clone(), case.reference())
        row["same_bits"] = all(torch.equal(out.clone(), case.run()) for _ in range(2))
        rows.append(row)
    meeting.ready()
    with meeting.turn():
        for case, row in zip(cases, rows, strict=True):
            row["launched_ms"] = round(triton.testing.do_bench(case.run, return_mode="median"), 4)
            milliseconds = triton.testing.do_bench_cudagraph(case.run, return_mode="median")
            row["ms"] = round(milliseconds, 4)
            if case.flops:
                row["tflops"] = round(case.flops / milliseconds * 1e-9, 1)
            if case.bytes:
                row["gigabytes_a_second"] = round(case.bytes / milliseconds * 1e-6)
    return rows


def tune(lowering: str, meeting: Meeting) -> list[dict[str, Any]]:
    """Time each distinct configuration of the pinned kernels, each launched as upstream does.

    Off the tensor cores only those with the most warps: with fewer, kilobytes of registers spill,
    and one configuration takes up to two minutes to compile.
    """
    import torch
    import triton
    import turing_cases

    lower(lowering)
    from vllm.pre_ampere.kernels.triton import launch_configurations as table

    of_card = table.TABLE[TABLE_OF[lowering]]
    alternatives = {}
    for name in table.KERNELS:
        configs = table.autotuner(table.load(name)).configs
        if lowering == "stock":
            most = max(config.num_warps for config in configs)
            configs = [config for config in configs if config.num_warps == most]
        alternatives[name] = sorted(
            {(tuple(sorted(config.kwargs.items())), config.num_warps) for config in configs}
        )
    table.pin(TABLE_OF[lowering])
    measured = []
    for tokens in (2048, 8192):
        launches = turing_cases.gdn_kernels(turing_cases.gdn_inputs(16, 32, tokens))
        for name, launch in launches.items():
            for blocks, warps in alternatives[name]:
                # Its 64 KiB of operands are beyond any use: 13 KB a thread spill.
                if dict(blocks).get("BK") == 128:
                    continue
                chosen = replace(of_card[name], blocks=dict(blocks), num_warps=warps)
                row = {
                    "kernel": name,
                    "lowering": lowering,
                    "T": tokens,
                    "blocks": dict(blocks),
                    "num_warps": warps,
                    "pinned": chosen == of_card[name],
                }
                measured.append((name, chosen, launch, row))
                table.restrict(table.load(name), chosen)
                launch()
    others = other_launches() if lowering == "mma" else []
    torch.accelerator.synchronize()
    meeting.ready()
    with meeting.turn():
        for name, chosen, launch, row in measured:
            table.restrict(table.load(name), chosen)
            row["ms"] = round(triton.testing.do_bench(launch, return_mode="median"), 4)
        for run, row in others:
            row["ms"] = round(triton.testing.do_bench(run, return_mode="median"), 4)
    return [row for *_, row in measured + others]


def other_launches() -> list[tuple[Callable[[], Any], dict[str, Any]]]:
    """Paged attention of prompts and batch-invariant linear layers, in several launches each."""
    import torch
    import turing_cases

    from vllm.pre_ampere.kernels.triton import batch_invariant_linear
    from vllm.pre_ampere.kernels.triton.unified_attention_launch import PROMPTS, AttentionLaunch

    common = {"lowering": "mma"}
    measured: list[tuple[Callable[[], Any], dict[str, Any]]] = []
    for case in turing_cases.attention():
        if case.name != "attention, prefill":
            continue
        expected = case.run().double()
        for launch in turing_cases.ATTENTION_LAUNCHES:
            run = functools.partial(turing_cases.attention_launched, case, *launch)
            assert turing_cases.relative_error(run(), expected) < 1e-3
            rows, keys, warps = launch
            row = {"shape": case.shape, "blocks": {"rows": rows, "keys": keys}, "num_warps": warps}
            row["pinned"] = AttentionLaunch(*launch) == PROMPTS
            measured.append((run, {"kernel": "unified_attention", **common, **row}))
    pinned = batch_invariant_linear.TABLE["sm75 tensor cores"]
    for rows, tiles in turing_cases.LINEAR_TILES.items():
        for features in turing_cases.LINEAR_SHAPES:
            first = None
            for tile in tiles:
                run = turing_cases.linear_launched(rows, features, tile)
                out = run().clone()
                first = out if first is None else first
                row = {"shape": f"{rows} rows, {features[0]}x{features[1]}"}
                row["blocks"] = dict(zip(("rows", "columns", "block_k"), tile, strict=False))
                row |= {"num_warps": tile[3], "blocks_per_multiprocessor": tile[4]}
                row["pinned"] = batch_invariant_linear.Tile(*tile) in pinned
                row["same_bits_as_first"] = torch.equal(out, first)
                measured.append((run, {"kernel": "batch_invariant_linear", **common, **row}))
    return measured


def one_process(arguments: argparse.Namespace) -> None:
    import torch

    meeting = Meeting(arguments.out, arguments.process)
    with torch.inference_mode():
        lowering, part = arguments.process.split("-")
        rows = tune(lowering, meeting) if part == "tune" else measure(lowering, part, meeting)
    (arguments.out / f"{arguments.process}.rows").write_text(json.dumps(rows))


@dataclass(frozen=True)
class Process:
    """One process of a benchmark: its arguments, and what its environment adds to ours."""

    arguments: list[str]
    environment: dict[str, str]


def emulating(lowering: str) -> dict[str, str]:
    """The environment of a process that lowers so."""
    if lowering == "native":
        return {}
    mma = "1" if lowering == "mma" else "0"
    return {"VLLM_PRE_AMPERE_EMULATE": "7.5", "VLLM_PRE_AMPERE_TURING_MMA": mma}


def gather(
    wanted: dict[str, Process], work: Path, seconds: float
) -> tuple[dict[str, Any], dict[str, str]]:
    """Run them all. Returns rows by process, and the ends of the logs of those that failed.

    Each has caches of its own, and writes "<name>.ready" (see `Meeting`) and "<name>.rows".
    """
    deadline = time.monotonic() + seconds
    processes = {}
    for name, process in wanted.items():
        caches = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT")
        environment = {cache: str(work / "cache" / name / cache) for cache in caches}
        with (work / f"{name}.log").open("wb") as log:
            processes[name] = subprocess.Popen(
                [sys.executable, *process.arguments],
                env={**os.environ, **environment, **process.environment},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def compiling() -> list[str]:
        return [
            name
            for name, process in processes.items()
            if process.poll() is None and not (work / f"{name}.ready").exists()
        ]

    while compiling() and time.monotonic() < deadline - 0.3 * seconds:
        time.sleep(0.2)
    late = compiling()
    (work / "go").touch()
    while any(p.poll() is None for p in processes.values()) and time.monotonic() < deadline:
        time.sleep(0.2)
    rows, failures = {}, {}
    for name, process in processes.items():
        process.kill()
        process.wait()
        result = work / f"{name}.rows"
        if result.exists():
            rows[name] = json.loads(result.read_text())
        else:
            log = (work / f"{name}.log").read_text(errors="replace")
            failures[name] = log[-3000:]
    if late:
        failures["timing"] = f"began while these were compiling: {', '.join(late)}"
    return rows, failures


def side_by_side(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a case, with the lowerings beside each other and how much faster ours is."""
    table: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        at = table.setdefault((row["name"], row["shape"]), {})
        at |= {"name": row["name"], "shape": row["shape"]}
        kept = ("ms", "launched_ms", "tflops", "gigabytes_a_second", "relative_error", "same_bits")
        kept += ("first_call_s",)
        at[row["lowering"]] = {key: row[key] for key in kept if key in row}
    for at in table.values():
        if "stock" in at and "mma" in at:
            at["times_stock"] = round(at["stock"]["ms"] / at["mma"]["ms"], 2)
    add_times_upstream(table)
    return list(table.values())


def add_times_upstream(table: dict[tuple[str, str], dict[str, Any]]) -> None:
    """What a server gains: our kernel or launch on the tensor cores against upstream's as it is."""
    for (name, shape), at in table.items():
        plain = name.removesuffix(", our key products").replace("wide prefill", "prefill")
        upstream = table.get((plain, shape), {})
        if upstream is not at and "mma" in at and "stock" in upstream:
            at["times_upstream"] = round(upstream["stock"]["ms"] / at["mma"]["ms"], 2)


def checks(table: list[dict[str, Any]]) -> dict[str, bool]:
    found = {}
    for name, shape, least in PROMISED:
        rows = [row for row in table if row["name"] == name and row["shape"].startswith(shape)]
        label = f"{name} {shape}".strip() + f": at least {least:g} times stock"
        found[label] = bool(rows) and all(row.get("times_stock", 0.0) >= least for row in rows)
    with_both = [row for row in table if "stock" in row and "mma" in row]
    found["no error is more than twice stock's"] = bool(with_both) and all(
        row["mma"]["relative_error"] <= 2 * row["stock"]["relative_error"] for row in with_both
    )
    found["every run gives the same bits"] = bool(with_both) and all(
        row["mma"]["same_bits"] for row in with_both
    )
    return found


def print_table(table: list[dict[str, Any]], found: dict[str, bool]) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table("case", "shape", "stock ms", "mma ms", "native ms", "times stock", "error")
    for row in table:
        times = [str(row.get(lowering, {}).get("ms", "-")) for lowering in LOWERINGS]
        error = row.get("mma", {}).get("relative_error")
        shown.add_row(
            row["name"], row["shape"], *times, str(row.get("times_stock", "-")),
            "-" if error is None else f"{error:.1e}",
        )  # fmt: skip
    console = Console(width=140)
    console.print(shown)
    for label, passed in found.items():
        console.print(f"{'yes' if passed else 'NO '}  {label}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--commit", default="", help="what is measured")
    parser.add_argument("--seconds", type=float, default=280, help="limit for all of it")
    parser.add_argument("--process", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.process:
        one_process(arguments)
        return 0
    work = arguments.out / "triton_turing"
    work.mkdir(parents=True)
    names = [f"{lowering}-{group}" for lowering in LOWERINGS for group in GROUPS]
    names += ["mma-tune", "stock-tune"]
    wanted = {
        name: Process(
            [__file__, "--out", str(work), "--process", name], emulating(name.split("-")[0])
        )
        for name in names
    }
    rows, failures = gather(wanted, work, arguments.seconds)
    configurations = [row for name in ("mma-tune", "stock-tune") for row in rows.pop(name, [])]
    table = side_by_side([row for part in rows.values() for row in part])
    found = checks(table) | {"every process ended well": not failures}

    result = {
        **provenance(arguments.commit),
        "cases": table,
        "launch_configurations": configurations,
        "passed": found,
        "failures": failures,
    }
    (arguments.out / "triton_turing.json").write_text(json.dumps(result, indent=1) + "\n")
    print_table(table, found)
    return 0 if all(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
