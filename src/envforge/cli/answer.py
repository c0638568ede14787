"""From the command line's words to an answer: what resolve, render, build, check and job have in common."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from envforge.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from envforge.cli.target import Targets
    from envforge.intake import Intake
    from envforge.lock import Availability, Lock, PipSettings
    from envforge.matrix.evidence import Cell
    from envforge.matrix.model import Matrix
    from envforge.matrix.releases import Release
    from envforge.resolver.constraints import Builds
    from envforge.resolver.hosts import Host
    from envforge.resolver.plan import Plan, Reason
    from envforge.resolver.request import Request
    from envforge.resolver.resolve import Answer, Wish
    from envforge.settings import Settings

MAX_LEARNED = 4  # closure failures that are learned before the closure's own words are the answer


@dataclass
class Outcome:
    """The answer with everything that printing it needs."""

    answer: Answer
    matrix: Matrix
    hosts: tuple[Host, ...]
    intake: Intake
    lock: Lock | None = None
    notes: list[str] = field(default_factory=list)
    plans: list[dict[str, Any]] = field(default_factory=list)
    explained: dict[str, tuple[Reason, ...]] = field(default_factory=dict)
    evidence: tuple[Cell, ...] = ()

    def conflict_text(self) -> str:
        """The explanation, a line per statement."""
        conflict = self.answer.conflict
        assert conflict is not None
        return "no environment meets this request:\n" + "\n".join(f"  - {line}" for line in conflict.lines)

    def fix_text(self) -> str:
        """The fixes, a line each."""
        conflict = self.answer.conflict
        assert conflict is not None
        if not conflict.fixes:
            return "no single change to the request or the host was found that solves it"
        head = "any one of these would do:"
        if any(s.kind == "learned" for s in conflict.statements):
            # What refused is outside the matrix, and only a lock would tell whether it refuses these too.
            head = "any one of these may do; their closures have not been tried:"
        return f"{head}\n" + "\n".join(f"  {f.text}" for f in conflict.fixes)


class _Place:
    """Where packages come from here. Its pages are asked for at once: they arrive while the first search runs."""

    def __init__(self, settings: PipSettings, wheelhouse: Path | None) -> None:
        from envforge.lock import Pages

        self.settings, self.wheelhouse = settings, wheelhouse
        self.pages = Pages(settings)


def run_resolve(
    words: list[str],
    files: list[Path],
    spec: str | None,
    targets: Targets,
    *,
    as_of: str | None = None,
    allow_uncapped: bool = False,
    no_compile: bool = False,
    lock: bool = False,
    glibc: str | None = None,
    wheelhouse: Path | None = None,
    pythons: tuple[str, ...] | None = None,
    upgrade: tuple[str, ...] = (),
    prefer: str | None = None,
    explain: bool = False,
    start: Path | None = None,
    chosen: Settings | None = None,
) -> Outcome:
    """Read, check and solve one request for the described targets; with `lock` also its closure.

    Raises:
        UsageError, NoTargetError, DataError: bad input. IndexUnreachableError and others from the lock, or for a pin
        newer than the matrix.
    """
    from dataclasses import replace

    from envforge.cli.known import evidence_for, with_notes
    from envforge.cli.mirrors import package_settings
    from envforge.intake import read_intake
    from envforge.keep.newer import find_newer
    from envforge.keep.rows import keep_rows
    from envforge.project import starting_point
    from envforge.resolver.resolve import Options, Wish, resolve
    from envforge.settings import layered_matrix, load_settings

    intake = read_intake(words, files, spec)
    earlier = starting_point(start, intake.project, upgrade)
    _check_date(as_of)
    settings = chosen or load_settings(intake.project)
    place = _Place(package_settings(settings), wheelhouse) if lock else None
    matrix = layered_matrix(settings=settings)
    hosts = targets.read(matrix)
    if glibc is not None:
        hosts = tuple(replace(host, glibc=glibc) for host in hosts)
    cpu = targets.variant == "cpu" or not any(host.has_gpu for host in hosts)
    requests = intake.requests(cpu)
    check_names(requests)
    asked = (targets.python,) if targets.python else pythons or (intake.spec.pythons_for(cpu) if intake.spec else ())
    options = Options(
        variant=targets.variant or "auto",
        pythons=tuple(asked),
        allow_uncapped=allow_uncapped,
        no_compile=no_compile,
        banned=settings.banned,
        keep=earlier,
        limits=tuple(c for c in intake.constraints if c.specifier),
    )
    newer = find_newer(requests, lambda: package_settings(settings))
    keep_rows(matrix, newer)
    wish = Wish(requests, hosts, options, as_of)
    if prefer is not None:
        wish = evidence_for(settings).prefer(prefer, matrix, wish, newer.load)
    if place is None:
        outcome = Outcome(resolve(matrix, wish, newer.load), matrix, hosts, intake)
    else:
        outcome = _locked(matrix, wish, hosts, intake, newer.load, place)
    outcome.answer = with_notes(outcome.answer, newer.notes)
    # What an address brings is no release that a receipt could speak of.
    addressed = {request.name for request in requests if request.url}
    cells = evidence_for(settings).cells(matrix, outcome.answer.plan)
    outcome.evidence = tuple(cell for cell in cells if cell.name not in addressed)
    if len(hosts) > 1 and outcome.answer is not None:
        from envforge.resolver.fleet import fleet_plans

        outcome.plans = fleet_plans(matrix, wish, newer.load)
    if explain and outcome.answer.plan is not None:
        from envforge.resolver.why import explain_pins

        outcome.explained = explain_pins(matrix, wish, newer.load)
    return outcome


def _locked(
    matrix: Matrix,
    wish: Wish,
    hosts: tuple[Host, ...],
    intake: Intake,
    load: Callable[[str], tuple[Release, ...]],
    place: _Place,
) -> Outcome:
    """Solve with what can be had from here, lock, and learn from closures that do not solve."""
    from dataclasses import replace

    from envforge.cli.addresses import build_addresses
    from envforge.errors import IndexUnreachableError, OutsideError
    from envforge.lock import LockConflict, default_variants, make_lock, probe_availability
    from envforge.resolver.constraints import Learned
    from envforge.resolver.resolve import resolve

    settings, wheelhouse = place.settings, place.wheelhouse
    # uv will hold the closure to pip's own constraint files: known before, they cost no failed closure.
    wish = replace(wish, options=replace(wish.options, limits=(*wish.options.limits, *_pip_limits(settings))))
    answer = resolve(matrix, wish, load)
    if answer.plan is None:
        return Outcome(answer, matrix, hosts, intake)
    arch = answer.plan.target.arch
    built = build_addresses(wish.requests, intake.project, settings, answer.plan.python, load)
    wish = replace(wish, requests=built.requests)
    availability = probe_availability(
        answer.plan.variant,
        settings,
        arch=arch,
        wheelhouse=wheelhouse,
        defaults=default_variants(arch, matrix),
        pages=place.pages,
    )
    free = Outcome(answer, matrix, hosts, intake, None, [*availability.warnings, *built.notes])
    wish = replace(wish, options=replace(wish.options, builds=recorded_builds(availability)))
    answer = resolve(matrix, wish, load)
    silent = [f"{place.url}: {place.problem}" for place in availability.places if not place.answers]
    if answer.plan is None and silent and free.answer.plan is not None:
        # What is missing may only be out of reach for now, so this is no conflict of the request.
        outage = IndexUnreachableError(
            "there is a plan, but what it needs cannot be had from here:\n" + "\n".join(f"  {line}" for line in silent),
            "try again later, name a mirror, or give the wheels (--wheelhouse); with what can be had now, "
            + Outcome(answer, matrix, hosts, intake).fix_text(),
        )
        outage.kept = free
        raise outage
    notes = list(free.notes)
    learned: list[Learned] = []
    while answer.plan is not None:
        try:
            made = make_lock(
                answer.plan,
                availability,
                settings,
                wheelhouse=wheelhouse,
                local=built.wheels,
                wheel_folder=built.folder,
            )
        except OutsideError as error:
            # The answer stands although its closure cannot be made now: whoever reports the failure can still keep it.
            error.kept = Outcome(answer, matrix, hosts, intake, None, notes)
            raise
        except LockConflict as conflict:
            learned.append(
                Learned(tuple(sorted(conflict.pins.items())), conflict.python, conflict.variant, conflict.cause)
            )
            if len(learned) > MAX_LEARNED:
                raise
            wish = replace(wish, options=replace(wish.options, learned=tuple(learned)))
            answer = resolve(matrix, wish, load)
            continue
        notes += [f"{name} is newer than the coherence date: nothing older solves" for name in made.exempted]
        notes += made.warnings
        answer = replace(answer, plan=built.shown(answer.plan)) if answer.plan else answer
        return Outcome(answer, matrix, hosts, intake, made, notes)
    return Outcome(answer, matrix, hosts, intake, None, notes)


def _pip_limits(settings: PipSettings) -> tuple[Request, ...]:
    """The lines of pip's constraint files that limit a version; what cannot be read is left to uv."""
    from envforge.errors import UsageError
    from envforge.lock import read_constraints
    from envforge.resolver.request import parse_request

    found = []
    for line in read_constraints(settings):
        with contextlib.suppress(UsageError):
            found.append(parse_request(line, "pip's constraints on this machine"))
    return tuple(limit for limit in found if limit.specifier)


