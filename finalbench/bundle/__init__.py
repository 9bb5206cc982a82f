"""Seal a run and verify it from its raw records."""

from __future__ import annotations

from finalbench.bundle.derived import (
    METRICS_FILE,
    Derived,
    derive,
    differences,
    load_checked,
    write_metrics,
)
from finalbench.bundle.seal import (
    MANIFEST_FILE,
    NOT_PROVEN,
    Manifest,
    Problem,
    Verification,
    read_manifest,
    seal,
    sign_sealed,
    unseal,
    verify,
)
from finalbench.bundle.signature import SIGNATURE_FILE, sign

__all__ = [
    "MANIFEST_FILE",
    "METRICS_FILE",
    "NOT_PROVEN",
    "SIGNATURE_FILE",
    "Derived",
    "Manifest",
    "Problem",
    "Verification",
    "derive",
    "differences",
    "load_checked",
    "read_manifest",
    "seal",
    "sign",
    "sign_sealed",
    "unseal",
    "verify",
    "write_metrics",
]
