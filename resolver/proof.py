"""The proof that there is no answer, from the search's own clauses to public values. Nothing here recurses: a proof can
be thousands of steps deep."""

from __future__ import annotations

from collections.abc import Sequence

from envforge.resolver.rows import Derived, Premise, Row, Unreached
from envforge.resolver.tables import Clause, resolve


def support(empty: Clause) -> list[Row]:
    """The given rows behind a clause, in the order in which its proof first uses them."""
    rows: list[Row] = []
    met: set[int] = set()
    stack: list[Clause | None] = [empty]
    while stack:
        clause = stack.pop()
        if clause is None or id(clause) in met:
            continue
        met.add(id(clause))
        if clause.row is None:
            stack += [reason for _, reason in reversed(clause.steps)]
            stack.append(clause.first)
        elif not isinstance(clause.row.origin, Unreached):
            rows.append(clause.row)
    return rows


def derivation(empty: Clause, names: Sequence[str], fulls: Sequence[int]) -> Premise:
    """A clause with all its premises."""
    done: dict[int, Premise] = {}
    stack = [empty]
    while stack:
        clause = stack[-1]
        if clause.row is not None:
            done[id(clause)] = clause.row
        elif id(clause) not in done:
            assert clause.first is not None
            missing = [c for c in (clause.first, *(reason for _, reason in clause.steps)) if id(c) not in done]
            if missing:
                stack += reversed(missing)
                continue
            done[id(clause)] = _replay(clause, clause.first, done, names, fulls)
        stack.pop()
    return done[id(empty)]


def _replay(
    clause: Clause, first: Clause, done: dict[int, Premise], names: Sequence[str], fulls: Sequence[int]
) -> Premise:
    premise = done[id(first)]
    terms = dict(zip(first.variables, first.masks, strict=True))
    for pivot, reason in clause.steps:
        resolve(terms, pivot, reason, fulls)
        named = tuple((names[variable], mask) for variable, mask in sorted(terms.items()))
        premise = Derived(named, names[pivot], premise, done[id(reason)])
    return premise
