# SPDX-License-Identifier: Apache-2.0
"""Shows on one GPU whether verification may run in full graphs, and prefixes be cached with it.

    VLLM_PRE_AMPERE_EMULATE=7.5 python3 tests/gpu/verification_graphs.py --out results --commit HASH

Guards 1 and 2 of docs/guards.md rest on it. Engines with k=3 in eager mode and with PIECEWISE and
FULL graphs answer batches in which requests join and leave; engines with k=1 and k=3 and prefix
caching, one of them short of memory, answer conversations; each is compared with an engine without
speculation, caching and graphs, token for token. All start at once, so their speed means nothing.
Exit status 0 where no answer differs by more than a rounding tie.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "guards"), str(TESTS.parent / "benchmarks")]

from conversations import differences, read, start  # noqa: E402
from provenance import provenance  # noqa: E402

# Two candidates this many float16 steps apart may change places by rounding.
TIE_STEPS = 4.0

MIXED, PREFIXES = "mixed_batches", "shared_prefixes"
GRAPHS = {
    mode: {"compilation_config": {"cudagraph_mode": mode}}
    for mode in ("PIECEWISE", "FULL_AND_PIECEWISE")
}
EAGER = {"enforce_eager": True}
UNCACHED, CACHED = {"enable_prefix_caching": False}, {"enable_prefix_caching": True}


def drafting(k: int) -> dict[str, Any]:
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": k}}


# Tokens of an attention block of the small model on a GPU, by k: a GDN page grows with the drafts.
BLOCK_SIZE = {1: 528, 3: 544}


@dataclass(frozen=True)
class Engine:
    """One engine: what it plays, its settings, and the engine it is compared with."""

    scenario: str
    block_size: int
    settings: dict[str, Any]
    reference: str | None = None


ENGINES = {
    "mixed": Engine(MIXED, BLOCK_SIZE[3], EAGER | UNCACHED),
    "mixed-k3-eager": Engine(MIXED, BLOCK_SIZE[3], EAGER | UNCACHED | drafting(3), "mixed"),
    "mixed-k3-piecewise": Engine(
        MIXED, BLOCK_SIZE[3], GRAPHS["PIECEWISE"] | UNCACHED | drafting(3), "mixed"
    ),
    "mixed-k3-full": Engine(
        MIXED, BLOCK_SIZE[3], GRAPHS["FULL_AND_PIECEWISE"] | UNCACHED | drafting(3), "mixed"
    ),
    "prefixes-of-k1": Engine(PREFIXES, BLOCK_SIZE[1], EAGER | UNCACHED),
    "prefixes-k1": Engine(PREFIXES, BLOCK_SIZE[1], EAGER | CACHED | drafting(1), "prefixes-of-k1"),
    "prefixes-of-k3": Engine(PREFIXES, BLOCK_SIZE[3], EAGER | UNCACHED),
    "prefixes-k3": Engine(
        PREFIXES, BLOCK_SIZE[3], GRAPHS["PIECEWISE"] | CACHED | drafting(3), "prefixes-of-k3"
    ),
    "prefixes-k3-full": Engine(
        PREFIXES,
        BLOCK_SIZE[3],
        GRAPHS["FULL_AND_PIECEWISE"] | CACHED | drafting(3),
        "prefixes-of-k3",
    ),
    "prefixes-k3-preempted": Engine(
        PREFIXES,
        BLOCK_SIZE[3],
        EAGER | CACHED | drafting(3) | {"num_gpu_blocks_override": 24},
        "prefixes-of-k3",
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(TESTS / "models" / "tiny-qwen3_5"))
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--commit", required=True, help="what is run")
    parser.add_argument("--seconds", type=float, default=500, help="when to give up")
    parser.add_argument("--only", nargs="+", choices=ENGINES, default=list(ENGINES))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    common = {
        "model": options.model,
        "max_model_len": 4096,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 1024,
        # Named, so that engines that start beside each other do not measure each other's memory.
        "kv_cache_memory_bytes": 2 << 30,
        "gpu_memory_utilization": 0.05,
        "seed": 0,
    }
    deadline = time.monotonic() + options.seconds
    processes = {}
    for name in options.only:
        engine = ENGINES[name]
        result = options.out / f"{name}.json"
        result.unlink(missing_ok=True)
        caches = {
            variable: str(options.out.absolute() / "caches" / name / variable.lower())
            for variable in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT")
        }
        processes[name] = start(
            engine.scenario, engine.block_size, common | engine.settings, result, caches
        )
    for process in processes.values():
        try:
            process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()

    summary: dict[str, Any] = {}
    for name in options.only:
        reference = ENGINES[name].reference
        if reference is None or reference not in options.only:
            continue
        expected = read(options.out / f"{reference}.json")
        try:
            played = read(options.out / f"{name}.json")
        except RuntimeError as error:
            summary[name] = {"failed": str(error)[-1500:]}
            continue
        found = list(differences(expected, played))
        summary[name] = {
            "answers": len(played.answers),
            # After a tie the scenario goes on with other prompts.
            "compared": sum(
                a.prompt == b.prompt for a, b in zip(expected.answers, played.answers, strict=True)
            ),
            "cached": sum(answer.cached > 0 for answer in played.answers),
            "preempted": played.preempted,
            "differences": [asdict(difference) for difference in found],
            "equal_but_for_ties": all(difference.gap <= TIE_STEPS for difference in found),
        }
    record = {
        "what": "verification in eager mode and in CUDA graphs, and with cached prefixes",
        **provenance(options.commit),
        "emulated": os.environ.get("VLLM_PRE_AMPERE_EMULATE"),
        "engines": summary,
    }
    print(json.dumps(record, indent=1))
    (options.out / "verification_graphs.json").write_text(json.dumps(record, indent=1) + "\n")
    return 0 if all(entry.get("equal_but_for_ties") for entry in summary.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
