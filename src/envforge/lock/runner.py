"""Runs uv and tells its failures apart.

uv's exit code does not separate "no" from "could not ask" (both occur with 1 and 2), so its words decide: only "No
solution found" is a fact about packages, and not even that when an index refused to answer.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from envforge.errors import (
    ConflictError,
    DiskFullError,
    EnvforgeError,
    HashMismatchError,
    IndexUnreachableError,
    OutsideError,
)
from envforge.lock.settings import PipSettings, redact, split_credentials

ROOT = "the-plan"  # the name of the generated project, as it shows up in uv's sentences


@dataclass(frozen=True, slots=True)
class UvResult:
    """One finished call. `words`: uv's standard error without credentials, colours and our stand-in names."""

    code: int
    stdout: str
    words: str
    seconds: float

    @property
    def unsolvable(self) -> bool:
        """uv looked at all the metadata it needed and found no answer."""
        return self.code != 0 and _no_solution(self.words) and not refused(self.words)


def find_uv(uv: str | Path | None = None) -> str:
    """The uv program: the given one, that of the `uv` package, or the one on PATH.

    Raises:
        OutsideError: there is none.
    """
    if uv is not None:
        return str(uv)
    try:
        from uv import find_uv_bin

        return str(find_uv_bin())
    except (ImportError, FileNotFoundError):
        found = shutil.which("uv")
        if found:
            return found
    raise OutsideError("the program uv is not there", "install it: python -m pip install uv", id="uv")


def run_uv(
    arguments: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str | Path,
    timeout: float,
    uv: str | Path | None = None,
) -> UvResult:
    """One uv call; it and what it started end with us (Ctrl-C, time-out).

    Args:
        timeout: seconds for the whole call.

    Raises:
        IndexUnreachableError: the time is up (uv waits for nothing but indexes when it locks).
        OutsideError: uv cannot be started.
    """
    started = time.monotonic()
    command = [find_uv(uv), *arguments]
    try:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # its own group, so that builds that it started end with it
        )
    except OSError as error:
        raise OutsideError(f"uv cannot be started: {error}", "install it: python -m pip install uv", id="uv") from error
    try:
        stdout, stderr = process.communicate(timeout=max(timeout, 0.1))
    except subprocess.TimeoutExpired as error:
        raise IndexUnreachableError(
            f"uv did not finish within {timeout:.0f} s; an index answers too slowly or not at all",
            "try again, or raise the time-out; --debug shows what was asked",
            id="index-timeout",
        ) from error
    finally:
        if process.poll() is None:
            _end(process)
    return UvResult(process.returncode, stdout, tidy(stderr), time.monotonic() - started)


def _end(process: subprocess.Popen[str]) -> None:
    for signum, patience in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, signum)
        except (ProcessLookupError, PermissionError):
            return
        try:
            process.communicate(timeout=patience)
            return
        except subprocess.TimeoutExpired:
            continue


