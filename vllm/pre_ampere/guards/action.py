# SPDX-License-Identifier: Apache-2.0
"""What a guard reports."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Action:
    """What one guard did.

    Attributes:
        guard: its name in docs/guards.md.
        did: what it changed.
        reason: why.
        remedy: what the user can do about it, or to have it otherwise.
    """

    guard: str
    did: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.did}: {self.reason}. {self.remedy}."
