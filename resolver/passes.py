"""One request on one set of hosts, searched in passes: the coherence date, the order of preference, the tiers.

The date comes from exact pins where there are some; else a first search finds the packages whose date the unnamed ones
then follow. The cuda-compat tier joins only when nothing else solves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from typing import TYPE_CHECKING, Literal, TypeAlias

from envforge.matrix.releases import Release
from envforge.resolver.constraints import encode, forward_eligible
from envforge.resolver.encoding import DRIVER, GLIBC, PYTHON, VARIANT, Encoding, Options, variant_cuda
from envforge.resolver.facts import fact_of
from envforge.resolver.hosts import Host, family_floor, key, shipped_driver
from envforge.resolver.request import Request
from envforge.resolver.solve import Problem, Row, Solution, leaves, solve
from envforge.resolver.versions import ABSENT

if TYPE_CHECKING:
    from envforge.matrix.model import Matrix

Loader: TypeAlias = Callable[[str], tuple[Release, ...]]
Direction: TypeAlias = Literal["oldest", "newest"]
Refused: TypeAlias = tuple[Encoding, tuple[Row, ...]]


@dataclass(frozen=True)
class Wish:
    """Everything a resolve depends on besides the matrix. `as_of`: ISO date or "today" (the matrix's own)."""

    requests: tuple[Request, ...]
    hosts: tuple[Host, ...]
    options: Options = field(default_factory=Options)
    as_of: str | None = None

    def __post_init__(self) -> None:
        # The order in which things are asked for means nothing: the same bytes come out for any.
        ordered = tuple(sorted(self.requests, key=lambda r: (r.name, r.text, r.origin)))
        object.__setattr__(self, "requests", ordered)


@dataclass(frozen=True)
class Relaxed:
    """How a search for a fix differs. `without`: keys of facts to leave out; `order`: packages that are to be tried
    oldest or newest first, whatever the date says."""

    without: frozenset[object] = frozenset()
    order: Mapping[str, Direction] = field(default_factory=dict)


@dataclass
class Found:
    """An answer: positions per variable, and the coherence date that was used."""

    enc: Encoding
    values: dict[str, int]
    as_of: str | None

    def value(self, name: str) -> str:
        """The value of a variable that is there."""
        return self.enc.domains[name].values[self.values[name] - 1]

    def pins(self) -> dict[str, str]:
        """Exact versions of the packages that are there, sorted."""
        return {n: self.value(n) for n, bit in sorted(self.values.items()) if bit and n in self.enc.releases}


def search(matrix: Matrix, wish: Wish, load: Loader, relaxed: Relaxed | None = None) -> Found | Refused:
    """The best answer, or the rows that the proof of none rests on."""
    relaxed = relaxed or Relaxed()
    enc = encode(matrix, wish.requests, wish.hosts, wish.options, load)
    result = _passes(enc, wish, relaxed)
    if isinstance(result, Found) or relaxed.without:
        return result if isinstance(result, Found) else (enc, result)
    if not wish.options.forward and not enc.cpu and forward_eligible(enc):
        forward = replace(wish, options=replace(wish.options, forward=True))
        second = encode(matrix, forward.requests, forward.hosts, forward.options, load)
        other = _passes(second, forward, relaxed)
        return other if isinstance(other, Found) else (second, other)
    return enc, result


def _passes(enc: Encoding, wish: Wish, relaxed: Relaxed) -> Found | tuple[Row, ...]:
    rows: Sequence[Row] = enc.rows
    if relaxed.without:
        # A freed host fact must still have some value, except a GPU, which may be missing.
        facts = [(row, fact_of(row)) for row in enc.rows]
        kept = [row for row, fact in facts if fact.key not in relaxed.without]
        freed = {row.activates: fact for row, fact in facts if fact.key in relaxed.without and fact.kind != "gpu"}
        rows = [*kept, *(Row(((name, ABSENT),), fact, name) for name, fact in freed.items() if name)]
    anchor = asked_date(enc, wish)
    leads = _leading(enc, wish)
    result = solve(_problem(enc, rows, anchor, bool(anchor), leads, relaxed))
    if not isinstance(result, Solution):
        return leaves(result)
    if anchor is None:
        # No pin sets the date: what was chosen does, for what nobody named.
        anchor = _chosen_date(enc, result.values, leads)
        if anchor:
            second = solve(_problem(enc, rows, anchor, False, leads, relaxed))
            if isinstance(second, Solution):
                result = second
    return Found(enc, result.values, anchor)


def asked_date(enc: Encoding, wish: Wish) -> str | None:
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
    pinned.pop("triton", None)  # it comes before the torch that it belongs to
    for roles in (("trainer", "framework"), ("torch",), ("engine",), ("companion",)):
        found = _date_of(enc, pinned, roles)
        if found:
            return found
    return None


def _leading(enc: Encoding, wish: Wish) -> frozenset[str]:
    """The trainers that are taken as new as they come, whatever the date: those that are asked for. Others come with
    them (unsloth-zoo with unsloth), and all follow a trainer that is pinned, or a date that the user names."""
    roles = {name: row.role for name, row in enc.matrix.packages.items()}
    asked = [r for r in enc.requests if roles.get(r.name) == "trainer"]
    if wish.as_of not in (None, "today") or any(r.pinned for r in asked):
        return frozenset(r.name for r in asked if r.pinned)
    return frozenset(r.name for r in asked)


def _chosen_date(enc: Encoding, values: Mapping[str, int], leads: frozenset[str]) -> str | None:
    """The date of what was chosen: a trainer with its transformers, else the frameworks or engines that are named."""
    named = {r.name: values.get(r.name, 0) for r in enc.requests}
    trainer = _date_of(enc, {name: values.get(name, 0) for name in leads} or values, ("trainer",))
    if trainer:
        return max(trainer, _date_of(enc, {"transformers": values.get("transformers", 0)}, ("framework",)) or trainer)
    return (
        _date_of(enc, named, ("framework",))
        or _date_of(enc, named, ("engine",))
        or _date_of(enc, {"transformers": values.get("transformers", 0)}, ("framework",))
    )


def _date_of(enc: Encoding, values: Mapping[str, int], roles: tuple[str, ...]) -> str | None:
    newest = ""
    for name, bit in values.items():
        row = enc.matrix.packages.get(name)
        if row is not None and bit and name in enc.releases and row.role in roles:
            newest = max(newest, enc.release(name, bit).uploaded)
    if not newest:
        return None
    day = date.fromisoformat(newest[:10]) + timedelta(days=enc.matrix.policy.coherence_days)
    return min(day.isoformat(), enc.matrix.policy.as_of)


def _problem(
    enc: Encoding,
    rows: Sequence[Row],
    as_of: str | None,
    named_follow: bool,
    leads: frozenset[str],
    relaxed: Relaxed | None = None,
) -> Problem:
    named = {r.name for r in enc.requests}
    keep = dict(enc.options.keep)
    directed = relaxed.order if relaxed else {}

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
            return _from_here(enc, DRIVER, enc.driver)
        if name == GLIBC:
            return _from_here(enc, GLIBC, enc.glibc)
        if base in directed:
            return newest_first(name)[:: -1 if directed[base] == "oldest" else 1]
        if as_of is None or base in leads or (base in named and not named_follow) or base not in enc.releases:
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


FRAMEWORK = 2


def rank_of(enc: Encoding, name: str) -> tuple[int, int]:
    """The total order of decisions: hosts, trainers, frameworks, engines, torch, variant, python, the rest."""
    if name.startswith("host:"):
        return (0, 0)
    groups = {"trainer": 1, "framework": FRAMEWORK, "engine": 3, "torch": 4, "companion": 7, "library": 8}
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


def _from_here(enc: Encoding, name: str, here: str | None) -> list[int]:
    """A host's own value, then the newer ones ascending, then the older ones descending: the least change first."""
    domain = enc.domains[name]
    bits = [domain.bit(v) for v in domain.values]
    at = domain.values.index(here) if here in domain.values else 0
    return bits[at:] + bits[:at][::-1]
