"""The invariants every row must satisfy; each breach is named, with its numbers. Pure."""

from __future__ import annotations

from finalbench.validity.check import check
from finalbench.validity.drafts import spec_faults
from finalbench.validity.gpu import busy_share
from finalbench.validity.violation import RULES, Rule, Violation, violation

__all__ = ["RULES", "Rule", "Violation", "busy_share", "check", "spec_faults", "violation"]
