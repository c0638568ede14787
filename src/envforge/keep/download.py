"""One file from an index to disk: resumed where it broke off, compared with its hash, in place only when whole."""

from __future__ import annotations

import hashlib
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from envforge.errors import DiskFullError, HashMismatchError, IndexUnreachableError, OutsideError
from envforge.files import no_space
from envforge.image.values import Event, Progress, silent
from envforge.lock.settings import PipSettings, redact, split_credentials

if TYPE_CHECKING:
    from requests import Response, Session

TRIES = 4  # in a row without a byte
_BLOCK = 1 << 20
_PIECE = 1 << 16  # what a connection that breaks off takes with it at most


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def download(
    session: Session,
    settings: PipSettings,
    url: str,
    target: Path,
    sha256: tuple[str, ...],
    progress: Progress = silent,
) -> None:
    """Fetch `url` into `target`; what is there with one of the hashes is left alone, `target`.part is gone on from.

    Raises:
        IndexUnreachableError: the index does not deliver. HashMismatchError: it delivers something else.
        DiskFullError, OutsideError: the file cannot be written.
    """
    if target.is_file() and sha256_of(target) in sha256:
        return
    part = target.with_name(f"{target.name}.part")
    problem = ""
    attempt = 0
    while attempt < TRIES:
        if attempt:
            time.sleep(min(4.0, 0.25 * 4**attempt))
        before = _size(part)
        try:
            problem = _more(session, settings, url, part, progress)
        except OSError as error:
            if no_space(error):
                raise DiskFullError(f"no space left for {target.name}", "free some space and run again") from error
            raise OutsideError(f"cannot write {part}: {error.strerror or error}") from error
        if problem:
            attempt = 0 if _size(part) > before else attempt + 1
            continue
        if sha256_of(part) in sha256:
            part.replace(target)
            return
        # A part of another file, or a mirror's rubbish: once more from the start.
        part.unlink()
        attempt += 2
        problem = "what comes is not the file that the lock names"
    if "not the file" in problem:
        raise HashMismatchError(
            f"{target.name}: {problem} ({redact(url)})",
            "if the index replaced the file on purpose, lock again; otherwise distrust the index or the mirror",
        )
    raise IndexUnreachableError(
        f"{target.name} cannot be fetched from {redact(url)}: {problem}",
        "check the network and the mirror; what is there is kept, run the same command again",
    )


def copy_file(source: Path, target: Path, sha256: tuple[str, ...]) -> None:
    """A file of this machine, as `download` would place it.

    Raises:
        HashMismatchError: it is not the file that was asked for. OutsideError: it cannot be read or written.
    """
    if target.is_file() and sha256_of(target) in sha256:
        return
    part = target.with_name(f"{target.name}.part")
    try:
        shutil.copyfile(source, part)
    except OSError as error:
        raise OutsideError(f"cannot copy {source}: {error.strerror or error}") from error
    if sha256_of(part) not in sha256:
        part.unlink()
        raise HashMismatchError(f"{source} is not the file that the lock names", "lock again")
    part.replace(target)


def _more(session: Session, settings: PipSettings, url: str, part: Path, progress: Progress) -> str:
    """Go on with a file; -> what went wrong, "" when it is complete."""
    import requests

    from envforge.lock.availability import verification

    have = _size(part)
    headers = {"Range": f"bytes={have}-"} if have else {}
    headers["Accept-Encoding"] = "identity"
    try:
        with session.get(
            url,
            headers=headers,
            stream=True,
            timeout=settings.timeout or 30,
            verify=verification(settings, url),
            auth=credentials(settings, url),
        ) as answer:
            if answer.status_code == 416:  # more than there is: somebody else's part
                part.unlink()
                return "the file is shorter than what was there"
            if answer.status_code not in (200, 206):
                return f"HTTP {answer.status_code}"
            return _write(answer, part, answer.status_code == 206, have, progress)
    except requests.RequestException as error:
        return type(error).__name__


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _write(answer: Response, part: Path, resumed: bool, have: int, progress: Progress) -> str:
    total = int(answer.headers.get("Content-Length") or 0) + (have if resumed else 0)
    done = have if resumed else 0
    name = part.name.removesuffix(".part")
    with part.open("ab" if resumed else "wb") as out:
        for block in answer.iter_content(_PIECE):
            out.write(block)
            done += len(block)
            progress(Event("line", name, done, total or None))
    return "the connection broke off" if total and done < total else ""


def credentials(settings: PipSettings, url: str) -> tuple[str, str] | None:
    """User name and password of the index on the same host: a lock's addresses carry none."""
    host = urlsplit(url).netloc.rpartition("@")[2]
    for index in (settings.index_url, *settings.extra_index_urls, *settings.find_links, settings.torch_index):
        bare, user, password = split_credentials(index or "")
        if user is not None and urlsplit(bare).netloc == host:
            return user, password or ""
    return None
