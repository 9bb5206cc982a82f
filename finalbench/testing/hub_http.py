"""Routes of the fake Hub, as the released client calls them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from finalbench.testing.hub_bodies import (
    DATE,
    discussions,
    entry,
    identity,
    ref,
    upload_mode,
)
from finalbench.testing.hub_store import Commit, HubRefusal, HubStore, Repo, blob_oid

_API = re.compile(r"^/api/(models|datasets|spaces)/([^/]+/[^/]+)(?:/([a-z-]+)(?:/(.+))?)?$")
_RESOLVE = re.compile(r"^/(?:(datasets|spaces)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)$")


class HubServer(ThreadingHTTPServer):
    """A server with its store."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], store: HubStore) -> None:
        super().__init__(address, Handler)
        self.store = store


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"

    @property
    def store(self) -> HubStore:
        assert isinstance(self.server, HubServer)
        return self.server.store

    def do_GET(self) -> None:
        self._answer(self._get)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self._answer(self._post)

    def do_DELETE(self) -> None:
        self._answer(self._delete)

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: what was asked is in `store.requests`."""

    def _answer(self, serve: Callable[[str, bytes], None]) -> None:
        # The body is read in every case, or the next request on the connection would start in it.
        body = self._read_body()
        path = urlsplit(self.path).path
        self.store.requests.append((self.command, unquote(path)))
        try:
            serve(path, body)
        except HubRefusal as refusal:
            self._refuse(refusal)
        except (KeyError, ValueError, TypeError) as error:
            self._refuse(HubRefusal(400, f"bad request: {error}"))

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _refuse(self, refusal: HubRefusal) -> None:
        headers = {"X-Error-Message": str(refusal)}
        if refusal.code is not None:
            headers["X-Error-Code"] = refusal.code
        if refusal.status == 429:
            headers["RateLimit"] = '"api";r=0;t=1'
            headers["RateLimit-Policy"] = '"fixed window";"api";q=1000;w=300'
        self._send(
            refusal.status, json.dumps({"error": str(refusal), **refusal.more}).encode(), headers
        )

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Request-Id", f"fake-{len(self.store.requests)}")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, document: Any) -> None:
        self._send(200, json.dumps(document).encode(), {"Content-Type": "application/json"})

    def _token(self) -> str | None:
        value = self.headers.get("Authorization", "")
        return value.removeprefix("Bearer ") or None

    def _planned(self, route: str, apply: Callable[[], Any] | None = None) -> None:
        """Raises the fault planned for this route; first applies the change where it says so."""
        fault = self.store.fault(route)
        if fault is None:
            return
        if fault.applied and apply is not None:
            apply()
        raise HubRefusal(fault.status, f"planned failure of {route}")

    def _get(self, path: str, body: bytes) -> None:
        store = self.store
        if path == "/api/whoami-v2":
            self._planned("whoami")
            role = store.role(self._token(), write=False)
            if role == "anonymous":
                raise HubRefusal(401, "Invalid username or password.")
            self._json(identity(role))
            return
        if (match := _RESOLVE.match(path)) is not None:
            self._planned("resolve")
            kind = (match[1] or "models")[:-1]
            repo = store.repo(kind, match[2], store.role(self._token()))
            self._resolve(repo, unquote(match[3]), unquote(match[4]))
            return
        match = _API.match(path)
        if match is None:
            raise HubRefusal(404, "not found")
        self._planned("info")
        repo = store.repo(match[1][:-1], match[2], store.role(self._token()))
        self._info(repo, match[3], unquote(match[4] or ""))

    def _resolve(self, repo: Repo, revision: str, name: str) -> None:
        commit = repo.resolve(revision)
        if name not in commit.files:
            raise HubRefusal(404, f"{name} does not exist on {revision}", "EntryNotFound")
        content = commit.files[name]
        headers = {"ETag": f'"{blob_oid(content)}"', "X-Repo-Commit": commit.oid}
        self._send(200, content, headers)

    def _info(self, repo: Repo, what: str | None, rest: str) -> None:
        if what == "refs":
            heads = [ref(name, oid) for name, oid in repo.branches.items() if "/" not in name]
            pulls = [ref(name, oid) for name, oid in repo.branches.items() if "/" in name]
            tags = [ref(name, oid, "refs/tags/") for name, oid in repo.tags.items()]
            self._json({"branches": heads, "converts": [], "tags": tags, "pullRequests": pulls})
            return
        if what == "discussions":
            self._json(discussions(repo))
            return
        if what == "commits":
            log = self.store.log(repo.kind, repo.id, rest or "main")
            self._json(
                [
                    {
                        "id": commit.oid,
                        "title": commit.message,
                        "message": commit.description,
                        "authors": [{"user": "tester"}],
                        "date": DATE,
                    }
                    for commit in log
                ]
            )
            return
        if what == "tree":
            commit, folder = self._split_revision(repo, rest)
            prefix = folder + "/" if folder else ""
            names = [name for name in sorted(commit.files) if name.startswith(prefix)]
            if folder and not names:
                raise HubRefusal(404, f"{folder} does not exist", "EntryNotFound")
            self._json([entry(name, commit.files[name]) for name in names])
            return
        commit = repo.resolve(rest if what == "revision" else "main")
        self._json(
            {
                "_id": repo.id,
                "id": repo.id,
                "author": repo.id.split("/")[0],
                "sha": commit.oid,
                "private": repo.private,
                "lastModified": DATE,
                "tags": [],
                "siblings": [{"rfilename": name} for name in sorted(commit.files)],
            }
        )

    def _split_revision(self, repo: Repo, rest: str) -> tuple[Commit, str]:
        for name in sorted([*repo.branches, *repo.tags], key=len, reverse=True):
            if rest == name or rest.startswith(name + "/"):
                return repo.resolve(name), rest[len(name) + 1 :]
        revision, _, folder = rest.partition("/")
        return repo.resolve(revision), folder

    def _post(self, path: str, body: bytes) -> None:
        store = self.store
        if path == "/api/validate-yaml":
            self._planned("validate")
            self._json({"errors": [], "warnings": []})
            return
        if path == "/api/repos/create":
            document = json.loads(body)
            name = f"{document.get('organization') or 'tester'}/{document['name']}"
            kind = document.get("type") or "model"
            private = document.get("visibility") == "private" or bool(document.get("private"))
            store.role(self._token(), write=True)
            self._planned("create", lambda: store.create(kind, name, private=private))
            try:
                store.create(kind, name, private=private)
            except HubRefusal as refusal:
                # The client reads the address from a conflict, too.
                refusal.more["url"] = self._url(kind, name)
                raise
            self._json({"url": self._url(kind, name), "name": name, "id": name})
            return
        match = _API.match(path)
        if match is None:
            raise HubRefusal(404, "not found")
        kind, repo_id, what, rest = match[1][:-1], match[2], match[3], unquote(match[4] or "main")
        if what == "paths-info":
            repo = store.repo(kind, repo_id, store.role(self._token()))
            wanted = self._wanted(body)
            files = repo.resolve(rest).files
            self._json([entry(name, files[name]) for name in wanted if name in files])
            return
        store.role(self._token(), write=True)
        repo = store.repo(kind, repo_id)
        if what == "preupload":
            self._planned("preupload")
            files = repo.resolve(rest).files
            self._json({"files": [upload_mode(row, files) for row in json.loads(body)["files"]]})
        elif what == "commit":
            self._commit(kind, repo_id, rest, body)
        elif what == "tag":
            tag = json.loads(body)["tag"]
            self._planned("tag", lambda: store.tag(kind, repo_id, rest, tag))
            store.tag(kind, repo_id, rest, tag)
            self._json({})
        else:
            raise HubRefusal(404, "not found")

    def _wanted(self, body: bytes) -> list[str]:
        if self.headers.get("Content-Type", "").startswith("application/json"):
            return json.loads(body)["paths"]
        return parse_qs(body.decode())["paths"]

    def _commit(self, kind: str, repo_id: str, revision: str, body: bytes) -> None:
        create_pr = "create_pr" in parse_qs(urlsplit(self.path).query)

        def apply() -> tuple[Commit, int | None]:
            return self.store.commit(kind, repo_id, revision, body, create_pr=create_pr)

        self._planned("commit", apply)
        commit, number = apply()
        url = self._url(kind, repo_id)
        answer = {
            "success": True,
            "commitOid": commit.oid,
            "commitUrl": f"{url}/commit/{commit.oid}",
            "hookOutput": "",
        }
        if number is not None:
            answer["pullRequestUrl"] = f"{url}/discussions/{number}"
        self._json(answer)

    def _delete(self, path: str, body: bytes) -> None:
        if path != "/api/repos/delete":
            raise HubRefusal(404, "not found")
        document = json.loads(body)
        self.store.role(self._token(), write=True)
        name = f"{document.get('organization') or 'tester'}/{document['name']}"
        self.store.repo(document.get("type") or "model", name)
        del self.store.repos[(document.get("type") or "model", name)]
        self._json({})

    def _url(self, kind: str, repo_id: str) -> str:
        return f"http://{self.headers['Host']}/{'' if kind == 'model' else kind + 's/'}{repo_id}"
