# SPDX-License-Identifier: Apache-2.0
"""Put what pytest wrote of a run on a GPU beside the run's other results, in their form.

    python3 benchmarks/recorded_tests.py results/triton_turing_tests.xml results/triton_turing.json

The second file is a result of the same run; what makes it repeatable is taken from there. Writes the
first file's name with .json, and ends 1 where a test failed or none ran.
"""

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

FACTS = ("commit", "device", "versions")


def record(report: Path, same_run: Path) -> dict[str, object]:
    """Every test with whether it passed.

    Args:
        report: of pytest's --junit-xml.
        same_run: a result of the same commit on the same machine.
    """
    (suite,) = ElementTree.parse(report).getroot()
    facts = json.loads(same_run.read_text())
    cases = suite.findall("testcase")
    files = sorted({f"{case.get('classname', '').replace('.', '/')}.py" for case in cases})
    passed = {
        f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}": not any(
            part.tag in ("failure", "error", "skipped") for part in case
        )
        for case in cases
    }
    return {
        "what": "tests that need a GPU, with kernels lowered for sm_75 and sm_70",
        "command": f"python3 -m pytest -m gpu {' '.join(files)}",
        **{fact: facts[fact] for fact in FACTS},
        "date": suite.get("timestamp", "")[:19] + "+00:00",
        "seconds": float(suite.get("time", 0)),
        "passed": passed,
    }


def main() -> int:
    report, same_run = (Path(argument) for argument in sys.argv[1:])
    result = record(report, same_run)
    report.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    passed = result["passed"]
    assert isinstance(passed, dict)
    print(f"{sum(passed.values())} of {len(passed)} tests passed")
    return 0 if passed and all(passed.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
