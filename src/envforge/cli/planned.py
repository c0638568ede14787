"""The command line's words -> one plan with its lock, and what building or rendering it needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from envforge.cli import target as t

if TYPE_CHECKING:
    from envforge.cli.answer import Outcome
    from envforge.image.engines import Engine
    from envforge.image.values import InstallSource, Progress
    from envforge.lock import Lock, PipSettings
    from envforge.matrix.model import Base
    from envforge.resolver.plan import Plan
    from envforge.spec import Spec


@dataclass(frozen=True)
class Found:
    """What the command line's words came to: one plan with its lock, and what building it needs."""

    plan: Plan
    lock: Lock
    spec: Spec
    source: InstallSource
    bases: tuple[Base, ...]
    project: Path | None
    notes: tuple[str, ...] = ()
    packages: PipSettings | None = None


@dataclass(frozen=True)
class Around:
    """What the place of the environment narrows: its glibc (a container brings its own) and its interpreters."""

    glibc: str | None = None
    pythons: tuple[str, ...] | None = None


def spec_pythons(words: list[str], files: list[Path], spec: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The versions that the spec allows, for a GPU and for a CPU target; empty where it leaves them open."""
    from envforge.intake import read_intake

    own = read_intake(words, files, spec).spec
    return (own.pythons_for(False), own.pythons_for(True)) if own else ((), ())


def surroundings(
    engine: Engine | None, base: str | None, targets: t.Targets, wanted: tuple[tuple[str, ...], tuple[str, ...]]
) -> Around:
    """Look at where the environment will stand. Without an engine the matrix's slim bases stand for it."""
    from envforge.image.engines.venv import VenvEngine
    from envforge.settings import layered_matrix

    matrix = layered_matrix()
    glibc: str | None = None
    if isinstance(engine, VenvEngine):
        there = engine.pythons() if base is None else ()
    elif engine is not None and base is not None:
        info = engine.base(base, "3")
        there, glibc = info.pythons, info.glibc
    elif base is not None:
        there = ()
    else:
        slim = [row for row in matrix.bases if row.kind == "slim"]
        there = tuple(python for row in slim for python in row.pythons)
        glibc = min((row.glibc for row in slim), key=lambda text: [int(n) for n in text.split(".")], default=None)
    if targets.python is not None or not there:
        return Around(glibc)
    cpu = targets.variant == "cpu" or targets.driver == "none"
    order = (wanted[1] if cpu else wanted[0]) or matrix.policy.pythons
    # Where nothing is left the resolver chooses freely, and the engine says what it lacks.
    return Around(glibc, tuple(python for python in order if python in there) or None)


def find_plan(
    words: list[str],
    files: list[Path],
    spec: str | None,
    targets: t.Targets,
    *,
    wheelhouse: Path | None,
    ca: Path | None,
    progress: Progress,
    around: Around,
    mirror: list[str] | None = None,
) -> Found:
    """Resolve and lock what was asked for; a project whose plan and lock still answer it keeps them, and no index is
    asked.

    Raises:
        ConflictError: there is no such environment. Others of resolving and locking.
    """
    from envforge.cli.answer import run_resolve
    from envforge.cli.mirrors import chosen_settings, package_settings
    from envforge.cli.source import install_source
    from envforge.errors import ConflictError
    from envforge.image.values import Event
    from envforge.intake import project_of
    from envforge.spec import Spec

    progress(Event("stage", "resolving and locking"))
    settings = chosen_settings(project_of(words), mirror, ca)
    packages = package_settings(settings)
    offline = run_resolve(
        words, files, spec, targets, glibc=targets.glibc or around.glibc, pythons=around.pythons, chosen=settings
    )
    if (kept := frozen(offline, progress)) is not None:
        plan, lock = kept
        own = offline.intake.spec or Spec(name="custom", requests=offline.intake.lines)
        source = install_source(packages, lock, wheelhouse=wheelhouse, mirrors=settings.mirrors)
        return Found(plan, lock, own, source, offline.matrix.bases, offline.intake.project, packages=packages)
    outcome = run_resolve(
        words,
        files,
        spec,
        targets,
        lock=True,
        wheelhouse=wheelhouse,
        glibc=targets.glibc or around.glibc,
        pythons=around.pythons,
        chosen=settings,
    )
    if outcome.answer.plan is None or outcome.lock is None:
        raise ConflictError(outcome.conflict_text(), outcome.fix_text())
    for note in outcome.notes:
        progress(Event("stage", f"note: {note}"))
    own = outcome.intake.spec or Spec(name="custom", requests=outcome.intake.lines)
    return Found(
        plan=outcome.answer.plan,
        lock=outcome.lock,
        spec=own,
        source=install_source(packages, outcome.lock, wheelhouse=wheelhouse, mirrors=settings.mirrors),
        bases=outcome.matrix.bases,
        project=outcome.intake.project,
        packages=packages,
        notes=tuple(outcome.notes),
    )


def frozen(outcome: Outcome, progress: Progress | None = None) -> tuple[Plan, Lock] | None:
    """The project's plan and lock, where they are what the request comes to now; None where something is new.

    The lock of a project is meant to be kept: asking the indexes again could only replace packages that nobody named.
    """
    from dataclasses import replace

    from envforge.errors import DataError, UsageError
    from envforge.image.values import Event
    from envforge.lock.read import read_lock
    from envforge.project import read_plan

    project, plan = outcome.intake.project, outcome.answer.plan
    if project is None or plan is None or any(request.url for request in outcome.intake.lines):
        return None
    try:
        kept = read_plan(project)
        if kept is None:
            return None

        def bare(plan: Plan) -> Plan:  # why it is so, and from which state of the matrix, changes no byte
            return replace(plan, reasons={}, warnings=(), matrix_hash="", matrix_as_of="")

        if bare(kept) != bare(plan):
            return None
        lock = read_lock(project, kept)
    except DataError as error:  # damaged, or another plan's: made anew
        if progress is not None:
            progress(Event("stage", f"note: {error.cause}; it is locked anew"))
        return None
    except UsageError:  # none
        return None
    if any(package.path and not Path(package.path).is_file() for package in lock.packages):
        return None
    return kept, lock
