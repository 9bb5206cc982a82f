"""Token embedding rows."""

from .reference import embed

__all__ = ["embed"]
