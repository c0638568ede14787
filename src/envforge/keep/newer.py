"""One release that the matrix does not know yet: looked up once on the index, for this run only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from envforge.errors import IndexUnreachableError
from envforge.matrix.releases import RELEASES, Release, known_packages, load_releases

if TYPE_CHECKING:
    from envforge.harvest.index import IndexSettings
    from envforge.resolver.request import Request

PATIENCE_S = 20.0  # for all look-ups of one run together


@dataclass(frozen=True, slots=True)
class Newer:
    """Releases beyond the matrix, by package, and what the user is told about each."""

    releases: dict[str, tuple[Release, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def load(self, name: str) -> tuple[Release, ...]:
        """What the matrix knows of a package, and what was looked up."""
        return (*load_releases(name), *self.releases.get(name, ()))


def wanted(requests: Sequence[Request], folder: Path = RELEASES) -> list[tuple[str, str]]:
    """(package, version) of the exact pins that are newer than everything the matrix knows of that package."""
    from packaging.version import InvalidVersion, Version

    names = set(known_packages(folder))
    found = []
    for request in requests:
        if request.pinned is None or request.name not in names or request.url:
            continue
        releases = load_releases(request.name, folder)
        try:
            if releases and Version(request.pinned) > Version(releases[-1].version):
                found.append((request.name, request.pinned))
        except InvalidVersion:
            continue
    return list(dict.fromkeys(found))


def find_newer(requests: Sequence[Request], settings: Callable[[], IndexSettings]) -> Newer:
    """Look up the pins that are newer than the matrix. Asks the network only where there is one, and once for each.

    A version that the index does not have either is left to the resolver, which says so.

    Raises:
        IndexUnreachableError: there is such a pin and the index does not answer (exit 3).
    """
    pins = wanted(requests)
    if not pins:
        return Newer()
    from envforge.harvest import Index

    found: dict[str, tuple[Release, ...]] = {}
    notes = []
    try:
        with Index(settings(), deadline_s=PATIENCE_S, attempts=2, read_s=10.0) as index:
            for name, version in pins:
                release = look_up(name, version, index)
                if release is None:
                    continue
                found[name] = (*found.get(name, ()), release)
                newest = load_releases(name)[-1]
                notes.append(
                    f"{name} {release.version} of {release.uploaded} is newer than the matrix (newest there: "
                    f"{newest.version}): its declared needs count, but no rule knows it yet"
                )
    except IndexUnreachableError as error:
        names = ", ".join(f"{name}=={version}" for name, version in pins)
        raise IndexUnreachableError(
            f"{names} is newer than the matrix and had to be looked up, but that failed: {error.cause}",
            "pin a release that the matrix knows, or run this where the package index answers "
            f"(envforge matrix update {pins[0][0]} --write keeps it for later)",
        ) from error
    return Newer(found, tuple(notes))


def look_up(name: str, version: str, index: object) -> Release | None:
    """One release from the index: its page and its metadata; None where the index does not have it.

    Raises:
        IndexUnreachableError: no usable answer.
    """
    from packaging.version import Version

    from envforge.harvest.choose import keep, pick
    from envforge.harvest.index import Index
    from envforge.harvest.read import Reader, Store, cache_folder

    assert isinstance(index, Index)
    wanted_version = Version(version)
    one = next(
        (p for p in pick(name, index.page(name).packages, window=False) if Version(p.version) == wanted_version), None
    )
    if one is None:
        return None
    lines, origin = Reader(index, Store(cache_folder(), name), name).requirements(one)
    kept, _ = keep(name, lines)
    return one.release(kept, origin)