def recorded_builds(availability: Availability) -> Builds:
    """The availability record in the resolver's own terms."""
    from envforge.lock import AS_TORCH, allowed_torch
    from envforge.resolver.constraints import Builds

    wheels = tuple(
        (build.package, build.version, "" if build.variant == AS_TORCH else build.variant, build.pythons)
        for build in allowed_torch(availability)
    )
    text = "only some builds of torch can be had from here"
    if availability.warnings:
        text += f": {'; '.join(availability.warnings)}"
    return Builds(wheels, availability.defaults, text)


def _check_date(as_of: str | None) -> None:
    from datetime import date

    if as_of is None or as_of == "today":
        return
    try:
        # Python reads 20250320 and 2025-W12 too, but dates are compared as text.
        if date.fromisoformat(as_of).isoformat() == as_of:
            return
    except ValueError:
        pass
    raise UsageError(f"--as-of {as_of[:40]!r} is not a date", "write it as 2025-03-20, or the word today")


def check_names(requests: Any) -> None:
    """A name that the matrix does not know but that is almost one it knows is taken for a slip.

    Raises:
        UsageError: with the nearest known names.
    """
    import difflib

    from envforge.matrix.releases import known_packages

    names = known_packages()
    for request in requests:
        if request.name in names or request.url:
            continue
        near = difflib.get_close_matches(request.name, names, 3, 0.84)
        if near:
            hint = f"did you mean {', '.join(near)}? (asked for in {request.origin})"
            raise UsageError(f"package {request.name!r} is not known", hint)


