"""Plan -> lock: asks uv, and makes of its 'no' something that the resolver can learn from.

The order of things: ask under the plan's date; let single packages past the date as uv names them; allow single source
archives; rule out what Requires-Python forbids (uv ignores upper bounds); and when it still does not solve, leave out
pins until a small set is left that conflicts by itself.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from envforge.errors import ConflictError, EnvforgeError
from envforge.lock.availability import FAMILY, Availability
from envforge.lock.formats import Lock, LockedPackage, lock_hash, parse_pylock, pylock_text, requirements_text
from envforge.lock.local import LocalWheel
from envforge.lock.project import Problem, companion, make_problem, with_torch_index
from envforge.lock.pythons import forbidden
from envforge.lock.runner import UvResult, explain_failure, message, reason, run_uv
from envforge.lock.settings import PipSettings, index_arguments, read_constraints, uv_environment
from envforge.resolver.plan import Plan

MAX_EXEMPT = 8  # packages let past the date, one at a time
MAX_SHRINK = 8  # calls spent on finding out who conflicts
MAX_EXCLUDE = 6  # rounds of ruling out releases by Requires-Python
MAX_BUILDS = 6  # source archives of packages outside the plan


class LockConflict(ConflictError):
    """A set of pins that cannot be closed, whatever else is chosen: to be learned as a row.

    Attributes:
        pins: name -> version without local part; with `python` and `variant` they are enough for the conflict.
        words: uv's own.
    """

    id = "lock-conflict"

    def __init__(self, pins: Mapping[str, str], words: str, *, python: str, variant: str, hint: str = "") -> None:
        named = ", ".join(f"{name} {version}" for name, version in sorted(pins.items()))
        verb = "cannot be installed" if len(pins) == 1 else "do not go together"
        super().__init__(
            f"{named} {verb} on Python {python} ({variant}):\n{words}",
            hint or "choose another version of one of them; their own requirements, or what those need, contradict",
        )
        self.pins = dict(pins)
        self.words = words
        self.python = python
        self.variant = variant


@dataclass
class _Asker:
    """Asks uv within one deadline and counts."""

    settings: PipSettings
    folder: Path
    uv: str | Path | None
    deadline: float
    calls: int = 0
    seconds: float = 0.0
    warnings: list[str] = field(default_factory=list)

    def ask(self, problem: Problem) -> UvResult:
        (self.folder / "pyproject.toml").write_text(problem.pyproject(), encoding="utf-8")
        (self.folder / "constraints.txt").write_text("\n".join((*problem.constraints, "")), encoding="utf-8")
        env = uv_environment(self.settings)
        if problem.metadata:
            self.keep_metadata(problem, env)
        arguments = ["pip", "compile", "pyproject.toml", "--format", "pylock.toml", "--no-header", "--no-annotate"]
        arguments += ["--color", "never", "--no-progress", "--resolution", "highest"]
        arguments += ["--prerelease", "if-necessary-or-explicit"]
        # By option and not in the project, because UV_NO_CONFIG and UV_CONFIG_FILE make uv pass over [tool.uv] (but
        # not over the sources and the explicit index that they name).
        arguments += [*index_arguments(self.settings), *problem.options()]
        if problem.left_out:  # an option of newer uv: not given when nothing is left out
            (self.folder / "excludes.txt").write_text("\n".join((*problem.left_out, "")), encoding="utf-8")
            arguments += ["--excludes", str(self.folder / "excludes.txt")]
        for path in (str(self.folder / "constraints.txt"), *self.settings.constraints):
            arguments += ["--constraints", path]
        result = run_uv(
            arguments, env=env, cwd=self.folder, timeout=max(1.0, self.deadline - time.monotonic()), uv=self.uv
        )
        self.calls += 1
        self.seconds += result.seconds
        return result

    def keep_metadata(self, problem: Problem, env: dict[str, str]) -> None:
        """dependency-metadata has no option: where the user's environment turns [tool.uv] off, a uv.toml has it."""
        theirs = env.get("UV_CONFIG_FILE")
        if not theirs and env.pop("UV_NO_CONFIG", "").lower() not in {"1", "true", "yes"}:
            return
        text = Path(theirs).read_text(encoding="utf-8") if theirs and Path(theirs).is_file() else ""
        ours = self.folder / "uv.toml"
        ours.write_text("\n".join([text, *problem.metadata_tables(), ""]), encoding="utf-8")
        env["UV_CONFIG_FILE"] = str(ours)

    def failure(self, result: UvResult) -> EnvforgeError:
        error = explain_failure(result, self.settings)
        if isinstance(error, ConflictError):
            error.hint = self.theirs(result.words)
        return error

    def theirs(self, words: str) -> str:
        """What pip's own constraint files say about the packages that uv names, "" if nothing."""
        lines = read_constraints(self.settings)
        named = _mentioned(words, {re.split(r"[\s<>=!~]", line)[0].lower(): "" for line in lines})
        said = [line for line in lines if re.split(r"[\s<>=!~]", line)[0].lower() in named]
        files = ", ".join(self.settings.constraints)
        return f"pip's constraints on this machine count too ({files}): {', '.join(said)}" if said else ""


