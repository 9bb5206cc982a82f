"""What serving costs the baseline: over HTTP against its own loop without it, in the same run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from finalbench.aggregate.headline import base_cell
from finalbench.aggregate.rows import BareBlockRow, BareComparison, ResultRow
from finalbench.record import BareBlock, BareLoop, Run
from finalbench.stats import paired


def compare_bare(run: Run, rows: Sequence[ResultRow], baselines: Sequence[str]) -> BareComparison:
    """Only the declared baseline has a bare loop."""
    bare = run.bare_loop
    if bare is None:
        return _none("the bare loop was not timed")
    if bare.blocks:
        return _in_turns(bare)
    return _behind_a_block(bare, base_cell(rows, baselines[0]) if baselines else None)


def _in_turns(bare: BareLoop) -> BareComparison:
    """Each block's ratio from its turns, then one interval over blocks: a fresh pair of processes.

    Of one block alone the interval is that of its turns.
    """
    blocks = tuple(_block(block) for block in bare.blocks)
    shares = [block.share for block in blocks if block.share is not None]
    turns = [turn for block in bare.blocks for turn in block.turns]
    if not shares:
        return _none(bare.reason or "no turn gave a rate", blocks)
    low, high = blocks[0].low, blocks[0].high
    if len(shares) > 1:
        over = paired(shares, [1.0] * len(shares))
        low, high = over.low, over.high
    return BareComparison(
        bare_decode_tok_s=sum(t.bare_tokens for t in turns) / sum(t.bare_seconds for t in turns),
        http_decode_tok_s=sum(t.http_tokens for t in turns) / sum(t.http_seconds for t in turns),
        share=math.exp(sum(map(math.log, shares)) / len(shares)),
        low=low,
        high=high,
        blocks=blocks,
        same_tokens=all(turn.same_tokens for turn in turns),
        reason=None,
    )


def _block(block: BareBlock) -> BareBlockRow:
    http = [turn.http_tokens / turn.http_seconds for turn in block.turns]
    loop = [turn.bare_tokens / turn.bare_seconds for turn in block.turns]
    found = paired(http, loop) if http else None
    return BareBlockRow(
        block=block.block,
        turns=len(block.turns),
        share=found.ratio if found else None,
        low=found.low if found else None,
        high=found.high if found else None,
        reason=block.reason,
    )


def _behind_a_block(bare: BareLoop, row: ResultRow | None) -> BareComparison:
    """The loop was timed once: against the block it ran behind, for a machine that changes its
    speed must not look like HTTP's cost."""
    http = None if row is None else row.cell.decode_tok_s
    if row is not None and bare.after_block is not None:
        blocks = row.cell.decode_tok_s_blocks
        if bare.after_block < len(blocks) and blocks[bare.after_block] is not None:
            http = blocks[bare.after_block]
    value = bare.decode_tok_s
    reason: str | None = None
    if value is None:
        reason = bare.reason or "the bare loop gave no rate"
    elif http is None:
        reason = "the baseline has no decode rate"
    share = http / value if http is not None and value else None
    return BareComparison(
        bare_decode_tok_s=value, http_decode_tok_s=http, share=share, reason=reason
    )


def _none(reason: str, blocks: tuple[BareBlockRow, ...] = ()) -> BareComparison:
    return BareComparison(
        bare_decode_tok_s=None, http_decode_tok_s=None, share=None, reason=reason, blocks=blocks
    )
