"""What the search is asked and what it answers, as frozen values.

Everything is said with incompatibilities. A `Row` lists terms (name, mask of positions in that name's `Domain`), and no
answer may lie inside all of them at once:

- "unsloth 2026.1 needs torch >=2.4": {unsloth in {2026.1}, torch in {<2.4, ABSENT}}, activates torch;
- the same on Python 3.9 only: a third term {python in {3.9}};
- "trl 0.8 breaks peft 0.14": {trl in {0.8}, peft in {0.14}}; without ABSENT nobody is forced to have either;
- "the driver is 470.57.02", "torch==2.1.2 is asked for": {host:driver in all else, ABSENT included}, activates it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from envforge.errors import EnvforgeError
from envforge.resolver.versions import Domain

Terms: TypeAlias = tuple[tuple[str, int], ...]
Prefer: TypeAlias = Callable[[str, Mapping[str, int]], Sequence[int]]


class BudgetError(EnvforgeError):
    """The search met more conflicts than it was allowed to."""

    id = "search-budget"


class Row(NamedTuple):
    """An incompatibility: no answer has, for every (name, mask) of `terms`, the name's value inside the mask.

    origin: whatever the row stands for; the search only carries it. Of rows that forbid the same, the one whose origin
        has the smallest `repr` is used.
    activates: the name among `terms` that must be decided once all other terms hold for decided values. Its mask must
        contain ABSENT. A row that names it twice, so that another condition on itself is left, activates nothing.

    A name given twice counts with the intersection of its masks; a term that every value meets is no condition.
    """

    terms: Terms
    origin: object = None
    activates: str | None = None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Derived:
    """A row that follows from two others by resolution on `pivot`: its masks united there, intersected elsewhere."""

    terms: Terms
    pivot: str
    left: Premise
    right: Premise


Premise: TypeAlias = Row | Derived


class Unreached(NamedTuple):
    """Origin of a row that the search adds itself: with these decisions nothing asks for `name`, so it is absent."""

    name: str


@dataclass(frozen=True, slots=True)
class Problem:
    """What is asked.

    domains: every name that a row mentions.
    rank: the order of decisions, smallest first, then by name; names that a mapping leaves out come last.
    prefer: per name, positions of its domain in the order to try them; or a pure function of the name and of what is
        decided so far (name -> position). Positions left out are tried last, newest first: to forbid a value, add a
        row. None: newest first.
    """

    domains: Mapping[str, Domain]
    rows: Sequence[Row]
    rank: Mapping[str, int] | Callable[[str], int] = field(default_factory=dict)
    prefer: Prefer | Mapping[str, Sequence[int]] | None = None


class Stats(NamedTuple):
    """How much work it was: choices made, masks narrowed, conflicts met (each but a last one teaches a row)."""

    decisions: int
    propagations: int
    conflicts: int


class Solution(NamedTuple):
    """values: position per name, 0 for absent; order: the names that are present, as they were decided."""

    values: dict[str, int]
    order: tuple[str, ...]
    stats: Stats


@dataclass(frozen=True, slots=True, eq=False)
class Conflict:
    """There is no answer. `derivation` ends in a row without terms (a plain Row where one row alone is impossible)."""

    derivation: Premise
    stats: Stats
