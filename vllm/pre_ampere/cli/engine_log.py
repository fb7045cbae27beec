# SPDX-License-Identifier: Apache-2.0
"""Why an engine ended, from what it and its processes logged."""

import re

_LINES_SHOWN = 25
# The last line of a traceback, alone or behind the prefix of vLLM's log.
_RAISED = re.compile(r"(?:^|\] )((?:\w+\.)*\w*(?:Error|Exception): .+)", re.MULTILINE)


def why(log: str) -> str:
    """The first error in a log and its last lines, to stand after a colon.

    The process that failed writes before those that wait for it, so the first error is the cause.
    """
    raised = _RAISED.search(log)
    last = "\n".join(log.splitlines()[-_LINES_SHOWN:])
    return f"{raised[1]}\n\nThe log ends with:\n{last}" if raised else f"\n{last}"
