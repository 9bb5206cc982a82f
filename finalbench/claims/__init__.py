"""The claims ledger: published figures, what backs them, and how their state may move."""

from __future__ import annotations

from finalbench.claims.ledger import (
    PROTOCOL,
    Claim,
    Evidence,
    Figure,
    Ledger,
    Move,
    Source,
    load_ledger,
    save_ledger,
)
from finalbench.claims.moves import (
    MARGIN,
    Bundle,
    check,
    claim_of,
    contest,
    open_bundle,
    replicate,
)

__all__ = [
    "MARGIN",
    "PROTOCOL",
    "Bundle",
    "Claim",
    "Evidence",
    "Figure",
    "Ledger",
    "Move",
    "Source",
    "check",
    "claim_of",
    "contest",
    "load_ledger",
    "open_bundle",
    "replicate",
    "save_ledger",
]
