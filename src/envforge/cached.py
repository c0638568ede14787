"""What can be made again, kept in the user's cache folder under what it was made of.

A missing, damaged or unwritable cache only costs time, so nothing here raises or waits for the disk: each file begins
with the SHA-256 of the rest, and one that does not match counts as not there. `ENVFORGE_CACHE_DIR` names another
folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def cache_folder(name: str) -> Path | None:
    """The user's folder for one kind of thing; None where there is no home folder."""
    chosen = os.environ.get("ENVFORGE_CACHE_DIR")
    if chosen:
        return Path(chosen) / name
    from platformdirs import user_cache_path

    try:
        return user_cache_path("envforge") / name
    except (OSError, RuntimeError):
        return None


class Cache:
    """Files of one folder; `most` of them are kept, the latest written ones (None: all)."""

    def __init__(self, folder: Path | None, most: int | None = None) -> None:
        self.folder, self.most = folder, most

    def read(self, name: str) -> bytes | None:
        """What was written under this name, whole and unchanged."""
        if self.folder is None:
            return None
        try:
            digest, _, body = (self.folder / name).read_bytes().partition(b"\n")
        except OSError:
            return None
        return body if hashlib.sha256(body).hexdigest().encode() == digest else None

    def write(self, name: str, body: bytes) -> None:
        """Keep it. Readers see the old file or the new one."""
        if self.folder is None:
            return
        import tempfile

        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.folder, suffix=".tmp")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
                Path(temporary).replace(self.folder / name)
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise
            if self.most is not None:
                for old in latest_first(path for path in self.folder.iterdir() if path.suffix != ".tmp")[self.most :]:
                    old.unlink()

    def read_json(self, name: str) -> Any:
        """What `write_json` wrote under this name; None where there is none."""
        body = self.read(name)
        try:
            return None if body is None else json.loads(body)
        except ValueError:
            return None

    def write_json(self, name: str, value: object) -> None:
        """Keep plain data."""
        self.write(name, json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())


def latest_first(paths: Iterable[Path]) -> list[Path]:
    """By time of change."""
    return sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)
