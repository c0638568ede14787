"""Plan + lock + spec -> a built and proven environment, once.

The order makes a half-made image impossible to mistake for a good one: an image has no name while it is built and
proven; the name is given last. Whoever finds a name of ours may trust it.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envforge.errors import OutsideError, UsageError
from envforge.files import told
from envforge.image import quote
from envforge.image.address import content_address, image_tag
from envforge.image.base import choose_base, find_base, mirrored, pinned, stage_for
from envforge.image.context import make_context, write_context
from envforge.image.engines import Engine, ImageInfo, choose_engine, container_engine
from envforge.image.proofs import keep_proof
from envforge.image.prove import Explainer, ModelMaker, check_model, prove, stamp
from envforge.image.publish import publish, record, shelf_for
from envforge.image.registry import Remote
from envforge.image.render import torch_version
from envforge.image.reproduce import reproduced
from envforge.image.sbom import FILE as SBOM_FILE
from envforge.image.sbom import write_sbom
from envforge.image.space import check_space
from envforge.image.state import one_at_a_time, state_folder, state_root
from envforge.image.system import SystemPackages, system_versions
from envforge.image.values import (
    LABEL_ADDRESS,
    LABEL_EPOCH,
    LABEL_VARIANT,
    BaseInfo,
    BuildContext,
    BuildOptions,
    BuildResult,
    Event,
    LockLike,
    Prediction,
    Progress,
    silent,
)
from envforge.resolver.plan import Plan

if TYPE_CHECKING:
    from envforge.matrix.model import Base
    from envforge.spec import Spec


# What `render` writes at the top of a context.
_CONTEXT = frozenset({"Dockerfile", ".dockerignore", "uv.toml", "build", "image", "site", "files"})


def build_plan(
    plan: Plan,
    lock: LockLike,
    spec: Spec,
    options: BuildOptions,
    *,
    bases: tuple[Base, ...] = (),
    progress: Progress = silent,
    engine: Engine | None = None,
    make_model: ModelMaker | None = None,
    measure: Callable[[], Prediction] | None = None,
    explain: Explainer | None = None,
) -> BuildResult:
    """Build one plan and prove what was built; where the same was built before, only what is missing is done.

    Args:
        bases: the matrix's base images, for plans without `options.base`.
        engine: the engine to use instead of choosing one by `options.engine`.
        make_model: turns the word `small` into a model folder with the help of what was just built; without it the
            word is passed on as it is.
        measure: says what the build will download and write; asked only where something is built.
        explain: adds what a diagnosis finds to the receipt of a proof that failed.

    Raises:
        UsageError, DataError: something in the options or the spec cannot be.
        EngineError, OutsideError and others of exit code 3: the engine, the index or the disk failed; nothing is left.
        RegistryError: it was built and could not be pushed; `kept` of the error is the result without the registry.
        ProofFailedError: the environment was built and did not pass; it has no name.
    """
    start = time.monotonic()
    if options.tag is not None:
        quote.reference(options.tag)
    check_model(options)
    engine = engine or choose_engine(options.engine, options.output)
    venv = engine.name == "venv"
    progress(Event("stage", f"{engine.name}: looking at the base"))
    base = find_base(plan, lock, options, bases, engine, progress)
    system = SystemPackages()
    if not venv:
        system = system_versions(
            engine,
            base,
            plan,
            lock,
            spec,
            options.source,
            state_root(options),
            refresh=options.refresh_base,
            network=options.network,
            progress=progress,
        )
    address = content_address(plan, lock, spec, base, "venv" if venv else "image", system.versions)
    state = state_folder(options, address)
    tag = str(options.output) if venv else image_tag(plan, lock, spec, address)
    shelf = shelf_for(options, engine, tag, address)
    with one_at_a_time(state, progress):
        found = None if options.rebuild else _found(engine, address, options)
        log = options.log or state / f"build-{stamp()}.log"
        there: Remote | None = None
        warnings: tuple[str, ...] = ()
        if shelf is not None and found is None:
            there, said = shelf.look(options.push, progress)
            warnings = (said,) if said is not None else ()
        if found is None and there is not None and not options.rebuild and _timeless(there.labels, options):
            if options.tag is None:
                proof = shelf.proof(there) if shelf is not None else None
                return _elsewhere(engine, there, address, start, proof, state)
            found = container_engine(engine).pull(there.reference.at(there.digest), progress)
        reused = found is not None
        if found is None:
            check_space(measure() if measure else None, lock, base, system, engine, progress)
            context = make_context(
                plan,
                lock,
                spec,
                base,
                options.source,
                dialect=options.dialect,
                epoch=options.epoch,
                network=options.network,
                compile_stage=stage_for(plan, lock, bases, options.source.registry, venv=venv),
                kind="venv" if venv else "image",
                system=system.versions,
                reproducible=options.reproducible,
            )
            found = engine.build(context, log, progress)
            if options.reproducible and not venv:
                found = reproduced(container_engine(engine), found, base.ref, options.epoch or 0, progress)
        bill = write_sbom(state / SBOM_FILE, spec.name, lock, base, address, engine, found, options.epoch)
        result = BuildResult(
            engine=engine.name,
            reference=tag,
            digest=found.id,
            address=address,
            reused=reused,
            seconds=time.monotonic() - start,
            size=found.size,
            log=None if reused else log,
            warnings=warnings,
            sbom=bill,
        )
        if options.verify:
            result = prove(plan, spec, options, engine, found, result, state, progress, make_model, explain)
        named = engine.tag(found, tag)
        if options.tag is not None and not venv:
            engine.tag(found, options.tag)
        if options.push:
            try:
                put, notes = publish(options, engine, shelf, named, progress, result.proof, bill)
                result = replace(result, registry=put, warnings=(*result.warnings, *notes))
            except OutsideError as error:
                error.kept = result  # the build itself stands
                raise
        elif there is not None:
            result = replace(result, registry=record(there.reference, there.digest, pushed=False))
    return replace(result, size=named.size, seconds=time.monotonic() - start)


def _found(engine: Engine, address: str, options: BuildOptions) -> ImageInfo | None:
    """What was built before; with `reproducible` only what has no times of its own."""
    images = engine.find(LABEL_ADDRESS, address)
    return next((image for image in images if engine.name == "venv" or _timeless(image.labels, options)), None)


def _timeless(labels: Mapping[str, str], options: BuildOptions) -> bool:
    """Will an image do where a reproducible one was asked for?"""
    return not options.reproducible or labels.get(LABEL_EPOCH) == str(options.epoch or 0)


def _elsewhere(
    engine: Engine, remote: Remote, address: str, start: float, proof: dict[str, Any] | None, state: Path
) -> BuildResult:
    """The result where the registry has it: nothing is fetched, whoever runs it does that by its digest.

    proof: the receipt beside it there.
    """
    where = record(remote.reference, remote.digest, pushed=False)
    grade = proof["grade"] if proof is not None else None
    pending = grade == "static" and remote.labels.get(LABEL_VARIANT) != "cpu"
    return BuildResult(
        engine=engine.name,
        reference=where["image"],
        digest=remote.config,
        address=address,
        reused=True,
        seconds=time.monotonic() - start,
        size=remote.size,
        receipt=keep_proof(proof, address, remote.reference.host, state.parent) if proof is not None else None,
        grade=grade,
        proof=proof,
        pending="the GPU proof is pending: the receipt in the registry is a static one" if pending else None,
        registry=where,
        here=False,
    )


def render_plan(
    plan: Plan,
    lock: LockLike,
    spec: Spec,
    options: BuildOptions,
    folder: Path,
    *,
    bases: tuple[Base, ...] = (),
    system: Mapping[str, str] | None = None,
) -> BuildContext:
    """Write the whole build context into `folder` (made new, or replaced if it is one of ours) without any engine.

    The base is taken on trust: its content is not known here, so the address differs from that of a build that looked.
    A bundle knows it, and the versions of the system packages (`system`): then the address is the build's.

    Raises:
        UsageError: as of `context_folder`.
        DataError, OutsideError: as for a build.
    """
    folder = context_folder(folder)
    chosen = None if options.base else choose_base(plan, lock, bases)
    ref = options.base or mirrored(pinned(chosen), options.source.registry)
    base = BaseInfo(ref=ref, digest=(chosen.digest if chosen else options.base_digest) or "")
    if chosen is not None:
        base = replace(base, os=chosen.os, install_python=chosen.kind != "slim")
    context = make_context(
        plan,
        lock,
        spec,
        base,
        options.source,
        dialect=options.dialect,
        epoch=options.epoch,
        compile_stage=stage_for(plan, lock, bases, options.source.registry),
        system=system,
    )
    with told(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
            fresh, old = Path(scratch) / "new", Path(scratch) / "old"
            fresh.mkdir(0o755)
            write_context(context, fresh)
            if not options.source.secret and options.dialect == "buildkit":
                (fresh / "uv.toml").write_text(options.source.uv_config, encoding="utf-8")
            if folder.exists():
                folder.rename(old)
            try:
                fresh.rename(folder)
            except BaseException:
                if old.exists() and not folder.exists():
                    old.rename(folder)
                raise
    return context


def context_folder(folder: Path) -> Path:
    """Where a context is to stand, links followed: a new or empty folder, or one that holds a context and nothing else.

    Raises:
        UsageError: it is something else, or somebody stands in it.
    """
    hint = "name a new or empty folder with -o"
    place = Path(os.path.realpath(folder))  # unlike resolve, this takes a loop of links
    if Path.cwd().is_relative_to(place):
        raise UsageError(f"{folder} holds the current folder, and would be replaced as a whole", hint)
    try:
        found = {path.name for path in place.iterdir()}
    except FileNotFoundError:
        return place
    except OSError as error:
        raise UsageError(f"{folder} is no folder that could be read: {error.strerror}", hint) from error
    foreign = sorted(found - _CONTEXT)
    if foreign or (found and not (place / "image/plan.json").is_file()):
        raise UsageError(f"{folder} holds something else ({(foreign or sorted(found))[0]})", hint)
    return place


def describe(plan: Plan, lock: LockLike, engine: str) -> str:
    """One line for the person who waits: what is about to be built."""
    return f"{engine}: python {plan.python}, torch {torch_version(plan, lock)}, {len(plan.pins)} pinned packages"
