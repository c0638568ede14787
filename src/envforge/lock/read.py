"""A lock that was written earlier, read back: what a frozen plan is built from."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

from envforge.errors import DataError, UsageError
from envforge.lock.availability import TORCH_INDEX_NAMES
from envforge.lock.formats import (
    PYLOCK,
    Lock,
    LockedPackage,
    lock_hash,
    parse_pylock,
    requirements_text,
)
from envforge.lock.runner import python_platform
from envforge.resolver.plan import Plan

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]


def read_lock(folder: Path, plan: Plan) -> Lock:
    """The pylock.toml of a folder, which must be the plan's own.

    Raises:
        UsageError: there is none. DataError: it is damaged, or another plan's.
    """
    path = folder / PYLOCK
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{folder} holds no lock ({PYLOCK})", f"make it: envforge resolve {folder}") from error
    again = f"lock again: envforge resolve {folder}"
    try:
        row = tomllib.loads(text)["tool"]["envforge"]
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not a lock of envforge's ({error})", again) from error
    if row.get("plan") != plan.hash():
        raise DataError(f"{path} belongs to another plan than the plan.json beside it", again)
    packages = [_in_place(package, folder) for package in parse_pylock(text)]
    index = _torch_index(packages, plan.variant)
    if index is not None:
        packages = [_torch(package, index) for package in packages]
    if row.get("lock") != lock_hash(packages):
        raise DataError(f"{path} was changed by hand: its packages are not those of its hash", again)
    platform = python_platform(plan.target.arch, plan.target.glibc)
    return Lock(
        requirements=requirements_text(
            packages,
            python=plan.python,
            platform=platform,
            variant=plan.variant,
            torch_index=index,
            local=any(package.path and "://" not in package.path for package in packages),
        ),
        pylock=text,
        packages=tuple(packages),
        hash=str(row["lock"]),
        python=plan.python,
        platform=platform,
        variant=plan.variant,
        index_kinds={package.name: package.kind for package in packages if package.kind != "default"},
        torch_index=index,
    )


def _in_place(package: LockedPackage, folder: Path) -> LockedPackage:
    """Paths in a lock start at its folder."""
    return replace(package, path=str((folder / package.path).absolute())) if package.path else package


def _torch_index(packages: list[LockedPackage], variant: str) -> str | None:
    """The index of torch's builds that a package came from: its address ends in the variant's own folder."""
    for package in packages:
        found = re.match(rf"(https?://.+/{re.escape(variant)})/", package.url or "")
        if found and package.name in TORCH_INDEX_NAMES:
            return found[1]
    return None


def _torch(package: LockedPackage, index: str) -> LockedPackage:
    return replace(package, kind="torch") if (package.url or "").startswith(f"{index}/") else package
