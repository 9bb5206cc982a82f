"""The engine's own counters against what was received: lost output, or somebody else's traffic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from finalbench.metrics import count_tokens
from finalbench.record import RequestRecord, ScoreRecord, ServerRecord
from finalbench.validity.violation import Violation, violation

GENERATED = "generation_tokens"
DRAFTED = {
    "spec_decode_num_drafts": "drafts",
    "spec_decode_num_draft_tokens": "draft_tokens",
    "spec_decode_num_accepted_tokens": "accepted_tokens",
}


def check_engine_counts(
    servers: Sequence[ServerRecord],
    requests: Sequence[RequestRecord],
    scores: Sequence[ScoreRecord],
) -> Iterator[Violation]:
    """Warm-ups count. A scoring request may generate a token, a failed one some never seen."""
    for server in servers:
        before, after = server.counters_before, server.counters_after
        if server.purpose != "measure" or before is None or after is None:
            continue
        own = [r for r in requests if r.server_id == server.server_id]
        if not own:
            continue
        whole = all(r.status == "ok" for r in own)
        scored = sum(s.scorer_server_id == server.server_id for s in scores)
        if GENERATED in after:
            counted = round(after[GENERATED] - before.get(GENERATED, 0.0))
            received = sum(count_tokens(r)[1] or 0 for r in own)
            if counted < received or (whole and counted > received + scored):
                yield _fault(server, GENERATED, counted, received)
        if not whole or any(r.spec is None for r in own):
            continue
        for name, field in DRAFTED.items():
            if name in after:
                counted = round(after[name] - before.get(name, 0.0))
                reported = sum(getattr(r.spec, field) for r in own)
                if counted != reported:
                    yield _fault(server, name, counted, reported)


def _fault(server: ServerRecord, name: str, counted: int, received: int) -> Violation:
    return violation(
        "engine_count",
        f"server {server.server_id}: {name} rose by {counted}, the requests account for {received}",
        block=server.block,
        counted=counted,
        received=received,
    )
