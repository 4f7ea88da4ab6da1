"""A Hugging Face Hub in memory, for tests: repositories with commits, over HTTP on this machine.

It speaks what `create_repo`, `upload_folder`, `push_to_hub`, `snapshot_download` and `from_pretrained` say. Every file is
"regular": it travels in the commit itself, and large-file storage is not needed.

    with serve() as hub:
        subprocess.run(..., env={**os.environ, **hub.environment(home)})
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_test"
USER = "reader"


@dataclass
class Repository:
    """Its commits, oldest first: (id, file name to content)."""

    private: bool = False
    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)

    def commit(self, files: dict[str, bytes]) -> str:
        oid = hashlib.sha1(repr((len(self.commits), sorted(files.items()))).encode()).hexdigest()
        self.commits.append((oid, files))
        return oid

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """The commit that a revision names, if there is one."""
        if revision == "main":
            return self.commits[-1]
        return next((commit for commit in self.commits if commit[0].startswith(revision)), None)


class Hub(ThreadingHTTPServer):
    """The server; `repositories` by name, `requests` as (method, path)."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, Repository] = {}
        self.requests: list[tuple[str, str]] = []
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"

    def environment(self, home: Path) -> dict[str, str]:
        """Variables that send a process to this server, with `home` for everything it keeps."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(home),
            "HF_MODULES_CACHE": str(home / "modules"),
            "HF_TOKEN": TOKEN,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    # --- answers ---

    def answer(self, content: Any, status: int = 200, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def refuse(self, status: int, code: str) -> None:
        self.answer({"error": code}, status, X_Error_Code=code, X_Error_Message=code)

    def handle_one(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append((self.command, path))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.command == "POST" and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer({"error": "Invalid credentials"}, 401)
        if path == "/api/whoami-v2":
            return self.answer({"name": USER, "type": "user", "orgs": [], "auth": {"accessToken": {"role": "write"}}})
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        for pattern, method in (
            (r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", self.info),
            (r"/api/models/([^/]+/[^/]+)/tree/([^/]+)(?:/(.*))?", self.tree),
            (r"/api/models/([^/]+/[^/]+)/preupload/([^/]+)", self.preupload),
            (r"/api/models/([^/]+/[^/]+)/commit/([^/]+)", self.commit),
            (r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.resolve),
        ):
            if found := re.fullmatch(pattern, path):
                name, revision, rest = (*found.groups(), None)[:3]
                if name not in self.server.repositories:
                    return self.refuse(404, "RepoNotFound")
                at = self.server.repositories[name].at(revision or "main")
                if at is None:
                    return self.refuse(404, "RevisionNotFound")
                return method(name, at, rest, body)
        return self.refuse(404, "EntryNotFound")

    do_GET = do_POST = do_HEAD = handle_one

    # --- endpoints ---

    def create(self, options: dict[str, Any]) -> None:
        name = f"{options.get('organization') or USER}/{options['name']}"
        known = name in self.server.repositories
        if not known:
            private = bool(options.get("private")) or options.get("visibility") == "private"
            self.server.repositories[name] = Repository(private)
            self.server.repositories[name].commit({".gitattributes": b""})
        self.answer({"url": f"{self.server.endpoint}/{name}", "name": name, "id": name}, 409 if known else 200)

    def info(self, name: str, at: tuple[str, dict[str, bytes]], *_: Any) -> None:
        siblings = [{"rfilename": file} for file in at[1]]
        private = self.server.repositories[name].private
        self.answer({"id": name, "modelId": name, "sha": at[0], "private": private, "tags": [], "siblings": siblings})

    def tree(self, name: str, at: tuple[str, dict[str, bytes]], folder: str | None, body: bytes) -> None:
        self.answer(
            [
                {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for file, data in at[1].items()
                if file.startswith(folder or "")
            ]
        )

    def preupload(self, name: str, at: Any, rest: Any, body: bytes) -> None:
        files = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]]
        self.answer({"files": files})

    def commit(self, name: str, at: tuple[str, dict[str, bytes]], rest: Any, body: bytes) -> None:
        files = dict(at[1])
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "deletedFile":
                files.pop(value["path"], None)
        oid = self.server.repositories[name].commit(files)
        url = f"{self.server.endpoint}/{name}/commit/{oid}"
        self.answer({"success": True, "commitOid": oid, "commitUrl": url, "hookOutput": ""})

    def resolve(self, name: str, at: tuple[str, dict[str, bytes]], file: str, body: bytes) -> None:
        if file not in at[1]:
            return self.refuse(404, "EntryNotFound")
        data = at[1][file]
        self.answer(data, X_Repo_Commit=at[0], ETag=f'"{hashlib.sha1(data).hexdigest()}"', Accept_Ranges="none")


@contextlib.contextmanager
def serve() -> Iterator[Hub]:
    """A running server, stopped at the end."""
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
