"""The only place that joins scenario, plan, runtime, client and record."""

from __future__ import annotations

from finalbench.runner.progress import Progress, Silent
from finalbench.runner.run import Options, Outcome, execute

__all__ = ["Options", "Outcome", "Progress", "Silent", "execute"]
