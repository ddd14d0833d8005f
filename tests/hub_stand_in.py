"""A stand-in for the Hugging Face Hub on loopback: the HTTP that huggingface_hub's downloads ask for, and its failures.

It serves repositories held in memory, answers Range requests, and records what was asked. Failures are set per file:
`cut` drops the connection once after so many bytes, `broken` answers 500, `short` ends a body early every time.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Asked:
    """One request: `range` is its Range header, `token` its Authorization header."""

    method: str
    path: str
    range: str | None
    token: str | None


@dataclass
class Hub:
    """What the stand-in serves and what it was asked."""

    url: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    cut: dict[str, int] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    short: dict[str, int] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)

    def bodies(self) -> list[str]:
        """The names of the files whose bytes were asked for, sorted."""
        return sorted(a.path.rpartition("/")[2] for a in self.asked if a.method == "GET" and "/resolve/" in a.path)


@contextmanager
def serve() -> Iterator[Hub]:
    """A running stand-in on a free port of 127.0.0.1."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, name="hub", daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        hub = self.hub
        hub.asked.append(Asked(self.command, path, self.headers.get("Range"), self.headers.get("Authorization")))
        if path.startswith("/api/models/"):
            repository = "/".join(path.removeprefix("/api/models/").split("/")[:2])
            if files := hub.repositories.get(repository):
                return self._json(_tree(files) if "/tree/" in path else _info(repository, files))
        elif "/resolve/" in path:
            repository, _, rest = path.removeprefix("/").partition("/resolve/")
            name = rest.partition("/")[2]
            if repository in hub.gated:
                return self._refuse(401, "GatedRepo", f"Access to model {repository} is restricted.")
            if name in hub.repositories.get(repository, {}):
                return self._file(name, hub.repositories[repository][name])
            if repository in hub.repositories:
                return self._refuse(404, "EntryNotFound", "Entry not found")
        self._refuse(404, "RepoNotFound", "Repository not found")

    def _json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int, code: str, message: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _file(self, name: str, content: bytes) -> None:
        hub = self.hub
        if self.command == "GET" and name in hub.broken:
            return self._refuse(500, "InternalError", "the stand-in was told to fail")
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        body = content[start:]
        self.send_response(206 if self.headers.get("Range") else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{_oid(content)}"')
        self.send_header("Accept-Ranges", "bytes")
        if self.headers.get("Range"):
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if self.command == "GET" and name in hub.short:
            body = body[: hub.short[name]]
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            cut = hub.cut.pop(name, None)
            self.wfile.write(body if cut is None else body[:cut])
            if cut is not None:
                self.close_connection = True


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _info(repository: str, files: dict[str, bytes]) -> dict[str, object]:
    siblings = [{"rfilename": name, "size": len(content), "blobId": _oid(content)} for name, content in files.items()]
    return {"_id": "1", "id": repository, "modelId": repository, "sha": COMMIT, "private": False, "siblings": siblings}


def _tree(files: dict[str, bytes]) -> list[dict[str, object]]:
    return [{"type": "file", "path": n, "size": len(content), "oid": _oid(content)} for n, content in files.items()]
