"""Plans and locks over stand-in wheels: tiny packages with the names of real ones, so that an image takes seconds.

What they stand in for is only the content of the packages; engine, base, uv, layers, labels and users are real. The
build of real packages is in test_real.py.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from engine_index import Index, Wheel, make_wheel

from envforge.image.values import BuildOptions, InstallSource
from envforge.resolver.plan import Plan, Target
from envforge.spec import Spec

# Where torch's local part would name the variant, as the PyTorch index does.
TORCH = make_wheel("torch", "2.13.0+cpu", requires=("filelock",))
FILELOCK = make_wheel("filelock", "3.20.0")
DEMO = make_wheel("demo-stack", "1.0")
WHEELS = (DEMO, FILELOCK, TORCH)


def own_wheels(salt: str) -> tuple[Wheel, ...]:
    """The same three with other bytes: nothing that an earlier build left in a cache fits them."""
    return tuple(
        make_wheel(wheel.name, wheel.version, {f"{wheel.name.replace('-', '_')}/__init__.py": f"# {salt}\n".encode()})
        for wheel in WHEELS
    )


@dataclass(frozen=True)
class StandInLock:
    """What a build needs of a lock."""

    requirements: str
    pylock: str = "lock-version = '1.0'\n"

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.requirements.encode()).hexdigest()


def lock_of(*wheels: Wheel) -> StandInLock:
    """A hashed lock of these wheels."""
    return StandInLock("".join(wheel.locked for wheel in sorted(wheels, key=lambda w: w.name)))


def make_plan(**changes: object) -> Plan:
    """A CPU plan for the base's Python."""
    values: dict[str, object] = {
        "python": "3.11",
        "variant": "cpu",
        "tier": "cpu",
        "pins": {"torch": "2.13.0"},
        "requests": ("demo-stack",),
        "target": Target(arch="x86_64", glibc=None, driver=None, driver_floor=None),
    }
    return Plan(**{**values, **changes})  # type: ignore[arg-type]


def make_spec(**changes: object) -> Spec:
    """A spec of one's own."""
    return Spec(**{"name": "demo", **changes})  # type: ignore[arg-type]


def wheelhouse(folder: Path, *wheels: Wheel) -> Path:
    """A folder with the wheels."""
    folder.mkdir(parents=True, exist_ok=True)
    for wheel in wheels:
        (folder / wheel.file).write_bytes(wheel.data)
    return folder


def offline(folder: Path, *wheels: Wheel) -> InstallSource:
    """No index at all: everything comes from a wheelhouse."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    return InstallSource(
        uv_config="no-index = true\n",
        wheelhouses=(wheelhouse(folder, *wheels),),
        arguments=("--no-index",),
        environment=environment,
    )


def online(index: Index) -> InstallSource:
    """Everything comes from the index on loopback."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    return InstallSource(
        uv_config=f'index-url = "{index.url}"\n',
        arguments=("--default-index", index.url),
        environment={**environment, "UV_HTTP_RETRIES": "0"},
    )


def options(source: InstallSource, **changes: object) -> BuildOptions:
    """Options of a build without a proof: stand-ins cannot train."""
    return BuildOptions(**{"source": source, "verify": False, **changes})  # type: ignore[arg-type]
