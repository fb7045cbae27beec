# SPDX-License-Identifier: Apache-2.0
"""A server's first start on an emulated Turing card, with pinned launches and with autotuning.

    python3 benchmarks/cold_start.py --out results/ --commit $(git rev-parse HEAD)

Four servers start at the same time on empty compile caches: matrix products on the tensor cores and
as Triton lowers them itself, each with the project's launch configurations and with upstream's
autotuning (the baseline's schedule switches at 0). Each then answers one prompt, which compiles
what the start did not. Seconds until both are compared; a server that does not get there in
`--seconds` is recorded with that limit.
"""

import argparse
import concurrent.futures
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from emulated_serve import Run, Server, prompts
from provenance import provenance

from vllm.pre_ampere import environment

AUTOTUNED = {
    schedule.name: "0"
    for schedule in (
        environment.KKT_SCHEDULE,
        environment.DELTA_H_SCHEDULE,
        environment.CHUNK_O_SCHEDULE,
        environment.RECURRENT_SCHEDULE,
        environment.SIGMOID_GATING_SCHEDULE,
    )
}
STOCK = {environment.TURING_MMA.name: "0"}
RUNS = (
    Run("tensor-cores-pinned", "7.5", 0),
    Run("tensor-cores-autotuned", "7.5", 0, environment=AUTOTUNED),
    Run("stock-pinned", "7.5", 0, environment=STOCK),
    Run("stock-autotuned", "7.5", 0, environment=STOCK | AUTOTUNED),
)


def measure(server: Server, prompt: list[int], deadline: float) -> dict[str, Any]:
    """Seconds until the server is ready, and until it has answered; None where it is not."""
    times: dict[str, Any] = {"ready_s": None, "answered_s": None}
    try:
        times["ready_s"] = round(server.wait_until_ready(deadline), 1)
        server.generate(prompt, 8, deadline)
        times["answered_s"] = round(time.monotonic() - server.started, 1)
    except (RuntimeError, OSError) as error:
        times["unfinished"] = f"{type(error).__name__}: {error}"
        times["after_s"] = round(time.monotonic() - server.started, 1)
    finally:
        server.stop()
    return {"name": server.run.name, "environment": server.run.environment, **times}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--commit", required=True, help="what is measured")
    parser.add_argument("--work", type=Path, default=Path("/tmp/cold-start"))
    parser.add_argument("--seconds", type=float, default=480, help="for everything together")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    arguments.out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(arguments.work, ignore_errors=True)
    prompt = prompts()[5]
    servers = [
        Server(run, 8200 + index, arguments.out, arguments.work) for index, run in enumerate(RUNS)
    ]
    with concurrent.futures.ThreadPoolExecutor(len(servers)) as pool:
        rows = list(pool.map(lambda server: measure(server, prompt, deadline), servers))
    by_name = {row["name"]: row for row in rows}
    passed = {
        f"{lowering}: pinned launches answer before autotuned ones": (
            by_name[f"{lowering}-pinned"]["answered_s"] or arguments.seconds
        )
        < (by_name[f"{lowering}-autotuned"]["answered_s"] or arguments.seconds)
        for lowering in ("tensor-cores", "stock")
    }
    record = {
        "what": "first start of vllm serve on an emulated Turing card, four servers at once",
        **provenance(arguments.commit),
        "prompt_tokens": len(prompt),
        "seconds": arguments.seconds,
        "runs": rows,
        "passed": passed,
    }
    (arguments.out / "cold_start.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({"runs": rows, "passed": passed}, indent=1))
    return 0 if all(passed.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
