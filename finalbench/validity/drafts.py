"""Draft counters: the identities that any true record of speculation satisfies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from finalbench.metrics import CellRow, count_tokens, is_valid
from finalbench.plan import Cell
from finalbench.record import RequestRecord, Spec
from finalbench.validity.violation import Violation, violation

LOW_ACCEPTANCE = 1.02


def check_drafts(
    cell: Cell, row: CellRow, requests: Sequence[RequestRecord]
) -> Iterator[Violation]:
    for request in requests:
        tokens = count_tokens(request)[1]
        if not is_valid(request) or request.spec is None or tokens is None:
            continue
        for fault, numbers in spec_faults(cell, request.spec, tokens):
            yield violation(
                "draft_identity",
                f"request {request.request_id}: {fault}",
                cell_id=cell.id,
                block=request.block,
                **numbers,
            )
    if cell.draft.method == "none" or row.counts.ok == 0:
        return
    length = row.acceptance_length
    if length is None:
        reason = row.reasons.get("acceptance_length", "unknown")
        yield violation("acceptance_unknown", f"acceptance length: {reason}", cell_id=cell.id)
    elif length < LOW_ACCEPTANCE:
        yield violation(
            "acceptance_low",
            f"acceptance length {length:.3f}: drafts cost time and give nothing",
            cell_id=cell.id,
            acceptance_length=length,
        )


def spec_faults(cell: Cell, spec: Spec, tokens: int) -> Iterator[tuple[str, dict[str, int]]]:
    """Each broken identity as a sentence with its numbers. `tokens` is what the request gave."""
    method, k = cell.draft.method, cell.draft.k
    if method == "none":
        if spec.drafts or spec.draft_tokens or spec.accepted_tokens:
            yield (
                "the cell has no drafts, but the server counted some",
                {"drafts": spec.drafts, "draft_tokens": spec.draft_tokens},
            )
        return
    width = 8 if k == "auto" else int(k)
    if not 0 <= spec.accepted_tokens <= spec.draft_tokens:
        yield (
            f"{spec.accepted_tokens} accepted of {spec.draft_tokens} proposed",
            {"accepted": spec.accepted_tokens, "proposed": spec.draft_tokens},
        )
    # A prompt lookup may find nothing and `auto` may choose none: such a round proposes no token.
    least = 0 if method == "ngram" or k == "auto" else spec.drafts
    if not least <= spec.draft_tokens <= spec.drafts * width:
        yield (
            f"{spec.draft_tokens} proposed in {spec.drafts} rounds of up to {width}",
            {"proposed": spec.draft_tokens, "rounds": spec.drafts, "k": width},
        )
    by_position = spec.accepted_per_pos
    if by_position or spec.accepted_tokens:
        if sum(by_position) != spec.accepted_tokens:
            yield (
                f"positions add up to {sum(by_position)}, accepted are {spec.accepted_tokens}",
                {"positions": sum(by_position), "accepted": spec.accepted_tokens},
            )
        falling = [spec.drafts, *by_position]
        if any(late > early for early, late in pairwise(falling)):
            yield (
                f"accepted by position {list(by_position)} of {spec.drafts} rounds must not rise",
                {"rounds": spec.drafts},
            )
        if len(by_position) > width:
            yield (
                f"{len(by_position)} positions where k is {width}",
                {"positions": len(by_position), "k": width},
            )
    # The prompt gives one token and each round one more than it accepted; the last round may be
    # cut. Rounds without a proposal are not counted as drafts, so more tokens prove nothing.
    least = 1 + spec.drafts + spec.accepted_tokens - width
    if tokens < least:
        yield (
            f"{tokens} tokens, but {spec.drafts} rounds that accepted {spec.accepted_tokens} give "
            f"at least {least}",
            {"tokens": tokens, "least": least},
        )
    if method == "mtp" and isinstance(k, int):
        most = 1 + spec.drafts + spec.accepted_tokens
        if tokens > most:
            yield (
                f"{tokens} tokens, but {spec.drafts} rounds that accepted {spec.accepted_tokens} "
                f"give at most {most}",
                {"tokens": tokens, "most": most},
            )
