"""Compile every kernel of a prompt's chunk for a GPU that is not there: see compile_round.py.

`python tests/ops/compile_prefill.py MODEL ROWS ARCH`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from compile_round import META, caught, on_meta


def compile_prefill(model: str, rows: int, arch: int) -> list[dict[str, Any]]:
    from vkengine.gpu_prefill import Prefill
    from vkengine.rows import Workspace

    weights, state = on_meta(model, ("gdn", "attention"))
    tokens = torch.empty(rows + 1, dtype=torch.int32, device=META)
    with caught(arch) as catcher:
        Prefill(weights, state, Workspace(META)).prompt(0, tokens, 0, rows)
    return list(catcher.seen.values())


if __name__ == "__main__":
    found = compile_prefill(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    print(json.dumps(found))  # noqa: T201
