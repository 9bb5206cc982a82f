"""Acceptance of drafts."""

from .reference import accept

__all__ = ["accept"]
