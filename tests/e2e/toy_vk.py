"""Stands in for `vk` in a container: takes its command line, and serves the toy model."""

from __future__ import annotations

import os
import sys
import threading
import time

from finalbench.testing import toy


def main() -> None:
    options = dict(zip(sys.argv[3::2], sys.argv[4::2], strict=False))
    command = [sys.executable, "-m", "finalbench.testing.toy", "--port", options["--port"]]
    command += ["--host", options["--host"], "--profile", options["--profile"]]
    command += ["--model", os.environ.get("TOY_MODEL", sys.argv[2])]
    command += ["--behaviour", os.environ.get("TOY", "fast")]
    if (trigger := os.environ.get("TOY_HOG_WHEN")) is not None:
        threading.Thread(target=hog, args=(trigger,), daemon=True).start()
        sys.exit(toy.main(command[3:]))  # in this process, whose memory then runs out
    os.execv(sys.executable, command)


def hog(trigger: str) -> None:
    """Take memory without end once the file is there."""
    while not os.path.exists(trigger):  # noqa: PTH110
        time.sleep(0.05)
    kept = []
    while True:
        kept.append(b"." * (16 << 20))


if __name__ == "__main__":
    main()
