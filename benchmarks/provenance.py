# SPDX-License-Identifier: Apache-2.0
"""What makes a result repeatable: the command, the commit, the date, the device and the software."""

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_REPOSITORY = Path(__file__).resolve().parents[1]


def provenance(commit: str) -> dict[str, Any]:
    """The facts, as they stand when this is called.

    Args:
        commit: what is measured.
    """
    import torch
    import triton

    from vllm.pre_ampere.devices import nvml_devices

    program = Path(sys.argv[0]).resolve().relative_to(_REPOSITORY)
    return {
        "command": " ".join(["python3", str(program), *sys.argv[1:]]),
        "commit": commit,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        # The GPU below an emulation, not the card that is emulated.
        "device": [f"{device.name} ({device.architecture})" for device in nvml_devices()],
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
    }
