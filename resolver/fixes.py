"""The smallest changes that would make a request solvable, each solved before it is said, the least change first."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import TYPE_CHECKING

from envforge.resolver.encoding import DRIVER, GLIBC, PYTHON, VARIANT, Encoding, sm_name
from envforge.resolver.explain import Conflict, Fix, parties, statements
from envforge.resolver.facts import Fact, fact_of
from envforge.resolver.hosts import Host, key
from envforge.resolver.passes import Direction, Found, Loader, Relaxed, Wish, ranks, search
from envforge.resolver.request import Request
from envforge.resolver.solve import Problem, Row, minimal_core

if TYPE_CHECKING:
    from envforge.matrix.model import Matrix

MAX_FIXES = 6
MAX_WAYS = 40  # of undoing one fact that are tried
ENOUGH = 2  # with as many better fixes, leaving a package out is not worth saying
FAR_DAYS = 400  # a fix that goes farther back than this is said only where no nearer one is


@dataclass(frozen=True, slots=True)
class Relaxation:
    """One thing that could give way: how little it changes (`cost`), and the request or facts to leave out."""

    cost: int
    kind: str
    key: Hashable
    request: int | None = None


@dataclass(frozen=True, slots=True)
class _Way:
    """A fix with what ranks it: the kind of change, then how many days it moves a package."""

    cost: int
    days: int
    fix: Fix


def core_of(enc: Encoding, rows: Sequence[Row]) -> tuple[Row, ...]:
    """The rows whose facts are all needed for the conflict."""
    return minimal_core(Problem(enc.domains, enc.rows, ranks(enc)), rows, group=fact_key)


def fact_key(origin: object) -> Hashable:
    """What groups rows into facts."""
    return origin.key if isinstance(origin, Fact) else repr(origin)


def explain(matrix: Matrix, wish: Wish, enc: Encoding, rows: Sequence[Row], load: Loader) -> Conflict:
    """The conflict of a search that found nothing, with its fixes."""
    core = core_of(enc, rows)
    return Conflict(parties(core), statements(enc, core), tuple(_Fixer(matrix, wish, enc, load).fixes(core)))


def relaxations(enc: Encoding, rows: Sequence[Row], fleet: bool = False) -> list[Relaxation]:
    """Everything in a core that the user could change; of a fleet, hosts can be left out."""
    found: dict[Hashable, Relaxation] = {}
    for row in rows:
        fact = fact_of(row)
        if fact.kind == "request":
            request: Request = fact.data
            index = int(fact.key[1])  # type: ignore[index]
            if request.local:
                found["local", index] = Relaxation(0, "local", fact.key, index)
            if request.specifier or request.local:
                found[fact.key] = Relaxation(1, "range", fact.key, index)
            if len(enc.requests) > 1:
                found["drop", index] = Relaxation(7, "drop", fact.key, index)
        elif fact.kind == "driver":
            found[fact.key] = Relaxation(2, "driver", fact.key)
            if fleet:
                found["apart"] = Relaxation(4, "apart", fact.key)
        elif fact.kind == "option" and fact.a == VARIANT and fact.b != "cuda":
            found[fact.key] = Relaxation(1, "variant", fact.key)
        elif fact.kind == "archive" and fact.b == "no-compile":
            found["compile"] = Relaxation(3, "compile", fact.key)
        elif fact.kind == "gpu":
            found[fact.key] = Relaxation(4, "gpu", fact.key)
        elif fact.kind == "option" and fact.a == PYTHON and enc.options.pythons:
            found[fact.key] = Relaxation(5, "python", fact.key)
        elif fact.kind == "glibc":
            found[fact.key] = Relaxation(6, "glibc", fact.key)
        elif fact.kind == "rule" and fact.key[0] == "limit":  # type: ignore[index]
            found[fact.key] = Relaxation(2, "limit", fact.key)
        elif fact.kind == "inherited":
            found["uncapped"] = Relaxation(8, "uncapped", fact.key)
    return sorted(found.values(), key=lambda r: (r.cost, str(r.key)))


class _Fixer:
    def __init__(self, matrix: Matrix, wish: Wish, enc: Encoding, load: Loader) -> None:
        self.matrix, self.wish, self.enc, self.load = matrix, wish, enc, load

    def fixes(self, core: Sequence[Row]) -> list[Fix]:
        # Each way is a search of its own; a request of a hundred lines on one package names as many.
        ways = relaxations(self.enc, core, len(self.wish.hosts) > 1)[:MAX_WAYS]
        found: list[_Way] = []
        for way in ways:
            if way.kind in ("drop", "uncapped") and len(found) >= ENOUGH:
                continue
            found += self.pinned(way) or self.unknown(way) or self.one(way)
        if not found:
            found = self.pairs(ways)
        found.sort(key=lambda way: (way.cost, way.days))
        builds = {way.fix.change.split("+")[0] for way in found if "+" in way.fix.change}
        found = [way for way in found if way.fix.change not in builds]  # the fix that names the build says it already
        near = [way for way in found if way.days <= FAR_DAYS]
        unique = dict.fromkeys(way.fix for way in (near or found))
        return list(unique)[:MAX_FIXES]

    def pairs(self, ways: list[Relaxation]) -> list[_Way]:
        """Several independent conflicts stand in one request: two changes at once, the cheap ones first."""
        found: list[_Way] = []
        for i, first in enumerate(ways):
            for second in ways[i + 1 :]:
                same = first.request is not None and first.request == second.request
                if same or "drop" in (first.kind, second.kind):
                    continue
                found += self.relaxed((first, second))
                if len(found) >= 3:
                    return found
        return found

    def one(self, way: Relaxation) -> list[_Way]:
        return self.relaxed((way,))

    def pinned(self, way: Relaxation) -> list[_Way]:
        """For an exact pin of a known release: the nearest releases above and below that solve, as ranges."""
        if way.kind != "range" or way.request is None:
            return []
        request = self.wish.requests[way.request]
        domain = self.enc.domains[request.name]
        if not request.pinned or request.local or not domain.mask(request.specifier, prereleases=True):
            return []
        at = domain.bit(request.pinned)
        found: list[_Way] = []
        directions: tuple[tuple[str, Direction, int], ...] = (
            (">", "oldest", domain.all_mask >> (at + 1) << (at + 1)),
            ("<", "newest", ((1 << at) - 1) & domain.all_mask),
        )
        for sign, order, side in directions:
            # Going back to a release from before a limit was known is no fix where going forward is one.
            if not side or found:
                continue
            near = self.ask(way.request, f"{sign}{request.pinned}", Relaxed(order={request.name: order}))
            if near is None or not near.values.get(request.name):
                continue
            bit = near.enc.domains[request.name].bit(near.value(request.name))
            mask = side >> bit << bit if sign == ">" else side & ((2 << bit) - 1)
            span = domain.describe(mask)
            if span[0] not in "<>=" or re.search(r"[^\w.,<>=!*]", span):
                span = f"=={domain.values[bit - 1]}"
            result = self.ask(way.request, span, Relaxed())
            if result is None or not result.values.get(request.name) or self.loses_torch(result):
                continue
            change = f"{_with_extras(request)}{span}"
            # How far it goes is how near a release that does it is, not how new the one is that is then taken.
            days = self.days(request.name, request.pinned, near.value(request.name))
            found.append(self.way(way.cost, change, result, days))
        return found

    def unknown(self, way: Relaxation) -> list[_Way]:
        """For an exact pin of a release that is not there: the nearest ones that are, where they solve."""
        request = self.wish.requests[way.request] if way.kind == "range" and way.request is not None else None
        if request is None or way.request is None or not request.pinned or request.local:
            return []
        domain = self.enc.domains[request.name]
        try:
            below, above = (domain.mask(f"{sign}{request.pinned}") & domain.all_mask for sign in "<>")
        except ValueError:  # `===` takes any text
            return []
        if domain.mask(request.specifier, prereleases=True):
            return []
        found: list[_Way] = []
        for bit in (below.bit_length() - 1, (above & -above).bit_length() - 1):
            if bit < 1:
                continue
            span = f"=={domain.values[bit - 1]}"
            result = self.ask(way.request, span, Relaxed())
            if result is not None and not self.loses_torch(result):
                found.append(self.way(way.cost, f"{_with_extras(request)}{span}", result))
        return found

    def ask(self, index: int, specifier: str, relaxed: Relaxed) -> Found | None:
        requests = list(self.wish.requests)
        old = requests[index]
        requests[index] = replace(old, specifier=specifier, local=None, text=f"{_with_extras(old)}{specifier}")
        result = search(self.matrix, replace(self.wish, requests=tuple(requests)), self.load, relaxed)
        return result if isinstance(result, Found) else None

    def way(self, cost: int, change: str, result: Found, days: int = 0) -> _Way:
        return _Way(cost, days, Fix(change, f"{change} (then {self.outcome(result)})"))

    def days(self, name: str, old: str, new: str) -> int:
        """Days between two releases, 0 where one is not known."""
        releases = {r.version: r.uploaded[:10] for r in self.enc.releases.get(name, ())}
        if old not in releases or new not in releases:
            return 0
        return abs((date.fromisoformat(releases[new]) - date.fromisoformat(releases[old])).days)

    def relaxed(self, ways: tuple[Relaxation, ...]) -> list[_Way]:
        """Solve with these things given way; -> the fix, if there is one."""
        wish, enc = self.wish, self.enc
        requests, options, hosts, driver = list(wish.requests), wish.options, wish.hosts, False
        without: set[object] = set()
        dropped: set[int] = set()
        for way in ways:
            if way.kind in ("range", "local") and way.request is not None:
                old = requests[way.request]
                specifier = old.specifier if way.kind == "local" else ""
                text = f"{_with_extras(old)}{specifier}"
                requests[way.request] = replace(old, specifier=specifier, local=None, text=text)
            elif way.kind == "drop" and way.request is not None:
                dropped.add(way.request)
            elif way.kind == "variant":
                options = replace(options, variant="auto")
            elif way.kind == "compile":
                options = replace(options, no_compile=False)
            elif way.kind == "python":
                options = replace(options, pythons=())
            elif way.kind == "uncapped":
                options = replace(options, allow_uncapped=True)
            elif way.kind in ("gpu", "apart") and (others := self.without(way, hosts)):
                hosts = others
            elif way.kind == "apart":
                return []
            else:
                without.add(way.key)
                driver = driver or way.kind == "driver"
        changed = tuple(r for i, r in enumerate(requests) if i not in dropped)
        if not changed:
            return []
        relaxed = replace(wish, requests=changed, options=options, hosts=hosts)
        result = search(self.matrix, relaxed, self.load, Relaxed(frozenset(without)))
        if not isinstance(result, Found):
            return []
        moved = result.value(DRIVER) if driver else None
        if moved and enc.driver:
            # Solve once more on the other driver, so that what is said to follow is what a user would get.
            newer = key(moved) >= key(enc.driver)
            hosts = tuple(
                replace(h, driver=moved) if h.driver and (key(h.driver) < key(moved)) == newer else h for h in hosts
            )
            rest = frozenset(without - {way.key for way in ways if way.kind == "driver"})
            result = search(self.matrix, replace(relaxed, hosts=hosts), self.load, Relaxed(rest))
            if not isinstance(result, Found):
                return []
        changes = [self.change(result, way) for way in ways]
        if any(c is None for c in changes) or (all(w.kind == "range" for w in ways) and self.loses_torch(result)):
            return []
        request = wish.requests[ways[0].request] if ways[0].kind == "range" and ways[0].request is not None else None
        days = 0
        if request is not None and result.values.get(request.name):
            days = self.days(request.name, self.edge(request, result), result.value(request.name))
        made = self.way(max(way.cost for way in ways), " and ".join(c for c in changes if c), result, days)
        return [made]

    def without(self, way: Relaxation, hosts: tuple[Host, ...]) -> tuple[Host, ...]:
        """The other hosts of a fleet; none where all have the GPU or the driver that a fact speaks of."""
        if way.kind == "apart":
            return tuple(h for h in hosts if h.driver and h.driver != self.enc.driver)
        words = str(way.key[1])  # type: ignore[index]
        return tuple(h for h in hosts if not any(g.sm and sm_name(g.sm) == words for g in h.gpus))

    def loses_torch(self, result: Found) -> bool:
        """An old release may declare no torch at all: that it then "solves" on a GPU helps nobody."""
        if self.enc.cpu or result.values.get("torch"):
            return False
        return any(row.activates == "torch" and fact_of(row).a not in self.enc.extras for row in self.enc.rows)

    def edge(self, request: Request, result: Found) -> str:
        """The release nearest to the new one that a request asks for: how far a fix goes is measured from there."""
        domain = self.enc.domains[request.name]
        mask = domain.mask(request.specifier) & domain.all_mask
        if not mask or not result.values.get(request.name):
            return ""
        lowest, highest = (mask & -mask).bit_length() - 1, mask.bit_length() - 1
        new = result.value(request.name)
        above = new in domain.values and domain.bit(new) > highest
        return domain.values[(highest if above else lowest) - 1]

    def change(self, result: Found, way: Relaxation) -> str | None:
        enc, pins = result.enc, result.pins()
        request = self.wish.requests[way.request] if way.request is not None else None
        if way.kind in ("range", "local") and request is not None:
            if request.name not in pins:
                return None
            if way.kind == "local":
                return f"{_with_extras(request)}=={pins[request.name]}+{result.value(VARIANT)}"
            return range_around(enc, request, pins[request.name])
        if way.kind == "drop" and request is not None:
            return f"leave {request.name} out" if request.name not in pins else None
        if way.kind == "driver":
            new, old = result.value(DRIVER), self.enc.driver or ""
            if new == old:
                return None
            branch = new.split(".")[0]
            return f"driver >={new}" if key(new) >= key(old) else f"a driver of branch {branch} (such as {new})"
        if way.kind == "variant":
            return f"variant {result.value(VARIANT)} (--variant auto)"
        if way.kind == "compile":
            return "let it be compiled (leave --no-compile out)"
        if way.kind == "python":
            return f"python {result.value(PYTHON)}"
        if way.kind == "glibc":
            return f"glibc >={result.value(GLIBC)} (a newer base image or host)"
        if way.kind == "limit":
            limit = self.wish.options.limits[int(way.key[1])]  # type: ignore[index]
            return f"lift the constraint {limit.text} ({limit.origin})"
        if way.kind in ("gpu", "apart"):
            sm = str(way.key[1]).removeprefix("host:")  # type: ignore[index]
            words = sm if way.kind == "gpu" else f"driver {self.enc.driver}"
            others = self.without(way, self.wish.hosts)
            if others:
                gone = sorted(h.name for h in self.wish.hosts if h not in others)
                named = " ".join(f"--exclude {name}" for name in gone[:8])
                return f"resolve the hosts with {words} apart: {named}" + (" ..." if len(gone) > 8 else "")
            if len(enc.sms) > 1:
                return f"hide the {words} GPU (CUDA_VISIBLE_DEVICES)"
            return f"another GPU than {words}"
        return "--allow-uncapped" if way.kind == "uncapped" else None

    def outcome(self, result: Found) -> str:
        pins, shown = result.pins(), []
        variant = result.value(VARIANT)
        for name in dict.fromkeys([*(r.name for r in self.wish.requests), "torch"]):
            if name in pins:
                shown.append(f"{name} {pins[name]}" + (f"+{variant}" if name == "torch" else ""))
        return ", ".join([*shown[:6], f"python {result.value(PYTHON)}"])


def range_around(enc: Encoding, request: Request, version: str) -> str:
    """How to ask for `version` with the least change to a request line."""
    domain = enc.domains[request.name]
    asked = domain.mask(request.specifier, prereleases=True) & domain.all_mask
    bit = 1 << domain.bit(version)
    name = _with_extras(request)
    if asked and bit < (asked & -asked):
        return f"{name}{domain.describe((asked & -asked) - 1)}"
    if asked and bit > asked and not request.pinned:
        return f"{name}{domain.describe(domain.all_mask >> asked.bit_length() << asked.bit_length())}"
    return f"{name}=={version}"


def _with_extras(request: Request) -> str:
    return f"{request.name}[{','.join(request.extras)}]" if request.extras else request.name


def with_line(request: Request, line: str) -> Request:
    """The request with another specifier."""
    specifier = re.sub(r"^[A-Za-z0-9._-]+(\[[^\]]*\])?", "", line)
    return replace(request, specifier=specifier, local=None, text=line)
