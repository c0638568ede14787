"""A small package index on loopback that serves wheels made here, and can be told to misbehave while it serves them."""

from __future__ import annotations

import base64
import hashlib
import io
import threading
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Literal

Mode = Literal["good", "stall", "cut", "corrupt"]
STALL_SECONDS = 120.0


@dataclass(frozen=True)
class Wheel:
    """A pure-Python wheel that stands in for a real package."""

    name: str
    version: str
    data: bytes = field(repr=False)
    requires: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        return f"{self.name.replace('-', '_')}-{self.version}-py3-none-any.whl"

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def metadata(self) -> bytes:
        return _metadata(self.name, self.version, self.requires)

    @property
    def locked(self) -> str:
        return f"{self.name}=={self.version} \\\n    --hash=sha256:{self.sha256}\n"


def _metadata(name: str, version: str, requires: tuple[str, ...]) -> bytes:
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", "Requires-Python: >=3.8"]
    return "\n".join([*lines, *(f"Requires-Dist: {r}" for r in requires), "", ""]).encode()


def make_wheel(
    name: str, version: str, files: Mapping[str, bytes] | None = None, requires: tuple[str, ...] = ()
) -> Wheel:
    """A wheel with one module, or with the given files; the same bytes every time."""
    module = name.replace("-", "_")
    content = dict(files or {f"{module}/__init__.py": f"__version__ = {version!r}\n".encode()})
    info = f"{module}-{version}.dist-info"
    content[f"{info}/METADATA"] = _metadata(name, version, requires)
    content[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = "".join(
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for path, data in content.items()
    )
    content[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in content.items():
            archive.writestr(zipfile.ZipInfo(path, (2024, 1, 1, 0, 0, 0)), data, zipfile.ZIP_DEFLATED)
    return Wheel(name, version, buffer.getvalue(), requires)


class Index:
    """A simple index (PEP 503, with PEP 658 metadata). `mode` is how it serves wheels from now on."""

    def __init__(self, *wheels: Wheel) -> None:
        self.wheels = {wheel.file: wheel for wheel in wheels}
        self.mode: Mode = "good"
        self.asked: list[str] = []
        self.downloading = threading.Event()
        index = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self.answer(False)

            def do_GET(self) -> None:
                self.answer(True)

            def answer(self, body: bool) -> None:
                path = self.path.split("?")[0]
                index.asked.append(path)
                if path.startswith("/simple/"):
                    self.page(path.removeprefix("/simple/").strip("/"), body)
                elif path.startswith("/files/"):
                    self.file(path.removeprefix("/files/"), body)
                else:
                    self.send_error(404)

            def page(self, name: str, body: bool) -> None:
                rows = "".join(
                    f'<a href="/files/{w.file}#sha256={w.sha256}" data-dist-info-metadata="true" '
                    f'data-core-metadata="true">{w.file}</a>\n'
                    for w in index.wheels.values()
                    if w.name == name
                )
                if not rows:
                    self.send_error(404)
                    return
                self.whole(f"<!DOCTYPE html><html><body>{rows}</body></html>".encode(), "text/html", body)

            def file(self, name: str, body: bool) -> None:
                wheel = index.wheels.get(name.removesuffix(".metadata"))
                if wheel is None:
                    self.send_error(404)
                elif name.endswith(".metadata"):
                    self.whole(wheel.metadata, "text/plain", body)
                elif not body or index.mode == "good":
                    self.whole(wheel.data, "application/octet-stream", body)
                else:
                    self.badly(wheel.data)

            def badly(self, data: bytes) -> None:
                index.downloading.set()
                if index.mode == "corrupt":
                    other = make_wheel("other", "1.0").data
                    self.whole((other + b"\0" * len(data))[: len(data)], "application/octet-stream", True)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data[: len(data) // 2])
                self.wfile.flush()
                if index.mode == "stall":
                    index.released.wait(STALL_SECONDS)
                self.close_connection = True

            def whole(self, data: bytes, kind: str, body: bool) -> None:
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if body:
                    self.wfile.write(data)

        self.released = threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}/simple"

    def __enter__(self) -> Index:
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.released.set()
        self.server.shutdown()
        self.server.server_close()

    def wait_for_download(self, seconds: float = 120.0) -> None:
        """Until somebody has begun to download a wheel badly."""
        end = time.monotonic() + seconds
        while not self.downloading.wait(0.1):
            assert time.monotonic() < end, f"nobody downloaded anything; asked: {self.asked}"
