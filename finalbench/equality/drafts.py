"""Drafts on against drafts off: the same tokens, bit for bit, greedy or sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from finalbench.equality.rows import Divergence, EqualityRow, first_difference
from finalbench.metrics import is_valid
from finalbench.plan import Cell
from finalbench.record import RequestRecord

Key = tuple[str, int | None]


def judge_drafts(
    cell: Cell,
    undrafted: Cell | None,
    outputs: Mapping[str, Sequence[RequestRecord]],
) -> EqualityRow:
    """Compare the timed outputs of a drafting cell with its undrafted twin of the same arm."""
    if cell.draft.acceptance is not None:
        return _row(cell, "none", "not_applicable", reason="synthetic acceptance changes tokens")
    if undrafted is None:
        return _row(cell, "none", "not_judged", reason="the plan has no cell without drafts")
    mine = [r for r in outputs.get(cell.id, ()) if is_valid(r)]
    theirs = [r for r in outputs.get(undrafted.id, ()) if is_valid(r)]
    if not mine or not theirs:
        return _row(cell, undrafted.id, "not_judged", reason="no valid output to compare")
    if any(not r.token_ids for r in (*mine, *theirs)):
        return _row(cell, undrafted.id, "not_judged", reason="token ids were not served")
    if not cell.sampling.greedy and any(r.seed is None for r in (*mine, *theirs)):
        return _row(cell, undrafted.id, "not_judged", reason="sampled without a known seed")
    twins = _by_key(theirs)
    judged, unpaired, positions = 0, 0, 0
    found: list[Divergence] = []
    for request in mine:
        candidates = twins.get((request.prompt_digest, request.seed))
        if not candidates:
            unpaired += 1
            continue
        judged += 1
        positions += len(request.token_ids)
        # Every block's twin must agree: the engine is exact, so a restart changes nothing.
        parted = [d for twin in candidates if (d := difference(request, twin)) is not None]
        found += parted[:1]
    if found:
        return _row(
            cell,
            undrafted.id,
            "divergent",
            prompts=judged,
            positions=positions,
            divergent_prompts=len(found),
            unpaired=unpaired,
            first=min(found, key=lambda d: (d.position, d.block, d.prompt_index)),
            longest_common_prefix=max(d.common_prefix for d in found),
            reason=f"{len(found)} of {judged} outputs differ from those without drafts",
        )
    if unpaired:
        reason = f"{unpaired} of {len(mine)} outputs have no counterpart without drafts"
        return _row(
            cell,
            undrafted.id,
            "not_judged",
            prompts=judged,
            positions=positions,
            unpaired=unpaired,
            reason=reason,
        )
    return _row(cell, undrafted.id, "identical", prompts=judged, positions=positions)


def difference(request: RequestRecord, twin: RequestRecord) -> Divergence | None:
    at = first_difference(request.token_ids, twin.token_ids)
    if at is None:
        return None
    return Divergence(
        request_id=request.request_id,
        against_request_id=twin.request_id,
        block=request.block,
        prompt_index=request.prompt_index,
        position=at,
        common_prefix=at,
        expected=twin.token_ids[at] if at < len(twin.token_ids) else None,
        got=request.token_ids[at] if at < len(request.token_ids) else None,
    )


def _by_key(requests: Sequence[RequestRecord]) -> dict[Key, list[RequestRecord]]:
    grouped: dict[Key, list[RequestRecord]] = {}
    for request in requests:
        grouped.setdefault((request.prompt_digest, request.seed), []).append(request)
    return grouped


def _row(cell: Cell, against: str, result: str, **fields: object) -> EqualityRow:
    return EqualityRow.model_validate(
        {"kind": "drafts", "cell_id": cell.id, "against": against, "result": result, **fields}
    )
