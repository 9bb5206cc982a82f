"""Every error a user can meet, each with its exit code.

FinalbenchError            70  a bug, when nothing more exact applies
├─ GateFailed               1  regression, or arms whose outputs diverge
├─ UsageError               2  scenario, option or override is invalid
├─ EnvironmentMissing       3  no container engine, GPU, checkpoint, image, Hub or token
├─ RunIncomplete            4  the run finished, some cells failed or are invalid
├─ BundleBroken             5  a bundle is damaged or not comparable
├─ Inconclusive             6  the measurement cannot tell
└─ Interrupted            130  stopped by the user; the partial run is kept
"""

from __future__ import annotations


class FinalbenchError(Exception):
    """Base of the tree. `hint` says what to do about it, where something can be done."""

    exit_code = 70

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class GateFailed(FinalbenchError):
    exit_code = 1


class UsageError(FinalbenchError):
    exit_code = 2


class EnvironmentMissing(FinalbenchError):
    exit_code = 3


class RunIncomplete(FinalbenchError):
    exit_code = 4


class BundleBroken(FinalbenchError):
    exit_code = 5


class Inconclusive(FinalbenchError):
    exit_code = 6


class Interrupted(FinalbenchError):
    exit_code = 130
