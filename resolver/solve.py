"""The pure search: a problem of packages, versions and incompatibilities -> the best answer, or the proof of none.

`solve` takes a `Problem` (what its rows mean: module `rows`; how it is searched: module `search`) and returns a
`Solution`, or a `Conflict` that carries its proof as data: `steps` lists the derived rows, each after its premises,
`leaves` the given rows that it rests on, and `minimal_core` shrinks those to the facts that are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

from envforge.resolver.proof import derivation, support
from envforge.resolver.rows import (
    BudgetError,
    Conflict,
    Derived,
    Premise,
    Problem,
    Row,
    Solution,
    Stats,
    Terms,
    Unreached,
)
from envforge.resolver.search import Search

__all__ = [
    "BudgetError",
    "Conflict",
    "Derived",
    "Premise",
    "Problem",
    "Row",
    "Solution",
    "Stats",
    "Terms",
    "Unreached",
    "leaves",
    "minimal_core",
    "solve",
    "steps",
]


def solve(problem: Problem, *, budget: int | None = None) -> Solution | Conflict:
    """The answer that plain backtracking in the order of ranks and preferences meets first, or the proof of none.

    Raises:
        BudgetError: more than `budget` conflicts were met (a count, not a time: equal everywhere).
        ValueError: a row names something without a domain, or activates without forbidding absence.
    """
    search = Search(problem)
    solution = search.run(budget)
    if solution is not None:
        return solution
    assert search.empty is not None
    return Conflict(derivation(search.empty, search.names, search.fulls), search.stats())


def steps(conflict: Conflict) -> tuple[Derived, ...]:
    """Every derived row of the proof once, each after its premises; the last one has no terms."""
    ordered: list[Derived] = []
    done: set[int] = set()
    stack: list[Premise] = [conflict.derivation]
    while stack:
        premise = stack[-1]
        missing = []
        if isinstance(premise, Derived) and id(premise) not in done:
            missing = [p for p in (premise.right, premise.left) if isinstance(p, Derived) and id(p) not in done]
            if not missing:
                done.add(id(premise))
                ordered.append(premise)
        if missing:
            stack += missing
        else:
            stack.pop()
    return tuple(ordered)


def leaves(conflict: Conflict) -> tuple[Row, ...]:
    """The given rows that the proof rests on, in the order of `steps`. They alone have no answer either."""
    if isinstance(conflict.derivation, Row):
        return (conflict.derivation,)
    found: dict[int, Row] = {}
    for step in steps(conflict):
        for premise in (step.left, step.right):
            if isinstance(premise, Row) and not isinstance(premise.origin, Unreached):
                found.setdefault(id(premise), premise)
    return tuple(found.values())


def _support(problem: Problem, rows: Sequence[Row]) -> tuple[list[Row], bool] | None:
    """The rows behind a proof that `rows` alone have no answer, and whether leaving rows out could make it worse; None
    when they have one."""
    names = {name for row in rows for name, _ in row.terms}
    search = Search(Problem({name: problem.domains[name] for name in names}, rows))
    search.run(None)
    return (support(search.empty), bool(search.loose)) if search.empty else None


def minimal_core(
    problem: Problem, rows: Iterable[Row], group: Callable[[object], Hashable] = lambda origin: origin
) -> tuple[Row, ...]:
    """A smallest-by-deletion part of `rows` that has no answer: leaving out any one group makes it solvable.

    Rows whose origins have equal `group` values stand and fall together; a row stays only with its group, but within a
    group every row given is returned. Groups that come first in `rows` are kept rather than later ones.

    Raises:
        ValueError: the rows have an answer.
    """
    groups: dict[Hashable, list[Row]] = {}
    for row in rows:
        groups.setdefault(group(row.origin), []).append(row)

    def unsolvable(keys: Iterable[Hashable]) -> tuple[list[Hashable], bool] | None:
        found = _support(problem, [row for key in keys for row in groups[key]])
        if found is None:
            return None
        used = {group(row.origin) for row in found[0]}
        return [key for key in groups if key in used], found[1]

    start = unsolvable(groups)
    if start is None:
        raise ValueError("these rows have an answer")
    kept, loose = start
    size = len(kept) + 1
    while len(kept) < size:
        size = len(kept)
        for key in reversed(kept):
            if key in kept:
                smaller = unsolvable(other for other in kept if other != key)
                if smaller is not None:
                    kept = smaller[0]
        if not loose:  # fewer rows, more answers: what was needed once stays needed
            break
    return tuple(row for key in kept for row in groups[key])
