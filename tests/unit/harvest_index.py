"""A package index for tests: a real HTTP server on the loopback that speaks the JSON simple API, PEP 658 and ranges.

It stands in for the real index. Its pages have the shape that a real one gave for a small package (file entries with
hashes, requires-python, size, upload-time, yanked), its wheels and source archives are made here.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

JSON = "application/vnd.pypi.simple.v1+json"


def metadata(name: str, version: str, requires: list[str]) -> bytes:
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    return "\n".join([*lines, *(f"Requires-Dist: {line}" for line in requires), "", "A description."]).encode()


def wheel(name: str, version: str, requires: list[str], members: Mapping[str, str] | None = None) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        # stored, not packed: larger than what one ranged read brings, so that reading it whole would show
        archive.writestr(zipfile.ZipInfo("filler.bin"), bytes(1_500_000))
        for path, text in (members or {}).items():
            archive.writestr(path, text)
        archive.writestr(f"{name.replace('-', '_')}-{version}.dist-info/METADATA", metadata(name, version, requires))
    return out.getvalue()


def sdist(name: str, version: str, members: Mapping[str, str]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for path, text in members.items():
            info = tarfile.TarInfo(f"{name}-{version}/{path}")
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
    return out.getvalue()


@dataclass
class FakeIndex:
    """The content and the moods of the index. `asked` counts requests by path, `sent` the bytes sent for each."""

    files: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)  # project -> filename -> page entry
    bodies: dict[str, bytes] = field(default_factory=dict)  # path -> content
    fail: dict[str, list[int]] = field(default_factory=dict)  # path pattern -> statuses to give, -1 = for ever 500
    trickle: set[str] = field(default_factory=set)  # path patterns answered one byte at a time
    ranges: bool = True
    extra: dict[str, Any] = field(default_factory=dict)  # overrides in every page's JSON
    asked: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    url: str = ""

    def add(
        self,
        project: str,
        filename: str,
        body: bytes,
        uploaded: str,
        *,
        python: str | None = None,
        yanked: bool | str = False,
        beside: bytes | None = None,
    ) -> None:
        """One distribution file; `beside` is its METADATA for PEP 658."""
        entry: dict[str, Any] = {
            "filename": filename,
            "hashes": {"sha256": hashlib.sha256(body).hexdigest()},
            "requires-python": python,
            "size": len(body),
            "upload-time": f"{uploaded}T16:41:25.146082Z",
            "url": f"../../files/{filename}",
            "yanked": yanked,
        }
        self.bodies[f"/files/{filename}"] = body
        if beside is not None:
            entry["core-metadata"] = {"sha256": hashlib.sha256(beside).hexdigest()}
            self.bodies[f"/files/{filename}.metadata"] = beside
        self.files.setdefault(project, {})[filename] = entry

    def release(self, name: str, version: str, uploaded: str, requires: list[str], **options: Any) -> str:
        """A pure wheel with its METADATA beside it; returns the file name."""
        filename = f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
        beside = metadata(name, version, requires)
        self.add(name, filename, wheel(name, version, requires), uploaded, beside=beside, **options)
        return filename

    def page(self, project: str) -> bytes:
        rows = list(self.files[project].values())
        page = {"meta": {"api-version": "1.1", "_last-serial": 41680645}, "name": project, "files": rows}
        return json.dumps({**page, "versions": [], **self.extra}).encode()


@contextmanager
def serve(index: FakeIndex) -> Iterator[FakeIndex]:
    """Runs the index on a free loopback port while the block runs."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            path = unquote(self.path)
            index.asked[path] += 1
            for pattern, statuses in index.fail.items():
                if statuses and re.fullmatch(pattern, path):
                    self.reply(path, 500 if statuses[0] == -1 else statuses.pop(0), b"no", {})
                    return
            if match := re.fullmatch(r"/simple/([^/]+)/", path):
                known = match.group(1) in index.files
                page = index.bodies.get(path) or (index.page(match.group(1)) if known else b"no such project")
                self.reply(path, 200 if known else 404, page, {"Content-Type": JSON})
                return
            body = index.bodies.get(path)
            if body is None:
                self.reply(path, 404, b"no such file", {})
                return
            span = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "")) if index.ranges else None
            if not span:
                self.reply(path, 200, body, {})
                return
            first, last = span.groups()
            start = int(first) if first else max(0, len(body) - int(last))
            end = min(int(last), len(body) - 1) if first and last else len(body) - 1
            self.reply(path, 206, body[start : end + 1], {"Content-Range": f"bytes {start}-{end}/{len(body)}"})

        def reply(self, path: str, status: int, body: bytes, headers: dict[str, str]) -> None:
            slow = any(re.fullmatch(pattern, path) for pattern in index.trickle)
            try:
                self.send_response(status)
                for key, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(key, value)
                self.end_headers()
                for piece in [body] if not slow else (body[i : i + 1] for i in range(len(body))):
                    self.wfile.write(piece)
                    index.sent[path] += len(piece)
                    if slow:
                        time.sleep(0.05)
            except OSError:
                self.close_connection = True  # the client gave up, as it should with a slow answer

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            pass  # clients that hang up are part of these tests

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    index.url = f"http://127.0.0.1:{server.server_address[1]}/simple"
    try:
        yield index
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
