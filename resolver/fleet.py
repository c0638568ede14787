"""Several kinds of hosts: the plans 1 to k that cover them, which host goes with which, and why they cannot share.

A set of hosts can share when one plan runs on all of them; if a set can, so can each of its parts. With k plans the
fleet is split so that each part can share; the fewest parts is exact for up to 12 kinds of hosts and greedy above.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from envforge.matrix.releases import Release, load_releases
from envforge.resolver.hosts import Host
from envforge.resolver.resolve import Answer, Wish, resolve

if TYPE_CHECKING:
    from envforge.matrix.model import Matrix

EXACT_KINDS = 12


@dataclass(frozen=True)
class Part:
    """Hosts that share one plan."""

    hosts: tuple[Host, ...]
    answer: Answer


@dataclass(frozen=True)
class Cover:
    """k parts that cover the fleet; `exact` says whether fewer were proven impossible. `uncovered`: hosts that no plan
    serves, each with its conflict."""

    parts: tuple[Part, ...]
    exact: bool
    uncovered: tuple[Part, ...]
    why: str  # why one plan cannot serve all, "" when it does


def kinds(hosts: Sequence[Host]) -> list[tuple[Host, ...]]:
    """Hosts that differ in nothing that matters to a plan stand together."""
    groups: dict[object, list[Host]] = {}
    for host in hosts:
        facts = (host.driver, tuple(sorted({(g.name, g.sm) for g in host.gpus}, key=str)), host.glibc, host.arch)
        groups.setdefault(facts, []).append(host)
    return [tuple(group) for group in groups.values()]


def cover(matrix: Matrix, wish: Wish, load: Callable[[str], tuple[Release, ...]] = load_releases) -> Cover:
    """The fewest plans that serve every host of the wish."""
    groups = kinds(wish.hosts)
    answers: dict[frozenset[int], Answer] = {}

    def ask(part: frozenset[int]) -> Answer:
        if part not in answers:
            hosts = tuple(h for i in sorted(part) for h in groups[i])
            if len({h.arch for h in hosts}) > 1 or len({bool(h.has_gpu) for h in hosts}) > 1:
                answers[part] = Answer(None, None)  # other wheels altogether
            else:
                answers[part] = resolve(matrix, replace(wish, hosts=hosts), load)
        return answers[part]

    alone = [ask(frozenset([i])) for i in range(len(groups))]
    usable = [i for i, answer in enumerate(alone) if answer.plan is not None]
    lost = tuple(Part(groups[i], alone[i]) for i in range(len(groups)) if alone[i].plan is None)
    exact = len(usable) <= EXACT_KINDS
    parts = _split(usable, lambda part: ask(part).plan is not None, exact)
    made = tuple(Part(tuple(h for i in sorted(p) for h in groups[i]), ask(p)) for p in parts)
    why = ""
    if len(parts) > 1 or lost:
        whole = ask(frozenset(range(len(groups))))
        why = whole.conflict.text if whole.conflict else "the hosts differ in architecture or only some have GPUs"
    return Cover(made, exact, lost, why)


def _split(usable: list[int], shares: Callable[[frozenset[int]], bool], exact: bool) -> list[frozenset[int]]:
    """Partition into the fewest sets that share. Exact: set partitions by restricted growth, smallest count first."""
    if not usable:
        return []
    greedy: list[set[int]] = []
    for i in usable:
        for part in greedy:
            if shares(frozenset(part | {i})):
                part.add(i)
                break
        else:
            greedy.append({i})
    best = [frozenset(part) for part in greedy]
    if not exact:
        return best

    def grow(position: int, parts: list[frozenset[int]], limit: int) -> list[frozenset[int]] | None:
        if position == len(usable):
            return parts
        i = usable[position]
        for n, part in enumerate(parts):
            wider = part | {i}
            if shares(wider):
                found = grow(position + 1, [*parts[:n], wider, *parts[n + 1 :]], limit)
                if found:
                    return found
        if len(parts) < limit:
            return grow(position + 1, [*parts, frozenset([i])], limit)
        return None

    for limit in range(1, len(best)):
        found = grow(0, [], limit)
        if found:
            return found
    return best


def fleet_plans(matrix: Matrix, wish: Wish) -> list[dict[str, Any]]:
    """For `resolve --json`: from one plan for all (where there is one) to a plan per kind, what each gains."""
    groups = kinds(wish.hosts)
    found = cover(matrix, wish)
    ways: list[tuple[Part, ...]] = [found.parts]
    single = tuple(Part(group, resolve(matrix, replace(wish, hosts=group))) for group in groups)
    if len(single) > len(found.parts):
        ways.append(single)
    plans = []
    for parts in ways:
        plans.append(
            {
                "count": len(parts),
                "exact": found.exact,
                "plans": [_part(part) for part in parts if part.answer.plan],
                "why": found.why,
                "uncovered": [_uncovered(part) for part in found.uncovered],
            }
        )
    return plans


def _part(part: Part) -> dict[str, Any]:
    plan = part.answer.plan
    assert plan is not None
    return {
        "hosts": sorted(h.name for h in part.hosts),
        "count": sum(h.count for h in part.hosts),
        "torch": plan.pins.get("torch"),
        "variant": plan.variant,
        "tier": plan.tier,
        "python": plan.python,
        "pins": plan.pins,
    }


def _uncovered(part: Part) -> dict[str, Any]:
    conflict = part.answer.conflict
    return {"hosts": sorted(h.name for h in part.hosts), "text": conflict.text if conflict else ""}
