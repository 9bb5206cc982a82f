"""The `vk` command with a planted slowdown: every step of the engine takes VK_SLOWDOWN longer.

0.1 is ten percent of the step's own time, so that a slow moment of the machine is slowed as well.
The stock profile has an engine of its own and stays as it is.
"""

from __future__ import annotations

import os
import time

from vkengine.cli import main
from vkengine.engine import Engine
from vkengine.engine import Output as StepOutput

SHARE = float(os.environ.get("VK_SLOWDOWN", "0"))
SPUN_S = 1e-4
step = Engine.step


def slowed(self: Engine) -> list[StepOutput]:
    begun = time.perf_counter()
    found = step(self)
    until = begun + (time.perf_counter() - begun) * (1 + SHARE)
    while (left := until - time.perf_counter()) > 0:
        # Only the end is spun away: a sleep is too coarse for it, and spinning keeps the server's
        # other thread from running, which would slow it by more than the share.
        if left > SPUN_S:
            time.sleep(left - SPUN_S)
    return found


if SHARE:
    Engine.step = slowed  # ty: ignore[invalid-assignment]
main()
