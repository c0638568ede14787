"""Rows as the search keeps them: numbers for names, and all rows on the same packages in one table.

The search asks of a term (package, mask) only whether it *holds*: whether nothing outside the mask is possible any
more. So a table stores what lies outside, and a term holds when `possible & outside` is 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from envforge.resolver.rows import Row
from envforge.resolver.versions import ABSENT


class Clause:
    """A row where it takes part in a proof: variables by number, ascending, with their masks.

    It stands for `row`, or follows from `first` by resolution with each (variable, clause) of `steps`.
    """

    __slots__ = ("first", "masks", "row", "steps", "variables")

    def __init__(self, variables: tuple[int, ...], masks: tuple[int, ...], row: Row | None = None) -> None:
        self.variables = variables
        self.masks = masks
        self.row = row
        self.first: Clause | None = None
        self.steps: tuple[tuple[int, Clause], ...] = ()


Key: TypeAlias = tuple[tuple[int, ...], int]  # variables, and the one that is activated or -1


class Table:
    """All given rows on the same variables that activate the same one (-1: none), in order; or one learned row.

    outs[side][index] is what lies outside the mask of row `index` on `variables[side]`.
    """

    __slots__ = ("activates", "outs", "rows", "variables")

    def __init__(self, key: Key, outs: list[list[int]], rows: Sequence[Row | Clause]) -> None:
        self.variables, self.activates = key
        self.outs = outs
        self.rows = rows

    def clause(self, index: int, fulls: Sequence[int]) -> Clause:
        """One row."""
        row = self.rows[index]
        if isinstance(row, Clause):
            return row
        masks = tuple([fulls[v] ^ outs[index] for v, outs in zip(self.variables, self.outs, strict=True)])
        return Clause(self.variables, masks, row)


def derived(terms: Mapping[int, int], first: Clause | None, steps: Iterable[tuple[int, Clause]]) -> Clause:
    """A clause of the given terms that came from `first` by `steps`."""
    variables = tuple(sorted(terms))
    clause = Clause(variables, tuple([terms[variable] for variable in variables]))
    clause.first, clause.steps = first, tuple(steps)
    return clause


def resolve(terms: dict[int, int], pivot: int, reason: Clause, fulls: Sequence[int]) -> list[int]:
    """Resolve `terms` in place with a clause on one variable: masks united there and intersected elsewhere, a term that
    every value meets dropped. -> the other variables whose terms are new, and the pivot if it is still there."""
    changed = []
    for variable, mask in zip(reason.variables, reason.masks, strict=True):
        old = terms.get(variable)
        if variable == pivot:
            mask |= terms[pivot]
        elif old is not None:
            mask &= old
        if mask == fulls[variable]:
            del terms[variable]
        elif mask != old:
            terms[variable] = mask
            changed.append(variable)
    return changed


def read_rows(rows: Iterable[Row], numbers: Mapping[str, int], fulls: Sequence[int]) -> list[Table]:
    """Tables of all rows that can hold, in an order that does not depend on theirs; of equal rows one is kept.

    Raises:
        ValueError: a row names something without a domain, or activates without forbidding absence.
    """
    alike: dict[tuple[str | None, ...], list[Row]] = {}
    for row in rows:
        alike.setdefault((row.activates, *[name for name, _ in row.terms]), []).append(row)
    groups: dict[Key, tuple[list[list[int]], list[Row]]] = {}  # per key: columns of `outs`, and the rows
    for same in alike.values():
        key = _common_key(same[0], numbers)
        columns = _columns(same, key, numbers, fulls) if key else None
        if key and columns:
            _join(groups, key, columns, same)
            continue
        for row in same:
            found = _normal(row, numbers, fulls)
            if found:
                _join(groups, found[0], [[out] for out in found[1]], [row])
    return [Table(key, *_in_order(*groups[key])) for key in sorted(groups)]


def _join(
    groups: dict[Key, tuple[list[list[int]], list[Row]]], key: Key, columns: list[list[int]], rows: list[Row]
) -> None:
    if key not in groups:
        groups[key] = columns, rows
        return
    for column, more in zip(groups[key][0], columns, strict=True):
        column += more
    groups[key][1].extend(rows)


def _in_order(columns: list[list[int]], rows: list[Row]) -> tuple[list[list[int]], list[Row]]:
    """Sorted by what they forbid; of rows that forbid the same, the one whose origin reads first."""
    size = len(rows)
    if size < 2:
        return columns, rows
    keys = list(zip(*columns, strict=True)) if columns else [()] * size
    if len(set(keys)) < size:
        order = sorted(range(size), key=lambda index: (keys[index], repr(rows[index].origin), rows[index].terms))
        order = [index for place, index in enumerate(order) if not place or keys[index] != keys[order[place - 1]]]
    else:
        order = sorted(range(size), key=keys.__getitem__)
    return [[column[index] for index in order] for column in columns], [rows[index] for index in order]


def _common_key(row: Row, numbers: Mapping[str, int]) -> Key | None:
    """The key of a row whose terms name different packages, as nearly all do."""
    found = [numbers.get(name, -1) for name, _ in row.terms]
    target = -1 if row.activates is None else numbers.get(row.activates, -2)
    if -1 in found or len(set(found)) < len(found) or target not in (-1, *found):
        return None
    return tuple(sorted(found)), target


def _columns(rows: Sequence[Row], key: Key, numbers: Mapping[str, int], fulls: Sequence[int]) -> list[list[int]] | None:
    """What lies outside the masks of rows that name the same packages in the same order, per variable of the key; None
    when some of them need a closer look. All rows at once: reading them is most of the time of an easy search."""
    place_of = {numbers[name]: place for place, (name, _) in enumerate(rows[0].terms)}
    columns = []
    for variable in key[0]:
        full, place = fulls[variable], place_of[variable]
        column = [full & ~row.terms[place][1] for row in rows]
        if 0 in column or full in column or (variable == key[1] and any(out & ABSENT for out in column)):
            return None
        columns.append(column)
    return columns


def _normal(row: Row, numbers: Mapping[str, int], fulls: Sequence[int]) -> tuple[Key, tuple[int, ...]] | None:
    """The key of any row and what lies outside its masks; None for a row that can never hold."""
    outs: dict[int, int] = {}
    activates, forbids = row.activates, row.activates is None
    for name, mask in row.terms:
        number = numbers.get(name)
        if number is None:
            raise ValueError(f"a row names {name}, which has no domain: {row}")
        outs[number] = fulls[number] & ~mask | outs.get(number, 0)
        if name == row.activates:
            if mask & ABSENT:
                forbids = True
            else:
                activates = None  # it asks for itself
    if not forbids:
        raise ValueError(f"a row that activates {row.activates} must forbid its absence: {row}")
    variables = tuple(sorted(number for number, out in outs.items() if out))
    if any(outs[number] == fulls[number] for number in variables):
        return None
    target = -1 if activates is None else numbers[activates]
    if target not in variables:  # no value of it would do: the other terms must not hold
        target = -1
    return (variables, target), tuple([outs[number] for number in variables])
