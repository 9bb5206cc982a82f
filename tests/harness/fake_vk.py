"""Stands in for the `vk` command: serves the toy model, so the harness is tested without torch.

VK_FAKE holds `ARM:BEHAVIOUR` pairs separated by `;`, for example `vk:dies;stock:ok,step_ms=1`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def bench(turns: bool) -> None:
    """`vk bench --bare`: a rate, or one span for each prompt; VK_FAKE_BARE=dies ends the second."""
    if not turns:
        sys.stdout.write(json.dumps({"schema_version": 1, "decode_tok_s": 99.0, "tokens": 64}))
        return
    sys.stdout.write("loading\n" + json.dumps({"ready": True}) + "\n")
    sys.stdout.flush()
    for number, line in enumerate(sys.stdin):
        if number == 1 and os.environ.get("VK_FAKE_BARE") == "dies":
            sys.exit("out of memory")
        ids = json.loads(line)
        told = {"tokens": 7, "seconds": 0.07, "token_ids": [*ids[:7], 0]}
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()


def main() -> None:
    arguments = sys.argv[1:]
    options = dict(zip(arguments[2::2], arguments[3::2], strict=False))
    if arguments[0] == "bench":
        bench("--stdin" in arguments)
        return
    arm = "stock" if options["--profile"] == "stock" else "vk"
    behaviours = dict(
        pair.split(":", 1) for pair in os.environ.get("VK_FAKE", "").split(";") if pair
    )
    command = [sys.executable, "-m", "finalbench.testing.toy", "--port", options["--port"]]
    command += ["--profile", options["--profile"], "--model", Path(arguments[1]).name]
    command += ["--behaviour", behaviours.get(arm, "fast")]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main()
