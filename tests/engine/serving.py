"""Runs the application on a free port in a thread of the test's process."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn
from vkengine.server.app import Limits, create_app
from vkengine.server.connection import Connection
from vkengine.server.serve import _Server, bind, run_loop


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.002)


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The `data:` events of a stream, which must end with [DONE]."""
        parts = self.body.decode().split("\n\n")
        assert parts[-1] == ""
        assert all(part.startswith("data: ") for part in parts[:-1])
        assert parts[-2] == "data: [DONE]"
        return [json.loads(part[6:]) for part in parts[:-2]]

    @property
    def chunks(self) -> list[Any]:
        """Choices of all events, in order."""
        return [choice for event in self.events for choice in event["choices"]]


@dataclass
class Running:
    port: int
    engine: Any
    driver: Any

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def send(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Reply:
        """`body`: bytes go as they are, anything else as JSON."""
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, raw, headers or {})
            response = connection.getresponse()
            names = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, names, response.read())
        finally:
            connection.close()

    def complete(self, **body: Any) -> Reply:
        return self.send("POST", "/v1/completions", body)

    def chat(self, **body: Any) -> Reply:
        return self.send("POST", "/v1/chat/completions", body)

    def idle(self) -> bool:
        return not self.driver.running and not self.driver.waiting and not self.driver._jobs


def open_request(server: Running, **body: object) -> socket.socket:
    """Sends a completion request and leaves the socket open."""
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
    client = socket.create_connection(("127.0.0.1", server.port))
    client.sendall(head.encode() + raw)
    return client


@contextlib.contextmanager
def running(
    engine: Any,
    tokenizer: Any = None,
    *,
    limits: Limits | None = None,
    http: Any = Connection,
    send_buffer: int | None = None,
    **options: Any,
) -> Iterator[Running]:
    """`send_buffer`: bytes that wait in the kernel for a client that does not read."""
    sock = bind("127.0.0.1", 0)
    if send_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    sock.listen(512)
    app = create_app(engine, tokenizer, limits=limits, **options)
    options_of = {"log_config": None, "access_log": False, "timeout_graceful_shutdown": 2}
    config = uvicorn.Config(app, http=http, **options_of)
    server = _Server(config)
    thread = threading.Thread(target=run_loop, args=(server, sock), name="test-server")
    port = sock.getsockname()[1]
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield Running(port, engine, app.state.service.driver)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
