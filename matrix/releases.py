"""Generated release metadata, one JSON file per package, read one package at a time.

File format (matrix/releases/NAME.json), written only by `envforge matrix update`; strings that repeat are stored once:

    {"schema": 1, "rules": 1, "name": "peft", "harvested": "2026-11-30",
     "strings": ["numpy>=1.17", "torch>=1.13.0", ...],            distinct Requires-Dist lines
     "tags": ["cp311-cp311-manylinux_2_28_x86_64", "py3-none-any", ...],   distinct wheel tags, sorted
     "sets": [[0, 2], ...],                                        distinct sets of requirements, by first use
     "releases": [{"version": "0.1.0", "uploaded": "2023-02-10", "python": ">=3.7", "requires": 0,
                   "wheels": [1], "sdist": true, "yanked": false, "size": 12345}, ...]}   ascending by version

`requires` indexes `sets`; a set is pairs of numbers, each pair a slice start:end of `strings`. Lines that come and go
together are neighbours in `strings` (ordered by the sets that hold them, then by text), so a set of hundreds is a few
slices. `wheels` indexes `tags`. `size` is bytes of the Linux x86_64 wheel most likely taken (largest cp tag), 0 where
unknown. Only Linux tags for x86_64 and aarch64 are kept (manylinux, linux, any; no musllinux, PyPy or free-threaded
builds). `requires_from` stands in a row where the requirements are not a wheel's own metadata (see `Release`).
`harvested` is the day on which the rows last changed; `rules` numbers the harvester's choice of lines, so that a
changed choice reads everything anew. Source: the package index's own metadata (METADATA of wheels and sdists, PEP 658
or JSON), so `confidence` is verified-from-metadata for all of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from envforge.errors import DataError

RELEASES = Path(__file__).parent / "releases"
SCHEMA = 1

RequiresFrom = Literal["wheel", "index", "sdist", "sdist-requires-txt", "sdist-requirements", "unknown"]


class Release(NamedTuple):
    """One release. `requires` holds PEP 508 lines, `wheels` compressed tag sets, `uploaded` an ISO date.

    `requires_from` says where `requires` was read: the METADATA of a wheel, the index's JSON answer, the sdist's
    PKG-INFO, the requires.txt that its build left in it, or its plain requirements file. "unknown" means that nothing
    declares them without running code: then `requires` is empty and says nothing.
    """

    version: str
    uploaded: str
    python: str
    requires: tuple[str, ...]
    wheels: tuple[str, ...]
    sdist: bool
    yanked: bool
    size: int
    requires_from: RequiresFrom = "wheel"


@cache
def load_releases(name: str, folder: Path = RELEASES) -> tuple[Release, ...]:
    """All releases of one package, ascending by version; empty when the matrix has no file for it.

    Releases with the same requirements share one tuple; its order has no meaning.

    Raises:
        DataError: the file is truncated or not what the generator writes (names the file).
    """
    path = folder / f"{name}.json"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ()
    except (OSError, UnicodeDecodeError) as error:
        raise _damaged(path, name, error) from error
    try:
        data = json.loads(text)
        if data["schema"] != SCHEMA or data["name"] != name:
            raise ValueError(f"schema {data['schema']!r}, name {data['name']!r}")
        strings, tags = data["strings"], data["tags"]
        if not all(type(value) is str for value in strings + tags):
            raise TypeError("a requirement or a tag is not text")
        sets = [_slices(strings, numbers) for numbers in data["sets"]]
        return tuple(
            [
                Release(
                    row["version"],
                    row["uploaded"],
                    row["python"],
                    sets[row["requires"]],
                    tuple([tags[i] for i in row["wheels"]]),
                    row["sdist"],
                    row["yanked"],
                    row["size"],
                    row.get("requires_from", "wheel"),
                )
                for row in data["releases"]
            ]
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise _damaged(path, name, error) from error


def _slices(strings: list[str], numbers: list[int]) -> tuple[str, ...]:
    out: list[str] = []
    for start, end in zip(numbers[::2], numbers[1::2], strict=True):
        if not 0 <= start < end <= len(strings):
            raise IndexError(f"no requirements {start}:{end}")
        out += strings[start:end]
    return tuple(out)


def _damaged(path: Path, name: str, error: Exception) -> DataError:
    return DataError(
        f"{path.name}: the generated release file is damaged ({error})",
        f"write it again: envforge matrix update {name} --write",
    )


def known_packages(folder: Path = RELEASES) -> tuple[str, ...]:
    """Names that have a release file, sorted."""
    return tuple(sorted(path.stem for path in folder.glob("*.json")))


def render_releases(name: str, releases: Sequence[Release], harvested: str, rules: int = 1) -> str:
    """The text of a release file: the same releases give the same bytes. `releases` are ascending by version."""
    set_at: dict[frozenset[str], int] = {}
    for release in releases:
        set_at.setdefault(frozenset(release.requires), len(set_at))
    holders: dict[str, list[int]] = {}
    for lines, at in set_at.items():
        for line in lines:
            holders.setdefault(line, []).append(at)
    strings = sorted(holders, key=lambda line: (holders[line], line))
    string_at = {line: i for i, line in enumerate(strings)}
    sets = [_runs(sorted(string_at[line] for line in lines)) for lines in set_at]
    tags = sorted({tag for release in releases for tag in release.wheels})
    tag_at = {tag: i for i, tag in enumerate(tags)}
    rows = [
        {
            "version": release.version,
            "uploaded": release.uploaded,
            "python": release.python,
            "requires": set_at[frozenset(release.requires)],
            "wheels": sorted(tag_at[tag] for tag in set(release.wheels)),
            "sdist": release.sdist,
            "yanked": release.yanked,
            "size": release.size,
        }
        | ({} if release.requires_from == "wheel" else {"requires_from": release.requires_from})
        for release in releases
    ]
    head = json.dumps({"schema": SCHEMA, "rules": rules, "name": name, "harvested": harvested})[:-1]
    parts = [f'"{key}": {_lines(values)}' for key, values in (("strings", strings), ("tags", tags), ("sets", sets))]
    return ",\n ".join([head, *parts, f'"releases": {_lines(rows)}']) + "}\n"


def _runs(numbers: Iterable[int]) -> list[int]:
    """Ascending numbers as start, end, start, end, ... of their unbroken runs."""
    out: list[int] = []
    for number in numbers:
        if out and out[-1] == number:
            out[-1] = number + 1
        else:
            out += [number, number + 1]
    return out


def _lines(values: Sequence[object]) -> str:
    """A JSON list with one value a line, so that a change shows as a few lines."""
    return "[" + ",\n  ".join(json.dumps(value, separators=(",", ":"), ensure_ascii=False) for value in values) + "]"
