"""What became of the drafts: length, rate and share by position, pooled over requests."""

from __future__ import annotations

from collections.abc import Iterable

from finalbench.record import Spec
from finalbench.scenario import Frozen


class Acceptance(Frozen):
    """`length` = 1 + accepted / drafts; `per_position[i]` = rounds that accepted draft i / drafts.

    All values are null, with a reason, when no counter was served or no draft was made.
    """

    length: float | None
    rate: float | None = None
    per_position: tuple[float, ...] = ()
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    reason: str | None = None


def acceptance(specs: Iterable[Spec | None]) -> Acceptance:
    """Pool requests by verify rounds; a request without counters makes the whole unknown."""
    known: list[Spec] = []
    for spec in specs:
        if spec is None:
            return Acceptance(length=None, reason="a request has no draft counters")
        known.append(spec)
    drafts = sum(s.drafts for s in known)
    proposed = sum(s.draft_tokens for s in known)
    accepted = sum(s.accepted_tokens for s in known)
    if drafts == 0:
        return Acceptance(length=None, reason="no verify round took place")
    width = max(len(s.accepted_per_pos) for s in known)
    by_position = [
        sum(s.accepted_per_pos[i] for s in known if i < len(s.accepted_per_pos))
        for i in range(width)
    ]
    return Acceptance(
        length=1 + accepted / drafts,
        rate=accepted / proposed if proposed else None,
        per_position=tuple(n / drafts for n in by_position),
        drafts=drafts,
        draft_tokens=proposed,
        accepted_tokens=accepted,
        reason=None if proposed else "no token was proposed",
    )
