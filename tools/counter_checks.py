# SPDX-License-Identifier: Apache-2.0
"""Revert each fix alone, and require exactly the tests that hold it to fail.

A test that passes whether or not the fix is there proves nothing, and one that fails for another
fix's sake misleads. Each reversal is made in a copy of the package; the working tree is not touched.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parent.parent
GATES = "tests/config/test_sm70_gates_any_visible_device.py"
GRAPH = "tests/compile/test_sm70_decode_graph.py"
VERIFY = "tests/v1/spec_decode/test_dflash2.py"
WRAPPER = "tests/model_executor/layers/test_gdn_full_forward_device_gate.py"
PREFILL = "tests/model_executor/layers/test_gdn_prefill_backend_resolve.py"
TEST_FILES = (GATES, GRAPH, VERIFY, WRAPPER, PREFILL)


@dataclass(frozen=True)
class Reversal:
    """One fix taken back.

    Attributes:
        name: what is taken back.
        file: the source file, from the repository's root.
        fixed, reverted: the text as it is, which stands there once, and what replaces it.
        fails: the tests that must fail, by file and id; all others must pass.
    """

    name: str
    file: str
    fixed: str
    reverted: str
    fails: frozenset[str]


def ids(file: str, *names: str) -> frozenset[str]:
    """Tests of one file, as pytest's report names them."""
    return frozenset(f"{Path(file).stem}::{name}" for name in names)


INVARIANT = "test_with_batch_invariance_speculation_changes_no_rounding"
FOLLOW = "test_sm70_baseline_defaults_follow_any_visible_device"
REVERSALS = (
    Reversal(
        "the baseline's gate back on exactly (7, 0)",
        "vllm/pre_ampere/baseline.py",
        "return any_pre_ampere(devices)",
        "return any(device.capability == (7, 0) for device in devices)",
        ids(
            GATES,
            f"{FOLLOW}[homogeneous-sm75-is-pre-ampere]",
            f"{FOLLOW}[two-turing]",
            f"{FOLLOW}[xavier]",
            f"{FOLLOW}[ampere-then-turing]",
            f"{FOLLOW}[turing-then-ampere]",
            "test_one_old_card_anywhere_is_enough",
        ),
    ),
    Reversal(
        "device 0 in place of the current one",
        "vllm/pre_ampere/devices.py",
        "return visible[torch.accelerator.current_device_index()]",
        "return visible[0]",
        ids(WRAPPER, "test_mixed_node_answers_for_the_current_device"),
    ),
    Reversal(
        "sm75 admitted to flashqla",
        "vllm/pre_ampere/kernels/registry.py",
        "shared_memory={(128, 128): 86016}",
        "shared_memory={(128, 128): 65536}",
        ids(
            PREFILL,
            "test_turing_is_refused_flashqla_with_both_numbers[Quadro RTX 8000]",
            "test_turing_is_refused_flashqla_with_both_numbers[Tesla T4]",
            "test_the_reason_is_a_warning_that_ends_with_what_is_used",
            "test_asking_by_name_for_what_the_card_cannot_run_is_an_error",
        ),
    ),
    Reversal(
        "two launches in the speculative branch",
        "vllm/pre_ampere/gdn/core.py",
        "        self._recurrent_update(mixed_qkv, b, a, out, state, slots, query_start_loc, accepted)",
        "        layer = self._layer\n"
        "        heads = (layer.num_k_heads // layer.tp_size, layer.head_k_dim, layer.head_v_dim)\n"
        "        gates = (a, b, layer.A_log, layer.dt_bias)\n"
        "        self._kernels.post_convolution(mixed_qkv, *gates, *heads)\n"
        "        self._recurrent_update(mixed_qkv, b, a, out, state, slots, query_start_loc, accepted)",
        ids(VERIFY, "test_verification_is_one_convolution_and_one_fused_routine"),
    ),
    Reversal(
        "the wrapper armed on any device",
        "vllm/pre_ampere/gdn/full_forward.py",
        "armed = (eager and device.is_volta) if forced is None else forced",
        "armed = eager if forced is None else forced",
        ids(
            WRAPPER,
            "test_automatic_arming_is_voltas[turing]",
            "test_automatic_arming_is_voltas[ampere]",
            "test_mixed_node_answers_for_the_current_device",
            f"{INVARIANT}[turing-k3]",
            f"{INVARIANT}[turing-k0]",
            f"{INVARIANT}[ampere-k3]",
            f"{INVARIANT}[ampere-k0]",
            "test_a_rank_writes_what_it_is_and_what_it_armed",
        ),
    ),
)


def failed_tests(reversal: Reversal | None) -> frozenset[str]:
    """Run the tests over a copy of the package, with one fix reverted or none.

    Raises:
        RuntimeError: the fixed text does not stand exactly once, or pytest itself broke.
    """
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory)
        package = Path("vllm") / "pre_ampere"
        shutil.copytree(REPOSITORY / package, tree / package)
        if reversal is not None:
            source = tree / reversal.file
            text = source.read_text()
            if text.count(reversal.fixed) != 1:
                raise RuntimeError(
                    f"{reversal.file} holds {text.count(reversal.fixed)} times, not once: "
                    f"{reversal.fixed!r}"
                )
            source.write_text(text.replace(reversal.fixed, reversal.reverted))
        report = tree / "report.xml"
        run = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", "-p", "counter_check_tree"),
                *("-p", "no:cacheprovider", f"--junitxml={report}", *TEST_FILES),
            ],
            cwd=REPOSITORY,
            env={
                **os.environ,
                "COUNTER_CHECK_TREE": str(tree),
                "PYTHONPATH": str(REPOSITORY / "tools"),
                "OMP_NUM_THREADS": "1",
            },
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode not in (0, 1):
            raise RuntimeError(f"pytest ended with {run.returncode}\n{run.stdout}\n{run.stderr}")
        cases = ElementTree.parse(report).iter("testcase")
        return frozenset(
            f"{case.get('classname', '').rsplit('.', 1)[-1]}::{case.get('name')}"
            for case in cases
            if case.find("failure") is not None or case.find("error") is not None
        )


def main() -> None:
    """Print a row a reversal; exit 1 unless each failed as it should."""
    console = Console()
    table = Table("reverted", "failed", "should fail but passed", "failed but should not")
    right = 0
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        outcomes = pool.map(failed_tests, (None, *REVERSALS))
        for reversal, failed in zip((None, *REVERSALS), outcomes, strict=True):
            expected = frozenset() if reversal is None else reversal.fails
            missing, unexpected = sorted(expected - failed), sorted(failed - expected)
            right += not missing and not unexpected
            name = "nothing" if reversal is None else reversal.name
            table.add_row(name, str(len(failed)), "\n".join(missing), "\n".join(unexpected))
    console.print(table)
    total = len(REVERSALS) + 1
    print(f"{right} passed, {total - right} failed")
    sys.exit(right != total)


if __name__ == "__main__":
    main()
