"""Writing files so that nobody ever sees half of one."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from envforge.errors import DiskFullError, OutsideError, UsageError

REQUIREMENTS = "requirements.txt"
LOCK_HEAD = "# envforge lock"  # how each of ours begins


def check_lock_place(folder: Path) -> None:
    """Before a lock is written.

    Raises:
        UsageError: the folder has a requirements.txt that is somebody's own.
    """
    path = folder / REQUIREMENTS
    try:
        with path.open(encoding="utf-8", errors="replace") as stream:
            head = stream.read(len(LOCK_HEAD))
    except OSError:
        return  # none, or the writing says why not
    if head not in ("", LOCK_HEAD):
        raise UsageError(
            f"{path} is no lock of envforge, and one would replace it",
            "give it another name (and that name to -r), or choose another folder",
        )


def no_space(error: OSError) -> bool:
    """Is the disk, or the user's share of it, full?"""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def write_atomic(path: Path, text: str | bytes, mode: int = 0o644) -> None:
    """Write to a temporary file beside `path`, then rename over it; a failure or Ctrl-C leaves what was there.

    A device or a pipe (/dev/null, /dev/stdout) is written into: as root, a rename would put a file in its place.

    Raises:
        DiskFullError: the disk is full. UsageError: the folder is missing or not writable.
    """
    import tempfile  # here, because a command that writes nothing starts faster without

    data = text.encode("utf-8") if isinstance(text, str) else text
    temporary: str | None = None
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_bytes(data)
            return
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).chmod(mode)
        Path(temporary).replace(path)
        temporary = None
    except OSError as error:
        if no_space(error):
            raise DiskFullError(f"no space left while writing {path}", "free some space and run again") from error
        raise UsageError(
            f"cannot write {path}: {error.strerror}", "choose a folder that exists and is writable"
        ) from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()


@contextlib.contextmanager
def told(folder: Path) -> Iterator[None]:
    """Faults of the system while something is made in `folder`, as errors of ours.

    Raises:
        DiskFullError: the disk is full. OutsideError: the folder cannot be made or written.
    """
    try:
        yield
    except OSError as error:
        if no_space(error):
            raise DiskFullError(f"the disk of {folder} is full", "free some space and run again") from error
        raise OutsideError(f"cannot write in {folder}: {error.strerror or error}", "choose another --output") from error
