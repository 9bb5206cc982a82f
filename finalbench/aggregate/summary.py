"""The document of `run --json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finalbench.aggregate.analysis import analyse
from finalbench.aggregate.rows import Analysis, ResultRow

SCHEMA_VERSION = 1
HEADLINE_FIELDS = (
    "model",
    "arm",
    "against",
    "decode_tok_s",
    "against_decode_tok_s",
    "ratio",
    "ratio_interval",
    "verdict",
    "equality",
    "acceptance_length",
    "bandwidth_share",
    "weights",
    "acceptance",
    "setting",
    "blocks",
    "detectable",
    "reasons",
)


def summary(run_dir: Path | Analysis) -> dict[str, Any]:
    """What a run found, as plain JSON values."""
    found = run_dir if isinstance(run_dir, Analysis) else analyse(run_dir)
    head = found.headline.model_dump(mode="json")
    return {
        "schema_version": SCHEMA_VERSION,
        "run": found.run_id,
        "status": found.status,
        "headline": {name: head[name] for name in HEADLINE_FIELDS},
        "bare_loop": found.bare_loop.model_dump(mode="json"),
        "aa": [a.model_dump(mode="json") for a in found.aa],
        "cells": [_cell(row) for row in found.rows],
        "spread": [s.model_dump(mode="json") for s in found.spread],
        "violations": [v.model_dump(mode="json") for v in found.violations],
        "failures": [f.model_dump(mode="json") for f in found.failures],
    }


def _cell(row: ResultRow) -> dict[str, Any]:
    cell, comparison = row.cell, row.comparison
    return {
        "id": cell.id,
        "model": cell.model,
        "arm": cell.arm,
        "axis": cell.axis,
        "seq_len": cell.seq_len,
        "output_len": cell.output_len,
        "sampling": cell.sampling,
        "draft": cell.draft,
        "concurrency": cell.concurrency,
        "cache": cell.cache,
        "cache_hit_share": cell.cache_hit_share,
        "runtime": cell.runtime,
        "requests": cell.counts.model_dump(mode="json"),
        "valid": row.valid,
        "decode_tok_s": cell.decode_tok_s,
        "decode_tok_s_blocks": list(cell.decode_tok_s_blocks),
        "decode_tok_s_interval": cell.decode_tok_s_interval and list(cell.decode_tok_s_interval),
        "e2e_tok_s": cell.e2e_tok_s,
        "steady_tok_s": cell.steady_tok_s,
        "ttft_s": cell.latencies["ttft_s"].mean,
        "acceptance_length": cell.acceptance_length,
        "accepted_per_position": list(cell.acceptance.per_position),
        "bandwidth_share": cell.bandwidth_share,
        "ratio": None if comparison is None else comparison.ratio,
        "ratio_interval": None
        if comparison is None or comparison.ratio_interval is None
        else list(comparison.ratio_interval),
        "against": None if comparison is None else comparison.against,
        "verdict": None if comparison is None else comparison.verdict.value,
        **row.marks.model_dump(mode="json"),
        "violations": [v.rule for v in row.violations],
        "reasons": cell.reasons,
    }
