# SPDX-License-Identifier: Apache-2.0
"""A user reads the error of the process that failed, not only of those that waited for it."""

from hypothesis import given
from hypothesis import strategies as st

from vllm.pre_ampere.cli.engine_log import why

# As three processes of vLLM 0.32 write it, shortened.
LOG = """\
INFO 11-30 18:47:01 [api_utils.py:286] non-default args
(VllmWorker-0 pid=2) ERROR 11-30 18:47:02 [multiproc_executor.py:953]     raise ValueError(
(VllmWorker-0 pid=2) ERROR 11-30 18:47:02 [multiproc_executor.py:953] ValueError: 9.5 of 13.0 GiB
(EngineCore pid=1) ERROR 11-30 18:47:03 [core.py:1510] Exception: WorkerProc initialization failed
Traceback (most recent call last):
RuntimeError: Engine core initialization failed. See root cause above.
"""


def test_the_first_error_is_named_first() -> None:
    reason = why(LOG)
    assert reason.splitlines()[0] == "ValueError: 9.5 of 13.0 GiB"
    assert reason.endswith("RuntimeError: Engine core initialization failed. See root cause above.")


def test_an_error_of_a_library_keeps_its_module() -> None:
    log = "Traceback (most recent call last):\ntorch.OutOfMemoryError: no memory\n"
    assert why(log).splitlines()[0] == "torch.OutOfMemoryError: no memory"


@given(st.lists(st.from_regex(r"[a-z ]{0,20}", fullmatch=True), max_size=60))
def test_without_an_error_the_last_lines_are_shown(lines: list[str]) -> None:
    log = "\n".join(lines)
    assert why(log) == "\n" + "\n".join(log.splitlines()[-25:])
