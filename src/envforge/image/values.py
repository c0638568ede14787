"""What goes in and out of a build, frozen. Everything here is plain data; nothing reads a file or starts a program."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

Dialect = Literal["buildkit", "plain"]
Grade = Literal["full", "static"]

# Labels, all under one prefix, so that an image answers for itself.
LABEL_PLAN = "envforge.plan"
LABEL_PLAN_HASH = "envforge.plan-hash"
LABEL_LOCK_HASH = "envforge.lock-hash"
LABEL_ADDRESS = "envforge.address"
LABEL_DRIVER_FLOOR = "envforge.driver-floor"
LABEL_VARIANT = "envforge.variant"
LABEL_TORCH = "envforge.torch"
LABEL_PYTHON = "envforge.python"
LABEL_STACK = "envforge.stack"
LABEL_SM = "envforge.sm"
LABEL_SBOM = "envforge.sbom"
LABEL_EPOCH = "envforge.epoch"


class LockLike(Protocol):
    """What a build needs of a lock: the hashed requirements, the same as pylock.toml, and the hash of both."""

    @property
    def requirements(self) -> str: ...
    @property
    def pylock(self) -> str: ...
    @property
    def hash(self) -> str: ...


@dataclass(frozen=True, slots=True)
class BaseInfo:
    """A base image as the build sees it.

    ref: what FROM names. digest: its content (`sha256:...`), empty while unknown. python: path of the interpreter of
    the plan's version, None when the base has none. install_python: the distribution has it in its own archive.
    pythons: the versions that are there. glibc: its version, None where it is not glibc or not known.
    """

    ref: str
    digest: str = ""
    python: str | None = None
    install_python: bool = False
    os: str | None = None
    pythons: tuple[str, ...] = ()
    glibc: str | None = None


@dataclass(frozen=True, slots=True)
class InstallSource:
    """Where wheels come from while building.

    uv_config: text of a uv.toml for builds inside containers (indexes; may carry credentials). ca: certificate file,
    PEM. wheelhouses: local folders that are searched for wheels of the lock before any index. secret: the text carries
    credentials. arguments, environment: the same settings as uv takes them on this machine, for the venv engine. apt,
    registry, hub: mirrors of the base's package archive (scheme and host), of Docker Hub, of the model hub. debs: a
    folder with system packages and their index (`Packages`), which then is the only place they come from.
    """

    uv_config: str = field(repr=False)
    ca: Path | None = None
    wheelhouses: tuple[Path, ...] = ()
    secret: bool = False
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict, repr=False)
    apt: str | None = field(default=None, repr=False)
    registry: str | None = field(default=None, repr=False)
    hub: str | None = field(default=None, repr=False)
    debs: Path | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """Progress of a build: `stage` starts a new step, `line` is one line of its output.

    done, total: bytes of what is being moved, where they are known.
    """

    kind: Literal["stage", "line"]
    text: str
    done: int | None = None
    total: int | None = None


class Progress(Protocol):
    """Receives events as they happen; must not raise."""

    def __call__(self, event: Event) -> None: ...


def silent(event: Event) -> None:
    """Progress for nobody."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Bytes of a build, before it starts: to download; all wheels unpacked; of these in the image; wheels that lie on
    this machine and are carried into the build. exact: the large wheels themselves said so."""

    download: int
    unpacked: int
    image: int
    carried: int = 0
    exact: bool = False


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What the caller decides about a build.

    engine: auto or one of ENGINES. base: image reference instead of the matrix's choice; base_digest: its digest
    where it is known better than by the engine (a base out of a bundle). tag: a second name for the image. output:
    folder of a venv build. state: where logs, receipts and locks of builds are kept. model: folder or hub id that
    `verify` loads; None leaves the choice to `verify`. epoch: SOURCE_DATE_EPOCH. network: network mode of build
    steps. reproducible: the same bytes each time. refresh_base: fetch the base by its tag and ask for the newest
    system packages. registry: host and path (`registry.example/team`) where images of ours are looked for; push:
    and put.
    """

    source: InstallSource
    engine: str = "auto"
    dialect: Dialect = "buildkit"
    base: str | None = None
    base_digest: str | None = None
    tag: str | None = None
    output: Path | None = None
    state: Path | None = None
    verify: bool = True
    model: str | None = None
    steps: int | None = None
    epoch: int | None = None
    network: str | None = None
    rebuild: bool = False
    refresh_base: bool = False
    reproducible: bool = False
    log: Path | None = None
    registry: str | None = None
    push: bool = False


@dataclass(frozen=True, slots=True)
class BuildResult:
    """What a build made.

    reference: image tag or environment folder. digest: image id, or the hash of what is installed. reused: nothing
    had to be built. grade: of the proof, None without one; pending: the sentence that says what is still to be proven.
    registry: where it is in a registry (`reference`, `digest` of the manifest, `image`: both in one word, and whether
    this build `pushed` it), None where it is in none. here: it is in the engine; else only in the registry.
    """

    engine: str
    reference: str
    digest: str
    address: str
    reused: bool
    seconds: float
    size: int
    log: Path | None = None
    receipt: Path | None = None
    grade: Grade | None = None
    proof: dict[str, Any] | None = None
    pending: str | None = None
    warnings: tuple[str, ...] = ()
    sbom: Path | None = None
    registry: dict[str, Any] | None = None
    here: bool = True

    def to_json(self) -> dict[str, Any]:
        """Plain data for `--json` and build.json; paths as text."""
        return {
            "schema": 1,
            "engine": self.engine,
            "reference": self.reference,
            "digest": self.digest,
            "address": self.address,
            "reused": self.reused,
            "seconds": round(self.seconds, 1),
            "size": self.size,
            "log": str(self.log) if self.log else None,
            "receipt": str(self.receipt) if self.receipt else None,
            "grade": self.grade,
            "pending": self.pending,
            "warnings": list(self.warnings),
            "sbom": str(self.sbom) if self.sbom else None,
            "registry": self.registry,
        }


@dataclass(frozen=True, slots=True)
class ContextFile:
    """One file of a build context: its text or the file it is taken from, and whether it is executable."""

    content: bytes | Path
    executable: bool = False


@dataclass(frozen=True, slots=True)
class BuildContext:
    """Everything an engine needs: the rendered Dockerfile, the files beside it, and what identifies the result."""

    name: str
    tag: str
    address: str
    dockerfile: str
    files: dict[str, ContextFile]
    labels: dict[str, str]
    source: InstallSource
    base: BaseInfo
    python: str
    dialect: Dialect = "buildkit"
    network: str | None = None
    ignored: tuple[str, ...] = field(default=("uv.toml", "ca.pem"))
