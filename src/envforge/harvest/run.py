"""One package's harvest from the page to the file: read what is new, compare with what is known, write or refuse."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from envforge.errors import DataError, EnvforgeError, IndexUnreachableError
from envforge.files import write_atomic
from envforge.harvest.choose import RULES, Pick, keep, pick
from envforge.harvest.index import Index
from envforge.harvest.read import Reader, Store, cache_folder
from envforge.matrix.releases import RELEASES, Release, RequiresFrom, load_releases, render_releases

MAX_LOSS = 0.01  # of the known rows
AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Harvest:
    """What one harvest found. `releases` ascend by version; `asked` counts requests; `notes` are for the user."""

    name: str
    old: tuple[Release, ...]
    releases: tuple[Release, ...]
    asked: int
    notes: tuple[str, ...]

    @property
    def changed(self) -> bool:
        """True where the file would differ."""
        return self.old != self.releases


class HarvestRefusedError(IndexUnreachableError):
    """The index answered, but with less than is known already: the old file is the better one."""

    id = "harvest-refused"


def harvest(
    name: str,
    index: Index,
    *,
    folder: Path = RELEASES,
    cache: Path | None = None,
    refresh: bool = False,
    accept_loss: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Harvest:
    """Reads what the index knows about `name` now. Writes the cache only.

    Args:
        folder: where the known rows are (a damaged file counts as none).
        cache: the folder for metadata read so far; the user's cache folder unless given.
        refresh: trust no known row, read every release's metadata (from the cache where it is there).
        accept_loss: take a harvest that lost more than 1 % of the known rows.
        progress: called with (releases done, releases to read).

    Raises:
        IndexUnreachableError: no usable answer; HarvestRefusedError: too much is gone.
    """
    notes: list[str] = []
    old, trusted = _known(name, folder, notes)
    before = index.requests_made
    picks = pick(name, index.page(name).packages)
    if not picks:
        raise IndexUnreachableError(f"the package index lists no usable release of {name}")
    usable = {} if refresh or not trusted else {release.version: release for release in old}
    store = Store(cache or cache_folder(), name)
    found: dict[str, Release] = {}
    todo: list[Pick] = []
    for one in picks:
        known = usable.get(one.version)
        if known and known.requires_from != "unknown" and (known.requires_from[:5] == "sdist") != one.wheel:
            found[one.version] = one.release(known.requires, known.requires_from)
        else:
            todo.append(one)
    reader = Reader(index, store, name)
    for one, (lines, origin) in _in_parallel(reader, todo, index, progress):
        kept, dropped = keep(name, lines)
        notes += [f"{name} {one.version}: unreadable requirement left out: {line}" for line in dropped]
        found[one.version] = one.release(kept, origin)
    unknown = [version for version, release in found.items() if release.requires_from == "unknown"]
    if unknown:
        notes.append(f"{name}: no declared requirements could be read for {len(unknown)} release(s): {_few(unknown)}")
    releases = tuple(found[one.version] for one in picks)
    if not accept_loss:
        refuse_loss(name, old, releases)
    return Harvest(name, old, releases, index.requests_made - before, tuple(notes))


def _known(name: str, folder: Path, notes: list[str]) -> tuple[tuple[Release, ...], bool]:
    """The rows on disk, and whether today's rules chose their lines."""
    load_releases.cache_clear()
    try:
        old = load_releases(name, folder)
    except DataError as error:
        notes.append(f"{error.cause}; everything is read anew")
        return (), False
    if not old:
        return (), False
    old = tuple(release._replace(requires=tuple(sorted(release.requires))) for release in old)
    return old, json.loads((folder / f"{name}.json").read_text(encoding="utf-8")).get("rules") == RULES


def refuse_loss(name: str, old: Sequence[Release], new: Sequence[Release]) -> None:
    """Raises HarvestRefusedError where more than 1 % of the known rows are gone, or lost all wheels they had."""
    by_version = {release.version: release for release in new}
    lost = [
        release.version
        for release in old
        if release.version not in by_version or (release.wheels and not by_version[release.version].wheels)
    ]
    if len(lost) > MAX_LOSS * len(old):
        raise HarvestRefusedError(
            f"{name}: the package index no longer shows {len(lost)} of {len(old)} known releases ({_few(lost)}); "
            "the old file is kept",
            "try again later; if they are really gone, run the update with --accept-loss",
        )


def _few(names: Sequence[str], limit: int = 6) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _in_parallel(
    reader: Reader, todo: list[Pick], index: Index, progress: Callable[[int, int], None] | None
) -> list[tuple[Pick, tuple[list[str], RequiresFrom]]]:
    """Reads all of `todo`, a few at once. The first failure, or Ctrl-C, stops the rest; what is done is cached."""
    done = 0
    out: list[tuple[Pick, tuple[list[str], RequiresFrom]]] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        futures = {pool.submit(reader.requirements, one): one for one in todo}
        try:
            pending = set(futures)
            while pending:
                finished, pending = wait(pending, timeout=1.0, return_when=FIRST_EXCEPTION)
                for future in finished:
                    out.append((futures[future], future.result()))
                done += len(finished)
                if progress and finished:
                    progress(done, len(todo))
        except BaseException as error:
            if not isinstance(error, EnvforgeError):
                index.stopped.set()  # Ctrl-C: end also the answers that are under way
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return out


def write(result: Harvest, harvested: str, folder: Path = RELEASES) -> Path | None:
    """Writes the release file of a harvest; None where nothing changed (then the file stays as it is)."""
    path = folder / f"{result.name}.json"
    if path.exists() and not result.changed:
        return None
    write_atomic(path, render_releases(result.name, result.releases, harvested, RULES))
    load_releases.cache_clear()
    return path
