"""A stand-in for package indexes, for the lock's tests: a small HTTP server on 127.0.0.1 with fake wheels.

What it stands in for: the default index (JSON pages with upload times and metadata files) and the PyTorch index
(plain HTML pages, no upload times, no metadata files). It can be told to misbehave per path.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import threading
import zipfile
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import unquote

import pytest
from packaging.utils import canonicalize_name

from envforge.lock.settings import PipSettings
from envforge.resolver.plan import Plan, Target


def metadata(name: str, version: str, requires: tuple[str, ...] = (), requires_python: str | None = None) -> str:
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Python: {requires_python}"] if requires_python else []
    lines += [f"Requires-Dist: {line}" for line in requires]
    return "\n".join(lines) + "\n"


def build_wheel(
    name: str,
    version: str,
    requires: tuple[str, ...] = (),
    requires_python: str | None = None,
    tag: str = "py3-none-any",
) -> tuple[str, bytes]:
    """-> file name and bytes of a wheel that holds one module with `VERSION`."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    files = {
        f"{module}/__init__.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": metadata(name, version, requires, requires_python),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(zipfile.ZipInfo(path, (2024, 1, 1, 0, 0, 0)), text)
    return f"{module}-{version}-{tag}.whl", buffer.getvalue()


@dataclass
class File:
    name: str
    data: bytes
    uploaded: str | None
    requires_python: str | None
    metadata: str | None
    hashed: bool = True

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


