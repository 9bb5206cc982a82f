"""finalbench measures how fast an LLM engine serves a model, and makes the result checkable."""

__version__ = "0.1.0"
