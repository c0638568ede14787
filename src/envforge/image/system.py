"""The system packages of an image with their versions: looked up once per base, kept, and part of the content address.

A package's version is what the base's archive offers on the day it is first asked; later builds keep it, so that the
same plan stays the same image, until `--refresh-base` asks anew.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from envforge.errors import OutsideError
from envforge.files import write_atomic
from envforge.image import quote
from envforge.image.engines import Engine, Mount
from envforge.image.failures import explain
from envforge.image.render import TEMPLATES, system_arguments
from envforge.image.values import BaseInfo, Event, InstallSource, LockLike, Progress, silent
from envforge.resolver.plan import Plan

if TYPE_CHECKING:
    from envforge.spec import Spec

_LINE = re.compile(r"^([a-z0-9][a-z0-9+.-]+)=([A-Za-z0-9.+:~-]+)$", re.MULTILINE)
_INSIDE = "/run/envforge"


@dataclass(frozen=True, slots=True)
class SystemPackages:
    """Name -> version, and the bytes that they take with all that they need (0 where apt did not say)."""

    versions: dict[str, str] = field(default_factory=dict)
    size: int = 0


def system_versions(
    engine: Engine,
    base: BaseInfo,
    plan: Plan,
    lock: LockLike,
    spec: Spec,
    source: InstallSource,
    state: Path,
    *,
    refresh: bool = False,
    network: str | None = None,
    progress: Progress = silent,
) -> SystemPackages:
    """Every system package that the image will ask for; empty where it asks for none.

    Args:
        state: the folder that keeps the answers. refresh: ask again.

    Raises:
        OutsideError: the base's archive cannot be reached, or has no such package.
    """
    wanted = [*system_arguments(plan, lock, base), *(quote.debian_package(name) for name in spec.system_packages)]
    if not any(not word.startswith("--") for word in wanted):
        return SystemPackages()
    # The archive is part of the question: a bundle has its own versions.
    asked = json.dumps([base.digest or base.ref, wanted, str(source.debs or ""), source.apt or ""])
    kept = state / f"system-{hashlib.sha256(asked.encode()).hexdigest()[:20]}.json"
    if not refresh and (known := _read(kept)):
        return known
    progress(Event("stage", "looking up the versions of system packages"))
    with tempfile.TemporaryDirectory(prefix="envforge-system-") as folder:
        mounts = archive_mounts(source, Path(folder))
        words = ["/bin/sh", f"{_INSIDE}/scripts/system.sh", "--versions", *wanted]
        done = engine.run(
            base.ref, words, mounts=mounts, network="none" if source.debs else network or "host", user="0:0"
        )
    if done.code != 0:
        raise explain(done.output.splitlines())
    found = dict(_LINE.findall(done.output))
    if not found:
        raise OutsideError("the base's package manager named no versions", "take a Debian or Ubuntu base", id="base")
    answer = SystemPackages(found, _bytes(done.output))
    write_atomic(kept, json.dumps({"versions": found, "bytes": answer.size}, indent=1, sort_keys=True) + "\n")
    return answer


def archive_mounts(source: InstallSource, scratch: Path) -> tuple[Mount, ...]:
    """What system.sh finds in a container outside of a build: itself, and where packages come from."""
    scripts, settings = scratch / "scripts", scratch / "settings"
    scripts.mkdir()
    settings.mkdir(mode=0o700)
    (scripts / "system.sh").write_bytes((TEMPLATES / "image" / "system.sh").read_bytes())
    if source.apt:
        (settings / "apt.mirror").write_text(source.apt, encoding="utf-8")
    if source.ca is not None:
        (settings / "ca.pem").write_bytes(source.ca.read_bytes())
    mounts = [Mount(scripts, f"{_INSIDE}/scripts"), Mount(settings, f"{_INSIDE}/settings")]
    if source.debs is not None:
        mounts.append(Mount(source.debs, f"{_INSIDE}/debs"))
    return tuple(mounts)


def _bytes(output: str) -> int:
    """apt: "After this operation, 12.3 MB of additional disk space will be used." """
    found = re.search(r"After this operation, ([\d.,]+) ([kMG]?)B of additional", output)
    return int(float(found[1].replace(",", "")) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}[found[2]]) if found else 0


def _read(path: Path) -> SystemPackages | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return SystemPackages({str(name): str(version) for name, version in data["versions"].items()}, data["bytes"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # not there, or damaged: asked again
