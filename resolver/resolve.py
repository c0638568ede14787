"""One request on one set of hosts: the plan with its reasons, or the conflict with its fixes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from envforge.matrix.releases import load_releases
from envforge.resolver.encoding import Options, sm_name
from envforge.resolver.explain import Conflict, Fix, Statement
from envforge.resolver.fixes import explain
from envforge.resolver.hosts import mixed
from envforge.resolver.passes import Found, Loader, Wish, rank_of, ranks, search, tier_of, variant_order
from envforge.resolver.plan import Plan
from envforge.resolver.planning import make_plan

if TYPE_CHECKING:
    from envforge.matrix.model import Matrix


@dataclass(frozen=True)
class Answer:
    """A plan or a conflict, never both."""

    plan: Plan | None
    conflict: Conflict | None


def resolve(matrix: Matrix, wish: Wish, load: Loader = load_releases) -> Answer:
    """The best plan for the wish, or exactly why there is none."""
    why = mixed(wish.hosts, wish.options.variant == "cpu")
    if why:
        return Answer(None, _apart(wish, why))
    found = search(matrix, wish, load)
    if isinstance(found, Found):
        return Answer(make_plan(matrix, wish, found, load), None)
    enc, rows = found
    return Answer(None, explain(matrix, wish, enc, rows, load))


def _apart(wish: Wish, why: str) -> Conflict:
    """Hosts that need other wheels altogether: said without a search."""
    arches = sorted({host.arch for host in wish.hosts})
    if len(arches) > 1:
        parties = tuple(f"host:arch {arch}" for arch in arches)
        rest = [host.name for host in wish.hosts if host.arch != wish.hosts[0].arch]
    else:
        parties = tuple(f"host:{host.name}" for host in wish.hosts if not host.has_gpu)
        rest = [host.name for host in wish.hosts if not host.has_gpu]
    change = "resolve them apart: " + " ".join(f"--exclude {name}" for name in sorted(rest)[:8])
    return Conflict(parties, (Statement(why, "hosts", "hosts"),), (Fix(change, change),))


def resolve_light(matrix: Matrix, wish: Wish, load: Loader = load_releases) -> Plan | None:
    """The plan without its reasons and warnings, None where there is none: for comparing many host sets."""
    found = search(matrix, wish, load)
    return make_plan(matrix, wish, found, load, light=True) if isinstance(found, Found) else None


__all__ = [
    "Answer",
    "Options",
    "Wish",
    "rank_of",
    "ranks",
    "resolve",
    "resolve_light",
    "sm_name",
    "tier_of",
    "variant_order",
]
