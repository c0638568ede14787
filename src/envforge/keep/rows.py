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
from envforge.cached import Cache, cache_folder, latest_first
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
        self.cache = Cache(folder)

    def read(self, at: Key) -> str | None:
        """The text under this key."""
        body = self.cache.read(_name(at))
        return None if body is None else body.decode()

    def write(self, at: Key, text: str) -> None:
        """Keep a text."""
        folder = self.cache.folder
        new = folder is not None and not folder.exists()
        self.cache.write(_name(at), text.encode())
        if folder is not None and new:
            with contextlib.suppress(OSError):
                for old in latest_first(folder.parent.iterdir())[KEEP:]:
                    shutil.rmtree(old)


def _name(at: Key) -> str:
    return f"{hashlib.sha256(repr(at).encode()).hexdigest()[:32]}.json"


def keep_rows(matrix: Matrix, newer: Newer, releases: Path = RELEASES, cache: Path | None = None) -> None:
    """Let solves of this matrix use, and add to, what earlier runs kept; not where releases were looked up besides."""
    if newer.releases:
        return
    cache = cache or cache_folder("rows")
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
