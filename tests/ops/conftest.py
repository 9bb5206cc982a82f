"""Kernels run under Triton's interpreter here; on a GPU machine tests/gpu runs them compiled."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that a test imports late are defined for the interpreter too."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
