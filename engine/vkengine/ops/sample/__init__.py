"""Processors and keyed noise."""

from .noise import gumbel, row_key
from .reference import Processors, process

__all__ = ["Processors", "gumbel", "process", "row_key"]
