"""Which base image a plan stands on, and the stage that compiles what has no wheel."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from envforge.errors import UsageError
from envforge.image import quote
from envforge.image.engines import Engine, container_engine
from envforge.image.render import Compile, compile_stage, needs_toolkit
from envforge.image.split import to_compile
from envforge.image.values import BaseInfo, BuildOptions, LockLike, Progress
from envforge.resolver.plan import Plan

if TYPE_CHECKING:
    from envforge.matrix.model import Base


def choose_base(plan: Plan, lock: LockLike, bases: tuple[Base, ...]) -> Base:
    """The base for a plan: slim, unless something in the lock needs a CUDA toolkit while it runs (deepspeed).

    Raises:
        UsageError: the matrix has no base with the plan's Python.
    """
    toolkit = needs_toolkit(plan)
    if toolkit:
        found = devel_base(plan, bases)
    else:
        fits = (base for base in bases if plan.python in base.pythons and plan.target.arch in base.arch)
        found = next((base for base in fits if base.kind == "slim"), None)
    if found is not None:
        return found
    what = f"a CUDA {plan.cuda} toolkit and Python {plan.python}" if toolkit else f"Python {plan.python}"
    known = sorted(
        {python for base in bases if base.kind == ("cuda-devel" if toolkit else "slim") for python in base.pythons}
    )
    raise UsageError(
        f"no base image is known with {what}",
        f"name one with --base REF, or plan for Python {', '.join(known) or 'another version'}",
        id="no-base",
    )


def devel_base(plan: Plan, bases: tuple[Base, ...]) -> Base | None:
    """The CUDA toolkit image for a plan: torch's own CUDA minor, else the nearest older one of that major, else any.

    Any minor of the major compiles what torch's major runs; an older one asks less of the driver.
    """
    wanted = _numbers(plan.cuda or "")
    fits = [
        base
        for base in bases
        if base.kind == "cuda-devel"
        and plan.python in base.pythons
        and plan.target.arch in base.arch
        and _numbers(base.cuda or "")[:1] == wanted[:1]
    ]
    older = [base for base in fits if _numbers(base.cuda or "")[:2] <= wanted[:2]]
    if older:
        return max(older, key=lambda base: _numbers(base.cuda or ""))
    return min(fits, key=lambda base: _numbers(base.cuda or ""), default=None)


def pinned(base: Base | None) -> str:
    """The reference with its digest, where that is known."""
    assert base is not None
    return f"{base.ref}@{base.digest}" if base.digest and "@" not in base.ref else base.ref


def mirrored(ref: str, registry: str | None) -> str:
    """A reference on Docker Hub as its mirror names it; others, and without a mirror all, as they are.

    The digest stays: a mirror serves the same content or the pull fails.
    """
    host, slash, _ = ref.partition("/")
    elsewhere = slash and ("." in host or ":" in host or host == "localhost") and host != "docker.io"
    if registry is None or elsewhere:
        return ref
    path = ref.removeprefix("docker.io/")
    path = path if "/" in path.split("@")[0] else f"library/{path}"
    return quote.reference(f"{registry.partition('://')[2] or registry}/{path}")


def find_base(
    plan: Plan, lock: LockLike, options: BuildOptions, bases: tuple[Base, ...], engine: Engine, progress: Progress
) -> BaseInfo:
    """The base of a build, looked at by its engine.

    Raises:
        UsageError: it has no Python of the plan's version. Others of the engine.
    """
    if engine.name == "venv":
        return engine.base(options.base or "", plan.python, progress)
    if options.base:
        ref = quote.reference(options.base)
    else:
        chosen = choose_base(plan, lock, bases)
        named = quote.reference(chosen.ref if options.refresh_base else pinned(chosen))
        ref = mirrored(named, options.source.registry)
    if options.refresh_base:
        container_engine(engine).pull(ref, progress)
    base = engine.base(ref, plan.python, progress)
    if options.base_digest:
        base = replace(base, digest=options.base_digest)
    if base.python is None:
        # The interpreter may come from the distribution's own archive: what the matrix says its release brings.
        if any(known.os == base.os and plan.python in known.pythons and known.kind != "slim" for known in bases):
            return replace(base, install_python=True)
        there = f"it has {', '.join(base.pythons)}" if base.pythons else "it has no Python at all"
        raise UsageError(
            f"the base image {ref} has no Python {plan.python}, which the plan is for ({there})",
            "name another base with --base, or plan for another version with --python",
            id="base-python",
        )
    return base


def stage_for(
    plan: Plan, lock: LockLike, bases: tuple[Base, ...], registry: str | None = None, *, venv: bool = False
) -> Compile | None:
    """The compile stage, None where every package of the plan has wheels. A folder compiles with what its machine has.

    Raises:
        UsageError: no base with such a toolkit is known.
    """
    names = to_compile(plan, lock)
    if not names:
        return None
    if venv:
        return compile_stage(plan, "", _memory_gib())
    base = devel_base(plan, bases)
    if base is not None:
        return compile_stage(plan, mirrored(pinned(base), registry), _memory_gib())
    raise UsageError(
        f"{', '.join(names)} must be compiled, and no base with a CUDA {plan.cuda} toolkit and Python "
        f"{plan.python} is known",
        "plan for the Python of such a base with --python, or leave the package out",
        id="no-base",
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
