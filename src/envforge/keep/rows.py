"""The rows that packages' metadata gives, kept between runs: making them again is a third of a resolve.

They lie in the user's cache folder, a file per package, in a folder named after everything they were made of: the
release files (name, size, time of change, as Python's own compiled files are known), the hand-written matrix and this
code. A missing, damaged or unwritable cache only costs time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import packaging

from envforge import resolver
from envforge.matrix.releases import RELEASES
from envforge.resolver.packages import shelf

if TYPE_CHECKING:
    from envforge.keep.newer import Newer
    from envforge.matrix.model import Matrix
    from envforge.resolver.pieces import Key

KEEP = 3  # folders: one for each matrix that this user works with


class RowFolder:
    """A `resolver.pieces.Store` in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path(self, at: Key) -> Path:
        return self.folder / f"{hashlib.sha256(repr(at).encode()).hexdigest()[:32]}.json"

    def read(self, at: Key) -> str | None:
        """The text under this key, unless it is not exactly what was written."""
        try:
            digest, _, body = self._path(at).read_bytes().partition(b"\n")
        except OSError:
            return None
        return body.decode() if hashlib.sha256(body).hexdigest().encode() == digest else None

    def write(self, at: Key, text: str) -> None:
        """Keep a text; failures are silent."""
        from envforge.errors import EnvforgeError
        from envforge.files import write_atomic

        body = text.encode()
        with contextlib.suppress(OSError, EnvforgeError):
            if not self.folder.is_dir():
                self.folder.mkdir(parents=True, exist_ok=True)
                _prune(self.folder.parent)
            write_atomic(self._path(at), hashlib.sha256(body).hexdigest().encode() + b"\n" + body)


def keep_rows(matrix: Matrix, newer: Newer, releases: Path = RELEASES, cache: Path | None = None) -> None:
    """Let solves of this matrix use, and add to, what earlier runs kept; not where releases were looked up besides."""
    if newer.releases:
        return
    cache = cache or _cache_folder()
    if cache is not None:
        shelf(matrix, newer.load).store = RowFolder(cache / _made_of(matrix.hash, releases))


def _made_of(matrix_hash: str, releases: Path) -> str:
    code = Path(resolver.__file__).parent
    parts = [matrix_hash, packaging.__version__]
    for folder in (releases, code, code.parent / "matrix"):
        with os.scandir(folder) as entries:
            found = [(e.name, e.stat().st_size, e.stat().st_mtime_ns) for e in entries if e.is_file()]
        parts.append(repr((str(folder), sorted(found))))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _cache_folder() -> Path | None:
    from platformdirs import user_cache_path

    try:
        return user_cache_path("envforge") / "rows"
    except (OSError, RuntimeError):  # no home folder
        return None


def _prune(folder: Path) -> None:
    """Remove the folders of matrices that are no longer used."""
    made = sorted((p for p in folder.iterdir() if p.is_dir()), key=lambda path: path.stat().st_mtime, reverse=True)
    for old in made[KEEP:]:
        shutil.rmtree(old, ignore_errors=True)
