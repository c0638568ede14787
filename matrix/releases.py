"""Generated release metadata, one JSON file per package, read one package at a time.

File format (matrix/releases/NAME.json), written only by `tools/update_matrix.py`; strings that repeat are stored once:

    {"schema": 1, "name": "peft", "harvested": "2026-11-30",
     "strings": ["torch>=1.13.0", "numpy>=1.17", ...],            distinct Requires-Dist lines, sorted
     "tags": ["py3-none-any", "cp311-cp311-manylinux_2_28_x86_64", ...],   distinct wheel tags, sorted
     "releases": [{"version": "0.1.0", "uploaded": "2023-02-10", "python": ">=3.7", "requires": [0, 1],
                   "wheels": [0], "sdist": true, "yanked": false, "size": 12345}, ...]}   ascending by version

`requires` and `wheels` index into `strings` and `tags`. `size` is bytes of the Linux x86_64 wheel most likely taken
(largest cp tag), 0 where unknown. Only Linux tags (manylinux, musllinux left out, linux, any) are kept. Source: the package index's own
metadata (PEP 658 / JSON), so `confidence` is verified-from-metadata for all of it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from envforge.errors import DataError

RELEASES = Path(__file__).parent / "releases"


@dataclass(frozen=True, slots=True)
class Release:
    """One release. `requires` holds PEP 508 lines, `wheels` compressed tag sets, `uploaded` an ISO date."""

    version: str
    uploaded: str
    python: str
    requires: tuple[str, ...]
    wheels: tuple[str, ...]
    sdist: bool
    yanked: bool
    size: int


@lru_cache(maxsize=None)
def load_releases(name: str, folder: Path = RELEASES) -> tuple[Release, ...]:
    """All releases of one package, ascending by version; empty when the matrix has no file for it.

    Raises:
        DataError: the file is truncated or not what the generator writes (names the file).
    """
    path = folder / f"{name}.json"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ()
    try:
        data = json.loads(text)
        strings, tags = data["strings"], data["tags"]
        return tuple(
            Release(
                version=row["version"],
                uploaded=row["uploaded"],
                python=row["python"],
                requires=tuple(strings[i] for i in row["requires"]),
                wheels=tuple(tags[i] for i in row["wheels"]),
                sdist=row["sdist"],
                yanked=row["yanked"],
                size=row["size"],
            )
            for row in data["releases"]
        )
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise DataError(
            f"{path.name}: the generated release file is damaged ({error})",
            f"write it again: envforge matrix update {name} --write",
        ) from error


def known_packages(folder: Path = RELEASES) -> tuple[str, ...]:
    """Names that have a release file, sorted."""
    return tuple(sorted(path.stem for path in folder.glob("*.json")))
