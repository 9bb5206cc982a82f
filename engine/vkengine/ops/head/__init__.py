"""Final norm, output head, argmax."""

from .reference import argmax, head

__all__ = ["argmax", "head"]
