"""A stand-in for the Hugging Face hub: the requests that an upload makes, answered as the hub answers them."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

TOKEN = "hf_stand_in"


class Hub(ThreadingHTTPServer):
    """What the hub holds: `created` repositories, `commits` as (branch, message, files)."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.created: list[dict[str, Any]] = []
        self.commits: list[tuple[str, str, dict[str, bytes]]] = []
        self.large: dict[str, bytes] = {}  # by SHA-256
        self.private = True  # whether the repository is, once it is there
        self.header_mistakes: list[str] = []  # found in README.md
        self.refused: tuple[str, int] | None = None  # a part of a path -> the status of the answer

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, value: Any, status: int = 200) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _refuses(self) -> bool:
        """Answer with an error, if it is to be refused or has no token."""
        part, status = self.server.refused or ("", 0)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            part, status = self.path, 401
        if status and part in self.path:
            self._answer({"error": "Said by the stand-in"}, status)
            return True
        return False

    def do_GET(self) -> None:
        if self._refuses():
            return
        if self.path == "/api/models/me/mine":
            self._answer({"id": "me/mine", "private": self.server.private})
        else:
            self._answer({"type": "user", "name": "me"} if self.path == "/api/whoami-v2" else {"error": self.path})

    def do_PUT(self) -> None:  # to a storage, without a token
        self.server.large[self.path.rpartition("/")[2]] = self._body()
        self._answer({})

    def do_POST(self) -> None:
        body = self._body()
        if self._refuses():
            return
        hub, path = self.server, unquote(self.path)
        if path == "/api/repos/create":
            hub.created.append(json.loads(body))
            self._answer({"url": f"{hub.address}/me/mine"})
        elif path == "/api/validate-yaml":
            errors = [{"message": message} for message in hub.header_mistakes]
            self._answer({"warnings": [], "errors": errors}, 400 if errors else 200)
        elif path.startswith("/api/models/me/mine/preupload/"):
            files = [file["path"] for file in json.loads(body)["files"]]
            modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in files}
            self._answer({"files": [{"path": n, "uploadMode": m, "shouldIgnore": False} for n, m in modes.items()]})
        elif path == "/me/mine.git/info/lfs/objects/batch":
            objects = json.loads(body)["objects"]
            places = [{"upload": {"href": f"{hub.address}/storage/{item['oid']}"}} for item in objects]
            answers = [item | {"actions": place} for item, place in zip(objects, places, strict=True)]
            self._answer({"transfer": "basic", "objects": answers})
        elif path.startswith("/api/models/me/mine/commit/"):
            branch = path.removeprefix("/api/models/me/mine/commit/")
            self._commit(branch, [json.loads(line) for line in body.splitlines()])
            self._answer({"commitUrl": f"{hub.address}/me/mine/commit/1", "commitOid": "1"})
        else:
            self._answer({"error": path}, 404)

    def _commit(self, branch: str, lines: list[dict[str, Any]]) -> None:
        files, message = {}, ""
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                message = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            else:
                files[value["path"]] = self.server.large[value["oid"]]
        self.server.commits.append((branch, message, files))


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub on a free port of this machine."""
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02})  # for a fast end
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()
