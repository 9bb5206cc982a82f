"""Stands in for `vk` in a container: takes its command line, and serves the toy model."""

from __future__ import annotations

import os
import sys


def main() -> None:
    options = dict(zip(sys.argv[3::2], sys.argv[4::2], strict=False))
    command = [sys.executable, "-m", "finalbench.testing.toy", "--port", options["--port"]]
    command += ["--host", options["--host"], "--profile", options["--profile"]]
    command += ["--model", os.environ.get("TOY_MODEL", sys.argv[2])]
    command += ["--behaviour", os.environ.get("TOY", "fast")]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main()
