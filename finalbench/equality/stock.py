"""Engine against stock: each timed token is stock's argmax, or within the tie bound of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from finalbench.equality.drafts import difference
from finalbench.equality.rows import Divergence, EqualityRow
from finalbench.metrics import is_valid
from finalbench.plan import Cell
from finalbench.record import RequestRecord, ScorePosition, ScoreRecord

# Logit units. A 16-bit type without a bound of its own gets that of bfloat16.
TIE_BOUNDS = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.25}
PLAIN = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def judge_stock(
    cell: Cell,
    baseline: Cell | None,
    outputs: Mapping[str, Sequence[RequestRecord]],
    scores: Mapping[str, ScoreRecord],
    *,
    dtype: str,
    self_rate: tuple[float | None, str | None] = (None, None),
) -> EqualityRow:
    """Judge every position of every timed output of `cell` by stock's stored scores.

    `scores` are keyed by request id. Without scores, outputs that equal stock's own timed outputs
    are identical; where they differ nothing is proven and the row is `not_judged`.
    """
    against = baseline.id if baseline is not None else "stock"
    fixed: dict[str, object] = {
        "tie_bound": tie_bound(dtype),
        "self_rate": self_rate[0],
        "self_rate_source": self_rate[1],
    }
    if not cell.sampling.greedy:
        return _row(cell, against, "not_applicable", reason="sampled: no single right token")
    if cell.draft.acceptance is not None:
        return _row(cell, against, "not_applicable", reason="synthetic acceptance changes tokens")
    if any(getattr(cell.sampling, name) != value for name, value in PLAIN.items()):
        return _row(cell, against, "not_applicable", reason="penalties change the logits")
    mine = [r for r in outputs.get(cell.id, ()) if is_valid(r)]
    if not mine:
        return _row(cell, against, "not_judged", reason="no valid output to judge")
    if any(not r.token_ids for r in mine):
        return _row(cell, against, "not_judged", reason="token ids were not served")
    same = _same_outputs(mine, outputs.get(baseline.id, ()) if baseline is not None else ())
    unscored = [r for r in mine if r.request_id not in scores]
    if unscored and same != len(mine):
        reason = f"{len(unscored)} of {len(mine)} outputs were not scored by stock"
        return _row(cell, against, "not_judged", reason=reason, same_outputs=same, **fixed)
    if unscored:
        return _row(
            cell,
            against,
            "identical",
            prompts=len(mine),
            positions=sum(len(r.token_ids) for r in mine),
            same_outputs=same,
            reason="by stock's own timed outputs; not scored",
            **fixed,
        )
    return _by_scores(cell, against, mine, scores, tie_bound(dtype), same, fixed)


def tie_bound(dtype: str) -> float:
    """Largest gap to stock's best logit that counts as a tie; the strict one for unknown types."""
    return TIE_BOUNDS.get(dtype, TIE_BOUNDS["float32"])


def gap(position: ScorePosition) -> float:
    """Stock's best logit less that of the engine's token; log-probabilities differ alike."""
    best = max(value for _, value in position.top)
    own = position.logit if position.logit is not None else position.logprob
    return best - own


def is_argmax(position: ScorePosition) -> bool:
    best = max(position.top, key=lambda entry: entry[1])
    return position.token == best[0]


def _by_scores(
    cell: Cell,
    against: str,
    mine: Sequence[RequestRecord],
    scores: Mapping[str, ScoreRecord],
    bound: float,
    same: int | None,
    fixed: Mapping[str, object],
) -> EqualityRow:
    positions, ties = 0, 0
    widest = 0.0
    found: list[Divergence] = []
    for request in mine:
        score = scores[request.request_id]
        if tuple(p.token for p in score.positions) != request.token_ids:
            return _row(
                cell,
                against,
                "not_judged",
                reason=f"the scores of request {request.request_id} are for other tokens",
                **fixed,
            )
        parted = False
        for index, position in enumerate(score.positions):
            positions += 1
            if is_argmax(position):
                continue
            distance = gap(position)
            widest = max(widest, distance)
            if distance <= bound:
                ties += 1
                continue
            if parted:
                continue
            parted = True
            found.append(
                Divergence(
                    request_id=request.request_id,
                    against_request_id=None,
                    block=request.block,
                    prompt_index=request.prompt_index,
                    position=index,
                    common_prefix=index,
                    expected=max(position.top, key=lambda entry: entry[1])[0],
                    got=position.token,
                    gap=distance,
                )
            )
    result = "divergent" if found else "ties" if ties else "identical"
    return _row(
        cell,
        against,
        result,
        prompts=len(mine),
        positions=positions,
        ties=ties,
        divergent_prompts=len(found),
        first=min(found, key=lambda d: (d.position, d.block, d.prompt_index)) if found else None,
        longest_common_prefix=max(d.common_prefix for d in found) if found else None,
        same_outputs=same,
        largest_gap=widest,
        reason=f"{len(found)} of {len(mine)} outputs hold a token stock would not choose"
        if found
        else None,
        **fixed,
    )


def _same_outputs(mine: Sequence[RequestRecord], stock: Sequence[RequestRecord]) -> int | None:
    """How many outputs equal stock's own timed output for the same prompt; None without those."""
    own = {r.prompt_digest: r for r in stock if is_valid(r) and r.token_ids}
    if not own:
        return None
    return sum(r.prompt_digest in own and difference(r, own[r.prompt_digest]) is None for r in mine)


def stock_self_rate(
    outputs: Sequence[RequestRecord], scores: Mapping[str, ScoreRecord]
) -> tuple[float | None, str | None]:
    """How often stock's timed token is not the argmax of its own scoring, or of its own repeat.

    By scores it is a rate per position; by repeats of a prompt in other blocks, a rate per output.
    """
    valid = [r for r in outputs if is_valid(r) and r.token_ids]
    judged = [p for r in valid if r.request_id in scores for p in scores[r.request_id].positions]
    if judged:
        return sum(not is_argmax(p) for p in judged) / len(judged), "per position, own scoring"
    pairs, differing = 0, 0
    first: dict[str, RequestRecord] = {}
    for request in valid:
        twin = first.setdefault(request.prompt_digest, request)
        if twin is not request:
            pairs += 1
            differing += difference(request, twin) is not None
    return (differing / pairs, "per output, repeats in other blocks") if pairs else (None, None)


def _row(cell: Cell, against: str, result: str, **fields: object) -> EqualityRow:
    return EqualityRow.model_validate(
        {"kind": "stock", "cell_id": cell.id, "against": against, "result": result, **fields}
    )
