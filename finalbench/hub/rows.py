"""Tables of the results dataset: one row a board place, a cell, a request. Pure."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any

from finalbench.aggregate import Analysis, leaderboard, summary
from finalbench.record import RunRecords
from finalbench.report import phrases, view
from finalbench.report.run_view import marks_of

CONFIGS = ("leaderboard", "cells", "requests")


def leaderboard_rows(analysis: Analysis) -> list[dict[str, Any]]:
    """Each row repeats its classes, and the shown rate carries them in words."""
    found = []
    for board in leaderboard([analysis]):
        for place in board.rows:
            cell, comparison = place.row.cell, place.row.comparison
            marks = marks_of(place.row)
            interval = cell.decode_tok_s_interval or (None, None)
            ratio = comparison.ratio_interval if comparison else None
            found.append(
                {
                    "run": analysis.run_id,
                    "model": analysis.model,
                    "engine": cell.arm,
                    "hardware": analysis.hardware,
                    "scenario": analysis.scenario,
                    "scenario_hash": analysis.scenario_hash,
                    "dtype": analysis.dtype,
                    "setting": place.row.label,
                    "position": place.position,
                    "tied": place.tied,
                    "not_ranked_because": place.reason,
                    "decode_tok_s": place.row.value,
                    "decode_tok_s_low": interval[0],
                    "decode_tok_s_high": interval[1],
                    "shown": _shown(place.row.value, marks),
                    "against": comparison.against if comparison else None,
                    "ratio": comparison.ratio if comparison else None,
                    "ratio_low": ratio[0] if ratio else None,
                    "ratio_high": ratio[1] if ratio else None,
                    "verdict": comparison.verdict.value if comparison else None,
                    "acceptance_length": cell.acceptance_length,
                    "bandwidth_share": cell.bandwidth_share,
                    **_classes(marks),
                }
            )
    return found


def cell_rows(analysis: Analysis) -> list[dict[str, Any]]:
    """The cells of `run --json`, flat."""
    found = []
    for cell, row in zip(summary(analysis)["cells"], analysis.rows, strict=True):
        marks = marks_of(row)
        draft = cell.pop("draft")
        requests = cell.pop("requests")
        interval = cell.pop("decode_tok_s_interval") or [None, None]
        ratio = cell.pop("ratio_interval") or [None, None]
        for name in ("weights", "acceptance", "equality", "equality_reason", "status", "reasons"):
            cell.pop(name, None)
        found.append(
            {
                "run": analysis.run_id,
                "hardware": analysis.hardware,
                **cell,
                "draft_method": draft.get("method"),
                "draft_k": str(draft.get("k")),
                "draft_chance": draft.get("acceptance"),
                "requests": requests.get("recorded"),
                "requests_ok": requests.get("ok"),
                "decode_tok_s_low": interval[0],
                "decode_tok_s_high": interval[1],
                "ratio_low": ratio[0],
                "ratio_high": ratio[1],
                "shown": _shown(row.value, marks),
                **_classes(marks),
            }
        )
    return found


def request_rows(records: RunRecords, analysis: Analysis) -> list[dict[str, Any]]:
    """Timings relative to the run's first scheduled send; neither prompts nor outputs."""
    marks = {row.cell.id: marks_of(row) for row in analysis.rows}
    start = min((request.scheduled_ns for request in records.requests), default=0)
    found = []
    for request in records.requests:
        chunks = request.chunks
        found.append(
            {
                "run": records.run.run_id,
                "request": request.request_id,
                "cell": request.cell_id,
                "engine": request.arm,
                "block": request.block,
                "roll": request.roll,
                "warmup": request.warmup,
                "domain": request.domain,
                "prompt_digest": request.prompt_digest,
                "prompt_tokens": request.prompt_tokens,
                "scheduled_s": (request.scheduled_ns - start) * 1e-9,
                "sent_s": (request.sent_ns - start) * 1e-9,
                "first_chunk_s": (chunks[0][0] - start) * 1e-9 if chunks else None,
                "last_chunk_s": (chunks[-1][0] - start) * 1e-9 if chunks else None,
                "first_chunk_tokens": request.first_chunk_tokens,
                "tokens": sum(count for _, count in chunks),
                "token_source": request.token_source,
                "finish_reason": request.finish_reason,
                "status": request.status,
                "error": request.error,
                **_classes(marks[request.cell_id], prefix="cell_"),
            }
        )
    return found


def packed(rows: Sequence[dict[str, Any]]) -> tuple[str, bytes]:
    """(extension, content): parquet where pyarrow is installed, else JSON lines."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        lines = [json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n" for row in rows]
        return "jsonl", "".join(lines).encode()
    names = list(rows[0]) if rows else ["run"]
    columns = {name: [row[name] for row in rows] for name in names}
    out = io.BytesIO()
    pq.write_table(pa.table(columns), out, compression="zstd")
    return "parquet", out.getvalue()


def _classes(marks: view.Marks, prefix: str = "") -> dict[str, str]:
    return {
        f"{prefix}weights": f"{marks.weights} weights",
        f"{prefix}acceptance": f"{marks.acceptance} acceptance",
        f"{prefix}equality": marks.equality,
        f"{prefix}claim_status": phrases.STATUS_WORDS[marks.status],
    }


def _shown(value: float | None, marks: view.Marks) -> str:
    if value is None:
        return phrases.MISSING
    return f"{phrases.tok_s(value)} tok/s ({phrases.caution(marks) or 'verified'})"
