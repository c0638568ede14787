"""Files of a bundle: fetched and resumed from a real server on loopback, predicted from it, images as layouts."""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
import json
import re
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from envforge.errors import DataError, HashMismatchError, IndexUnreachableError
from envforge.image.oci import to_archive, to_layout
from envforge.image.values import Event
from envforge.keep import download as module
from envforge.keep.download import copy_file, download
from envforge.keep.predict import measure
from envforge.lock import Lock, LockedPackage, PipSettings
from envforge.lock.availability import http_session

DATA = bytes(range(256)) * 4000


class Files:
    """Serves bytes by path, ranges too; breaks off after `cut` bytes, and asks for a login where `login` is set."""

    def __init__(self, **files: bytes) -> None:
        self.files, self.cut, self.login = files, 0, ""
        self.asked: list[tuple[str, str]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                spread = self.headers.get("Range", "")
                outer.asked.append((self.path, spread))
                data = outer.files.get(self.path[1:])
                wanted = "Basic " + base64.b64encode(outer.login.encode()).decode()
                if data is None or (outer.login and self.headers.get("Authorization") != wanted):
                    self.send_error(404 if data is None else 401)
                    return
                start, end = 0, len(data)
                if found := re.fullmatch(r"bytes=(\d*)-(\d*)", spread):
                    if not found[1]:
                        start = max(0, end - int(found[2]))
                    else:
                        start = int(found[1])
                        end = int(found[2]) + 1 if found[2] else end
                    if start >= len(data):
                        self.send_error(416)
                        return
                    self.send_response(206)
                    self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
                else:
                    self.send_response(200)
                self.send_header("Content-Length", str(end - start))
                self.end_headers()
                if self.command == "GET":
                    piece = data[start:end]
                    self.wfile.write(piece[: outer.cut] if outer.cut else piece)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Iterator[Files]:
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    found = Files(**{"a.whl": DATA})
    threading.Thread(target=found.server.serve_forever, daemon=True).start()
    yield found
    found.server.shutdown()
    found.server.server_close()


def fetch(files: Files, target: Path, digest: str = "", settings: PipSettings | None = None) -> list[Event]:
    """Download a.whl; returns the events."""
    events: list[Event] = []
    settings = settings or PipSettings()
    hashes = (digest or hashlib.sha256(DATA).hexdigest(),)
    with http_session(settings) as session:
        download(session, settings, f"{files.url}/a.whl", target, hashes, events.append)
    return events


def test_a_file_that_breaks_off_is_gone_on_with(files: Files, tmp_path: Path) -> None:
    files.cut = 400_000
    events = fetch(files, tmp_path / "a.whl")
    assert (tmp_path / "a.whl").read_bytes() == DATA
    starts = [int(spread[6:-1] or 0) if spread else 0 for _, spread in files.asked]
    assert starts[0] == 0
    assert all(after - before > 300_000 for before, after in itertools.pairwise(starts))
    assert (events[-1].done, events[-1].total) == (len(DATA), len(DATA))
    fetch(files, tmp_path / "a.whl")
    assert len(files.asked) == len(starts), "what is whole is not asked for again"
    assert [path.name for path in tmp_path.iterdir()] == ["a.whl"]


def test_a_stop_is_gone_on_with_by_the_next_run(files: Files, tmp_path: Path) -> None:
    (tmp_path / "a.whl.part").write_bytes(DATA[:1000])
    fetch(files, tmp_path / "a.whl")
    assert files.asked == [("/a.whl", "bytes=1000-")]
    # A part of some other file costs one more try and does no harm.
    (tmp_path / "a.whl").unlink()
    (tmp_path / "a.whl.part").write_bytes(b"x" * 1000)
    fetch(files, tmp_path / "a.whl")
    assert (tmp_path / "a.whl").read_bytes() == DATA
    (tmp_path / "a.whl").unlink()
    (tmp_path / "a.whl.part").write_bytes(b"x" * (len(DATA) + 1))
    fetch(files, tmp_path / "a.whl")
    assert (tmp_path / "a.whl").read_bytes() == DATA


def test_another_file_under_that_name_is_refused(files: Files, tmp_path: Path) -> None:
    with pytest.raises(HashMismatchError):
        fetch(files, tmp_path / "a.whl", "0" * 64)
    assert not list(tmp_path.iterdir())
    with pytest.raises(HashMismatchError):
        copy_file(Path(__file__), tmp_path / "b.whl", ("0" * 64,))
    assert not list(tmp_path.iterdir())


def test_a_server_that_does_not_deliver_is_named(files: Files, tmp_path: Path) -> None:
    files.files.clear()
    with pytest.raises(IndexUnreachableError) as error:
        fetch(files, tmp_path / "a.whl")
    assert "HTTP 404" in error.value.cause
    assert len(files.asked) == module.TRIES


def test_the_login_of_the_same_host_is_used_and_never_told(files: Files, tmp_path: Path) -> None:
    files.login = "user:s3cr3t"
    settings = PipSettings(index_url=files.url.replace("//", "//user:s3cr3t@") + "/simple")
    fetch(files, tmp_path / "a.whl", settings=settings)
    with pytest.raises(IndexUnreachableError) as error:
        fetch(files, tmp_path / "b.whl")
    assert "401" in error.value.cause
    assert "s3cr3t" not in error.value.render()


def wheel(**content: bytes) -> bytes:
    """A zip with these files."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def test_the_wheels_themselves_say_what_they_take(files: Files, tmp_path: Path) -> None:
    big = wheel(
        **{"torch/a.so": b"\0" * 900_000, "torch/test/x.py": b"\0" * 50_000, "torch/include/a.h": b"\0" * 7_000}
    )
    local = wheel(**{"numpy/a.so": b"\0" * 100_000, "numpy/tests/t.py": b"\0" * 10_000})
    files.files |= {"torch.whl": big, "none.whl": b"x" * 5000}
    (tmp_path / "numpy.whl").write_bytes(local)
    rows = [
        LockedPackage("torch", "2", "torch", ("sha256:0",), "torch.whl", None, url=f"{files.url}/torch.whl"),
        LockedPackage("numpy", "2", "default", ("sha256:0",), "numpy.whl", len(local), url=f"{files.url}/numpy.whl"),
    ]
    lock = Lock("", "", tuple(rows), "0", "3.11", "x86_64", "cpu")
    told = measure(lock, PipSettings(), [tmp_path], keep_headers=False)
    assert (told.unpacked, told.image, told.exact) == (1_067_000, 1_000_000, True)
    assert (told.download, told.carried) == (len(big), len(local))
    assert measure(lock, PipSettings(), [tmp_path], keep_headers=True).image == 1_007_000
    # Of the file only its end was asked for, and a file that is no wheel is asked for its size alone.
    assert all(spread for path, spread in files.asked if path == "/torch.whl")
    odd = LockedPackage("none", "1", "torch", ("sha256:0",), "none.whl", None, url=f"{files.url}/none.whl")
    told = measure(Lock("", "", (odd,), "0", "3.11", "x86_64", "cpu"), PipSettings(), [], keep_headers=False)
    assert (told.download, told.exact) == (5000, False)
    gone = LockedPackage("gone", "1", "torch", ("sha256:0",), "gone.whl", None, url=f"{files.url}/gone.whl")
    told = measure(Lock("", "", (gone,), "0", "3.11", "x86_64", "cpu"), PipSettings(), [], keep_headers=False)
    assert (told.download, told.exact) == (0, False)


def test_an_image_is_a_layout_and_an_archive_again(tmp_path: Path) -> None:
    layer, config = b"layer" * 1000, json.dumps({"rootfs": {}}).encode()
    with tarfile.open(tmp_path / "docker.tar", "w") as tar:
        manifest = json.dumps(
            [{"Config": "c.json", "RepoTags": None, "Layers": ["1/layer.tar", "2/layer.tar"]}]
        ).encode()
        for name, data in (("c.json", config), ("1/layer.tar", layer), ("manifest.json", manifest)):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        link = tarfile.TarInfo("2/layer.tar")  # docker links a layer that is there twice
        link.type, link.linkname = tarfile.SYMTYPE, "../1/layer.tar"
        tar.addfile(link)
    identity = to_layout(tmp_path / "docker.tar", tmp_path / "layout", "x:1")
    assert identity == f"sha256:{hashlib.sha256(config).hexdigest()}"
    (entry,) = json.loads((tmp_path / "layout/index.json").read_text())["manifests"]
    made = json.loads((tmp_path / "layout/blobs/sha256" / entry["digest"][7:]).read_text())
    assert [row["digest"] for row in made["layers"]] == [f"sha256:{hashlib.sha256(layer).hexdigest()}"] * 2
    to_archive(tmp_path / "layout", tmp_path / "again.tar")
    assert to_layout(tmp_path / "again.tar", tmp_path / "twice", "x:1") == identity
    blob = tmp_path / "layout/blobs/sha256" / hashlib.sha256(layer).hexdigest()
    blob.write_bytes(b"other")
    with pytest.raises(DataError):
        to_archive(tmp_path / "layout", tmp_path / "third.tar")
    with pytest.raises(DataError):
        to_layout(blob, tmp_path / "nothing", "x:1")
