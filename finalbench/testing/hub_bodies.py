"""Pieces of the fake Hub's answers."""

from __future__ import annotations

from typing import Any

from finalbench.testing.hub_store import Repo, blob_oid

DATE = "2025-01-01T00:00:00.000Z"


def identity(role: str) -> dict[str, Any]:
    token = {"displayName": "test", "role": role, "createdAt": DATE}
    return {
        "type": "user",
        "id": "0",
        "name": "tester",
        "fullname": "Tester",
        "orgs": [{"type": "org", "id": "1", "name": "lab", "roleInOrg": "write"}],
        "auth": {"type": "access_token", "accessToken": token},
    }


def ref(name: str, oid: str, prefix: str = "refs/heads/") -> dict[str, str]:
    ref = name if name.startswith("refs/") else prefix + name
    return {"name": name, "ref": ref, "targetCommit": oid}


def entry(name: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": name, "size": len(content), "oid": blob_oid(content)}


def upload_mode(row: dict[str, Any], files: dict[str, bytes]) -> dict[str, Any]:
    mode: dict[str, Any] = {"path": row["path"], "uploadMode": "regular", "shouldIgnore": False}
    if row["path"] in files:
        mode["oid"] = blob_oid(files[row["path"]])
    return mode


def discussions(repo: Repo) -> dict[str, Any]:
    """One page with every open pull request; the fake Hub has no other discussions."""
    rows = [
        {
            "num": number,
            "title": title,
            "status": "open",
            "isPullRequest": True,
            "author": {"name": "tester"},
            "createdAt": DATE,
            "repo": {"name": repo.id, "type": repo.kind},
        }
        for number, title in enumerate(repo.pull_requests, 1)
    ]
    return {"discussions": rows, "count": len(rows), "start": 0}
