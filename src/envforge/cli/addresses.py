"""Requests by address (`name @ git+URL@COMMIT`, local paths) between the resolver and the lock.

They are built into wheels beside the lock, and only then is their version known. The resolver judges such a package by
the release of that version, or, for a version between or after releases, by the newest release before it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from envforge.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from envforge.lock import LocalWheel, PipSettings
    from envforge.matrix.releases import Release
    from envforge.resolver.plan import Plan
    from envforge.resolver.request import Request


@dataclass(frozen=True)
class Built:
    """Wheels made of addresses, the requests with their versions, and what the user should know of it."""

    wheels: tuple[LocalWheel, ...]
    requests: tuple[Request, ...]
    folder: Path | None = None
    notes: tuple[str, ...] = ()

    def shown(self, plan: Plan) -> Plan:
        """The plan with the versions that were really built."""
        pins = dict(plan.pins)
        for wheel in self.wheels:
            if wheel.name in pins:
                pins[wheel.name] = wheel.version
        return replace(plan, pins=pins)


def build_addresses(
    requests: Sequence[Request],
    project: Path | None,
    settings: PipSettings,
    python: str,
    load: Callable[[str], tuple[Release, ...]],
) -> Built:
    """Build every request by address, for a Python ("3.11"), into the project's wheels folder.

    Raises:
        UsageError: there is no project folder for the wheels, or an address that cannot be locked.
        OutsideError: git or a build fails.
    """
    from envforge.lock import WHEELS, build_local

    wanted = [request for request in requests if request.url]
    if not wanted:
        return Built((), tuple(requests))
    if project is None:
        raise UsageError(
            f"{wanted[0].text[:80]!r} is built into a wheel that lies beside the lock, and there is no folder for it",
            f"make a project: envforge init DIR, then envforge resolve DIR '{wanted[0].name} @ ...'",
        )
    lines = [f"{request.name} @ {_from(project, request)}" for request in wanted]
    wheels = build_local(lines, project, settings, python=python, base=project)
    versions = {wheel.name: wheel.version for wheel in wheels}
    notes: list[str] = []
    pinned = []
    for request in requests:
        stand_in = _stand_in(request, versions, load, notes) if request.url else None
        pinned.append(replace(request, specifier=f"=={stand_in}") if stand_in else request)
    return Built(wheels, tuple(pinned), project / WHEELS, tuple(notes))


def _from(project: Path, request: Request) -> str:
    """A relative path on the command line starts where the user is; one in a file of the project, in the project."""
    url = request.url or ""
    if "://" in url or url.startswith(("file:", "/")) or request.origin != "command line":
        return url
    return os.path.relpath(Path(url).resolve(), project.resolve())


def _stand_in(
    request: Request,
    versions: dict[str, str],
    load: Callable[[str], tuple[Release, ...]],
    notes: list[str],
) -> str | None:
    """The release that a built version is judged by; None for packages outside the matrix."""
    from packaging.version import Version

    releases = load(request.name)
    built = versions.get(request.name)
    if not releases or built is None:
        return None
    version = Version(Version(built).public)
    exact = next((r.version for r in releases if Version(r.version) == version), None)
    if exact is not None:
        return exact
    before = [r.version for r in releases if Version(r.version) < version and not Version(r.version).is_prerelease]
    if not before:
        return None
    notes.append(f"{request.name} {built} is built from an address and is no release: it is judged as {before[-1]}")
    return before[-1]
