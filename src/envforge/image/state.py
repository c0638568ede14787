"""What is kept of builds beside the images: logs, receipts, the lock of each address, and which projects use it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from envforge.errors import OutsideError
from envforge.files import write_atomic
from envforge.image.values import BuildOptions, Event, Progress

_USERS = "used-by.json"


def state_folder(options: BuildOptions, address: str) -> Path:
    """Where the logs and receipts of one address are kept (made when needed)."""
    return state_root(options, address[:16])


def state_root(options: BuildOptions | None = None, name: str = "") -> Path:
    """The folder above all of them, or one in it."""
    from platformdirs import user_state_path

    root = options.state if options is not None else None
    folder = (root or user_state_path("envforge") / "builds") / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutsideError(f"cannot write build logs in {folder}: {error.strerror}", "set XDG_STATE_HOME") from error
    return folder


@contextlib.contextmanager
def one_at_a_time(state: Path, progress: Progress) -> Iterator[None]:
    """Two builds of one address: the second waits, then finds the work done. A killed one leaves no lock behind."""
    from filelock import FileLock, Timeout

    lock = FileLock(state / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress(Event("stage", "waiting for another build of the same plan"))
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def being_built(state: Path) -> bool:
    """Does somebody hold the address's lock at this moment?"""
    from filelock import FileLock, Timeout

    if not state.is_dir():
        return False
    lock = FileLock(state / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    lock.release()
    return False


def folder_of(root: Path, address: str) -> Path:
    """The folder of one address, made or not."""
    return root / address[:16]


def note_user(state: Path, project: Path) -> None:
    """Remember that a project is built on what this state folder belongs to."""
    known = _noted(state)
    place = str(project.resolve())
    if place not in known:
        write_atomic(state / _USERS, json.dumps([*known, place], indent=1) + "\n")


def users(state: Path, address: str) -> tuple[Path, ...]:
    """The projects that were built on an address and whose build.json still says so."""
    found = []
    for place in map(Path, _noted(state)):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if json.loads((place / "build.json").read_text(encoding="utf-8")).get("address") == address:
                found.append(place)
    return tuple(found)


def _noted(state: Path) -> list[str]:
    try:
        found = json.loads((state / _USERS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [str(place) for place in found] if isinstance(found, list) else []


def proof_of(state: Path) -> str | None:
    """The best grade that a receipt here has."""
    return next((grade for grade in ("full", "static") if (state / f"receipt-{grade}.json").is_file()), None)
