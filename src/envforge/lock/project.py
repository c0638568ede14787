"""The question that uv is asked: a generated pyproject and the options beside it.

Why `uv pip compile` over a pyproject, and not `uv lock`: a lock is for one Python and one platform, which the first
answers in a single resolution; its pylock.toml carries one wheel per package with hash and size, and requirements.txt
is written from that same answer, so that the two can never differ. Why a pyproject, and not a requirements file: only
there can single packages be sent to an explicit index ([tool.uv.sources]); everything else never looks at it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from envforge.errors import IndexUnreachableError, OutsideError
from envforge.lock.availability import (
    CUDA_NAMES,
    FAMILY,
    GUESTS,
    TORCH_INDEX_NAMES,
    Availability,
    Build,
    find_builds,
)
from envforge.lock.local import LocalWheel
from envforge.lock.runner import ROOT, python_platform
from envforge.lock.settings import TORCH, NamedIndex, PipSettings, named
from envforge.resolver.plan import Plan


@dataclass(frozen=True, slots=True)
class Route:
    """Where a package of the torch family comes from and the exact version to ask for there."""

    package: str
    version: str  # with the local part where the wheel has one
    where: str  # as Build.where
    index: str | None = None  # explicit index


@dataclass(frozen=True, slots=True)
class Problem:
    """One question for uv. `pins` are the only part that shrinking takes away.

    routes: per package of the torch family. requests: lines that no pin covers. exempt: not cut off at `as_of`.
    builds: source archives that may be built. metadata: requires-dist and requires-python of pins without a wheel.
    left_out: packages that must not be in the answer, whoever declares them.
    local: wheels built from local requests, name -> file address. links: further folders of wheels (wheelhouse).
    """

    python: str
    platform: str
    pins: tuple[tuple[str, str], ...]
    extras: tuple[tuple[str, tuple[str, ...]], ...] = ()
    requests: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()
    routes: tuple[Route, ...] = ()
    torch_index: NamedIndex | None = None
    as_of: str | None = None
    exempt: frozenset[str] = frozenset()
    builds: frozenset[str] = frozenset()
    metadata: tuple[tuple[str, str, tuple[str, ...], str], ...] = ()
    left_out: tuple[str, ...] = ()
    local: tuple[tuple[str, str], ...] = ()
    links: tuple[str, ...] = ()

    def keep(self, names: frozenset[str]) -> Problem:
        """The same question with only these pins."""
        return replace(self, pins=tuple(pin for pin in self.pins if pin[0] in names))

    def dependencies(self) -> list[str]:
        """PEP 508 lines of the generated project. `===` keeps a build apart from those with another local part."""
        routes = {route.package: route for route in self.routes}
        extras, local = dict(self.extras), dict(self.local)
        lines = []
        for name, version in self.pins:
            wanted = f"[{','.join(extras[name])}]" if extras.get(name) else ""
            if name in local:  # by address: an index may have the same version with other contents
                lines.append(f"{name}{wanted} @ {local[name]}")
                continue
            lines.append(
                f"{name}{wanted}=={version}" if name not in routes else f"{name}{wanted}==={routes[name].version}"
            )
        return lines + list(self.requests)

    def pyproject(self) -> str:
        """The generated file: no credentials in it (they are in the environment)."""
        pinned = {name for name, _ in self.pins}
        sources = {r.package: r.index for r in self.routes if r.index and r.package in pinned}
        index = self.torch_index
        lines = [
            "[project]",
            f"name = {_text(ROOT)}",
            'version = "0"',
            f"requires-python = {_text('>=' + self.python)}",
            f"dependencies = {_list(self.dependencies())}",
            "[tool.uv.sources]",
            *(f"{_text(name)} = {{ index = {_text(source)} }}" for name, source in sorted(sources.items())),
        ]
        if sources and index is not None:
            lines += [
                "[[tool.uv.index]]",
                f"name = {_text(index.name)}",
                f"url = {_text(index.url)}",
                "explicit = true",
            ]
        return "\n".join(lines + self.metadata_tables("tool.uv.")) + "\n"

    def metadata_tables(self, prefix: str = "") -> list[str]:
        """uv's dependency-metadata, for a pyproject (prefix "tool.uv.") or a uv.toml (none)."""
        lines: list[str] = []
        for name, version, requires, python in self.metadata:
            lines += [f"[[{prefix}dependency-metadata]]", f"name = {_text(name)}", f"version = {_text(version)}"]
            lines += [f"requires-dist = {_list(requires)}"]
            lines += [f"requires-python = {_text(python)}"] if python else []
        return lines

    def options(self) -> list[str]:
        """uv's options that belong to this question (no addresses among them but folders)."""
        out = ["--python-version", self.python, "--python-platform", self.platform]
        out += ["--only-binary", ":all:"]
        for name in sorted(self.builds):
            out += ["--no-binary", name]
        if self.as_of:
            out += ["--exclude-newer", f"{self.as_of}T23:59:59Z"]
            for name in sorted(self.exempt):
                out += ["--exclude-newer-package", f"{name}=false"]
        for link in self.links:
            out += ["--find-links", link]
        if not self.builds and sys.executable:
            # Nothing is built, so any interpreter will do. Without one uv starts all that it finds to look for this
            # version, which takes a second where they are the stand-ins of a version manager.
            out += ["--python", sys.executable]
        return out


