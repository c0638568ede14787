"""What a build will download and write, told before it starts; what cannot fit is refused before it starts."""

from __future__ import annotations

from envforge.errors import DiskFullError
from envforge.image.engines import Engine
from envforge.image.system import SystemPackages
from envforge.image.values import BaseInfo, Event, LockLike, Prediction, Progress

# Where the wheels were not looked at: what wheels of this kind unpack to (torch's CPU wheel 3.5, its CUDA libraries
# under 2 times their size).
_LEAST, _LIKELY = 2.0, 3.6

# What frees space of an engine's own.
_TIDY = {
    "docker": " (docker builder prune, docker image prune)",
    "podman": " (podman image prune)",
    "buildah": " (buildah prune)",
}


def check_space(
    told: Prediction | None,
    lock: LockLike,
    base: BaseInfo,
    system: SystemPackages,
    engine: Engine,
    progress: Progress,
) -> None:
    """Say what the build takes, and refuse what cannot fit.

    At the peak the disk holds what is installed, the same unpacked in the build cache, and the wheels of this machine
    twice: in the context and where the builder keeps it.

    Raises:
        DiskFullError: the disk of the engine is too small. Nothing was written.
    """
    if told is None:
        size = int(getattr(lock, "size", 0) or 0)
        if not size:
            return
        told = Prediction(size, int(size * _LEAST), int(size * _LIKELY))
    if not told.exact and not told.download + told.carried:
        progress(Event("stage", "no index says how large the packages are"))
        return
    if engine.name == "venv":  # a folder keeps the headers and tests of its wheels, and has no base
        whole = told.unpacked
    else:
        there = engine.inspect(base.ref)
        whole = told.image + system.size + (there.size if there else 0)
    cached = _cached(engine)
    peak = told.unpacked + system.size + max(0, told.unpacked - cached) + 2 * told.carried
    about = "" if told.exact else "about "
    progress(
        Event(
            "stage",
            f"{about}{told.download / 1e6:,.0f} MB to download, {about}{whole / 1e6:,.0f} MB when it is done, at most "
            f"{peak / 1e6:,.0f} MB of disk on the way",
            total=told.download,
        )
    )
    free = engine.free_space()
    if free is not None and free < peak:
        tidy = _TIDY.get(engine.name, "")
        raise DiskFullError(
            f"the build takes {peak / 1e9:.1f} GB of disk on the way, and {free / 1e9:.1f} GB are free where the "
            f"{engine.name} engine keeps its files",
            f"free some space{tidy}, or build elsewhere",
            id="disk-too-small",
        )


def _cached(engine: Engine) -> int:
    """Bytes of earlier builds' packages that the engine still has, 0 where it cannot say."""
    ask = getattr(engine, "build_cache", None)
    return int(ask()) if ask is not None else 0
