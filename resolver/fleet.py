"""Several kinds of hosts: the plans that cover them, which host goes with which, what each gains, and why not one.

A set of hosts can share when one plan runs on all of them; if a set can, so can each of its parts. The fewest plans
are exact for up to 12 kinds of hosts and greedy above. From there on a further plan is made where it gains most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from envforge.matrix.releases import Release, load_releases
from envforge.resolver.hosts import Host, key, mixed
from envforge.resolver.plan import Plan
from envforge.resolver.resolve import Answer, Wish, resolve, resolve_light

if TYPE_CHECKING:
    from envforge.matrix.model import Matrix

EXACT_KINDS = 12
MAX_PLANS = 4  # beyond the fewest, no more plans than this are proposed
_TIERS = {"forward": 0, "minor": 1, "native": 2, "cpu": 2}


@dataclass(frozen=True)
class Part:
    """Hosts that share one plan; `gains` says what they have of it against the way with fewer plans."""

    hosts: tuple[Host, ...]
    plan: Plan
    gains: tuple[str, ...] = ()


@dataclass(frozen=True)
class Lost:
    """Hosts that no plan serves, and why."""

    hosts: tuple[Host, ...]
    text: str


@dataclass(frozen=True)
class Cover:
    """Ways to serve the fleet: the fewest plans first, then one more each. `exact`: fewer were proven impossible.
    `why`: why one plan cannot serve all, "" when it does."""

    ways: tuple[tuple[Part, ...], ...]
    exact: bool
    lost: tuple[Lost, ...]
    why: str

    @property
    def parts(self) -> tuple[Part, ...]:
        """The way with the fewest plans."""
        return self.ways[0] if self.ways else ()


def kinds(hosts: Sequence[Host]) -> list[tuple[Host, ...]]:
    """Hosts that differ in nothing that matters to a plan stand together."""
    groups: dict[object, list[Host]] = {}
    for host in hosts:
        facts = (host.driver, tuple(sorted({(g.name, g.sm) for g in host.gpus}, key=str)), host.glibc, host.arch)
        groups.setdefault(facts, []).append(host)
    return [tuple(group) for group in groups.values()]


@dataclass
class _Fleet:
    """The kinds of a fleet and what is known of their sets, as bitmasks of kinds."""

    matrix: Matrix
    wish: Wish
    load: Callable[[str], tuple[Release, ...]]
    groups: list[tuple[Host, ...]]
    plans: dict[object, Plan | None] = field(default_factory=dict)
    apart: list[int] = field(default_factory=list)  # sets that cannot share
    together: list[int] = field(default_factory=list)  # sets that can

    @property
    def cpu(self) -> bool:
        return self.wish.options.variant == "cpu"

    def hosts(self, part: int) -> tuple[Host, ...]:
        return tuple(host for i, group in enumerate(self.groups) if part >> i & 1 for host in group)

    def plan(self, part: int) -> Plan | None:
        hosts = self.hosts(part)
        if mixed(hosts, self.cpu):
            return None
        # All that a plan sees of its hosts: two sets that look the same have the same plan.
        drivers = [h.driver for h in hosts if h.driver]
        floors = [h.glibc for h in hosts if h.glibc]
        facts = (
            hosts[0].arch,
            min(drivers, key=key) if drivers else None,
            min(floors, key=key) if floors else None,
            frozenset((g.name, g.sm) for h in hosts for g in h.gpus),
        )
        if facts not in self.plans:
            self.plans[facts] = resolve_light(self.matrix, replace(self.wish, hosts=hosts), self.load)
        return self.plans[facts]

    def shares(self, part: int) -> bool:
        if any(part & other == other for other in self.apart):
            return False
        if any(part & other == part for other in self.together):
            return True
        ok = self.plan(part) is not None
        (self.together if ok else self.apart).append(part)
        return ok

    def make(self, part: int, gains: Iterable[str] = ()) -> Part:
        hosts, plan = self.hosts(part), self.plan(part)
        assert plan is not None
        return Part(hosts, replace(plan, target=replace(plan.target, hosts=_names(hosts))), tuple(gains))


def cover(matrix: Matrix, wish: Wish, load: Callable[[str], tuple[Release, ...]] = load_releases) -> Cover:
    """The fewest plans that serve every host of the wish, and what more plans would gain."""
    fleet = _Fleet(matrix, wish, load, kinds(wish.hosts))
    alone = [fleet.shares(1 << i) for i in range(len(fleet.groups))]
    usable = [i for i, ok in enumerate(alone) if ok]
    lost = tuple(
        Lost(group, _reason(resolve(matrix, replace(wish, hosts=group), load)))
        for group, ok in zip(fleet.groups, alone, strict=True)
        if not ok
    )
    exact = len(usable) <= EXACT_KINDS
    classes: dict[object, list[int]] = {}  # these can never share, so each is split by itself
    for i in usable:
        host = fleet.groups[i][0]
        classes.setdefault((host.arch, host.has_gpu and not fleet.cpu), []).append(i)
    parts = [part for members in classes.values() for part in fewest(members, fleet.shares, exact)]
    exact = exact or len(parts) == len(classes)
    why = ""
    if len(parts) > 1 or lost:
        served = fleet.hosts(sum(1 << i for i in usable)) or wish.hosts
        why = mixed(served, fleet.cpu) or (
            _reason(resolve(matrix, replace(wish, hosts=served), load)) if len(parts) > 1 else ""
        )
    ways = [tuple(fleet.make(part) for part in parts)] if parts else []
    while parts and len(parts) < max(MAX_PLANS, len(ways[0])):
        wider = _one_more(fleet, parts)
        if wider is None:
            break
        ways.append(_gained(fleet, parts, wider))
        parts = wider
    return Cover(tuple(ways), exact, lost, why)


def _reason(answer: Answer) -> str:
    return answer.conflict.text if answer.conflict else ""


def fewest(usable: Sequence[int], shares: Callable[[int], bool], exact: bool) -> list[int]:
    """Partition kinds into the fewest sets (bitmasks) that share; greedy unless `exact`. Set partitions by restricted
    growth, smallest count first: the first found is the same whatever the order of answers."""
    whole = sum(1 << i for i in usable)
    if usable and shares(whole):
        return [whole]
    greedy: list[int] = []
    for i in usable:
        at = next((n for n, part in enumerate(greedy) if shares(part | 1 << i)), None)
        if at is None:
            greedy.append(1 << i)
        else:
            greedy[at] |= 1 << i
    if not exact:
        return greedy

    def grow(position: int, parts: list[int], limit: int) -> list[int] | None:
        if position == len(usable):
            return parts
        one = 1 << usable[position]
        for n, part in enumerate(parts):
            if shares(part | one):
                found = grow(position + 1, [*parts[:n], part | one, *parts[n + 1 :]], limit)
                if found:
                    return found
        return grow(position + 1, [*parts, one], limit) if len(parts) < limit else None

    for limit in range(2, len(greedy)):
        found = grow(0, [], limit)
        if found:
            return found
    return greedy


def _worth(fleet: _Fleet, part: int) -> int:
    """How new a plan is for its hosts: positions of what was asked for and of torch, then the tier, by host count."""
    plan = fleet.plan(part)
    if plan is None:
        return 0
    names = {request.name for request in fleet.wish.requests} | {"torch"}
    total = 0
    for name in names & set(plan.pins):
        versions = [release.version for release in fleet.load(name)]
        total += 10 * versions.index(plan.pins[name]) if plan.pins[name] in versions else 0
    return (total + _TIERS[plan.tier]) * sum(host.count for host in fleet.hosts(part))


def _one_more(fleet: _Fleet, parts: list[int]) -> list[int] | None:
    """The same with one part split where that gains most; None when nothing is gained."""
    best: tuple[int, list[int]] | None = None
    for n, part in enumerate(parts):
        members = [i for i in range(len(fleet.groups)) if part >> i & 1]
        # A plan is held back by its weakest hosts: part the strong from the weak, at every place.
        count = {i: sum(host.count for host in fleet.groups[i]) for i in members}
        alone = {i: _worth(fleet, 1 << i) / count[i] for i in members}
        driver = {i: key(fleet.groups[i][0].driver or "0") for i in members}
        orders = [
            sorted(members, key=lambda i: (alone[i], driver[i], i)),
            sorted(members, key=lambda i: (driver[i], i)),
        ]
        before = _worth(fleet, part)
        splits = dict.fromkeys(sum(1 << i for i in order[:at]) for order in orders for at in range(1, len(members)))
        for weak in splits:
            gain = _worth(fleet, weak) + _worth(fleet, part & ~weak) - before
            if gain > 0 and (best is None or gain > best[0]):
                best = (gain, [*parts[:n], weak, part & ~weak, *parts[n + 1 :]])
    return best[1] if best else None


def _gained(fleet: _Fleet, before: list[int], after: list[int]) -> tuple[Part, ...]:
    made = []
    for part in after:
        old = fleet.plan(next(other for other in before if other & part == part))
        new = fleet.plan(part)
        assert old is not None and new is not None
        made.append(fleet.make(part, gains(old, new, [request.name for request in fleet.wish.requests])))
    return tuple(made)


def gains(old: Plan, new: Plan, asked: Sequence[str]) -> tuple[str, ...]:
    """What one plan has of another: changes of torch, build, tier, python and of what was asked for."""
    found = []
    for name in dict.fromkeys(["torch", *asked]):
        a, b = old.pins.get(name), new.pins.get(name)
        if a != b:
            found.append(f"{name} {b or 'left out'} instead of {a or 'none'}")
    for what, a, b in (
        ("", old.variant, new.variant),
        ("tier ", old.tier, new.tier),
        ("python ", old.python, new.python),
    ):
        if a != b:
            found.append(f"{what}{b} instead of {a}")
    return tuple(found)


def _names(hosts: Iterable[Host]) -> tuple[str, ...]:
    return tuple(sorted(host.name for host in hosts))


def fleet_plans(
    matrix: Matrix, wish: Wish, load: Callable[[str], tuple[Release, ...]] = load_releases
) -> list[dict[str, Any]]:
    """For `resolve --json`: the fewest plans first, then one more each, with what each gains."""
    found = cover(matrix, wish, load)
    ways = [
        {
            "count": len(parts),
            "exact": found.exact,
            "plans": [_part(part) for part in parts],
            "why": found.why,
            "uncovered": [{"hosts": list(_names(lost.hosts)), "text": lost.text} for lost in found.lost],
        }
        for parts in found.ways
    ]
    return ways or [
        {
            "count": 0,
            "exact": found.exact,
            "plans": [],
            "why": found.why,
            "uncovered": [{"hosts": list(_names(lost.hosts)), "text": lost.text} for lost in found.lost],
        }
    ]


def _part(part: Part) -> dict[str, Any]:
    plan = part.plan
    return {
        "hosts": list(_names(part.hosts)),
        "count": sum(h.count for h in part.hosts),
        "torch": plan.pins.get("torch"),
        "variant": plan.variant,
        "tier": plan.tier,
        "python": plan.python,
        "pins": plan.pins,
        "gains": list(part.gains),
    }


def fleet_text(ways: Sequence[dict[str, Any]]) -> list[str]:
    """The ways as lines for people: one table per way."""
    lines: list[str] = []
    for way in ways:
        if not way["plans"]:
            continue
        proven = "the fewest" if way is ways[0] and way["exact"] else "found greedily" if way is ways[0] else "one more"
        every = "all hosts" if not ways[0]["uncovered"] else "all hosts that can be served"
        title = f"one plan for {every}" if way["count"] == 1 else f"{way['count']} plans ({proven})"
        lines.append(title + ":")
        width = max(len(_hosts_words(part)) for part in way["plans"])
        for part in way["plans"]:
            torch = f"torch {part['torch']}+{part['variant']}" if part["torch"] else part["variant"]
            row = f"  {_hosts_words(part):<{width}}  {torch:<20}  {part['tier']:<7}  python {part['python']}"
            lines.append(row.rstrip())
            if part["gains"]:
                lines.append(f"  {'':<{width}}    gains: {', '.join(part['gains'])}")
    if ways and ways[0]["why"]:
        lines.append(f"why one plan cannot serve all: {ways[0]['why']}")
    for lost in ways[0]["uncovered"] if ways else ():
        lines.append(f"no plan serves {', '.join(lost['hosts'])}: {lost['text']}")
    return lines


def _hosts_words(part: dict[str, Any]) -> str:
    names = part["hosts"]
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"{shown} ({part['count']} host{'s' if part['count'] > 1 else ''})"
