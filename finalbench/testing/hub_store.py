"""State of the fake Hub: repositories, commits, branches, tags, tokens and planned faults."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

TOKENS = {"hf_write": "write", "hf_read": "read", "hf_expired": "expired"}


class HubRefusal(Exception):
    """An answer other than success. `code` becomes X-Error-Code, `more` joins the body."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.more: dict[str, str] = {}


@dataclass
class Fault:
    """Answer `status` on a route, `times` times after letting `skip` calls through.

    `applied`: the change is made all the same, as when a gateway loses the answer.
    """

    route: str
    status: int
    times: int = 1
    skip: int = 0
    applied: bool = False


@dataclass(frozen=True)
class Commit:
    """A snapshot of all files."""

    oid: str
    parent: str | None
    message: str
    description: str
    files: dict[str, bytes]


@dataclass
class Repo:
    """One repository; `branches` and `tags` point at commits."""

    kind: str
    id: str
    private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    pull_requests: list[str] = field(default_factory=list)  # titles of open ones, from number 1

    def resolve(self, revision: str) -> Commit:
        oid = self.branches.get(revision) or self.tags.get(revision) or revision
        if oid not in self.commits:
            raise HubRefusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return self.commits[oid]

    def add(self, branch: str, commit: Commit) -> None:
        self.commits[commit.oid] = commit
        self.branches[branch] = commit.oid


def blob_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class HubStore:
    """All repositories of one fake Hub. Its methods are atomic."""

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], Repo] = {}
        self.tokens = dict(TOKENS)
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str]] = []
        self.before_commit: Callable[[], None] | None = None
        self.lock = threading.RLock()

    def fail(self, route: str, status: int, **options: Any) -> None:
        """Plans a fault; `options` as in `Fault`."""
        self.faults.append(Fault(route, status, **options))

    def fault(self, route: str) -> Fault | None:
        """The fault due on this call, if any, counted down."""
        with self.lock:
            for fault in self.faults:
                if fault.route != route or fault.times <= 0:
                    continue
                if fault.skip > 0:
                    fault.skip -= 1
                    continue
                fault.times -= 1
                return fault
        return None

    def role(self, token: str | None, *, write: bool = False) -> str:
        """What a token may do. HubRefusal 401 or 403 when that is not enough."""
        if token is None:
            if write:
                raise HubRefusal(401, "Invalid username or password.")
            return "anonymous"
        role = self.tokens.get(token)
        if role is None:
            raise HubRefusal(401, "Invalid credentials in Authorization header")
        if role == "expired":
            raise HubRefusal(401, 'User Access Token "test" is expired')
        if write and role != "write":
            raise HubRefusal(403, "You don't have the rights to create or change this repo")
        return role

    def repo(self, kind: str, repo_id: str, role: str = "write") -> Repo:
        found = self.repos.get((kind, repo_id))
        if found is None or (found.private and role == "anonymous"):
            raise HubRefusal(404, "Repository not found", "RepoNotFound")
        return found

    def create(self, kind: str, repo_id: str, *, private: bool = False) -> Repo:
        """An empty repository with one initial commit on main, as the Hub makes it."""
        with self.lock:
            if (kind, repo_id) in self.repos:
                raise HubRefusal(409, f"You already created this {kind} repo")
            repo = Repo(kind, repo_id, private)
            files = {".gitattributes": b"*.parquet filter=lfs diff=lfs merge=lfs -text\n"}
            repo.add("main", _commit(None, "initial commit", "", files))
            self.repos[(kind, repo_id)] = repo
            return repo

    def commit(
        self, kind: str, repo_id: str, revision: str, payload: bytes, *, create_pr: bool = False
    ) -> tuple[Commit, int | None]:
        """Applies an NDJSON commit; (commit, pull request number). 412 on another parent."""
        hook, self.before_commit = self.before_commit, None
        if hook is not None:
            hook()
        with self.lock:
            repo = self.repo(kind, repo_id)
            head = repo.resolve(revision)
            lines = [json.loads(line) for line in payload.splitlines() if line.strip()]
            if not lines or lines[0].get("key") != "header":
                raise HubRefusal(400, "the first line must be the header")
            header = lines[0]["value"]
            parent = header.get("parentCommit")
            if parent is not None and parent != head.oid:
                raise HubRefusal(412, "A commit has happened since. Please refresh and try again.")
            files = _apply(head.files, lines[1:])
            commit = _commit(head.oid, header["summary"], header.get("description", ""), files)
            if create_pr:
                repo.pull_requests.append(commit.message)
                number = len(repo.pull_requests)
                repo.add(f"refs/pr/{number}", commit)
                return commit, number
            if revision not in repo.branches:
                raise HubRefusal(400, f"{revision} is not a branch")
            repo.add(revision, commit)
            return commit, None

    def push(self, kind: str, repo_id: str, files: dict[str, bytes], branch: str = "main") -> str:
        """A commit by somebody else, behind the client's back; returns its id."""
        lines = [{"key": "header", "value": {"summary": "from elsewhere"}}]
        for path, content in files.items():
            value = {"path": path, "encoding": "base64"}
            value["content"] = base64.b64encode(content).decode()
            lines.append({"key": "file", "value": value})
        hook, self.before_commit = self.before_commit, None
        try:
            payload = "\n".join(map(json.dumps, lines)).encode()
            return self.commit(kind, repo_id, branch, payload)[0].oid
        finally:
            self.before_commit = hook

    def tag(self, kind: str, repo_id: str, revision: str, tag: str) -> None:
        with self.lock:
            repo = self.repo(kind, repo_id)
            if tag in repo.tags:
                raise HubRefusal(409, f"Tag {tag} already exists")
            repo.tags[tag] = repo.resolve(revision).oid

    def files(self, kind: str, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """Contents at a revision, for tests."""
        return dict(self.repo(kind, repo_id).resolve(revision).files)

    def log(self, kind: str, repo_id: str, revision: str = "main") -> list[Commit]:
        """Commits from the newest to the first."""
        repo = self.repo(kind, repo_id)
        found = [repo.resolve(revision)]
        while (parent := found[-1].parent) is not None:
            found.append(repo.commits[parent])
        return found


def _apply(files: dict[str, bytes], operations: list[dict[str, Any]]) -> dict[str, bytes]:
    result = dict(files)
    for operation in operations:
        key, value = operation["key"], operation["value"]
        path = value["path"]
        if key == "file":
            result[path] = base64.b64decode(value["content"], validate=True)
        elif key == "deletedFile":
            if path not in result:
                raise HubRefusal(400, f"cannot delete {path}: no such file")
            del result[path]
        elif key == "deletedFolder":
            prefix = path.rstrip("/") + "/"
            result = {name: data for name, data in result.items() if not name.startswith(prefix)}
        else:
            raise HubRefusal(400, f"unsupported operation {key}")
    return result


def _commit(parent: str | None, message: str, text: str, files: dict[str, bytes]) -> Commit:
    tree = sorted((path, blob_oid(content)) for path, content in files.items())
    oid = hashlib.sha1(json.dumps([parent, message, text, tree]).encode()).hexdigest()
    return Commit(oid, parent, message, text, files)