def make_problem(
    plan: Plan,
    availability: Availability,
    settings: PipSettings,
    *,
    links: tuple[str, ...] = (),
    local: Sequence[LocalWheel] = (),
    wheel_folder: Path | None = None,
) -> Problem:
    """A plan -> the question for uv.

    Args:
        local, wheel_folder: wheels that were built from `name @ ...` requests and their folder; they stand in for those
            lines, and for a pin of the same name.

    Raises:
        IndexUnreachableError: torch's build is only on the PyTorch index, which does not answer.
        OutsideError: no place here has the build.
    """
    built = {wheel.name: wheel for wheel in local}
    routes = tuple(
        _route(plan, availability, name, version)
        for name, version in sorted(plan.pins.items())
        if name not in built
        and (name in FAMILY or (name in GUESTS and _guest_from_torch(plan, availability, name, version)))
    )
    have = _names_in_folders((*settings.local_folders(), *map(Path, links)))
    exempt = {_normal(name) for name in plan.undated} | set(built)
    if "torch" in plan.pins:
        exempt |= {"torch", *CUDA_NAMES}
    builds = {_normal(name) for name in plan.source_only} - have
    problem = Problem(
        python=plan.python,
        platform=python_platform(plan.target.arch, plan.target.glibc),
        pins=tuple(sorted({**plan.pins, **{name: wheel.version for name, wheel in built.items()}}.items())),
        extras=tuple(sorted((_normal(name), tuple(extras)) for name, extras in plan.extras.items())),
        requests=_free_requests(plan, set(built)),
        constraints=plan.constraints,
        routes=routes,
        as_of=None if settings.no_index else plan.as_of,  # a folder of wheels is its own cut-off
        exempt=frozenset(exempt),
        builds=frozenset(builds),
        metadata=_source_metadata(plan, builds),
        left_out=plan.left_out,
        local=tuple(
            (name, ((wheel_folder or Path()).absolute() / w.file).as_uri()) for name, w in sorted(built.items())
        ),
        links=links,
    )
    return with_torch_index(problem, plan, settings) if any(route.index for route in routes) else problem


def with_torch_index(problem: Problem, plan: Plan, settings: PipSettings) -> Problem:
    """The question with the PyTorch index of the plan's variant; it gives no upload times, so no date there."""
    index = named(TORCH, f"{settings.torch_index.rstrip('/')}/{plan.variant}")
    return replace(problem, torch_index=index, exempt=problem.exempt | set(TORCH_INDEX_NAMES))