def _reasons(outcome: Outcome) -> dict[str, tuple[Reason, ...]]:
    """Why each pin is what it is; what --explain found stands instead of the plan's own word on newer releases."""
    plan, more = outcome.answer.plan, outcome.explained
    rows = dict(plan.reasons) if plan else {}
    for name, found in more.items():
        own = (r for r in rows.get(name, ()) if " is refused: " not in r.text and r.source != "coherence date")
        rows[name] = (*own, *found)
    return dict(sorted(rows.items()))


def answer_json(outcome: Outcome) -> str:
    """The JSON of `resolve` (schema 1), one stable shape for plans and conflicts."""
    plan, conflict = outcome.answer.plan, outcome.answer.conflict
    data: dict[str, Any] = {
        "schema": 1,
        "status": "ok" if plan else "conflict",
        "python": plan.python if plan else None,
        "variant": plan.variant if plan else None,
        "tier": plan.tier if plan else None,
        "pins": plan.pins if plan else {},
        "reasons": {n: [{"text": r.text, "source": r.source} for r in rows] for n, rows in _reasons(outcome).items()},
        "warnings": [{"id": w.id, "text": w.text} for w in plan.warnings] if plan else [],
        "as_of": plan.as_of if plan else None,
        "lock": outcome.lock.hash if outcome.lock else None,
        "conflict": None,
        "plans": outcome.plans,
        "evidence": [cell.to_json() for cell in outcome.evidence],
        "matrix": {"hash": outcome.matrix.hash, "as_of": outcome.matrix.policy.as_of},
    }
    data["warnings"] += [{"id": "availability", "text": note} for note in outcome.notes]
    if plan:
        data["requirements"] = requirement_lines(plan)
        data["plan"] = plan.to_json()
    if conflict:
        data["conflict"] = {
            "parties": list(conflict.parties),
            "text": conflict.text,
            "facts": [{"text": s.text, "source": s.source} for s in conflict.statements],
            "fixes": [{"change": f.change, "text": f.text} for f in conflict.fixes],
        }
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


