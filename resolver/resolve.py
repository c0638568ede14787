"""One request on one set of hosts: the search in its passes, the plan with its reasons, or the conflict.

Passes: the coherence date comes from exact pins where there are some; else a first search finds the trainer and
transformers whose date the unnamed packages then follow. The cuda-compat tier joins only when nothing else solves.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from typing import TYPE_CHECKING

from envforge.matrix.releases import Release, load_releases
from envforge.resolver.constraints import (
    DRIVER,
    GLIBC,
    PYTHON,
    TORCH_FAMILY,
    VARIANT,
    Encoding,
    Options,
    encode,
    forward_eligible,
    gpu_words,
    minor_of,
    rule_terms,
    sm_name,
    variant_cuda,
    violated_terms,
)
from envforge.resolver.explain import (
    Conflict,
    Fix,
    Relaxation,
    driver_words,
    parties,
    range_around,
    relaxations,
    statements,
    with_line,
)
from envforge.resolver.facts import Fact
from envforge.resolver.hosts import Host, covers, family_floor, key, shipped_driver
from envforge.resolver.metadata import parse_line
from envforge.resolver.plan import Plan, Reason, Target, Warning_
from envforge.resolver.request import Request
from envforge.resolver.solve import Problem, Row, Solution, leaves, minimal_core, solve
from envforge.resolver.versions import ABSENT

if TYPE_CHECKING:
    from envforge.matrix.model import Matrix

Loader = Callable[[str], tuple[Release, ...]]
MAX_FIXES = 6


@dataclass(frozen=True)
class Answer:
    """A plan or a conflict, never both."""

    plan: Plan | None
    conflict: Conflict | None


@dataclass(frozen=True)
class Wish:
    """Everything a resolve depends on besides the matrix. `as_of`: ISO date or "today" (the matrix's own)."""

    requests: tuple[Request, ...]
    hosts: tuple[Host, ...]
    options: Options = field(default_factory=Options)
    as_of: str | None = None


def resolve(matrix: Matrix, wish: Wish, load: Loader = load_releases) -> Answer:
    """The best plan for the wish, or exactly why there is none."""
    found = _search(matrix, wish, load)
    if isinstance(found, _Found):
        return Answer(_plan(matrix, wish, found, load), None)
    enc, rows = found
    return Answer(None, _conflict(matrix, wish, enc, rows, load))


@dataclass
class _Found:
    enc: Encoding
    values: dict[str, int]
    as_of: str | None


def _search(
    matrix: Matrix, wish: Wish, load: Loader, without: frozenset[object] = frozenset(), drivers: str | None = None
) -> _Found | tuple[Encoding, tuple[Row, ...]]:
    """The passes. `without`: fact keys to leave out (for fixes); `drivers`: order in which a freed driver is tried."""
    enc = encode(matrix, wish.requests, wish.hosts, wish.options, load)
    result = _passes(enc, wish, without, drivers)
    if isinstance(result, _Found) or without:
        return result if isinstance(result, _Found) else (enc, result)
    if not wish.options.forward and not enc.cpu and forward_eligible(enc):
        forward = replace(wish, options=replace(wish.options, forward=True))
        second = encode(matrix, forward.requests, forward.hosts, forward.options, load)
        other = _passes(second, forward, without, drivers)
        return other if isinstance(other, _Found) else (second, other)
    return enc, result


def _passes(enc: Encoding, wish: Wish, without: frozenset[object], drivers: str | None) -> _Found | tuple[Row, ...]:
    rows: Sequence[Row] = enc.rows
    if without:
        # A freed host fact must still have some value, except a GPU, which may be missing.
        kept = [row for row in enc.rows if row.origin.key not in without]
        freed = {row.activates: row for row in enc.rows if row.origin.key in without and row.origin.kind != "gpu"}
        rows = [*kept, *(Row(((name, ABSENT),), row.origin, name) for name, row in freed.items() if name)]
    anchor = _as_of(enc, wish)
    result = solve(_problem(enc, rows, anchor, bool(anchor), drivers))
    if not isinstance(result, Solution):
        return leaves(result)
    if anchor is None:
        # No pin sets the date: the chosen trainer and transformers do, for what nobody named.
        anchor = _date_of(enc, result.values, ("trainer",), also=("transformers",))
        if anchor:
            second = solve(_problem(enc, rows, anchor, False, drivers))
            if isinstance(second, Solution):
                result = second
    return _Found(enc, result.values, anchor)


def _as_of(enc: Encoding, wish: Wish) -> str | None:
    """The coherence date that the request itself sets, or None."""
    policy = enc.matrix.policy
    if wish.as_of == "today":
        return policy.as_of
    if wish.as_of:
        return wish.as_of
    pinned = {
        r.name: enc.domains[r.name].bit(r.pinned)
        for r in enc.requests
        if r.pinned and r.name in enc.domains and enc.domains[r.name].mask(r.specifier, prereleases=True)
    }
    return _date_of(enc, pinned, ("trainer", "framework")) or _date_of(enc, pinned, ("torch",))


def _date_of(enc: Encoding, values: dict[str, int], roles: tuple[str, ...], also: tuple[str, ...] = ()) -> str | None:
    newest = ""
    for name, bit in values.items():
        row = enc.matrix.packages.get(name)
        if row is None or not bit or name not in enc.releases or not (row.role in roles or name in also):
            continue
        newest = max(newest, enc.release(name, bit).uploaded)
    if not newest:
        return None
    day = date.fromisoformat(newest[:10]) + timedelta(days=enc.matrix.policy.coherence_days)
    return min(day.isoformat(), enc.matrix.policy.as_of)


def _problem(enc: Encoding, rows: Sequence[Row], as_of: str | None, named_follow: bool, drivers: str | None) -> Problem:
    named = {r.name for r in enc.requests}
    packages = enc.matrix.packages

    keep = dict(enc.options.keep)

    def kept_first(name: str) -> list[int]:
        order = prefer(name)
        try:
            old = enc.domains[name].bit(keep[name])
        except KeyError:
            return order
        return [old, *(position for position in order if position != old)]

    def newest_first(name: str) -> list[int]:
        return list(range(len(enc.domains[name].values), 0, -1))

    def prefer(name: str) -> list[int]:
        base = enc.extras.get(name, name)
        if name == PYTHON:
            order = enc.options.pythons or enc.matrix.policy.pythons
            return [enc.domains[PYTHON].bit(p) for p in order]
        if name == VARIANT:
            return variant_order(enc)
        if name == DRIVER:
            return _driver_order(enc, drivers)
        if name == GLIBC or name.startswith("host:"):
            return newest_first(name)
        row = packages.get(base)
        trainer = row is not None and row.role == "trainer"
        if as_of is None or trainer or (base in named and not named_follow) or base not in enc.releases:
            return newest_first(name)
        releases = enc.releases[base]
        before = [i + 1 for i in range(len(releases) - 1, -1, -1) if releases[i].uploaded[:10] <= as_of]
        after = [i + 1 for i in range(len(releases)) if releases[i].uploaded[:10] > as_of]
        return before + after

    return Problem(enc.domains, rows, ranks(enc), {name: kept_first(name) for name in enc.domains})


def ranks(enc: Encoding) -> dict[str, int]:
    """The total order as consecutive numbers."""
    ordered = sorted(enc.domains, key=lambda name: (rank_of(enc, name), name))
    return {name: number for number, name in enumerate(ordered)}


def rank_of(enc: Encoding, name: str) -> tuple[int, int]:
    """The total order of decisions: hosts, trainers, frameworks, engines, torch, variant, python, the rest."""
    if name.startswith("host:"):
        return (0, 0)
    groups = {"trainer": 1, "framework": 2, "engine": 3, "torch": 4, "companion": 7, "library": 8}
    if name == VARIANT:
        return (5, 0)
    if name == PYTHON:
        return (6, 0)
    row = enc.matrix.packages.get(enc.extras.get(name, name))
    return (groups[row.role], row.rank) if row else (9, 0)


def variant_order(enc: Encoding) -> list[int]:
    """The newest CUDA family first; inside it native newest first, then minor lowest toolkit first."""
    domain = enc.domains[VARIANT]
    if enc.driver is None:
        gpu = [domain.bit(v) for v in reversed(domain.values) if v != "cpu"]
        return [domain.bit("cpu"), *gpu] if enc.cpu else gpu

    def order(name: str) -> tuple[int, int, tuple[int, ...]]:
        cuda = key(variant_cuda(name) or "0.0")
        tier = tier_of(enc.matrix, name, enc.driver)
        rank = {"native": 0, "minor": 1, "forward": 2}[tier]
        # A family that only cuda-compat could run comes after every family that the driver itself runs.
        family = -cuda[0] if rank < 2 else 100 - cuda[0]
        return (family, rank, tuple(-c for c in cuda) if rank == 0 else cuda)

    names = sorted((v for v in domain.values if v != "cpu"), key=order)
    return [domain.bit(v) for v in names] + [domain.bit("cpu")]


def tier_of(matrix: Matrix, variant: str, driver: str | None) -> str:
    """How a variant runs on a driver: native, minor, forward or cpu."""
    cuda = variant_cuda(variant)
    if cuda is None:
        return "cpu"
    if driver is None:
        return "native"
    shipped = shipped_driver(matrix, cuda)
    if shipped and key(driver) >= key(shipped):
        return "native"
    floor = family_floor(matrix, key(cuda)[0])
    return "minor" if floor and key(driver) >= key(floor) else "forward"


def _driver_order(enc: Encoding, drivers: str | None) -> list[int]:
    domain = enc.domains[DRIVER]
    bits = [domain.bit(v) for v in domain.values]
    here = domain.values.index(enc.driver) if enc.driver in domain.values else 0
    up, down = bits[here:], list(reversed(bits[:here]))
    return down + up if drivers == "down" else up + down


# --- the plan -------------------------------------------------------------------------------------------------------


def _plan(matrix: Matrix, wish: Wish, found: _Found, load: Loader, light: bool = False) -> Plan:
    enc, values = found.enc, found.values
    pins = {
        name: enc.domains[name].values[bit - 1] for name, bit in sorted(values.items()) if bit and name in enc.releases
    }
    variant = _value(enc, values, VARIANT)
    python = _value(enc, values, PYTHON)
    tier = "cpu" if variant == "cpu" else tier_of(matrix, variant, enc.driver)
    extras: dict[str, tuple[str, ...]] = {}
    for name, bit in sorted(values.items()):
        if name in enc.extras and bit:
            base = enc.extras[name]
            extras[base] = (*extras.get(base, ()), name[len(base) + 1 : -1])
    undated = _undated(enc, pins, found.as_of)
    source_only = tuple(
        name for name, version in pins.items() if not enc.releases[name][_index(enc, name, version)].wheels
    )
    memory = [g.memory_mib for h in wish.hosts for g in h.gpus if g.memory_mib]
    cuda = variant_cuda(variant)
    target = Target(
        arch=enc.arch,
        glibc=enc.glibc,
        driver=enc.driver,
        driver_floor=driver_floor(matrix, variant, enc, pins),
        sm=enc.sms,
        hosts=tuple(sorted(h.name for h in wish.hosts)),
        memory_mib=min(memory) if memory else None,
    )
    return Plan(
        python=python,
        variant=variant,
        tier=tier,
        pins=pins,
        requests=tuple(sorted(r.text for r in enc.requests)),
        target=target,
        reasons={} if light else reasons(enc, values, found.as_of),
        warnings=() if light else warnings(matrix, wish, found, pins, tier, load),
        constraints=closure_constraints(enc, values),
        extras=extras,
        as_of=found.as_of,
        undated=undated,
        source_only=source_only,
        cuda=cuda,
        matrix_hash=matrix.hash,
        matrix_as_of=matrix.policy.as_of,
    )


def _value(enc: Encoding, values: dict[str, int], name: str) -> str:
    return enc.domains[name].values[values[name] - 1]


def _index(enc: Encoding, name: str, version: str) -> int:
    return enc.domains[name].values.index(version)


def _undated(enc: Encoding, pins: dict[str, str], as_of: str | None) -> tuple[str, ...]:
    """What the closure must not cut off at the date: torch with its own needs, and pins that are newer than it."""
    if as_of is None:
        return ()
    names = {name for name in TORCH_FAMILY if name in pins}
    if "torch" in pins:
        release = enc.releases["torch"][_index(enc, "torch", pins["torch"])]
        names |= {d.name for line in release.requires if (d := parse_line(line)) and d.extra is None}
    names |= {n for n, v in pins.items() if enc.releases[n][_index(enc, n, v)].uploaded[:10] > as_of}
    return tuple(sorted(names))


def driver_floor(matrix: Matrix, variant: str, enc: Encoding, pins: dict[str, str]) -> str | None:
    """The lowest driver that the plan runs on: the family floor, or the toolkit's own where only PTX fits a GPU."""
    cuda = variant_cuda(variant)
    if cuda is None:
        return None
    floor = family_floor(matrix, key(cuda)[0])
    build = next(
        (
            b
            for b in matrix.torch_builds
            if "torch" in pins and b.torch == minor_of(pins["torch"]) and b.variant == variant and b.arch == enc.arch
        ),
        None,
    )
    if build and any(covers(build.sm, build.ptx, sm, jit=True) == "ptx" for sm in enc.sms):
        return shipped_driver(matrix, cuda) or floor
    return floor


def reasons(enc: Encoding, values: dict[str, int], as_of: str | None) -> dict[str, tuple[Reason, ...]]:
    """For each pin: who asked for it, and what stands in the way of the next better release."""
    touching: dict[str, list[Row]] = {}
    for row in enc.rows:
        for name, _ in row.terms:
            touching.setdefault(name, []).append(row)
    result: dict[str, tuple[Reason, ...]] = {}
    for name in [*sorted(enc.releases), VARIANT, PYTHON]:
        bit = values.get(name, 0)
        if not bit:
            continue
        found: list[Reason] = []
        for row in touching.get(name, ()):
            fact: Fact = row.origin
            if fact.kind == "request" and fact.a == name:
                found.append(Reason(f"you ask for {fact.text}", fact.source))
            elif row.activates == name and fact.kind == "dependency" and _holds(row, values, name):
                who = fact.a
                version = _value(enc, values, who)
                allowed = enc.domains[name].all_mask & ~dict(row.terms)[name]
                every = allowed == enc.domains[name].all_mask
                span = "" if every else f" {enc.domains[name].describe(allowed)}"
                found.append(Reason(f"{who} {version} needs {name}{span}", fact.source))
        blocked = _capped(enc, values, name, touching)
        if blocked:
            found.append(blocked)
        elif name in enc.releases and as_of and bit < len(enc.domains[name].values):
            found.append(Reason(f"the newest that was current on {as_of}", "coherence date"))
        result["variant" if name == VARIANT else name] = tuple(dict.fromkeys(found))[:6]
    return result


def _holds(row: Row, values: dict[str, int], besides: str) -> bool:
    return all(mask >> values.get(n, 0) & 1 for n, mask in row.terms if n != besides)


def _capped(enc: Encoding, values: dict[str, int], name: str, touching: dict[str, list[Row]]) -> Reason | None:
    """The row that refuses the next newer release when everything else stays as chosen."""
    bit = values[name]
    if name in (VARIANT, PYTHON) or bit >= len(enc.domains[name].values):
        return None
    version = enc.domains[name].values[bit]
    for row in touching.get(name, ()):
        if dict(row.terms)[name] >> (bit + 1) & 1 and _holds(row, values, name) and row.origin.kind != "request":
            text = statements(enc, [row])[0].text
            return Reason(f"{version} is refused: {text}", row.origin.source)
    return None


def _inside(values: dict[str, int], terms: Sequence[tuple[str, int]]) -> bool:
    return all(mask >> values.get(name, 0) & 1 for name, mask in terms)


def closure_constraints(enc: Encoding, values: dict[str, int]) -> tuple[str, ...]:
    """Rules about packages that are not in the game become constraints of the closure."""
    found: set[str] = set()
    for rule in enc.matrix.rules:
        if rule.level != "hard":
            continue
        for name, specifier in (*rule.needs.items(), *rule.requires.items()):
            outside = name not in enc.domains and name not in ("sm", "variant", "cuda", "driver", "glibc", "python")
            absent = name in enc.domains and not values.get(name, 0)
            if not (outside or absent):
                continue
            terms = rule_terms(enc, rule)
            if terms and any(_inside(values, t) for t in terms):
                found.add(f"{name}{specifier}" if specifier != "*" else name)
    return tuple(sorted(found))


def warnings(
    matrix: Matrix, wish: Wish, found: _Found, pins: dict[str, str], tier: str, load: Loader
) -> tuple[Warning_, ...]:
    """Everything that the user should know although the plan stands."""
    enc, values = found.enc, found.values
    out: list[Warning_] = []
    for rule in matrix.rules:
        if rule.level != "warn":
            continue
        terms = rule_terms(enc, rule)
        if not terms or not any(_inside(values, t) for t in terms):
            continue
        for name, specifier in rule.needs.items():
            for bad in violated_terms(enc, name, specifier):
                if bad is not None and bad[1] >> values.get(bad[0], 0) & 1:
                    out.append(Warning_(rule.warning or rule.id, rule.text))
    if tier == "minor":
        out.append(Warning_("minor-tier", _minor_text(enc, _value(enc, values, VARIANT))))
    if tier == "forward":
        out.append(
            Warning_(
                "forward-tier",
                "this plan runs only with NVIDIA's cuda-compat libraries inside the image, "
                f"because driver {enc.driver} is older than CUDA {variant_cuda(_value(enc, values, VARIANT))} needs",
            )
        )
    for sm in enc.sms:
        text = _code_note(enc, values, pins, sm)
        if text:
            out.append(Warning_("gpu-code", text))
    for request in enc.outside:
        out.append(
            Warning_("outside-matrix", f"{request.name} is not in the matrix: its own needs join only when locked")
        )
    out += stale(matrix, wish, found, load)
    return tuple(dict.fromkeys(out))


def _minor_text(enc: Encoding, variant: str) -> str:
    cuda = variant_cuda(variant)
    own = shipped_driver(enc.matrix, cuda) if cuda else None
    return (
        f"driver {enc.driver} is older than the one CUDA {cuda} shipped with ({own}): the build's own machine code "
        "runs, but PTX is not compiled by the driver (no JIT), and features that need the newer driver fail at run time"
    )


def _code_note(enc: Encoding, values: dict[str, int], pins: dict[str, str], sm: str) -> str | None:
    """Says which code of torch serves a GPU that has no code of its own capability."""
    if "torch" not in pins:
        return None
    variant = _value(enc, values, VARIANT)
    build = next(
        (
            b
            for b in enc.matrix.torch_builds
            if b.torch == minor_of(pins["torch"]) and b.variant == variant and b.arch == enc.arch
        ),
        None,
    )
    if build is None or sm in build.sm:
        return None
    how = covers(build.sm, build.ptx, sm, jit=True)
    major = key(sm)[0]
    code = next((s for s in reversed(build.sm) if key(s)[0] == major and key(s) <= key(sm)), None)
    through = f"its sm_{code.replace('.', '')} code" if how == "cubin" and code else "PTX that the driver compiles"
    return f"torch {pins['torch']}+{variant} serves {gpu_words(enc, sm)} through {through}"


def stale(matrix: Matrix, wish: Wish, found: _Found, load: Loader) -> list[Warning_]:
    """Requested packages that landed far behind what their hosts would allow, and who held them back."""
    enc, values = found.enc, found.values
    out: list[Warning_] = []
    limit = matrix.policy.stale_days
    for request in enc.requests:
        if request.name not in enc.releases or request.specifier or request.name in enc.options.pythons:
            continue
        if not values.get(request.name, 0):
            continue
        chosen = enc.release(request.name, values[request.name])
        newest = _newest_before(enc, request.name, found.as_of)
        if _days(chosen.uploaded, newest) <= limit:
            continue
        alone = _search(matrix, replace(wish, requests=(replace(request, extras=()),), as_of="today"), load)
        if not isinstance(alone, _Found):
            continue
        free = alone.enc.release(request.name, alone.values[request.name])
        reference = min(free.uploaded[:10], found.as_of or free.uploaded[:10])
        if _days(chosen.uploaded, reference) <= limit:
            continue
        who = _held_by(matrix, wish, request, free.version, load)
        out.append(
            Warning_(
                "stale",
                f"{request.name} {chosen.version} of {chosen.uploaded[:10]} is far behind "
                f"{free.version} of {free.uploaded[:10]}, which these hosts would allow" + who,
            )
        )
    return out


def _held_by(matrix: Matrix, wish: Wish, request: Request, version: str, load: Loader) -> str:
    line = f"{request.name}=={version}"
    others = tuple(r for r in wish.requests if r.name != request.name)
    found = _search(matrix, replace(wish, requests=(*others, with_line(request, line))), load)
    if isinstance(found, _Found):
        return ""
    enc, rows = found
    core = _core(enc, rows)
    said = [s.text for s in statements(enc, core) if s.text != f"you ask for {line}"]
    return f"; held back because {'; '.join(said)}" if said else ""


def _newest_before(enc: Encoding, name: str, as_of: str | None) -> str:
    dates = [r.uploaded[:10] for r in enc.releases[name] if not as_of or r.uploaded[:10] <= as_of]
    return max(dates) if dates else enc.releases[name][-1].uploaded[:10]


def _days(early: str, late: str) -> int:
    return (date.fromisoformat(late[:10]) - date.fromisoformat(early[:10])).days


# --- the conflict ---------------------------------------------------------------------------------------------------


def _core(enc: Encoding, rows: Sequence[Row]) -> tuple[Row, ...]:
    return minimal_core(Problem(enc.domains, enc.rows, ranks(enc)), rows, group=_fact_key)


def _fact_key(origin: object) -> Hashable:
    return origin.key if isinstance(origin, Fact) else repr(origin)


def _conflict(matrix: Matrix, wish: Wish, enc: Encoding, rows: tuple[Row, ...], load: Loader) -> Conflict:
    core = _core(enc, rows)
    return Conflict(parties(core), statements(enc, core), tuple(_fixes(matrix, wish, enc, core, load)))


def _fixes(matrix: Matrix, wish: Wish, enc: Encoding, core: tuple[Row, ...], load: Loader) -> list[Fix]:
    found: list[Fix] = []
    ways = relaxations(enc, core)
    for way in ways:
        fix = _try(matrix, wish, enc, (way,), load)
        if fix and fix not in found:
            found.append(fix)
    if not found:
        # Several independent conflicts stand in one request: two changes at once, the cheap ones first.
        for i, first in enumerate(ways):
            for second in ways[i + 1 :]:
                if first.request is not None and first.request == second.request:
                    continue
                fix = _try(matrix, wish, enc, (first, second), load)
                if fix and fix not in found:
                    found.append(fix)
                if len(found) >= 3:
                    return found
    return found[:MAX_FIXES]


def _try(matrix: Matrix, wish: Wish, enc: Encoding, ways: tuple[Relaxation, ...], load: Loader) -> Fix | None:
    """Solve with these things given way; -> the fix in words, or None."""
    requests = list(wish.requests)
    options, hosts, drivers = wish.options, wish.hosts, None
    without: set[object] = set()
    dropped: set[int] = set()
    for way in ways:
        if way.kind == "range" and way.request is not None:
            old = requests[way.request]
            requests[way.request] = replace(old, specifier="", local=None, text=old.name)
        elif way.kind == "drop" and way.request is not None:
            dropped.add(way.request)
        elif way.kind == "variant":
            options = replace(options, variant="auto")
        elif way.kind == "python":
            options = replace(options, pythons=())
        elif way.kind == "uncapped":
            options = replace(options, allow_uncapped=True)
        else:
            without.add(way.key)
            if way.kind == "driver":
                drivers = "up"
    changed = tuple(r for i, r in enumerate(requests) if i not in dropped)
    if not changed:
        return None
    relaxed = replace(wish, requests=changed, options=options, hosts=hosts)
    result = _search(matrix, relaxed, load, frozenset(without), drivers)
    if not isinstance(result, _Found):
        return None
    moved = _value(result.enc, result.values, DRIVER) if drivers else None
    if moved and enc.driver:
        # Solve once more on the other driver, so that what is said to follow is what a user would get.
        newer = key(moved) >= key(enc.driver)
        hosts = tuple(
            replace(h, driver=moved) if h.driver and (key(h.driver) < key(moved)) == newer else h for h in hosts
        )
        result = _search(
            matrix,
            replace(relaxed, hosts=hosts),
            load,
            frozenset(without - {way.key for way in ways if way.kind == "driver"}),
        )
        if not isinstance(result, _Found):
            return None
    pins = {n: _value(result.enc, result.values, n) for n, b in result.values.items() if b and n in result.enc.releases}
    changes = [_change(wish, enc, result, way, pins) for way in ways]
    if any(c is None for c in changes):
        return None
    change = " and ".join(c for c in changes if c)
    return Fix(change, f"{change} (then {_outcome(result, pins, wish)})")


def _change(wish: Wish, before: Encoding, result: _Found, way: Relaxation, pins: dict[str, str]) -> str | None:
    enc = result.enc
    if way.kind == "range" and way.request is not None:
        request = wish.requests[way.request]
        if request.name not in pins:
            return None
        if request.local:
            same = f"{request.name}{request.specifier}"
            version = pins[request.name]
            domain = enc.domains[request.name]
            fits = domain.mask(request.specifier) >> domain.bit(version) & 1
            return same if fits else f"{request.name}=={version}"
        return range_around(enc, request, pins[request.name])
    if way.kind == "drop" and way.request is not None:
        name = wish.requests[way.request].name
        return f"leave {name} out" if name not in pins else None
    if way.kind == "driver":
        new, old = _value(enc, result.values, DRIVER), before.driver or ""
        return driver_words(old, new, key(new) >= key(old)) if new != old else None
    if way.kind == "variant":
        return f"variant {_value(enc, result.values, VARIANT)} (--variant auto)"
    if way.kind == "python":
        return f"python {_value(enc, result.values, PYTHON)}"
    if way.kind == "glibc":
        return f"glibc >={_value(enc, result.values, GLIBC)} (a newer base image or host)"
    if way.kind == "gpu":
        sm = str(way.key[1])  # type: ignore[index]
        words = sm.replace("host:", "")
        if len(enc.sms) > 1:
            return f"hide the {words} GPU (CUDA_VISIBLE_DEVICES) or resolve it apart"
        return f"another GPU than {words}"
    if way.kind == "uncapped":
        return "--allow-uncapped"
    return None


def _outcome(result: _Found, pins: dict[str, str], wish: Wish) -> str:
    shown = []
    variant = _value(result.enc, result.values, VARIANT)
    for name in dict.fromkeys([*(r.name for r in wish.requests), "torch"]):
        if name in pins:
            shown.append(f"{name} {pins[name]}" + (f"+{variant}" if name == "torch" else ""))
    python = _value(result.enc, result.values, PYTHON)
    return ", ".join([*shown[:6], f"python {python}"])


__all__ = ["Answer", "Options", "Wish", "rank_of", "resolve", "sm_name", "tier_of", "variant_order"]
