"""Compiled kernels on a CUDA device; `make gpu-test`. The shapes are those of tests/ops."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "ops"))
