"""After the last request: derive, seal, judge, render. Reads the run folder and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finalbench.aggregate import Analysis


@dataclass(frozen=True, slots=True)
class Finished:
    """A judged run and the files that tell of it."""

    path: Path
    analysis: Analysis
    summary: dict[str, Any]
    files: tuple[Path, ...]


def finish(path: Path) -> Finished:
    """Seal a run that ended and write its report beside it, in `reports/<run>/`."""
    from finalbench.aggregate import analyse, summary
    from finalbench.bundle import seal
    from finalbench.report import render

    seal(path)
    analysis = analyse(path)
    files = render([path], path.parent / "reports" / path.name)
    return Finished(path=path, analysis=analysis, summary=summary(analysis), files=tuple(files))


def exit_code_of(summary: dict[str, Any]) -> int:
    """0, or 4 when a cell failed or is invalid, or its outputs diverge."""
    sound = all(
        cell["valid"] and not str(cell.get("equality", "")).startswith("divergent")
        for cell in summary["cells"]
    )
    return 0 if summary["status"] == "complete" and sound else 4
