"""How many blocks a wanted effect needs, from a stated or a measured spread."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import stdev

from finalbench.aggregate.analysis import analyse
from finalbench.aggregate.headline import base_cell
from finalbench.errors import UsageError
from finalbench.scenario import Frozen
from finalbench.stats import blocks_to_see, detectable_effect

ASSUMED_CV = 0.01


class SampleSize(Frozen):
    """`blocks` find a relative `effect` four times out of five, two-sided at 5 %.

    `sd_log` is the spread of the log ratio of two arms in one block; `source` says whence.
    `given_detectable` is what the plan's own `given_blocks` find; None when there is only one.
    """

    effect: float
    sd_log: float
    source: str
    blocks: int
    given_blocks: int
    given_detectable: float | None


def sample_size(
    effect: float, given_blocks: int, *, cv: float | None = None, measured: Path | None = None
) -> SampleSize:
    """From the run-to-run spread of one arm (`cv`), or from the blocks of a run.

    Errors: `UsageError` for both, for an effect that no number of blocks shows, or for a run whose
    base cell has fewer than three pairs of blocks.
    """
    if cv is not None and measured is not None:
        raise UsageError("state the spread or name a run that measured it, not both")
    if measured is not None:
        sd_log, source = _measured(measured)
    else:
        spread = ASSUMED_CV if cv is None else cv
        sd_log = spread * math.sqrt(2)
        source = f"a run-to-run spread of {spread:.2%}, {'assumed' if cv is None else 'as stated'}"
    try:
        blocks = blocks_to_see(effect, sd_log)
    except ValueError as error:
        raise UsageError(str(error)) from error
    seen = detectable_effect(sd_log, given_blocks) if given_blocks > 1 else None
    return SampleSize(
        effect=effect,
        sd_log=sd_log,
        source=source,
        blocks=blocks,
        given_blocks=given_blocks,
        given_detectable=seen,
    )


def _measured(run_dir: Path) -> tuple[float, str]:
    """Standard deviation of the log ratios of the base cell's blocks."""
    analysis = analyse(run_dir)
    row = base_cell(analysis.rows, analysis.headline.arm)
    comparison = row.comparison if row is not None else None
    if comparison is None or len(comparison.pairs) < 3:
        found = 0 if comparison is None else len(comparison.pairs)
        why = comparison.reason if comparison is not None else "it has no baseline"
        raise UsageError(
            f"{run_dir.name}: its base cell has {found} pairs of blocks; three are needed to know "
            f"a spread ({why or 'too few blocks'})"
        )
    logs = [math.log(p.candidate / p.baseline) for p in comparison.pairs]
    source = f"{len(logs)} blocks of {analysis.headline.arm} against {comparison.against}"
    return stdev(logs), f"{source} in {analysis.run_id}"
