"""Baseline and candidate -> verdict, with the formats that CI systems read."""

from __future__ import annotations

from finalbench.gate.formats import to_json, to_junit, to_markdown, write_step_summary
from finalbench.gate.judge import compare_cells, gate
from finalbench.gate.pin import Pin, Refresh, read_pin, refresh_pin, resolve
from finalbench.gate.rows import EXIT_CODES, Change, GateCell, GateResult

__all__ = [
    "EXIT_CODES",
    "Change",
    "GateCell",
    "GateResult",
    "Pin",
    "Refresh",
    "compare_cells",
    "gate",
    "read_pin",
    "refresh_pin",
    "resolve",
    "to_json",
    "to_junit",
    "to_markdown",
    "write_step_summary",
]
