"""A Hugging Face Hub on this machine, for tests: `HF_ENDPOINT` set to its address is enough.

Serves what uploads, downloads and pull requests need, answers `uploadMode: regular` for every file
so that neither LFS nor Xet takes part, and fails on request (`store.fail`). Tokens: `hf_write`,
`hf_read`, `hf_expired`.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading

from finalbench.testing.hub_http import HubServer
from finalbench.testing.hub_store import HubStore


class FakeHub:
    """A running fake Hub; use as a context manager. `store` holds everything."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.store = HubStore()
        self._server = HubServer((host, port), self.store)
        self.endpoint = f"http://{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True
        )

    def start(self) -> FakeHub:
        self._thread.start()
        return self

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> FakeHub:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()


def main(argv: list[str] | None = None) -> int:
    """Serves until interrupted. Writes one JSON line with the endpoint to stdout first."""
    parser = argparse.ArgumentParser(prog="finalbench.testing.fake_hub", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args(argv)
    with FakeHub(options.host, options.port) as hub:
        sys.stdout.write(json.dumps({"endpoint": hub.endpoint}) + "\n")
        sys.stdout.flush()
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
