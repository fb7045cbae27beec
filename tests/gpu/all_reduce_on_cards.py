# SPDX-License-Identifier: Apache-2.0
"""The trial of upstream's custom all-reduce on this box's cards, as a server would run it.

    python3 tests/gpu/all_reduce_on_cards.py --out results --commit HASH

Needs at least two cards. Exit status 0 where the trial ran the all-reduce and its sums were right;
a box that upstream does not use it on shows nothing.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from provenance import provenance

from vllm.pre_ampere.devices import nvml_devices
from vllm.pre_ampere.guards import all_reduce


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the result")
    parser.add_argument("--commit", required=True, help="what is run")
    options = parser.parse_args()
    cards = len(nvml_devices())
    started = time.monotonic()
    verdict = all_reduce.run_trial(all_reduce._OPERATOR, cards)
    record = {
        "what": "the trial of the custom all-reduce",
        **provenance(options.commit),
        "cards": cards,
        **asdict(verdict),
        "seconds": round(time.monotonic() - started, 1),
    }
    print(json.dumps(record, indent=1))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "all_reduce.json").write_text(json.dumps(record, indent=1) + "\n")
    return 0 if cards > 1 and verdict == all_reduce.Verdict(False, "its sums were right") else 1


if __name__ == "__main__":
    sys.exit(main())
