"""What a build starts from: a request that is resolved and locked now, or a bundle, where nothing else is asked."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from envforge.cli import target as t

if TYPE_CHECKING:
    from collections.abc import Callable

    from envforge.cli.planned import Found
    from envforge.image.engines import Engine, ImageInfo
    from envforge.image.prove import ModelMaker
    from envforge.image.values import Prediction, Progress
    from envforge.keep.bundle import Bundle


@dataclass(frozen=True)
class Start:
    """One plan with its lock, the base to build on (None: the matrix's choice), and the model of the proof.

    measure: what the build will download and write.
    """

    found: Found
    base: str | None
    base_digest: str | None
    model: str | None
    make_model: ModelMaker
    measure: Callable[[], Prediction]


def start(
    engine: Engine,
    words: list[str],
    files: list[Path],
    spec: str | None,
    targets: t.Targets,
    *,
    base: str | None,
    model: str | None,
    wheelhouse: Path | None,
    ca: Path | None,
    mirror: list[str] | None,
    progress: Progress,
) -> Start:
    """Open the bundle that the wheelhouse is, or resolve and lock.

    Raises:
        ConflictError, UsageError, DataError, and others of resolving, locking and bundles.
    """
    from envforge.cli.small import small_model
    from envforge.image.engines import container_engine

    found, bundle = find_start(
        engine, words, files, spec, targets, base=base, wheelhouse=wheelhouse, ca=ca, mirror=mirror, progress=progress
    )
    if bundle is None:
        return Start(found, base, None, model, small_model, measure_of(found))
    from envforge.keep.bundle import load_base

    digest = None
    if base is None and engine.name != "venv":
        base = load_base(bundle, container_engine(engine), progress)
        digest = (bundle.base or {}).get("digest")
    make_model = partial(packed_small, bundle)
    return Start(found, base, digest, model or packed_model(bundle), make_model, measure_of(found))


def find_start(
    engine: Engine | None,
    words: list[str],
    files: list[Path],
    spec: str | None,
    targets: t.Targets,
    *,
    base: str | None,
    wheelhouse: Path | None,
    ca: Path | None,
    mirror: list[str] | None,
    progress: Progress,
) -> tuple[Found, Bundle | None]:
    """The plan with its lock, and the bundle that they came from, if the wheelhouse is one.

    Raises:
        ConflictError, UsageError, DataError, and others of resolving, locking and bundles.
    """
    from envforge.cli.planned import find_plan, spec_pythons, surroundings

    if wheelhouse is not None:
        packed = open_bundle(words, files, spec, targets, wheelhouse, progress)
        if packed is not None:
            return packed
    around = surroundings(engine, base, targets, spec_pythons(words, files, spec))
    found = find_plan(
        words, files, spec, targets, wheelhouse=wheelhouse, ca=ca, mirror=mirror, progress=progress, around=around
    )
    return found, None


def measure_of(found: Found) -> Callable[[], Prediction]:
    """Asks the wheels of a lock what they take, when it is called."""

    def ask() -> Prediction:
        from envforge.image.render import may_compile
        from envforge.keep.predict import measure
        from envforge.lock import PipSettings

        keep_headers = may_compile(found.plan, found.spec)
        return measure(found.lock, found.packages or PipSettings(), found.source.wheelhouses, keep_headers=keep_headers)

    return ask


def open_bundle(
    words: list[str], files: list[Path], spec: str | None, targets: t.Targets, wheelhouse: Path, progress: Progress
) -> tuple[Found, Bundle] | None:
    """What is to be built, where the wheelhouse is a bundle; None where it is not.

    Raises:
        UsageError: something is asked for besides the bundle's own plan, or the bundle is not whole.
    """
    from envforge.cli.mirrors import chosen_settings, package_settings
    from envforge.cli.planned import Found
    from envforge.cli.source import install_source
    from envforge.errors import UsageError
    from envforge.intake import project_of
    from envforge.keep.bundle import is_bundle, offline, read_bundle
    from envforge.project import plan_of
    from envforge.settings import layered_matrix

    if not is_bundle(wheelhouse):
        return None
    project = project_of(words)
    own = "its plan is frozen: leave the request out, or bundle another project"
    if files or spec or any(Path(word) != project for word in words):
        raise UsageError(f"{wheelhouse} is a bundle of one plan, and something else is asked for", own)
    if given := ", ".join(targets.given()):
        frozen = "its plan is frozen for the hosts that it was bundled for: leave that out, or make a bundle for others"
        raise UsageError(f"{wheelhouse} is a bundle, and {given} describes other hosts", frozen)
    found = read_bundle(wheelhouse.resolve(), progress)
    if project is not None and plan_of(project).hash() != found.plan.hash():
        raise UsageError(f"{wheelhouse} is a bundle of another plan than that of {project}", own)
    bases = layered_matrix(project).bases
    packages = package_settings(chosen_settings(project))
    source = offline(install_source(packages, None), found)
    return Found(found.plan, found.lock, found.spec, source, bases, project, packages=packages), found


def packed_model(bundle: Bundle) -> str | None:
    """The folder of a whole model in the bundle; None where it holds the parts of the small one, or none."""
    files = bundle.model / "files" if bundle.model else None
    return str(files) if files and files.is_dir() else None


def packed_small(bundle: Bundle, engine: Engine, image: ImageInfo, reference: str) -> Path:
    """The small model out of the bundle's parts.

    Raises:
        ModelError: the bundle has none.
    """
    from envforge.cli.small import small_model
    from envforge.errors import ModelError

    parts = bundle.model / "parts" if bundle.model else None
    if parts is None or not parts.is_dir():
        raise ModelError(
            f"{bundle.folder} holds no model to prove with", "bundle it again with one, name --model, or --no-verify"
        )
    return small_model(engine, image, reference, parts)
