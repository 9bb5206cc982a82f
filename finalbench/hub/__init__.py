"""Publishing runs on the Hugging Face Hub: plan, then apply; and fetching what others published."""

from __future__ import annotations

from finalbench.hub.apply import Applied, apply_proposal, apply_upload
from finalbench.hub.plan import Proposal, Upload, plan_upload
from finalbench.hub.pull import Pulled, pull
from finalbench.hub.redact import find_secrets, scrub, scrub_command, scrub_document

__all__ = [
    "Applied",
    "Proposal",
    "Pulled",
    "Upload",
    "apply_proposal",
    "apply_upload",
    "find_secrets",
    "plan_upload",
    "pull",
    "scrub",
    "scrub_command",
    "scrub_document",
]
