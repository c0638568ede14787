"""`envforge matrix update`: what the index has that the matrix has not, and what it would change for users.

Everything is harvested and told first; files are written last, each whole. A harvest that lost more than 1 % of the
known releases is refused and leaves its file as it is. Metadata is kept as it is read, so that a stopped run goes on
where it was.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from envforge.errors import EnvforgeError, UsageError
from envforge.files import write_atomic
from envforge.harvest import PACKAGES, Floors, Harvest, Index, harvest, news, transformers_floors, write
from envforge.keep.floors import MAX_WHEELS, FloorRow, compare, write_rows
from envforge.keep.images import changes, image_answers
from envforge.matrix.check import Finding, check_matrix
from envforge.matrix.check_torch import final
from envforge.matrix.load import DATA
from envforge.matrix.releases import RELEASES, Release, known_packages, load_releases

if TYPE_CHECKING:
    from envforge.matrix.model import Matrix

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class PackageUpdate:
    """One package: what its harvest brought, in sentences; `error` where it was refused or the index failed."""

    name: str
    lines: tuple[str, ...]
    harvest: Harvest | None
    error: EnvforgeError | None = None

    @property
    def changed(self) -> bool:
        """Its file would differ."""
        return self.harvest is not None and self.harvest.changed


@dataclass(frozen=True, slots=True)
class Update:
    """All packages, what users of the ready-made stacks would see, and what the checks say about the new rows only."""

    packages: tuple[PackageUpdate, ...]
    images: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = field(default=())
    floors: tuple[FloorRow, ...] = ()

    @property
    def changed(self) -> tuple[PackageUpdate, ...]:
        """Packages whose files would differ."""
        return tuple(one for one in self.packages if one.changed)

    @property
    def failed(self) -> tuple[PackageUpdate, ...]:
        """Packages that were refused or could not be read."""
        return tuple(one for one in self.packages if one.error is not None)


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """The packages to harvest; all of them where none is named.

    Raises:
        UsageError: an unknown name, with the nearest known ones.
    """
    import difflib

    for name in names:
        if name not in PACKAGES:
            near = difflib.get_close_matches(name, PACKAGES, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else "envforge matrix update without names takes all"
            raise UsageError(f"{name[:60]} is not in the matrix", hint)
    return tuple(dict.fromkeys(names)) or PACKAGES


def update(
    names: Sequence[str],
    index: Index,
    matrix: Matrix,
    *,
    folder: Path = RELEASES,
    data: Path = DATA,
    cache: Path | None = None,
    refresh: bool = False,
    accept_loss: bool = False,
    progress: Progress | None = None,
) -> Update:
    """Harvest, and work out what would change. Writes nothing but the cache of metadata.

    Args:
        names: packages of the matrix (see `check_names`).
        matrix: the hand-written rows.
        folder: the release files. data: the hand-written files. Others as for `harvest`.

    Raises:
        UsageError: an unknown name. What fails for one package is told in its PackageUpdate.
    """
    done = []
    for name in check_names(names):
        show = (lambda a, b, name=name: progress(name, a, b)) if progress else None
        try:
            found = harvest(
                name, index, folder=folder, cache=cache, refresh=refresh, accept_loss=accept_loss, progress=show
            )
        except EnvforgeError as error:
            done.append(PackageUpdate(name, (), None, error))
            continue
        done.append(PackageUpdate(name, (), found))
    fresh = {one.name: one.harvest.releases for one in done if one.harvest is not None and one.changed}

    def old_load(name: str) -> tuple[Release, ...]:
        return load_releases(name, folder)

    def new_load(name: str) -> tuple[Release, ...]:
        return fresh[name] if name in fresh else load_releases(name, folder)

    told = []
    for one in done:
        lines = news(one.name, one.harvest.old, one.harvest.releases, PACKAGES) if one.harvest else []
        told.append(PackageUpdate(one.name, tuple(with_caps(one.name, lines, new_load)), one.harvest, one.error))
    notes = tuple(note for one in done if one.harvest for note in one.harvest.notes)
    read, unread = _floors(fresh.get("transformers", ()), old_load("transformers"), index)
    notes += unread
    rows, lower = compare(read, matrix, new_load)
    if not fresh:
        return Update(tuple(told), notes=notes)
    seen = changes(image_answers(matrix, old_load), image_answers(matrix, new_load))
    released = tuple(sorted({*known_packages(folder), *fresh}))
    before = {(f.id, f.where, f.row, f.what) for f in check_matrix(data, releases=folder)}
    after = check_matrix(data, load=new_load, released=released)
    findings = tuple(f for f in after if (f.id, f.where, f.row, f.what) not in before and f.id != "policy")
    return Update(tuple(told), tuple(seen), findings + lower, notes, rows)


def _floors(new: tuple[Release, ...], old: tuple[Release, ...], index: Index) -> tuple[list[Floors], tuple[str, ...]]:
    """What the newest of the new transformers releases check inside themselves, and a note on each unread one."""
    known = {release.version for release in old}
    found, notes = [], []
    for release in [r for r in final(new) if r.version not in known][-MAX_WHEELS:]:
        try:
            found.append(transformers_floors(release.version, index))
        except EnvforgeError as error:
            notes.append(f"transformers {release.version}: its run-time floors were not read: {error.cause}")
    return found, tuple(notes)


def with_caps(name: str, lines: Sequence[str], load: Callable[[str], tuple[Release, ...]]) -> list[str]:
    """The news, each new release with who of the newest others does not take it."""
    out = []
    for line in lines:
        match = re.match(rf"{re.escape(name)} (\S+): new", line)
        if match and "yanked" not in line and not re.search(r"(a|b|rc)\d", match[1]):
            line += "".join(f"; {text}" for text in capped(name, match[1], load))
        out.append(line)
    return out


def capped(name: str, version: str, load: Callable[[str], tuple[Release, ...]]) -> list[str]:
    """ "unsloth 2026.10.9 caps it at 5.17.0" for each package whose newest release does not take this one."""
    from packaging.version import Version

    from envforge.matrix.check_rules import declared
    from envforge.matrix.check_torch import final, matching

    known = final(load(name))
    out = []
    for other in PACKAGES:
        releases = final(load(other)) if other != name else ()
        if not releases:
            continue
        own = declared(releases[-1].requires, name)
        if not own:
            continue
        able = [v for r in known if (v := r.version) in matching(known, own)]
        if version not in able and able and all(Version(v) < Version(version) for v in able):
            out.append(f"{other} {releases[-1].version} caps it at {able[-1]}")
    return out


def write_update(
    update: Update, today: str, *, folder: Path = RELEASES, data: Path = DATA, whole: bool = False
) -> list[Path]:
    """Write what changed: the run-time floors, the release files, then the day up to which the matrix is complete.

    Args:
        today: ISO date. whole: every package was asked, so the matrix is complete up to today.

    Raises:
        UsageError, DiskFullError: a file cannot be written; those before it are whole.
    """
    written = [path] if (path := write_rows(update.floors, today, data)) else []
    newest = ""
    for one in update.changed:
        assert one.harvest is not None
        path = write(one.harvest, today, folder)
        newest = max([newest, *(r.uploaded[:10] for r in one.harvest.releases)])
        if path is not None:
            written.append(path)
    day = today if whole and not update.failed else newest
    path = data / "policy.yaml"
    text = path.read_text(encoding="utf-8")
    match = re.search(r'(?m)^(\s*as_of: ")(\d{4}-\d\d-\d\d)(")', text)
    if match and day > match[2]:
        write_atomic(path, text[: match.start(2)] + day + text[match.end(2) :])
        written.append(path)
    return written