def tidy(stderr: str) -> str:
    """uv's words for a person: no colours, no credentials, no progress, our project called "the plan"."""
    text = redact(re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", stderr))
    text = text.replace(f"{ROOT} depends on", "the plan needs").replace(ROOT, "the plan")
    lines = [line.rstrip() for line in text.splitlines()]
    return "\n".join(
        line for line in lines if line and not re.match(r"(Resolved|Prepared|Installed) \d+ package", line)
    )


def message(words: str, limit: int = 2000) -> str:
    """The error part of uv's words, without the warnings before it, shortened."""
    lines = [line for line in words.splitlines() if not line.startswith("warning:")]
    text = "\n".join(lines)
    text = re.sub(r"^(error:|×)\s*", "", text.strip())
    return text if len(text) <= limit else text[: limit - 4] + " ..."


def reason(words: str) -> str:
    """Why there is no solution: uv's sentences without the frame around them."""
    text = re.sub(r"^No solution found when resolving dependencies:?\s*", "", message(words))
    text = re.sub(r"^\s*(?:cause:|╰─▶)\s*", "", text).partition("\nhint:")[0]
    return "\n".join(line.strip() for line in text.splitlines())


def _no_solution(words: str) -> bool:
    """The closure itself has none (a build whose own needs do not solve says so further down)."""
    return message(words).startswith("No solution found when resolving dep")


def refused(words: str) -> str | None:
    """The address of an index that asked for other credentials, if uv mentions one."""
    found = re.search(r"An index(?: URL)? \((\S+?)\) (?:returned a 403|could not be queried)", words)
    return found[1] if found else None


_MISMATCH = re.compile(r"[Hh]ash(?:es)? mismatch|[Hh]ash mismatch|failed to verify|expected hash", re.IGNORECASE)
_TLS = re.compile(r"certificate|UnknownIssuer|InvalidContentType|tls|handshake", re.IGNORECASE)
_UNREACHED = re.compile(
    r"Failed to fetch|Request failed|error sending request|unexpected JSON|timed out|dns error|Connection refused|"
    r"error decoding response|Could not connect|Network is unreachable|connectivity is disabled|reading a body",
    re.IGNORECASE,
)
_BUILD = re.compile(
    r"Failed to (?:download and )?build|build backend|Failed to resolve requirements from `(?:setup|build)",
    re.IGNORECASE,
)
_CUT = re.compile(r"Failed to (?:download|read|extract)|Unable to parse", re.IGNORECASE)
_FULL = re.compile(r"No space left on device|os error 28|Disk quota exceeded")


def explain_failure(result: UvResult, settings: PipSettings) -> EnvforgeError:
    """The error that a failed uv call (locking or installing) stands for.

    A ConflictError only where uv says that no solution exists; everything else is outside (exit 3).
    """
    words = result.words
    said = message(words)
    if _FULL.search(words):
        return DiskFullError(
            f"the disk filled up while uv worked:\n{said}", "free space, or set UV_CACHE_DIR elsewhere"
        )
    if "Failed to initialize cache" in words:
        return OutsideError(
            f"uv cannot keep its cache:\n{said}",
            "set XDG_CACHE_HOME (or UV_CACHE_DIR) to a folder that can be written",
            id="uv-cache",
        )
    address = refused(words)
    if address:
        return IndexUnreachableError(
            f"{index_name(address, settings)} refused the login:\n{said}",
            "put the credentials where pip has them (index-url with user and password, netrc or keyring)",
            id="index-login",
        )
    if _no_solution(words):
        return ConflictError(f"the closure of these versions does not solve; uv says:\n{reason(words)}")
    if _MISMATCH.search(words):
        return HashMismatchError(
            f"a download is not what the lock records:\n{said}",
            "if the index replaced the file on purpose, lock again; otherwise distrust the index or the mirror",
        )
    unreached = _UNREACHED.search(words)
    if _BUILD.search(words) and not unreached:
        return OutsideError(
            f"building a source archive failed:\n{said}",
            "install what its build needs, or give a ready wheel through --wheelhouse",
            id="build",
        )
    if unreached or _CUT.search(words):
        found = re.search(r"https?://[^\s`)\"']+", words)
        where = index_name(found[0], settings) if found else "a package index"
        if re.search(r"HTTP status (?:client|server) error", words):
            how = "answers with an error"
        elif "timed out" in words:
            how = "does not answer in time"
        elif re.search(r"unexpected JSON|decoding|reading a body|Unable to parse", words):
            how = "answers with nonsense or a cut answer"
        else:
            how = "cannot be reached"
        hint = "check the network and pip's index settings (pip config list); then run the same command again"
        if _TLS.search(words):
            hint = "set pip's `cert` (or SSL_CERT_FILE) to the bundle of your certificate authority"
        return IndexUnreachableError(f"{where} {how}:\n{said}", hint)
    return OutsideError(f"uv failed (exit {result.code}):\n{said or 'it said nothing'}", "", id="uv")


def index_name(url: str, settings: PipSettings) -> str:
    """Which of the configured indexes an address belongs to, in words, with the address (never credentials)."""
    plain = split_credentials(url)[0]
    rows = [("the PyTorch index", settings.torch_index), ("the default index", settings.index_url)]
    rows += [("the extra index", extra) for extra in settings.extra_index_urls]
    best, name = 0, ""
    for label, base in rows:
        stem = split_credentials(base or "")[0].rstrip("/")
        if stem and plain.startswith(stem) and len(stem) > best:
            best, name = len(stem), f"{label} ({stem})"
    if name:
        return name
    host = re.match(r"(https?://[^/]+)", plain)
    return f"the package index at {host[1] if host else plain}"


def python_platform(arch: str, glibc: str | None) -> str:
    """uv's name for Linux with this glibc: the newest manylinux that it knows and the host meets.

    Without a known glibc: 2.28, what every base image of the matrix has at least.
    """
    known = ((2, 17), (2, 28), (2, 31), (2, 32), (2, 33), (2, 34), (2, 35), (2, 36), (2, 37), (2, 38), (2, 39), (2, 40))
    found = re.match(r"(\d+)\.(\d+)", glibc or "2.28")
    have = (int(found[1]), int(found[2])) if found else (2, 28)
    fit = [pair for pair in known if pair <= have] or [known[0]]
    return f"{arch}-manylinux_{fit[-1][0]}_{fit[-1][1]}"
