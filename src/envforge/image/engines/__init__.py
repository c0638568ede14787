"""Container engines, and the environment folder on machines without one, behind one small interface."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

from envforge.errors import UsageError
from envforge.image.values import BaseInfo, BuildContext, Progress, silent

ENGINES = ("docker", "podman", "buildah", "venv")


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Whether an engine can build here, its version, and where not, why."""

    ok: bool
    version: str = ""
    reason: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """One built image or environment: its id (content), names, labels, size in bytes, when it was made (ISO)."""

    id: str
    names: tuple[str, ...]
    labels: dict[str, str]
    size: int
    created: str = ""


@dataclass(frozen=True, slots=True)
class Mount:
    """A folder of this machine shown inside, read-only unless said otherwise."""

    source: Path
    target: str
    writable: bool = False


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a command inside ended: exit code, its output (both streams), and the file asked for, if it was there."""

    code: int
    output: str
    fetched: bytes | None = None
    command: tuple[str, ...] = field(default=())


@runtime_checkable
class Engine(Protocol):
    """What builds and runs. Every method but `available` raises EngineError where the engine does not answer."""

    name: str

    def available(self) -> EngineStatus:
        """Can this engine build here? Never raises."""
        ...

    def base(self, ref: str, python: str, progress: Progress = silent) -> BaseInfo:
        """Look at a base once, fetching it where needed: its content, and the interpreter of that version in it."""
        ...

    def find(self, label: str, value: str) -> tuple[ImageInfo, ...]:
        """Finished images with that label; one without a name of ours is not finished."""
        ...

    def inspect(self, reference: str) -> ImageInfo | None:
        """One image by name or id, None where there is none."""
        ...

    def build(self, context: BuildContext, log: Path, progress: Progress = silent) -> ImageInfo:
        """Make the image; it gets no name yet (`tag` gives it). Nothing half-made stays when this raises."""
        ...

    def tag(self, image: ImageInfo, reference: str) -> ImageInfo:
        """Give a name: from now on the image counts as made."""
        ...

    def run(
        self,
        reference: str,
        argv: list[str],
        *,
        mounts: tuple[Mount, ...] = (),
        network: str = "none",
        user: str | None = None,
        env: dict[str, str] | None = None,
        fetch: str | None = None,
        gpus: bool = False,
        progress: Progress = silent,
    ) -> RunResult:
        """Run a command inside, wait for it, take everything away again."""
        ...

    def free_space(self) -> int | None:
        """Bytes free where what is built will be kept, None where that cannot be known."""
        ...

    def gpus(self) -> bool:
        """Can what this engine runs get at a GPU of this machine?"""
        ...


class ContainerEngine(Engine, Protocol):
    """An engine whose images can leave it: what registries, exports and housekeeping need besides."""

    def ask(self, image: ImageInfo, argv: list[str]) -> RunResult:
        """Run a program of the image in place of its entrypoint, without network."""
        ...

    def images(self) -> tuple[ImageInfo, ...]:
        """All images that carry a content address of ours, named or not."""
        ...

    def pull(self, reference: str, progress: Progress = silent) -> ImageInfo:
        """Fetch an image from its registry.

        Raises:
            RegistryError: the registry refused or did not answer, in its own words.
        """
        ...

    def push(self, image: ImageInfo, reference: str, progress: Progress = silent) -> str:
        """Send an image to a registry under that reference; returns the digest of its manifest there.

        Raises:
            RegistryError: as for `pull`. The image stays here either way.
        """
        ...

    def remove(self, name: str) -> None:
        """Take away a name, or the image where it is the last one (or an id); one that a container uses stays."""
        ...

    def save(self, image: ImageInfo, path: Path) -> None:
        """Write the image as an archive (docker's format) to a new file."""
        ...

    def load(self, path: Path) -> None:
        """Take the images of such an archive in, under the names in it."""
        ...


def container_engine(engine: Engine) -> ContainerEngine:
    """The engine, for what only container images can do.

    Raises:
        UsageError: it makes folders, not images.
    """
    if engine.name == "venv":
        raise UsageError(
            "the venv engine makes a folder, and only container images can go to a registry or be exported",
            "choose a container engine with --engine docker or podman",
        )
    return cast("ContainerEngine", engine)


def make_engine(name: str, output: Path | None = None) -> Engine:
    """The engine of that name.

    Raises:
        UsageError: no such engine.
    """
    if name == "docker":
        from envforge.image.engines.docker import DockerEngine

        return DockerEngine()
    if name == "podman":
        from envforge.image.engines.podman import PodmanEngine

        return PodmanEngine()
    if name == "buildah":
        from envforge.image.engines.buildah import BuildahEngine

        return BuildahEngine()
    if name == "venv":
        from envforge.image.engines.venv import VenvEngine

        return VenvEngine(output)
    raise UsageError(f"no engine is named {name!r}", f"known engines: auto, {', '.join(ENGINES)}")


def choose_engine(name: str = "auto", output: Path | None = None) -> Engine:
    """The engine to build with. `auto` takes the first container engine that answers, else venv; where a folder for the
    environment is named, that is what is wanted.

    Raises:
        UsageError: no such engine.
        EngineError: the named engine cannot build here.
    """
    from envforge.errors import EngineError

    if name == "auto":
        if output is not None:
            return make_engine("venv", output)
        containers = (make_engine(known) for known in ENGINES if known != "venv")
        return next((found for found in containers if found.available().ok), None) or make_engine("venv", output)
    engine = make_engine(name, output)
    status = engine.available()
    if not status.ok:
        raise EngineError(status.reason, status.hint, id="no-engine")
    return engine
