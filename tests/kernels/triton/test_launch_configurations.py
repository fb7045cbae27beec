# SPDX-License-Identifier: Apache-2.0
"""The launch table: complete, fit for upstream's kernels, and in force once pinned."""

import json
import subprocess
import sys

import pytest
import triton
import triton.language as tl

from vllm.pre_ampere.kernels.triton import launch_configurations
from vllm.pre_ampere.kernels.triton.launch_configurations import Launch


@triton.heuristics({"EVEN": lambda arguments: arguments["N"] % 2 == 0})
@triton.autotune(
    configs=[triton.Config({"BLOCK": 16 * w}, num_warps=w, num_stages=3) for w in (1, 2)], key=["N"]
)
@triton.jit
def _tuned(x, N, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), N)


@triton.jit
def _plain(x):
    tl.store(x, 1)


def test_a_tuned_kernel_keeps_one_configuration() -> None:
    for _ in range(2):
        launch_configurations.restrict(_tuned, Launch(8, "a test", {"BLOCK": 64}))
        [config] = _tuned.fn.configs
        assert config.kwargs == {"BLOCK": 64}
        assert (config.num_warps, config.num_stages) == (8, 1)


def test_a_kernel_of_another_release_is_not_pinned() -> None:
    with pytest.raises(ValueError, match=r"_tuned is tuned over \(BLOCK\).* sets \(BK, BV\)"):
        launch_configurations.restrict(_tuned, Launch(8, "a test", {"BK": 64, "BV": 32}))
    with pytest.raises(ValueError, match="is not autotuned"):
        launch_configurations.restrict(_plain, Launch(8, "a test"))


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="no launch configuration for chunk_x; there is one for"):
        launch_configurations.pin("sm75", ["chunk_o", "chunk_x"])


def test_kernels_that_upstream_launches_in_one_way_are_passed_over() -> None:
    assert launch_configurations.pin("sm70", launch_configurations.LAUNCHED_AS_ONE) == {}


def test_the_table_is_complete_and_says_why() -> None:
    for lowering in ("sm75 tensor cores", "sm75", "sm70"):
        table = launch_configurations.TABLE[lowering]
        assert table.keys() == launch_configurations.KERNELS.keys()
        assert all(launch.reason and launch.num_warps in (1, 2, 4, 8) for launch in table.values())


_PIN_UPSTREAM = """
import json
from vllm.pre_ampere.preflight import card
card.pose_as((7, 5))
from vllm.pre_ampere.kernels.triton import launch_configurations as table
before = {name: table.autotuner(table.load(name)).configs for name in table.KERNELS}
found = {}
for lowering in table.TABLE:
    table.pin(lowering)
    for name in table.KERNELS:
        [config] = table.autotuner(table.load(name)).configs
        among = any(c.kwargs == config.kwargs and c.num_warps == config.num_warps
                    for c in before[name])
        found[f"{lowering}, {name}"] = (among, len(before[name]))
print(json.dumps(found))
"""


def test_upstreams_kernels_take_what_the_table_says() -> None:
    """Each pinned configuration is one of those that upstream would have tried on the card."""
    run = subprocess.run(
        [sys.executable, "-c", _PIN_UPSTREAM], capture_output=True, text=True, check=True
    )
    found = json.loads(run.stdout.splitlines()[-1])
    assert len(found) == 3 * len(launch_configurations.KERNELS)
    assert all(among for among, _ in found.values()), found
    assert found["sm75, chunk_o"][1] == 36
