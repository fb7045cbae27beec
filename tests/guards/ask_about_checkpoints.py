# SPDX-License-Identifier: Apache-2.0
"""What the guard and the doctor say of checkpoints, in a process that emulates a card.

Reads cases from standard input, one JSON object with `folder` and `options` each, and prints one JSON
line a case. A process of its own because the platform is chosen once a process, by the environment.
"""

import json
import sys
from pathlib import Path
from typing import Any

from vllm.pre_ampere.cli import engine_options
from vllm.pre_ampere.cli.checkpoint import read_checkpoint
from vllm.pre_ampere.cli.diagnosis import serving


def ask(case: dict[str, Any]) -> dict[str, Any]:
    options = ["--load-format", "dummy", "--max-model-len", "256", "--skip-tokenizer-init"]
    options += case["options"]
    try:
        engine_options.parse(case["folder"], options).create_engine_config()
        guard = None
    except ValueError as error:
        guard = engine_options.first_reason(error)
    doctor = serving.look(read_checkpoint(Path(case["folder"])), options)
    products = [vars(each) for each in doctor.choices if each.subject == "matrix products"]
    return {"guard": guard, "doctor": doctor.refusal, "products": products}


def main() -> None:
    for line in sys.stdin:
        print("RESULT " + json.dumps(ask(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
