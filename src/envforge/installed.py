"""What an environment that somebody else built holds: package versions, its Python, the build of its torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.metadata import distributions
from pathlib import Path

from envforge.errors import UsageError
from envforge.resolver.request import Request, normalise

_LOCAL = re.compile(r"\+(cu\d+|cpu)$")


@dataclass(frozen=True, slots=True)
class Installed:
    """Pins without local part; `python` as "3.11"; `variant` from torch's local part, None where it does not say.
    `requests`: what was asked for, where a plan tells it. `unread`: packages whose version nothing says."""

    pins: dict[str, str]
    python: str | None
    variant: str | None
    where: str
    requests: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


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
    if "torch" in found and "+" not in found["torch"]:
        found["torch"] += _torch_build(site)
    python = site.parent.name.removeprefix("python")
    return from_versions(found.items(), python, str(prefix))


def _torch_build(site: Path) -> str:
    """The metadata of the default index's torch names no build, but the package itself does: "+cu124"."""
    try:
        text = (site / "torch" / "version.py").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    cuda = re.search(r"^cuda\b[^=\n]*=\s*(?:'(\d+)\.(\d+)'|None)", text, re.MULTILINE)
    return "" if cuda is None else f"+cu{cuda[1]}{cuda[2]}" if cuda[1] else "+cpu"


def from_requests(requests: Iterable[Request], where: str) -> Installed:
    """A requirements file whose lines are exact pins; wheels by address count as such.

    Raises:
        UsageError: a line is not an exact pin (named).
    """
    found, unread = [], []
    for request in requests:
        if request.url is not None:
            wheel = re.search(r"/[^/-]+-([0-9][^/-]*)(?:-[^/-]+){3,4}\.whl(?:$|#)", request.url)
            if wheel:
                found.append((request.name, wheel[1].replace("%2B", "+")))
            else:
                unread.append(request.name)
            continue
        if request.pinned is None:
            raise UsageError(
                f"{request.origin}: {request.text} is not an exact pin", "check judges exact versions; resolve chooses"
            )
        found.append((request.name, request.pinned + (f"+{request.local}" if request.local else "")))
    return replace(from_versions(found, None, where), unread=tuple(unread))


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
