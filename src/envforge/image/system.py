"""The system packages of an image with their versions: looked up once per base, kept, and part of the content address.

A package's version is what the base's archive offers on the day it is first asked; later builds keep it, so that the
same plan stays the same image, until `--refresh-base` asks anew.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from envforge.errors import DataError, OutsideError
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
) -> dict[str, str]:
    """Name -> version of every system package that the image will ask for; empty where it asks for none.

    Args:
        state: the folder that keeps the answers. refresh: ask again.

    Raises:
        OutsideError: the base's archive cannot be reached, or has no such package.
    """
    wanted = [*system_arguments(plan, lock, base), *(quote.debian_package(name) for name in spec.system_packages)]
    if not any(not word.startswith("--") for word in wanted):
        return {}
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
    write_atomic(kept, json.dumps(found, indent=1, sort_keys=True) + "\n")
    return found


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


def _read(path: Path) -> dict[str, str]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(data, dict) or not all(isinstance(value, str) for value in data.values()):
        raise DataError(f"{path} is damaged", "remove it")
    return data