def make_lock(
    plan: Plan,
    availability: Availability,
    settings: PipSettings,
    *,
    uv: str | Path | None = None,
    timeout: float = 600.0,
    wheelhouse: Path | None = None,
    local: Sequence[LocalWheel] = (),
    wheel_folder: Path | None = None,
) -> Lock:
    """The whole closure of a plan with hashes. Downloads metadata only (wheels on indexes without hashes excepted).

    Args:
        availability: from `probe_availability` for the plan's variant.
        timeout: seconds for everything.
        wheelhouse: the folder that was probed.
        local, wheel_folder: what `build_local` made, and its folder (wheels/ beside the lock).

    Raises:
        LockConflict: some of the pins cannot go together.
        ConflictError: no answer, and no pin is to blame.
        IndexUnreachableError: an index is down, slow, refuses the login or talks nonsense.
        OutsideError: a source archive does not build, uv is missing, or no place has torch's build.
    """
    links = tuple(str(Path(folder).absolute()) for folder in (wheelhouse,) if folder is not None)
    problem = make_problem(plan, availability, settings, links=links, local=local, wheel_folder=wheel_folder)
    with tempfile.TemporaryDirectory(prefix="envforge-lock-") as folder:  # mode 0700
        asker = _Asker(settings, Path(folder), uv, time.monotonic() + timeout)
        closing = _Closing(plan, availability, asker, problem)
        packages, text = closing.run()
    problem = closing.problem
    torch_index = problem.torch_index.url if problem.torch_index is not None else None
    digest = lock_hash(packages)
    row = {"lock": digest, "plan": plan.hash(), "python": plan.python, "variant": plan.variant}
    return Lock(
        requirements=requirements_text(
            packages,
            python=plan.python,
            platform=problem.platform,
            variant=plan.variant,
            torch_index=torch_index,
            local=bool(local),
        ),
        pylock=pylock_text(text, row, wheel_folder),
        packages=tuple(packages),
        hash=digest,
        python=plan.python,
        platform=problem.platform,
        variant=plan.variant,
        index_kinds={package.name: package.kind for package in packages if package.kind != "default"},
        torch_index=torch_index,
        exempted=tuple(closing.exempted),
        excluded=tuple(closing.excluded),
        left_out=problem.left_out,
        warnings=tuple(asker.warnings),
        calls=asker.calls,
        seconds=asker.seconds,
    )


