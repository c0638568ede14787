"""A redacted archive of a run, to send with a report: the same inputs give the same bytes."""

from __future__ import annotations

import contextlib
import gzip
import io
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, cast

from envforge.redact import Redactor

HEAD, TAIL = 1 << 20, 4 << 20  # bytes that are kept of a file, from its start and its end
LEAST = 64 << 10
TOTAL = 200 << 20
README = "README.txt"


def shortened(path: Path, room: int = HEAD + TAIL) -> str:
    """A file's text, plain or gzip; of a large one its start and its end, cut at line breaks."""
    first, last = room // 5, room - room // 5
    with contextlib.ExitStack() as stack:
        file: BinaryIO = stack.enter_context(path.open("rb"))
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        if packed:
            file = stack.enter_context(cast(BinaryIO, gzip.GzipFile(fileobj=file)))
        head, tail, size = file.read(first), b"", 0
        while block := file.read(1 << 20):
            size += len(block)
            tail = (tail + block)[-last:]
    size += len(head)
    if size <= room:
        return _text(head + tail)
    head = head[: head.rfind(b"\n") + 1] or head
    tail = tail[tail.find(b"\n") + 1 :] or tail
    return f"{_text(head)}[... {size - len(head) - len(tail)} bytes left out ...]\n{_text(tail)}"


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace").replace("\x00", "")


def make_archive(
    texts: Mapping[str, str], files: Sequence[tuple[str, Path]], redactor: Redactor
) -> tuple[bytes, dict[str, int]]:
    """The archive's bytes, and how much of each kind was taken out.

    texts: name in the archive -> text. files: names and files. Every text is redacted, names of files too.
    """
    room = max(LEAST, min(HEAD + TAIL, TOTAL // max(len(files), 1)))
    content = {**texts, **{name: shortened(path, room) for name, path in files}}
    for text in content.values():
        redactor.learn(text)
    redactor.counts.clear()
    clean = {redactor.text(name): redactor.text(text) for name, text in sorted(content.items())}
    counts = dict(sorted(redactor.counts.items()))
    clean[README] = _readme(sorted(clean), counts)
    out = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=out, mode="wb", mtime=0, filename="") as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for name, text in sorted(clean.items()):
            data = text.encode("utf-8", "replace")
            info = tarfile.TarInfo(f"envforge-report/{name}")
            info.size, info.mode = len(data), 0o644
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue(), counts


def _readme(names: Sequence[str], counts: Mapping[str, int]) -> str:
    taken = "\n".join(f"  {what}: {count}" for what, count in counts.items()) or "  nothing"
    return (
        "A run as envforge diagnose --bundle gathered it. Taken out before it was packed (kind: how often):\n"
        f"{taken}\n\n"
        "Names of nodes, packages, models and paths below home folders are still in it: look it over before you send "
        "it.\n\n" + "\n".join(names) + "\n"
    )