@dataclass
class StandIn:
    """`url` is the server's root; indexes are the first path segments ("simple", "whl/cu126")."""

    files: dict[str, dict[str, list[File]]] = field(default_factory=dict)
    misbehave: dict[str, str] = field(default_factory=dict)  # part of a path -> 500, 401, hang, truncate, garbage
    log: list[str] = field(default_factory=list)
    agents: list[str] = field(default_factory=list)
    authorization: list[str | None] = field(default_factory=list)
    password: str | None = None

    def add(
        self,
        index: str,
        name: str,
        version: str,
        *requires: str,
        python: str | None = None,
        tag: str = "py3-none-any",
        uploaded: str | None = "2024-01-01T00:00:00Z",
        hashed: bool = True,
    ) -> File:
        filename, data = build_wheel(name, version, requires, python, tag)
        modern = index == "simple"
        text = metadata(name, version, requires, python) if modern else None
        made = File(filename, data, uploaded if modern else None, python, text, hashed)
        self.files.setdefault(index, {}).setdefault(canonicalize_name(name), []).append(made)
        return made

    def add_source(self, index: str, name: str, version: str, setup: str) -> File:
        """A source archive whose setup.py begins with `setup`."""
        stem = f"{name.replace('-', '_')}-{version}"
        call = f"from setuptools import setup\nsetup(name={name!r}, version={version!r}, py_modules=[])\n"
        info = metadata(name, version).replace("2.1", "1.2", 1)
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
            for path, text in {f"{stem}/setup.py": setup + call, f"{stem}/PKG-INFO": info}.items():
                member = tarfile.TarInfo(path)
                member.size = len(text.encode())
                archive.addfile(member, io.BytesIO(text.encode()))
        made = File(f"{stem}.tar.gz", buffer.getvalue(), "2024-01-01T00:00:00Z", None, None)
        self.files.setdefault(index, {}).setdefault(canonicalize_name(name), []).append(made)
        return made

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> StandIn:
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                return

            def do_HEAD(self) -> None:
                self.answer(body=False)

            def do_GET(self) -> None:
                self.answer(body=True)

            def answer(self, body: bool) -> None:
                stand_in.log.append(f"{self.command} {self.path}")
                stand_in.authorization.append(self.headers.get("Authorization"))
                if stand_in.password and not self.headers.get("Authorization"):
                    self.send(401, b"", "text/plain", body)
                    return
                for part, how in stand_in.misbehave.items():
                    if part in unquote(self.path) and self.broken(how, body):
                        return
                status, data, kind = stand_in.page(self.path)
                self.send(status, data, kind, body)

            def broken(self, how: str, body: bool) -> bool:
                if how.isdigit():
                    self.send(int(how), b"broken on purpose", "text/plain", body)
                elif how == "hang":
                    for _ in range(600):
                        if stand_in.stopping.wait(0.1):
                            break
                    self.close_connection = True
                elif how == "truncate":
                    _, data, kind = stand_in.page(self.path)
                    self.send_response(200)
                    self.send_header("Content-Type", kind)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data[: len(data) // 2])
                    self.close_connection = True
                elif how == "garbage":
                    self.send(200, b"\x00\x01 not an index", "application/vnd.pypi.simple.v1+json", body)
                elif how == "other-bytes":
                    self.send(200, build_wheel("other", "9")[1], "application/octet-stream", body)
                return True

            def send(self, status: int, data: bytes, kind: str, body: bool) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                if status == 401:
                    self.send_header("WWW-Authenticate", 'Basic realm="test"')
                self.end_headers()
                if body:
                    self.wfile.write(data)

        class Server(ThreadingHTTPServer):
            def handle_error(self, request: Any, client_address: Any) -> None:
                return  # clients that give up are part of the tests

        self.stopping = threading.Event()
        self.server = Server(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stopping.set()
        self.server.shutdown()
        self.server.server_close()

    def page(self, path: str) -> tuple[int, bytes, str]:
        """-> status, body, content type."""
        path = unquote(path.partition("?")[0])
        for index, projects in self.files.items():
            if not path.startswith(f"/{index}/"):
                continue
            rest = path[len(index) + 2 :].strip("/")
            if rest in projects:
                return (200, *self.project(index, rest, projects[rest]))
            name = rest.rpartition("/")[2]
            for listed in projects.values():
                for made in listed:
                    if name == made.name:
                        return 200, made.data, "application/octet-stream"
                    if name == made.name + ".metadata" and made.metadata:
                        return 200, made.metadata.encode(), "text/plain"
        return 404, b"not here", "text/plain"

    def project(self, index: str, name: str, listed: list[File]) -> tuple[bytes, str]:
        if index == "simple":
            rows = []
            for made in listed:
                row: dict[str, Any] = {
                    "filename": made.name,
                    "url": f"/{index}/files/{made.name}",
                    "hashes": {"sha256": made.sha256} if made.hashed else {},
                    "size": len(made.data),
                    "core-metadata": made.metadata is not None,
                }
                if made.uploaded:
                    row["upload-time"] = made.uploaded
                if made.requires_python:
                    row["requires-python"] = made.requires_python
                rows.append(row)
            versions = sorted({made.name.split("-")[1].removesuffix(".tar.gz") for made in listed})
            page = {"meta": {"api-version": "1.1"}, "name": name, "files": rows, "versions": versions}
            return json.dumps(page).encode(), "application/vnd.pypi.simple.v1+json"
        links = "".join(
            f'<a href="/{index}/files/{made.name.replace("+", "%2B")}'
            f'{"#sha256=" + made.sha256 if made.hashed else ""}">{made.name}</a>\n'
            for made in listed
        )
        return f"<!DOCTYPE html><html><body>\n{links}</body></html>".encode(), "text/html"


def settings_for(stand_in: StandIn, **changes: Any) -> PipSettings:
    """pip's settings that name the stand-in as default index and as the PyTorch index's root, with short patience."""
    base = PipSettings(index_url=f"{stand_in.url}/simple", torch_index=f"{stand_in.url}/whl", timeout=5)
    return replace(base, **changes)


def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings of the machine, no proxy, caches of its own, one retry."""
    for name in list(os.environ):
        if name.startswith(("PIP_", "UV_")) or name.lower().endswith("_proxy") or name == "SSL_CERT_FILE":
            monkeypatch.delenv(name)
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv-cache"))
    monkeypatch.setenv("ENVFORGE_CACHE_DIR", str(tmp_path / "envforge-cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path / "config-dirs"))
    monkeypatch.setenv("UV_HTTP_RETRIES", "1")


def make_plan(pins: dict[str, str], variant: str = "cu126", python: str = "3.11", **changes: Any) -> Plan:
    """A plan by hand; requests are the pins' names unless given."""
    changes.setdefault("requests", tuple(sorted(pins)))
    return Plan(
        python=python, variant=variant, tier="cpu", pins=pins, target=Target("x86_64", "2.36", None, None), **changes
    )
