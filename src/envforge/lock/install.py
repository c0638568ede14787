"""How a lock gets into an environment, and how it gets onto disk."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from envforge.errors import DataError, DiskFullError, OutsideError
from envforge.files import REQUIREMENTS, check_lock_place
from envforge.lock.formats import PYLOCK, Lock, read_requirements
from envforge.lock.runner import find_uv
from envforge.lock.settings import TORCH, PipSettings, index_arguments, uv_environment


def write_lock(lock: Lock, folder: Path) -> tuple[Path, Path]:
    """Writes requirements.txt and pylock.toml into a folder, each atomically. -> their paths.

    Raises:
        UsageError: as of `check_lock_place`.
        DiskFullError, OutsideError: they cannot be written; nothing half-written remains.
    """
    check_lock_place(folder)
    paths = (folder / REQUIREMENTS, folder / PYLOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, (lock.requirements, lock.pylock), strict=True):
            _replace(path, text)
    except OSError as error:
        if error.errno == 28:
            raise DiskFullError(f"the lock cannot be written to {folder}: the disk is full", "free space") from error
        raise OutsideError(f"the lock cannot be written to {folder}: {error}", "choose another folder") from error
    return paths


def _replace(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def install_options(requirements: str, sources: Sequence[str] = ()) -> list[str]:
    """The part of the install command that does not depend on the machine (also for a Dockerfile).

    Hashes make it safe, and the PyTorch index beside the default one makes it needed, that all indexes are looked at
    alike. Nothing but the lock's own lines is installed; wheels only, except for `sources`.
    """
    out = ["--require-hashes", "--no-deps", "--only-binary", ":all:"]
    for name in sources:
        out += ["--no-binary", name]
    return [*out, "--index-strategy", "unsafe-best-match", "-r", requirements]


def source_packages(requirements: str) -> tuple[str, ...]:
    """Names in a requirements text that are built from source when they are installed."""
    return tuple(package.name for package in read_requirements(requirements) if package.kind == "source")


def install_command(
    lock_dir: Path,
    settings: PipSettings,
    *,
    python: Path | str,
    target: Path | None = None,
    wheelhouse: Path | None = None,
    uv: str | Path | None = None,
    env: Mapping[str, str] | None = None,
) -> tuple[list[str], dict[str, str]]:
    """How to install a lock into an existing environment: argv and the whole environment. Run it with cwd=lock_dir.

    Args:
        python: the environment's interpreter. target: a folder to install into instead (`--target`).
        wheelhouse: a further folder of wheels.

    The argv holds no credentials and may be shown; the environment holds them and may not. A failure is told apart by
    `explain_failure`.

    Raises:
        DataError: the folder holds no lock, or a damaged one.
    """
    path = lock_dir / REQUIREMENTS
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{lock_dir} holds no lock ({REQUIREMENTS}: {error.strerror})", "make one first") from error
    argv = [find_uv(uv), "pip", "install", "--python", str(python), "--color", "never"]
    if target is not None:
        argv += ["--target", str(target)]
    arguments = index_arguments(settings)
    if "--index-strategy" in arguments:
        at = arguments.index("--index-strategy")
        del arguments[at : at + 2]
    argv += arguments
    if wheelhouse is not None:
        argv += ["--find-links", str(wheelhouse)]
    found = re.search(r"^--extra-index-url (https?://\S+)$", text, re.MULTILINE)
    if found:  # by name too, because its credentials in the environment are tied to the name
        argv += ["--index", f"{TORCH}={found[1]}"]
    if found and settings.no_index:
        # Air-gapped: the address in the file is where the wheel came from, not where it can be had now.
        raise DataError(
            "this lock names the PyTorch index, and pip is told to use no index",
            "take its wheel from a folder: lock with --wheelhouse",
        )
    return [*argv, *install_options(REQUIREMENTS, source_packages(text))], uv_environment(settings, env)