@dataclass
class _Closing:
    """One closure under way: the question as it stands, and what was conceded so far."""

    plan: Plan
    availability: Availability
    asker: _Asker
    problem: Problem
    exempted: list[str] = field(default_factory=list)
    excluded: list[str] = field(default_factory=list)
    built: list[str] = field(default_factory=list)

    def run(self) -> tuple[list[LockedPackage], str]:
        for _ in range(MAX_EXCLUDE + 1):
            text = self.solve()
            packages = self.packages(text)
            if self.companions(packages):
                continue
            bad = forbidden(packages, self.plan, self.asker.settings)
            for name, why in bad.items():
                if name in self.plan.pins:
                    raise LockConflict(
                        {name: self.plan.pins[name]}, why, python=self.plan.python, variant=self.plan.variant
                    )
            if not bad:
                return packages, text
            news = [f"{p.name}!={p.version}" for p in packages if p.name in bad]
            self.excluded += news
            self.problem = replace(self.problem, constraints=(*self.problem.constraints, *news))
        raise ConflictError(
            f"releases that Python {self.plan.python} may not use keep turning up: {', '.join(self.excluded)}",
            "choose another Python",
        )

    def companions(self, packages: list[LockedPackage]) -> bool:
        """Torch and its companions that only the closure brought in: they must fit the variant too. True: ask again."""
        changed = False
        for package in packages:
            if package.name not in FAMILY or package.name in dict(self.problem.pins):
                continue
            if "torch" not in self.plan.pins:
                raise ConflictError(
                    f"something in the closure needs {package.name}, and the plan has no torch",
                    "ask for torch by name, so that its build is chosen for these hosts",
                    id="torch-not-planned",
                )
            version = package.version.partition("+")[0]
            route = companion(self.plan, self.availability, package.name, version)
            if route is not None and route.version == package.version and route.index is None:
                continue
            changed = True
            if route is not None:
                pins = tuple(sorted((*self.problem.pins, (package.name, version))))
                self.problem = replace(self.problem, pins=pins, routes=(*self.problem.routes, route))
                if route.index:
                    self.problem = with_torch_index(self.problem, self.plan, self.asker.settings)
                continue
            self.problem = replace(self.problem, left_out=(*self.problem.left_out, package.name))
            self.asker.warnings.append(
                f"{package.name} is left out: no build of it for {self.plan.variant} can be had here, and the default "
                "index's build fails at import beside this torch"
            )
        return changed

    def packages(self, text: str) -> list[LockedPackage]:
        torch_names = {route.package for route in self.problem.routes if route.index}
        links = (*map(str, self.asker.settings.local_folders()), *self.problem.links)
        return parse_pylock(text, torch_names=torch_names, links=links)

    def solve(self) -> str:
        """uv's pylock.toml, after whatever concessions it takes."""
        for _ in range(1 + MAX_EXEMPT + MAX_BUILDS + 1):
            result = self.asker.ask(self.problem)
            if result.code == 0:
                return result.stdout
            if not result.unsolvable:
                raise self.asker.failure(result)
            if not (self.allow_build(result.words) or self.exempt(result.words)):
                raise self.blame(result)
        raise self.asker.failure(result)

    def allow_build(self, words: str) -> bool:
        """A package outside the plan that has source archives only: its build code has to run once to lock it."""
        for name in re.findall(r"Wheels are required for `([^`]+)`", words):
            if name in self.problem.builds or name in self.plan.pins or len(self.built) >= MAX_BUILDS:
                continue
            self.built.append(name)
            self.problem = replace(self.problem, builds=self.problem.builds | {name})
            self.asker.warnings.append(
                f"{name} is published as source only: its build code ran to lock it, and runs again at install"
            )
            return True
        return False

    def exempt(self, words: str) -> bool:
        """Lets one more package past the date: the first that uv says was cut off."""
        if self.problem.as_of is None:
            return False
        for name in re.findall(r"`([^`]+)` was filtered by `exclude-newer`", words):
            if name in self.problem.exempt:
                continue
            if len(self.exempted) >= MAX_EXEMPT:
                return self.drop_date(name)
            self.exempted.append(name)
            self.problem = replace(self.problem, exempt=self.problem.exempt | {name})
            return True
        return False

    def drop_date(self, name: str) -> bool:
        self.asker.warnings.append(
            f"the closure could not be held at {self.problem.as_of}: besides {', '.join(self.exempted)} also {name} "
            "and more would have to be newer, or an index gives no upload times; it is locked without a date"
        )
        self.exempted.clear()
        self.problem = replace(self.problem, as_of=None)
        return True

    def blame(self, result: UvResult) -> EnvforgeError:
        """The small set of pins behind an unsolvable closure. Asked without the date: a fact must not depend on it."""
        free = replace(self.problem, as_of=None)
        pins = dict(free.pins)
        words = result.words
        suspects = _mentioned(words, pins)
        if not suspects:
            return self.asker.failure(result)
        calls = 0

        def conflict(names: frozenset[str]) -> str | None:
            nonlocal calls
            calls += 1
            asked = self.asker.ask(free.keep(names))
            if asked.code == 0:
                return None
            if not asked.unsolvable:
                raise self.asker.failure(asked)
            return asked.words

        confirmed = conflict(suspects)
        if confirmed is None:  # uv's sentence left somebody out
            current = frozenset(pins)
        else:
            current, words = suspects, confirmed
        for name in sorted(current):
            if calls >= MAX_SHRINK:
                break
            if name not in current:
                continue
            told = conflict(current - {name})
            if told is not None:
                current, words = (current - {name}) & (_mentioned(told, pins) or frozenset()), told
                if not current:
                    break
        if not current:
            return ConflictError(
                f"the closure does not solve, whatever the pins; uv says:\n{reason(words)}",
                self.asker.failure(result).hint,
            )
        chosen = {name: pins[name] for name in current}
        hint = self.asker.theirs(words)
        return LockConflict(chosen, reason(words), python=self.plan.python, variant=self.plan.variant, hint=hint)


def _mentioned(words: str, pins: Mapping[str, str]) -> frozenset[str]:
    """Pins that uv's sentences name (its hints and warnings do not count)."""
    said = message(words, limit=10**9).partition("hint:")[0]
    names = {re.sub(r"[-_.]+", "-", name).lower() for name in re.findall(r"[A-Za-z0-9][A-Za-z0-9._-]*", said)}
    loose = {name for name in pins if re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-]|\.\w)", said)}
    return frozenset(name for name in pins if name in names or name in loose)
