"""Stands in for the `vk` command: serves the toy model, so the harness is tested without torch.

VK_FAKE holds `ARM:BEHAVIOUR` pairs separated by `;`, for example `vk:dies;stock:ok,step_ms=1`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> None:
    arguments = sys.argv[1:]
    options = dict(zip(arguments[2::2], arguments[3::2], strict=False))
    if arguments[0] == "bench":
        sys.stdout.write(json.dumps({"schema_version": 1, "decode_tok_s": 99.0, "tokens": 64}))
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
