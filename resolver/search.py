"""Conflict-driven search over finite domains: PubGrub's idea, with sets of versions as integers.

**The answer that is wanted** is not any answer. Packages are decided one at a time. The next is the first, in the order
of ranks, of those that are *activated* and not yet decided: a row activates its package once all its other terms hold
for values already decided. A package is given the value that comes first in its order of preference and still leads to
an answer. When no activated package is left, all others are ABSENT. Plain backtracking in that order defines the result
(`tests/unit/oracle.py` does exactly that); what follows only reaches it sooner.

**Propagation.** The search keeps, per package, the mask of values still possible. When all terms of a row but one hold
whatever is chosen from those masks, the last one must not: its values are struck out. A term comes to hold only when
the last possible value outside its mask goes. So each term waits at one such value and is looked at when that is struck
out; then it moves to another one, or it holds. Nothing has to be undone there when the search goes back. The conditions
of a dependency ("A in S" in "A in S needs B in T") are looked at once A has a single value left, which is soon enough.
Rows on the same packages lie in one `Table`; those that strike together count as one, "A in S1 or S2 needs B in T1 or
T2".

**Learning.** When a row holds completely, the choices made so far cannot stand. The value that kept it from holding was
struck out by another row, and the two forbid something together: with {v in M, X} and {v in N, Y} also {v in M or N, X
and Y} is forbidden, whatever v is. Resolving backwards like this ends in a row of which only one term depends on the
latest choice. It is learned, the search returns to the choice before, and there the row strikes out all values that
would fail for the same reason. A learned row follows from the others, so it costs no answer, and answers are met in the
order of plain backtracking. Learned rows never activate.

**No answer.** When the resolution ends in the row without terms, the steps that led there are the proof.

Everything is deterministic and independent of the order of rows and of hashes: rows are sorted before they are used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from envforge.resolver.rows import BudgetError, Problem, Row, Solution, Stats, Unreached
from envforge.resolver.tables import Clause, Table, derived, read_rows, resolve
from envforge.resolver.versions import ABSENT

Terms: TypeAlias = tuple[Table, int, list[int]]  # terms on one side of a table, by index of the row
# What struck values out: a clause, or the rows of a table (with the side they struck from) that are merged on demand.
Reason: TypeAlias = Clause | tuple[Table, int, Sequence[int]]


class _Mark:
    """One narrowing of one variable: its mask before, what asked for it (None: a decision), and the level."""

    __slots__ = ("before", "level", "reason", "variable")

    def __init__(self, variable: int, before: int, reason: Reason | None, level: int) -> None:
        self.variable = variable
        self.before = before
        self.reason = reason
        self.level = level


class Search:
    """One run. After `run` returned None, `empty` is the clause without terms that ends the proof."""

    def __init__(self, problem: Problem) -> None:
        rank = problem.rank
        if callable(rank):
            self.names = sorted(problem.domains, key=lambda name: (rank(name), name))
        else:
            self.names = sorted(problem.domains, key=lambda name: (rank.get(name, float("inf")), name))
        self.numbers = {name: number for number, name in enumerate(self.names)}
        self.prefer = problem.prefer
        self.fulls = [problem.domains[name].full for name in self.names]
        self.masks = list(self.fulls)  # what is still possible
        size = len(self.names)
        self.conditions: list[list[tuple[Table, int]]] = [[] for _ in range(size)]  # per variable: (table, side)
        self.waiting: list[dict[int, list[Terms]]] = [{} for _ in range(size)]  # per variable: value -> terms
        self.watched = [0] * size  # the values at which terms wait
        self.facts: list[Clause] = []  # rows with one term, or (impossible) none
        self.loose: list[Clause] = []  # rows that another absence than that of what they activate can break
        self.trail: list[_Mark] = []
        self.history: list[list[int]] = [[] for _ in range(size)]  # per variable: where it is in the trail
        self.changed: dict[int, int] = {}  # variable -> what was struck out and not yet followed up
        self.decided: dict[str, int] = {}
        self.levels: list[tuple[int, int, int]] = []  # (variable, length of the trail before, `pending` before)
        self.pending = 0  # bit v: v is activated and not decided; smaller number = higher rank
        self.seen = 0  # bit v: v is decided
        self.empty: Clause | None = None
        self.decisions = self.propagations = self.conflicts = 0
        self._take_in(read_rows(problem.rows, self.numbers, self.fulls))

    def run(self, budget: int | None) -> Solution | None:
        """Search to the end; None when there is no answer.

        Raises:
            BudgetError: more than `budget` conflicts.
        """
        conflict = next((c for c in self.facts if not c.masks or not self._strike(c, 0)), None)
        while True:
            conflict = conflict or self._propagate()
            if conflict is None:
                if self.pending:
                    self._decide()
                    continue
                conflict = self._close()
                if conflict is None:
                    values = {name: self.decided.get(name, 0) for name in self.names}
                    return Solution(values, tuple(self.decided), self.stats())
            self.conflicts += 1
            if budget is not None and self.conflicts > budget:
                raise BudgetError(f"the search gave up after {budget} conflicts", "pin more of the request")
            if not self._learn(conflict):
                return None
            conflict = None

    def stats(self) -> Stats:
        return Stats(self.decisions, self.propagations, self.conflicts)

    def _take_in(self, tables: Iterable[Table]) -> None:
        """Start the waiting of all terms, and collect what has no other terms to wait for."""
        for table in tables:
            variables, activates, size = table.variables, table.activates, len(table.rows)
            if len(variables) < 2:
                self.facts += [table.clause(index, self.fulls) for index in range(size)]
                self.pending |= 1 << activates if activates >= 0 else 0
            for side, (variable, outs) in enumerate(zip(variables, table.outs, strict=True)):
                if activates >= 0 and variable != activates:
                    self.conditions[variable].append((table, side))
                elif len(variables) > 1:
                    for index, out in enumerate(outs):
                        self._wait(variable, out.bit_length() - 1, table, side, index)
                if variable != activates:
                    blank = [index for index, out in enumerate(outs) if not out & ABSENT]
                    self.loose += [table.clause(index, self.fulls) for index in blank]

    def _wait(self, variable: int, value: int, table: Table, side: int, index: int) -> None:
        """Let a term wait at a value of its variable; neighbours of one table share an entry."""
        entries = self.waiting[variable].get(value)
        if entries is None:
            self.waiting[variable][value] = [(table, side, [index])]
            self.watched[variable] |= 1 << value
        elif entries[-1][0] is table:
            entries[-1][2].append(index)
        else:
            entries.append((table, side, [index]))

    # Narrowing

    def _strike(self, clause: Clause, term: int) -> bool:
        """Strike out what a clause forbids by a term; False where nothing would be left (and then nothing is done)."""
        variable = clause.variables[term]
        before = self.masks[variable]
        after = before & ~clause.masks[term]
        if after and after != before:
            self._narrow(variable, after, clause)
        return after != 0

    def _narrow(self, variable: int, after: int, reason: Reason | None) -> None:
        self.history[variable].append(len(self.trail))
        before = self.masks[variable]
        self.trail.append(_Mark(variable, before, reason, len(self.levels)))
        self.masks[variable] = after
        self.changed[variable] = self.changed.get(variable, 0) | before ^ after
        self.propagations += 1

    def _propagate(self) -> Clause | None:
        """Follow up all that was narrowed; -> a clause that holds completely, if one turns up."""
        while self.changed:
            variable = next(iter(self.changed))
            gone = self.changed.pop(variable) & self.watched[variable]
            possible = self.masks[variable]
            waiting = self.waiting[variable]
            held: dict[Table, tuple[int, list[int]]] = {}
            while gone:
                low = gone & -gone
                gone ^= low
                value = low.bit_length() - 1
                stay: list[Terms] = []
                for table, side, indices in waiting.pop(value):
                    outs, kept = table.outs[side], []
                    for index in indices:
                        outside = outs[index] & possible
                        if outside:
                            self._wait(variable, outside.bit_length() - 1, table, side, index)
                        else:
                            kept.append(index)
                    if kept:
                        stay.append((table, side, kept))
                        if table in held:
                            held[table][1].extend(kept)
                        else:
                            held[table] = (side, kept.copy())
                if stay:
                    waiting[value] = stay
                else:
                    self.watched[variable] ^= low
            if not possible & (possible - 1):
                for table, side in self.conditions[variable]:
                    indices = [index for index, out in enumerate(table.outs[side]) if not out & possible]
                    if indices:
                        held[table] = (side, indices)
            for table, (side, indices) in held.items():
                conflict = self._use(table, side, indices)
                if conflict:
                    return conflict
        return None

    def _use(self, table: Table, side: int, indices: list[int]) -> Clause | None:
        """Terms of these rows on this side hold now: where only one other term of a row does not, strike it out."""
        masks, variables, outs = self.masks, table.variables, table.outs
        frees: dict[int, list[int]] = {}
        if len(variables) == 2:
            frees[1 - side] = indices
        else:
            for index in indices:
                free = [k for k, v in enumerate(variables) if k != side and masks[v] & outs[k][index]]
                if not free:
                    return table.clause(index, self.fulls)
                if len(free) == 1:
                    frees.setdefault(free[0], []).append(index)
        for free_side, rows in frees.items():
            column, used = outs[free_side], []
            after = masks[variables[free_side]]
            for index in rows:
                if after & ~column[index]:
                    after &= column[index]
                    used.append(index)
            if not after:
                return self._merged(table, free_side, used)
            if used:
                self._narrow(variables[free_side], after, (table, free_side, used))
        return None

    def _merged(self, table: Table, free: int, used: Sequence[int]) -> Clause:
        """Several rows of a table as one, resolved on the variable from which they struck something."""
        clauses = [table.clause(index, self.fulls) for index in used]
        pivot = table.variables[free]
        terms = dict(zip(table.variables, clauses[0].masks, strict=True))
        for clause in clauses[1:]:
            resolve(terms, pivot, clause, self.fulls)
        steps = [(pivot, clause) for clause in clauses[1:]]
        return derived(terms, clauses[0], steps) if steps else clauses[0]

    # Learning

    def _satisfier(self, variable: int, mask: int) -> int:
        """Where in the trail the term (variable, mask) came to hold."""
        trail, places = self.trail, self.history[variable]
        index = len(places) - 1
        while not trail[places[index]].before & ~mask:
            index -= 1
        return places[index]

    def _learn(self, conflict: Clause) -> bool:
        """Resolve a clause that holds until one of its terms alone depends on the last level; go back and use it.

        False when the resolution ends in the clause without terms, which is left in `empty`.
        """
        self.changed.clear()
        terms = dict(zip(conflict.variables, conflict.masks, strict=True))
        places = {variable: self._satisfier(variable, mask) for variable, mask in terms.items()}
        steps: list[tuple[int, Clause]] = []
        while terms:
            last = max(places, key=places.__getitem__)
            mark = self.trail[places[last]]
            back = max((self.trail[place].level for variable, place in places.items() if variable != last), default=0)
            if back < mark.level:
                learned = derived(terms, conflict, steps)
                self._add(learned, places)
                self._back(back)
                return self._strike(learned, learned.variables.index(last))
            assert mark.reason is not None  # a decision is the first mark of its level
            if not isinstance(mark.reason, Clause):
                mark.reason = self._merged(*mark.reason)
            reason = mark.reason
            steps.append((last, reason))
            for variable in resolve(terms, last, reason, self.fulls):
                places[variable] = self._satisfier(variable, terms[variable])
            if last not in terms:
                del places[last]
        self.empty = derived(terms, conflict, steps)
        return False

    def _add(self, learned: Clause, places: dict[int, int]) -> None:
        """Let the terms of a learned row wait, each at a value whose loss made it hold: going back far enough to free
        the term brings that value back."""
        if len(places) > 1:
            outs = [[self.fulls[v] ^ mask] for v, mask in zip(learned.variables, learned.masks, strict=True)]
            table = Table((learned.variables, -1), outs, [learned])
            for side, variable in enumerate(learned.variables):
                lost = self.trail[places[variable]].before & outs[side][0]
                self._wait(variable, lost.bit_length() - 1, table, side, 0)

    def _back(self, level: int) -> None:
        """Undo every level above `level`."""
        _, length, self.pending = self.levels[level]
        for variable, _, _ in self.levels[level:]:
            self.seen ^= 1 << variable
            del self.decided[self.names[variable]]
        del self.levels[level:]
        for mark in reversed(self.trail[length:]):
            self.masks[mark.variable] = mark.before
            self.history[mark.variable].pop()
        del self.trail[length:]

    # Deciding

    def _decide(self) -> None:
        """Give the first activated package its most preferred value, and activate what that needs."""
        low = self.pending & -self.pending
        variable = low.bit_length() - 1
        value = self._choice(variable)
        self.levels.append((variable, len(self.trail), self.pending))
        self.decisions += 1
        bit = 1 << value
        if self.masks[variable] != bit:
            self._narrow(variable, bit, None)
        self.decided[self.names[variable]] = value
        self.pending ^= low
        self.seen |= low
        for table, side in self.conditions[variable]:
            activates = table.activates
            if not (self.seen | self.pending) >> activates & 1 and any(
                not bit & out and self._met(table, index) for index, out in enumerate(table.outs[side])
            ):
                self.pending |= 1 << activates

    def _met(self, table: Table, index: int) -> bool:
        """Do all terms of a row hold for decided values, but for the one on what it activates?"""
        return all(
            variable == table.activates or (self.seen >> variable & 1 and not self.masks[variable] & outs[index])
            for variable, outs in zip(table.variables, table.outs, strict=True)
        )

    def _choice(self, variable: int) -> int:
        possible = self.masks[variable]
        if self.prefer is not None and possible & (possible - 1):
            name = self.names[variable]
            order = self.prefer(name, self.decided) if callable(self.prefer) else self.prefer.get(name, ())
            for position in order:
                if possible >> position & 1:
                    return position
        return possible.bit_length() - 1

    def _close(self) -> Clause | None:
        """All activated packages are decided. May all others be absent? -> a clause that holds when not.

        They may, where every row forbids the absence of nothing but the package it activates. Rows that forbid another
        absence (a merged row, or "one of these two must be there") can object; then the row "with these decisions
        nothing asks for B, so B is absent" is a part of the conflict.
        """
        rest = [variable for variable in range(len(self.names)) if not self.seen >> variable & 1]
        for variable in rest:
            if not self.masks[variable] & ABSENT:
                return self._unreached(variable)
        for clause in self.loose:
            terms = dict(zip(clause.variables, clause.masks, strict=True))
            if all(mask & (self.masks[v] if self.seen >> v & 1 else ABSENT) for v, mask in terms.items()):
                steps = [(v, self._unreached(v)) for v in terms if not self.seen >> v & 1]
                for variable, reason in steps:
                    resolve(terms, variable, reason, self.fulls)
                return derived(terms, clause, steps)
        return None

    def _unreached(self, variable: int) -> Clause:
        terms = {number: self.masks[number] for number, _, _ in self.levels}
        terms[variable] = self.fulls[variable] & ~ABSENT
        named = tuple((self.names[number], mask) for number, mask in sorted(terms.items()))
        clause = derived(terms, None, ())
        clause.row = Row(named, Unreached(self.names[variable]))
        return clause
