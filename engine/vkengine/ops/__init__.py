"""Block-level operations of a decode round.

Each sub-package holds ``reference.py`` (torch, the truth), where it pays ``cpu.py`` (the same
numbers in few torch calls on packed weights), ``triton.py`` for a GPU, and ``__init__.py``, which
picks one by the device of the residual stream. Every block op has the signature
``op(h, weights, state, rows, ws) -> None`` and updates the residual stream ``h [R, H]`` (fp32)
and the state in place.
"""
