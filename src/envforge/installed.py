"""What an environment that somebody else built holds: package versions, its Python, the build of its torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from envforge.errors import UsageError
from envforge.resolver.request import Request, normalise

_LOCAL = re.compile(r"\+(cu\d+|cpu)$")


@dataclass(frozen=True, slots=True)
class Installed:
    """Pins without local part; `python` as "3.11"; `variant` from torch's local part, None where it does not say.
    `requests`: what was asked for, where a plan tells it."""

    pins: dict[str, str]
    python: str | None
    variant: str | None
    where: str
    requests: tuple[str, ...] = ()


def from_prefix(prefix: Path) -> Installed:
    """A virtual environment, or any folder with lib/pythonX.Y/site-packages. Nothing in it is run.

    Raises:
        UsageError: no such environment.
    """
    sites = sorted(prefix.glob("lib/python3.*/site-packages")) + sorted(prefix.glob("lib64/python3.*/site-packages"))
    if not sites:
        raise UsageError(f"{prefix} holds no Python environment", "give the folder that has bin/python and lib/ in it")
    site = sites[0]
    found = {}
    for distribution in distributions(path=[str(site)]):
        name = distribution.metadata["Name"]
        if name:
            found[normalise(name)] = distribution.version
    python = site.parent.name.removeprefix("python")
    return from_versions(found.items(), python, str(prefix))


def from_requests(requests: Iterable[Request], where: str) -> Installed:
    """A requirements file whose lines are exact pins.

    Raises:
        UsageError: a line is not an exact pin (named).
    """
    found = []
    for request in requests:
        if request.pinned is None:
            raise UsageError(
                f"{request.origin}: {request.text} is not an exact pin", "check judges exact versions; resolve chooses"
            )
        found.append((request.name, request.pinned + (f"+{request.local}" if request.local else "")))
    return from_versions(found, None, where)


def from_versions(
    found: Iterable[tuple[str, str]], python: str | None, where: str, requests: tuple[str, ...] = ()
) -> Installed:
    """(normalised name, version with its local part) of each package."""
    pins, variant = {}, None
    for name, version in found:
        match = _LOCAL.search(version)
        if match and name == "torch":
            variant = match[1]
        pins[name] = version.split("+")[0]
    return Installed(pins, python, variant, where, requests)
