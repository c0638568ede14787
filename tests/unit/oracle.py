"""The reference for the search: plain backtracking with the same rule of selection, and a maker of small problems.

`answer` shares nothing with `envforge.resolver.solve` but the problem's data classes. It never narrows, learns or
jumps; it tries values one by one and looks at rows only once all their packages have a value.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from envforge.resolver.solve import Problem, Row
from envforge.resolver.versions import Domain

ABSENT_POSITION = 0


def answer(problem: Problem) -> dict[str, int] | None:
    """The first answer in the order of ranks and preferences; None when there is none."""
    full = {name: 2 ** (len(domain.values) + 1) - 1 for name, domain in problem.domains.items()}

    def rank(name: str) -> tuple[float, str]:
        if callable(problem.rank):
            return problem.rank(name), name
        return problem.rank.get(name, float("inf")), name

    def order(name: str, chosen: Mapping[str, int]) -> list[int]:
        asked: Sequence[int] = ()
        if callable(problem.prefer):
            asked = problem.prefer(name, chosen)
        elif problem.prefer is not None:
            asked = problem.prefer.get(name, ())
        return [
            *asked,
            *(p for p in range(len(problem.domains[name].values), 0, -1) if p not in asked),
            ABSENT_POSITION,
        ]

    def holds(terms: Sequence[tuple[str, int]], values: Mapping[str, int]) -> bool:
        """All names have a value, inside the masks."""
        for name, mask in terms:  # noqa: SIM110 (a loop is twice as fast, and this runs a million times)
            if name not in values or not mask >> values[name] & 1:
                return False
        return True

    # What activates a name: all other terms hold for decided values. A term that every value meets is no condition; a
    # package that asks for itself activates nothing.
    asks = []
    for row in problem.rows:
        if row.activates is not None and all(mask & 1 for name, mask in row.terms if name == row.activates):
            others = [(n, m) for n, m in row.terms if n != row.activates and m & full[n] != full[n]]
            asks.append((others, row.activates))
    mentions = {name: [row for row in problem.rows if any(name == term[0] for term in row.terms)] for name in full}

    def search(values: dict[str, int]) -> dict[str, int] | None:
        waiting = {name for others, name in asks if name not in values and holds(others, values)}
        if not waiting:
            whole = {name: values.get(name, ABSENT_POSITION) for name in problem.domains}
            return None if any(holds(row.terms, whole) for row in problem.rows) else whole
        name = min(waiting, key=rank)
        for position in order(name, values):
            longer = {**values, name: position}
            if not any(holds(row.terms, longer) for row in mentions[name]):
                found = search(longer)
                if found is not None:
                    return found
        return None

    return search({})


def small_problem(seed: int) -> Problem:
    """A random problem of up to 8 names with up to 5 values each; about half have an answer.

    A third are rows of all kinds thrown together, mostly settled by propagation. The others have, like real releases, a
    row per value and dependency, dense enough that the search has to go back and learn; in some (`hard`) each pair of
    values is forbidden at even odds, which is where such puzzles are hardest for their size.
    """
    rng = random.Random(seed)
    hard = rng.random() < 0.15
    dense = hard or rng.random() < 0.67
    packages = [f"p{i}" for i in range(5 if hard else rng.randint(4, 6) if dense else rng.randint(1, 6))]
    facts = rng.sample(["python", "torch-variant", "host:driver"], rng.randint(0, 2))
    everything = [*packages, *facts]
    sizes = {name: rng.randint(3, 5) if dense else rng.randint(1, 5) for name in everything}
    if rng.random() < 0.05:
        sizes[packages[-1]] = 0  # no release at all
    domains = {name: Domain(name, [f"{i}.0" for i in range(1, size + 1)]) for name, size in sizes.items()}

    def some(name: str) -> int:
        """A run of values, any set of them, all or (rarely) none; never ABSENT."""
        size = sizes[name]
        if size == 0 or rng.random() < 0.03:
            return 0
        if rng.random() < 0.1:
            return domains[name].all_mask
        if rng.random() < 0.6:
            low, high = sorted((rng.randint(1, size), rng.randint(1, size)))
            return sum(1 << position for position in range(low, high + 1))
        return rng.getrandbits(size) << 1

    def most(name: str) -> int:
        """All values but one or two: what a loose dependency allows."""
        mask = domains[name].all_mask
        for _ in range(rng.randint(1, 2)):
            mask &= ~(2 << rng.randrange(max(1, sizes[name])))
        return mask

    def unmet(name: str, allowed: int) -> int:
        return domains[name].full & ~allowed

    rows: list[Row] = []

    def add(*terms: tuple[str, int], activates: str | None = None) -> None:
        rows.append(Row(terms, f"{len(rows)}", activates))

    wide = most if dense else some
    for name in facts:
        add((name, unmet(name, wide(name))), activates=name)
    for name in rng.sample(
        packages, min(len(packages), 5 if hard else rng.randint(2, 4) if dense else rng.randint(0, 3))
    ):
        add((name, unmet(name, domains[name].all_mask if hard else wide(name))), activates=name)
    if dense:
        needed = 1.0 if hard else rng.uniform(0.4, 1.0)
        bad = rng.uniform(0.1, 0.6)
        loose = rng.uniform(0.3, 1.0)
        for one in packages:
            for two in everything:
                if one == two or rng.random() > needed or (hard and one > two):
                    continue
                for position in range(1, sizes[one] + 1):
                    if not hard and rng.random() < 0.3:
                        continue
                    value = (one, 1 << position)
                    marker = [(rng.choice(facts), 0)] if facts and rng.random() < 0.3 else []
                    guard = [(name, some(name)) for name, _ in marker]
                    allowed = most(two) if rng.random() < loose else some(two)
                    if hard:
                        allowed = rng.getrandbits(sizes[two]) << 1
                    if rng.random() < bad:
                        add(value, (two, domains[two].all_mask & ~allowed), *guard)
                    else:
                        add(value, (two, unmet(two, allowed)), *guard, activates=two)
    for _ in range(rng.randint(0, 2) if dense else rng.randint(0, 4 * len(packages))):
        one, two, three = (rng.choice(everything) for _ in range(3))
        kind = rng.random()
        if kind < 0.45:
            add((one, some(one)), (two, unmet(two, some(two))), activates=two)
        elif kind < 0.6 and facts:
            marker = rng.choice(facts)
            add((one, some(one)), (two, unmet(two, some(two))), (marker, some(marker)), activates=two)
        elif kind < 0.75:
            add((one, some(one)), (two, some(two)))
        elif kind < 0.8:
            add((one, some(one)), (two, some(two)), (three, some(three)))
        elif kind < 0.84:
            add((one, some(one)), (three, some(three)), (two, unmet(two, some(two))), activates=two)
        elif kind < 0.88:  # a merged row: it forbids absence and activates nothing
            add((one, some(one)), (two, unmet(two, some(two))))
        elif kind < 0.91:  # one of two must be there
            add((one, some(one)), (two, unmet(two, some(two))), (three, unmet(three, some(three))))
        elif kind < 0.94:  # needed where another one is absent
            add((one, some(one) | 1), (two, unmet(two, some(two))), activates=two)
        elif kind < 0.98:
            add((one, some(one)))
        elif rows:
            rows.append(Row(rows[-1].terms, f"{len(rows)}", rows[-1].activates))

    ranks = {name: rng.randint(0, 4) for name in everything if rng.random() < 0.9}
    shuffled = {name: rng.sample(range(1, size + 1), size) for name, size in sizes.items()}
    kind = rng.random()
    if kind < 0.3:
        return Problem(domains, rows, ranks)
    if kind < 0.6:
        return Problem(domains, rows, ranks, shuffled)

    def prefer(name: str, decided: Mapping[str, int]) -> Sequence[int]:
        """Depends on what is decided, as the choice of releases by date does; leaves one value out."""
        order = shuffled[name]
        turn = sum(decided.values()) % max(1, len(order))
        return (order[turn:] + order[:turn])[:-1]

    return Problem(domains, rows, lambda name: ranks.get(name, 9), prefer)
