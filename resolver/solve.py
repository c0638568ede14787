"""Conflict-driven search over finite domains: PubGrub's idea, with sets of versions as integers.

**The question.** Every package has a finite domain (`versions.Domain`): its known releases and ABSENT. A `Row` is an
*incompatibility*: a list of terms (package, set), and the answer may not lie inside all of its sets at once. Everything
is said that way: "unsloth 2026.1 needs torch >=2.4" forbids {unsloth in {2026.1}, torch in {<2.4, ABSENT}}; "trl 0.8
breaks peft 0.14" forbids {trl in {0.8}, peft in {0.14}}; "the driver is 470.57.02" forbids everything else.

**The answer that is wanted** is not any answer. Packages are decided one at a time. The next is the first, in the order
of ranks, of those that are *activated* and not yet decided: a row with `activates=B` activates B once all its other
terms hold for values that are already decided. A package is given the value that comes first in its order of preference
and still leads to an answer. When no activated package is left, all others are ABSENT. Plain backtracking in that
order defines the result (`tests/unit/oracle.py` does exactly this); what follows only reaches it sooner.

**Propagation.** The search keeps, per package, the mask of values still possible. When all terms of a row but one hold
whatever is chosen from those masks, the last one must not: its values are struck out. A term can only come to hold when
a value outside its set is struck out, so each row waits (`_Clause`, `_watch`) at two such values of two terms and is
looked at only when one of them goes. Nothing has to be undone there when the search goes back.

**Learning.** When a row holds completely, the choices made so far cannot stand. The value that made it hold last was
struck out by another row, and the two together forbid something on their own: with {v in M, X} and {v in N, Y} also
{v in M|N, X and Y} is forbidden, whatever v is. Resolving backwards like this ends in a row of which only one term
depends on the latest choice. It is learned, the search returns to the choice before, and the row strikes out more than
one value there. No answer is lost, since a learned row follows from the others, and therefore the order in which answers
are met is that of plain backtracking. Learned rows never activate.

**No answer.** When the resolution ends in the empty row, the request is unsolvable, and the steps that led there are the
proof. `Conflict.derivation` holds them as data; `leaves` are the rows that it rests on.

Everything here is deterministic: rows are sorted first, and neither their order nor hashes decide anything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from envforge.errors import EnvforgeError
from envforge.resolver.versions import ABSENT, Domain

Terms = tuple[tuple[str, int], ...]
Prefer = Callable[[str, Mapping[str, int]], Sequence[int]]


class BudgetError(EnvforgeError):
    """The search met more conflicts than it was allowed to."""

    id = "search-budget"


@dataclass(frozen=True, slots=True)
class Row:
    """An incompatibility: no answer has, for every (name, mask) of `terms`, the name's value inside the mask.

    origin: whatever the row stands for; the search only carries it. Where two rows forbid the same, the one whose
        origin has the smaller `repr` is used.
    activates: the name among `terms` that must be decided once all other terms hold for decided values. Its mask must
        contain ABSENT.
    """

    terms: Terms
    origin: Any = None
    activates: str | None = None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Derived:
    """A row that follows from two others by resolution on `pivot`: its masks united there, intersected elsewhere."""

    terms: Terms
    pivot: str
    left: Premise
    right: Premise


Premise: TypeAlias = Row | Derived


@dataclass(frozen=True, slots=True)
class Unreached:
    """Origin of a row that the search adds itself: nothing in such an answer asks for `name`, so it is absent."""

    name: str


@dataclass(frozen=True, slots=True)
class Problem:
    """What is asked.

    domains: every name that a row mentions.
    rank: the order of decisions, smallest first, then by name; names that a mapping leaves out come last.
    prefer: per name, positions of its domain in the order to try them; or a function of the name and of what is decided
        so far (name -> position). Positions that it leaves out are tried last, newest first: to forbid a value,
        add a row. None: newest first.
    """

    domains: Mapping[str, Domain]
    rows: Sequence[Row]
    rank: Mapping[str, int] | Callable[[str], int] = field(default_factory=dict)
    prefer: Prefer | Mapping[str, Sequence[int]] | None = None


@dataclass(frozen=True, slots=True)
class Stats:
    """How much work it was: choices made, values struck out by rows, conflicts met (rows learned)."""

    decisions: int
    propagations: int
    conflicts: int


@dataclass(frozen=True, slots=True)
class Solution:
    """values: position per name, 0 for absent; order: the names that are present, as they were decided."""

    values: dict[str, int]
    order: tuple[str, ...]
    stats: Stats


@dataclass(frozen=True, slots=True, eq=False)
class Conflict:
    """There is no answer. `derivation` ends in a row without terms (a plain Row when one row alone is impossible)."""

    derivation: Premise
    stats: Stats


class _Clause:
    """A row inside the search: variables by number, in order, and for each the mask and its complement.

    watch_a, watch_b: indices of the two terms at which it waits. It comes from `row`, or was learned by resolving
    `first` with each (variable, clause) of `steps`.
    """

    __slots__ = ("first", "masks", "outs", "row", "steps", "variables", "watch_a", "watch_b")

    def __init__(self, variables: tuple[int, ...], masks: tuple[int, ...], outs: tuple[int, ...]) -> None:
        self.variables = variables
        self.masks = masks
        self.outs = outs
        self.watch_a = 0
        self.watch_b = 1
        self.row: Row | None = None
        self.first: _Clause | None = None
        self.steps: tuple[tuple[int, _Clause], ...] = ()


@dataclass(slots=True, eq=False)
class _Mark:
    """One narrowing of one variable: its mask before, the clause that did it (None: a decision), and the level."""

    variable: int
    before: int
    reason: _Clause | None
    level: int


class _Search:
    def __init__(self, problem: Problem) -> None:
        rank = problem.rank
        if callable(rank):
            key: Callable[[str], tuple[float, str]] = lambda name: (rank(name), name)  # noqa: E731
        else:
            key = lambda name: (rank.get(name, float("inf")), name)  # noqa: E731
        self.names = sorted(problem.domains, key=key)
        self.numbers = {name: number for number, name in enumerate(self.names)}
        self.fulls = [problem.domains[name].full for name in self.names]
        self.prefer = problem.prefer
        self.masks = list(self.fulls)  # what is still possible
        size = len(self.names)
        self.trail: list[_Mark] = []
        self.history: list[list[int]] = [[] for _ in range(size)]  # per variable, where it is in the trail
        self.queue: deque[tuple[int, int]] = deque()  # (variable, values struck out)
        self.buckets: list[dict[int, list[_Clause]]] = [{} for _ in range(size)]  # per variable and watched value
        self.watched = [0] * size  # the values that have a bucket
        self.decided: dict[str, int] = {}
        self.levels: list[tuple[int, int, int]] = []  # (variable, length of the trail before, `pending` before)
        self.pending = 0  # bit v: variable v is activated and not decided; smaller number = higher rank
        self.seen = 0  # bit v: v is decided
        self.activators: list[list[tuple[int, list[tuple[int, int]], int]]] = [[] for _ in range(size)]
        self.loose: list[_Clause] = []  # rows that "all others are ABSENT" could break, see `_close`
        self.units: list[_Clause] = []  # rows with one term
        self.empty: _Clause | None = None  # a row without terms: there is no answer
        self.decisions = self.propagations = self.conflicts = 0
        self._load(problem.rows)

    def run(self, budget: int | None) -> Solution | None:
        """Search to the end; None when there is no answer."""
        if self.empty:
            return None
        conflict = next((c for c in self.units if not self._strike(c.variables[0], c.masks[0], c)), None)
        conflict = conflict or self._propagate()
        while True:
            if conflict is None and self.pending:
                self._decide()
            else:
                conflict = conflict or self._close()
                if conflict is None:
                    order = tuple(self.names[number] for number, _, _ in self.levels)
                    return Solution({name: self.decided.get(name, 0) for name in self.names}, order, self.stats())
                self.conflicts += 1
                if budget is not None and self.conflicts > budget:
                    raise BudgetError(f"the search gave up after {budget} conflicts", "pin more of the request")
                if not self._learn(conflict):
                    return None
            conflict = self._propagate()

    def stats(self) -> Stats:
        return Stats(self.decisions, self.propagations, self.conflicts)

    # Preparing

    def _load(self, rows: Iterable[Row]) -> None:
        """Put rows into canonical form and order, and start the watches and the facts of level 0."""
        prepared = []
        for row in rows:
            terms = self._terms(row)
            if terms is not None:
                prepared.append((terms, self._activates(row), row))
        prepared.sort(key=lambda item: item[:2])
        previous: tuple[object, int] | None = None
        kept: list[tuple[list[tuple[int, int]], int, Row]] = []
        for terms, activates, row in prepared:
            if (terms, activates) != previous:
                kept.append((terms, activates, row))
                previous = (terms, activates)
            elif repr(row.origin) < repr(kept[-1][2].origin):
                kept[-1] = (terms, activates, row)
        fulls = self.fulls
        for terms, activates, row in kept:
            clause = _Clause(
                tuple([v for v, _ in terms]),
                tuple([mask for _, mask in terms]),
                tuple([fulls[v] & ~mask for v, mask in terms]),
            )
            clause.row = row
            if activates >= 0:
                others = [(v, mask) for v, mask in terms if v != activates]
                if not others:
                    self.pending |= 1 << activates
                for v, mask in others:
                    self.activators[v].append((mask, others, activates))
            if any(mask & ABSENT and v != activates for v, mask in terms):
                self.loose.append(clause)
            if len(terms) > 1:
                self._watch(clause, 0, clause.outs[0])
                self._watch(clause, 1, clause.outs[1])
            elif terms:
                self.units.append(clause)
            elif self.empty is None:
                self.empty = clause

    def _terms(self, row: Row) -> list[tuple[int, int]] | None:
        """The terms by number, sorted, without those that always hold; None for a row that can never hold."""
        merged: dict[int, int] = {}
        for name, mask in row.terms:
            try:
                number = self.numbers[name]
            except KeyError:
                raise ValueError(f"a row names {name}, which has no domain: {row}") from None
            merged[number] = mask & merged.get(number, self.fulls[number])
        if 0 in merged.values():
            return None
        return sorted((number, mask) for number, mask in merged.items() if mask != self.fulls[number])

    def _activates(self, row: Row) -> int:
        """The variable that a row activates, or -1. A package that asks for itself is there already: no activation."""
        if row.activates is None:
            return -1
        masks = [mask for name, mask in row.terms if name == row.activates]
        absent = [mask & ABSENT for mask in masks]
        if not any(absent):
            raise ValueError(f"a row that activates {row.activates} must forbid its absence: {row}")
        return self.numbers[row.activates] if all(absent) else -1

    def _watch(self, clause: _Clause, term: int, outside: int) -> None:
        """Let `clause` wait at the newest value of `outside`, the values that keep its term from holding."""
        variable, value = clause.variables[term], outside.bit_length() - 1
        self.buckets[variable].setdefault(value, []).append(clause)
        self.watched[variable] |= 1 << value

    # Narrowing

    def _strike(self, variable: int, mask: int, reason: _Clause | None) -> bool:
        """Strike the values of `mask` out; False where nothing would be left (and then nothing is done)."""
        before = self.masks[variable]
        after = before & ~mask
        if not after:
            return False
        if after != before:
            self.history[variable].append(len(self.trail))
            self.trail.append(_Mark(variable, before, reason, len(self.levels)))
            self.masks[variable] = after
            self.queue.append((variable, before ^ after))
            self.propagations += 1
        return True

    def _propagate(self) -> _Clause | None:
        """Follow up all that was struck out; -> a clause all of whose terms hold, if one turns up."""
        masks, queue = self.masks, self.queue
        while queue:
            variable, gone = queue.popleft()
            buckets = self.buckets[variable]
            gone &= self.watched[variable]
            while gone:
                low = gone & -gone
                gone ^= low
                value = low.bit_length() - 1
                bucket = buckets.pop(value)
                self.watched[variable] ^= low
                kept = []  # clauses that go on waiting here: their other term cannot hold, or was just struck out
                conflict = None
                for place, clause in enumerate(bucket):
                    variables, outs = clause.variables, clause.outs
                    this, other = clause.watch_a, clause.watch_b
                    if variables[this] != variable:
                        this, other = other, this
                    outside = masks[variable] & outs[this]
                    if outside:
                        self._watch(clause, this, outside)
                        continue
                    if not masks[variables[other]] & clause.masks[other]:
                        kept.append(clause)
                        continue
                    for term in range(len(variables)):
                        if term != this and term != other:
                            outside = masks[variables[term]] & outs[term]
                            if outside:
                                clause.watch_a, clause.watch_b = term, other
                                self._watch(clause, term, outside)
                                break
                    else:
                        kept.append(clause)
                        if not self._strike(variables[other], clause.masks[other], clause):
                            kept += bucket[place + 1 :]
                            conflict = clause
                            break
                if kept:
                    buckets[value] = kept
                    self.watched[variable] |= low
                if conflict:
                    return conflict
        return None

    # Learning

    def _satisfier(self, variable: int, mask: int) -> int:
        """Where in the trail the term (variable, mask) came to hold."""
        trail, places = self.trail, self.history[variable]
        place = len(places) - 1
        while not trail[places[place]].before & ~mask:
            place -= 1
        return places[place]

    def _learn(self, conflict: _Clause) -> bool:
        """Resolve a clause that holds until one of its terms alone depends on the last level; go back and use it.

        False when the resolution ends in the empty row, which is left in `empty`.
        """
        self.queue.clear()
        terms = dict(zip(conflict.variables, conflict.masks, strict=True))
        places = {variable: self._satisfier(variable, mask) for variable, mask in terms.items()}
        steps: list[tuple[int, _Clause]] = []
        while terms:
            last = max(places, key=places.__getitem__)
            mark = self.trail[places[last]]
            back = max((self.trail[place].level for variable, place in places.items() if variable != last), default=0)
            if back < mark.level:
                learned = self._clause(terms, conflict, steps)
                self._learned_watches(learned, last, places)
                self._back(back)
                return self._strike(last, terms[last], learned)
            reason = mark.reason
            assert reason is not None  # a decision is the first mark of its level
            steps.append((last, reason))
            for variable in _resolve(terms, last, reason, self.fulls):
                places[variable] = self._satisfier(variable, terms[variable])
            if last not in terms:
                del places[last]
        self.empty = self._clause(terms, conflict, steps)
        return False

    def _clause(self, terms: dict[int, int], first: _Clause | None, steps: list[tuple[int, _Clause]]) -> _Clause:
        ordered = sorted(terms.items())
        clause = _Clause(
            tuple([variable for variable, _ in ordered]),
            tuple([mask for _, mask in ordered]),
            tuple([self.fulls[variable] & ~mask for variable, mask in ordered]),
        )
        clause.first, clause.steps = first, tuple(steps)
        return clause

    def _learned_watches(self, clause: _Clause, last: int, places: dict[int, int]) -> None:
        """Wait at the term that will be struck out, and at the one of the others that held last: going back further
        frees that one first."""
        if len(clause.variables) == 1:
            return
        others = [term for term, variable in enumerate(clause.variables) if variable != last]
        clause.watch_a = clause.variables.index(last)
        clause.watch_b = max(others, key=lambda term: places[clause.variables[term]])
        for term in (clause.watch_a, clause.watch_b):
            before = self.trail[places[clause.variables[term]]].before
            self._watch(clause, term, before & clause.outs[term])

    def _back(self, level: int) -> None:
        """Undo every level above `level`."""
        _, length, self.pending = self.levels[level]
        for number, _, _ in self.levels[level:]:
            self.seen ^= 1 << number
            del self.decided[self.names[number]]
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
        self._strike(variable, self.masks[variable] & ~(1 << value), None)
        self.decided[self.names[variable]] = value
        self.pending ^= low
        self.seen |= low
        masks = self.masks
        for mask, others, activated in self.activators[variable]:
            if mask >> value & 1 and not (self.seen | self.pending) >> activated & 1:
                for other, needed in others:
                    if not self.seen >> other & 1 or masks[other] & ~needed:
                        break
                else:
                    self.pending |= 1 << activated

    def _choice(self, variable: int) -> int:
        possible = self.masks[variable]
        prefer = self.prefer
        if prefer is not None and possible & (possible - 1):
            name = self.names[variable]
            order = prefer(name, self.decided) if callable(prefer) else prefer.get(name, ())
            for position in order:
                if possible >> position & 1:
                    return position
        return possible.bit_length() - 1

    def _close(self) -> _Clause | None:
        """All activated packages are decided. May all others be absent? -> a clause that holds when not.

        With rows that only ever ask for the presence of what they activate this is always so. Rows that are broken by an absence and
        activate nothing (merged rows, or "one of these must be there") can break it. Then the row "with these
        decisions nothing asks for B, so B is absent" is part of the conflict.
        """
        rest = [v for v in range(len(self.names)) if not self.seen >> v & 1]
        for variable in rest:
            if not self.masks[variable] & ABSENT:
                return self._unreached(variable)
        for clause in self.loose:
            for variable, out in zip(clause.variables, clause.outs, strict=True):
                if out & (self.masks[variable] if self.seen >> variable & 1 else ABSENT):
                    break
            else:
                terms = dict(zip(clause.variables, clause.masks, strict=True))
                steps = [(v, self._unreached(v)) for v in clause.variables if not self.seen >> v & 1]
                for variable, _ in steps:
                    del terms[variable]
                for variable, _, _ in self.levels:
                    terms[variable] = self.masks[variable]
                return self._clause(terms, clause, steps)
        return None

    def _unreached(self, variable: int) -> _Clause:
        terms = {number: self.masks[number] for number, _, _ in self.levels}
        terms[variable] = self.fulls[variable] & ~ABSENT
        clause = self._clause(terms, None, [])
        name = self.names[variable]
        clause.row = Row(self._named(clause), Unreached(name))
        return clause

    def _named(self, clause: _Clause) -> Terms:
        return tuple((self.names[v], mask) for v, mask in zip(clause.variables, clause.masks, strict=True))

    # The proof

    def support(self) -> list[Row]:
        """The given rows behind the empty row, in the order in which the proof first uses them."""
        rows: list[Row] = []
        seen: set[int] = set()
        stack = [self.empty]
        while stack:
            clause = stack.pop()
            if clause is None or id(clause) in seen:
                continue
            seen.add(id(clause))
            if clause.row is None:
                stack += [reason for _, reason in reversed(clause.steps)]
                stack.append(clause.first)
            elif not isinstance(clause.row.origin, Unreached):
                rows.append(clause.row)
        return rows

    def derivation(self) -> Premise:
        """The empty row with its premises, as public values. Without recursion: proofs can be thousands of steps deep."""
        assert self.empty is not None
        done: dict[int, Premise] = {}
        stack = [self.empty]
        while stack:
            clause = stack[-1]
            if clause.row is not None:
                done[id(clause)] = clause.row
            else:
                assert clause.first is not None
                missing = [c for c in (clause.first, *(reason for _, reason in clause.steps)) if id(c) not in done]
                if missing:
                    stack += reversed(missing)
                    continue
                if id(clause) not in done:
                    done[id(clause)] = self._replay(clause, done)
            stack.pop()
        return done[id(self.empty)]

    def _replay(self, clause: _Clause, done: dict[int, Premise]) -> Premise:
        first = clause.first
        assert first is not None
        premise = done[id(first)]
        terms = dict(zip(first.variables, first.masks, strict=True))
        for pivot, reason in clause.steps:
            _resolve(terms, pivot, reason, self.fulls)
            named = tuple((self.names[variable], mask) for variable, mask in sorted(terms.items()))
            premise = Derived(named, self.names[pivot], premise, done[id(reason)])
        return premise


def _resolve(terms: dict[int, int], pivot: int, reason: _Clause, fulls: list[int]) -> list[int]:
    """Resolve `terms` in place with a clause on one variable; -> the variables whose terms are new."""
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


def solve(problem: Problem, *, budget: int | None = None) -> Solution | Conflict:
    """The answer that plain backtracking in the order of ranks and preferences meets first, or the proof of none.

    Raises:
        BudgetError: more than `budget` conflicts were met (a count, not a time: equal everywhere).
        ValueError: a row names something without a domain, or activates without forbidding absence.
    """
    search = _Search(problem)
    solution = search.run(budget)
    return solution if solution is not None else Conflict(search.derivation(), search.stats())


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
    search = _Search(Problem({name: problem.domains[name] for name in names}, rows))
    return None if search.run(None) is not None else (search.support(), bool(search.loose))


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