def _route(plan: Plan, availability: Availability, name: str, version: str) -> Route:
    torch = plan.pins.get("torch", version)
    found = find_builds(availability, name, version, plan.variant, plan.python, torch)
    if not found:
        raise _nowhere(plan, availability, name, version)
    return _as_route(found[0], plan.variant)


def companion(plan: Plan, availability: Availability, name: str, version: str) -> Route | None:
    """The route of a torch companion that the plan does not pin but the closure holds; None where no build fits."""
    found = find_builds(availability, name, version, plan.variant, plan.python, plan.pins["torch"])
    return _as_route(found[0], plan.variant) if found else None


def _as_route(build: Build, variant: str) -> Route:
    version = f"{build.version}+{variant}" if build.local else build.version
    # The exact version keeps other builds out; only the PyTorch index, which is explicit, has to be named.
    return Route(build.package, version, build.where, TORCH if build.where == "torch" else None)


def _guest_from_torch(plan: Plan, availability: Availability, name: str, version: str) -> bool:
    """Whether the PyTorch index has this guest and torch itself comes from there."""
    torch = plan.pins.get("torch")
    if torch is None:
        return False
    first = find_builds(availability, "torch", torch, plan.variant, plan.python, torch)[:1]
    guests = find_builds(availability, name, version, plan.variant, plan.python, torch)
    return bool(first) and first[0].where == "torch" and any(build.where == "torch" for build in guests)


def _nowhere(plan: Plan, availability: Availability, name: str, version: str) -> OutsideError:
    what = f"{name} {version} for {plan.variant} and Python {plan.python}"
    index = availability.place("torch")
    offers = sorted(
        {
            f"{build.version} for {build.variant} (Python {', '.join(build.pythons) or 'any'}, {build.where})"
            for build in availability.builds
            if build.package == name and build.variant == plan.variant
        }
    )
    also = f"; to be had here: {'; '.join(offers[:6])}" if offers else ""
    if index is not None and not index.answers:
        return IndexUnreachableError(
            f"{what} is on the PyTorch index only, which does not answer ({index.url}: {index.problem}){also}",
            "name a mirror of it, give the wheel through --wheelhouse, or take a torch of the default index's variant",
        )
    return OutsideError(
        f"{what} is in none of the places asked{also}",
        "give the wheel through --wheelhouse or pip's find-links, or resolve again with what can be had",
        id="no-build",
    )


def _free_requests(plan: Plan, local: set[str]) -> tuple[str, ...]:
    """Request lines that no pin covers; of requests by address only the name stays, as a built wheel."""
    from packaging.requirements import InvalidRequirement, Requirement

    out = []
    for line in plan.requests:
        try:
            parsed = Requirement(line)
        except InvalidRequirement:
            out.append(line)  # let uv say it
            continue
        name = _normal(parsed.name)
        if name in plan.pins or name in local:
            continue
        if parsed.url:
            raise OutsideError(
                f"{line!r} was not built into a wheel before locking", "build_local has to run first", id="not-built"
            )
        out.append(line)
    return tuple(sorted(out))


def _source_metadata(plan: Plan, builds: set[str]) -> tuple[tuple[str, str, tuple[str, ...], str], ...]:
    """The matrix's own metadata for pins without a wheel: asking their build would run it, with the wrong Python."""
    from envforge.matrix.releases import load_releases

    out = []
    for name in sorted(builds & set(plan.pins)):
        version = plan.pins[name]
        row = next((release for release in load_releases(name) if release.version == version), None)
        if row is not None:
            out.append((name, version, row.requires, row.python))
    return tuple(out)


def _names_in_folders(folders: tuple[Path, ...]) -> set[str]:
    return {_normal(path.name.partition("-")[0]) for folder in folders for path in folder.glob("*.whl")}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _text(value: str) -> str:
    """A TOML basic string."""
    return json.dumps(value, ensure_ascii=True).replace("\x7f", "\\u007f")


def _list(values: tuple[str, ...] | list[str]) -> str:
    return "[" + ", ".join(_text(value) for value in values) + "]"
