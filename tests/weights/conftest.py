"""Small HTTP servers that stand in for a package index and for the model hub."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest


class Server(http.server.ThreadingHTTPServer):
    """A server whose handler finds what it serves in attributes."""

    daemon_threads = True

    def __init__(self, handler: type[http.server.BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.served: list[str] = []  # names of the files that were asked for
        self.seconds = 0.0  # how long to take over each file

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that was killed in the middle of a download is what some tests want."""


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: object) -> None:
        pass

    def answer(self, content: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            step = max(len(content) // 20, 4096)
            for start in range(0, len(content), step):
                self.wfile.write(content[start : start + step])
                time.sleep(self.server.seconds * step / len(content) if len(content) > step else 0)


class IndexHandler(Handler):
    """A simple package index of the wheels in `server.folder`."""

    def do_GET(self) -> None:
        name = urlparse(self.path).path.strip("/").split("/")[-1]
        file = self.server.folder / name
        if file.is_file():
            self.server.served.append(name)
            self.answer(file.read_bytes())
        else:
            links = "".join(
                f'<a href="/files/{wheel.name}">{wheel.name}</a>' for wheel in self.server.folder.glob("*.whl")
            )
            self.answer(f"<html><body>{links}</body></html>".encode(), Content_Type="text/html")


class HubHandler(Handler):
    """As much of the hub as a download needs: `server.repos` maps hub ids to {path: content}."""

    SHA = "0123456789abcdef0123456789abcdef01234567"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlparse(self.path).path).strip("/")
        parts = path.removeprefix("api/models/").split("/")
        repo, rest = "/".join(parts[:2]), parts[2:]
        files = self.server.repos.get(repo)
        if self.server.status is not None:
            status, code = self.server.status
            self.answer(b"{}", status, X_Error_Code=code, X_Error_Message=code)
        elif files is None:
            self.answer(b"{}", 404, X_Error_Code="RepoNotFound")
        elif not path.startswith("api/"):
            self.file(files, "/".join(rest[2:]))
        elif rest[:1] == ["tree"]:
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": self.oid(content)}
                for name, content in files.items()
            ]
            self.answer(json.dumps(entries).encode(), Content_Type="application/json")
        else:
            siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
            info = {"id": repo, "modelId": repo, "sha": self.SHA, "siblings": siblings}
            self.answer(json.dumps(info).encode(), Content_Type="application/json")

    def file(self, files: dict[str, bytes], name: str) -> None:
        if name not in files:
            self.answer(b"", 404, X_Error_Code="EntryNotFound")
            return
        if self.command == "GET":
            self.server.served.append(name)
        self.answer(files[name], ETag=f'"{self.oid(files[name])}"', X_Repo_Commit=self.SHA, Accept_Ranges="bytes")

    @staticmethod
    def oid(content: bytes) -> str:
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def running(server: Server) -> Iterator[Server]:
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def package_index(tmp_path: Path) -> Iterator[Server]:
    """A package index that serves the wheels in `.folder`."""
    server = Server(IndexHandler)
    server.folder = tmp_path / "index"
    server.folder.mkdir()
    with running(server):
        yield server


@pytest.fixture
def model_hub() -> Iterator[Server]:
    """A model hub that serves `.repos`, or answers everything with `.status` = (HTTP status, error code)."""
    server = Server(HubHandler)
    server.repos, server.status = {}, None
    with running(server):
        yield server
