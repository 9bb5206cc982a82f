"""Kernels run under Triton's interpreter here; on a GPU machine tests/gpu runs them compiled."""

from __future__ import annotations

import os
import sys

if "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"