TORCH_INDEX = "https://download.pytorch.org/whl/"


def requirement_lines(plan: Plan) -> list[str]:
    """The pins as requirement lines; torch and its companions carry the variant and bring their index."""
    lines = []
    addresses = {name: line for line in plan.requests if (name := _addressed(line))}
    for name, version in sorted(plan.pins.items()):
        if name in addresses:
            lines.append(addresses[name])
            continue
        local = f"+{plan.variant}" if name in ("torch", "torchvision", "torchaudio") else ""
        extras = f"[{','.join(plan.extras[name])}]" if plan.extras.get(name) else ""
        lines.append(f"{name}{extras}=={version}{local}")
    return lines


def _addressed(line: str) -> str | None:
    """The name of a request by address ("peft @ git+https://...")."""
    name, at, _ = line.partition("@")
    return re.sub(r"[-_.]+", "-", name.split("[")[0].strip()).lower() if at and not set("<>=!~;") & set(name) else None


def _plain_name(line: str) -> str | None:
    """The name that a request line begins with; None where its marker leaves it out or it cannot be told."""
    match = re.match(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)", line)
    return re.sub(r"[-_.]+", "-", match[1]).lower() if match else None


def evidence_lines(cells: tuple[Cell, ...]) -> list[str]:
    """What is known of the answer's cells: each that was proven or is known bad, the rest in one line."""
    told = [f"{cell.state}: {cell.words()} ({cell.source})" for cell in cells if cell.state != "declared"]
    rest = [f"{cell.name} {cell.version}" for cell in cells if cell.state == "declared"]
    if rest:
        told.append(f"declared, not proven here: torch {cells[0].torch}+{cells[0].variant} with {', '.join(rest)}")
    return told


def answer_text(outcome: Outcome, format: str, explain: bool) -> str:
    """What `resolve` prints for people and pip: requirement lines, comments for everything else."""
    plan = outcome.answer.plan
    if plan is None:
        return ""
    if outcome.lock is not None:
        return outcome.lock.pylock if format == "pylock" else outcome.lock.requirements
    floor = f", driver >={plan.target.driver_floor}" if plan.target.driver_floor else ""
    dated = f", as of {plan.as_of}" if plan.as_of else ""
    out = [f"# python {plan.python}, {plan.variant} ({plan.tier}){floor}{dated}"]
    if "torch" in plan.pins:
        out.append(f"--extra-index-url {TORCH_INDEX}{plan.variant}")
    lines = requirement_lines(plan)
    for name, line in zip(sorted(plan.pins), lines, strict=True):
        out.append(line)
        if explain:
            out += [f"    # {reason.text} [{reason.source}]" for reason in _reasons(outcome).get(name, ())]
    if explain:
        rows = outcome.explained
        out += [f"# {name}: {reason.text}" for name in ("variant", "python") for reason in rows.get(name, ())]
    out += [line for line in plan.requests if _plain_name(line) not in plan.pins]
    # Limits, no requirements: as lines of their own pip would install what nobody asked for.
    out += [f"# where it is installed too: {line} (a rule)" for line in plan.constraints]
    return "\n".join([*out, *(f"# {line}" for line in notes(outcome))]) + "\n"


def notes(outcome: Outcome) -> list[str]:
    """What is known of an answer besides its pins: evidence, warnings, the ways of a fleet; a line each."""
    plan = outcome.answer.plan
    out = [f"evidence: {line}" for line in evidence_lines(outcome.evidence)]
    out += [f"warning ({w.id}): {w.text}" for w in (plan.warnings if plan else ())]
    out += [f"warning (availability): {note}" for note in outcome.notes]
    if outcome.plans:
        from envforge.resolver.fleet import fleet_text

        out += fleet_text(outcome.plans)
    return out
