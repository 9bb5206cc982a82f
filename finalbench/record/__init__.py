"""A run on disk: the models of what is stored, and the only writer and reader of it."""

from __future__ import annotations

from finalbench.record.journal import RunRecords, RunWriter, load_run, write_atomic
from finalbench.record.models import (
    SCHEMA_VERSION,
    BareLoop,
    Block,
    Cell,
    Classes,
    ClientCeiling,
    CounterWindow,
    Failure,
    Plan,
    PromptRecord,
    RequestRecord,
    Roll,
    Run,
    RunStatus,
    ScorePosition,
    ScoreRecord,
    ServerRecord,
    Spec,
    TelemetryRecord,
    Usage,
)

__all__ = [
    "SCHEMA_VERSION",
    "BareLoop",
    "Block",
    "Cell",
    "Classes",
    "ClientCeiling",
    "CounterWindow",
    "Failure",
    "Plan",
    "PromptRecord",
    "RequestRecord",
    "Roll",
    "Run",
    "RunRecords",
    "RunStatus",
    "RunWriter",
    "ScorePosition",
    "ScoreRecord",
    "ServerRecord",
    "Spec",
    "TelemetryRecord",
    "Usage",
    "load_run",
    "write_atomic",
]
