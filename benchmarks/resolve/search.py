"""The search alone: against resolvelib on the same constraints, and as the matrix grows.

    python benchmarks/resolve/search.py [--json FILE] [--repeat N]

Needs `pip install resolvelib`. Problems are made up, with the shape of real release histories: packages release at their
own pace over the same years; each release asks for others in a range that starts some time before it and sometimes ends
some time after it; neighbouring releases share their ranges, so that a package of 200 releases has some 20 distinct rows
per dependency. A request names three packages and, two times in three, pins or caps
a fourth. Both solvers get the sets as the same
bitmasks, decide in the same order and try the newest first. The time is that of one resolution from prepared rows to
the answer or the conflict, median of N runs each; problems that resolvelib cannot finish in its rounds count with the
time until then.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from envforge.resolver.solve import Problem, Row, Solution, solve
from envforge.resolver.versions import Domain

ROUNDS = 300


def make_problem(seed: int, packages: int = 30, releases: int = 200, dependencies: int = 8, runs: int = 20) -> Problem:
    """About `packages * dependencies * runs` rows over `packages` domains of `releases` values.

    Time runs from 0 to 1. Dependencies go mostly from lower to higher numbers (trainers to libraries), a tenth the other
    way, so that there are cycles.
    """
    rng = random.Random(seed)
    names = [f"package-{i:04}" for i in range(packages)]
    domains = {name: Domain(name, [f"{k // 20}.{k % 20}.0" for k in range(releases)]) for name in names}
    times = {name: sorted(rng.random() ** 0.7 for _ in range(releases)) for name in names}
    rows: list[Row] = []

    def since(name: str, start: float) -> int:
        first = min(bisect_left(times[name], start), releases - 1)
        return domains[name].full & ~((2 << first) - 1)

    for i, name in enumerate(names):
        strict = rng.random() < 0.25
        near = range(i + 1, min(packages, i + 40))
        targets = rng.sample(near, min(dependencies, len(near)))
        if i and rng.random() < 0.1 * dependencies:
            targets.append(rng.randrange(max(0, i - 20), i))
        for target in targets:
            other = names[target]
            window = rng.uniform(0.05, 0.3)
            capped = 0.5 if strict else 0.0
            edges = sorted(rng.sample(range(1, releases), runs - 1))
            for low, high in zip([0, *edges], [*edges, releases], strict=True):
                mask = (2 << high) - (2 << low)
                at = times[name][low]
                allowed = since(other, at - window * rng.uniform(0.5, 1.0))
                if rng.random() < capped:
                    allowed &= ~since(other, at + window * rng.uniform(0.3, 1.0))
                allowed = allowed or domains[other].all_mask
                origin = (name, low, other)
                rows.append(Row(((name, mask), (other, domains[other].outside(allowed))), origin, activates=other))
    for name in sorted(rng.sample(names[: max(3, packages // 2)], 3)):
        rows.append(Row(((name, 1),), ("request", name), activates=name))
    kind = rng.random()
    if kind < 0.7:
        pinned = rng.choice(names[: max(4, packages // 2)])
        at = rng.randint(releases // 3, releases)
        allowed = 1 << at if kind < 0.35 else (2 << at) - 2
        rows.append(Row(((pinned, domains[pinned].outside(allowed)),), ("request", pinned, at), activates=pinned))
    rng.shuffle(rows)
    return Problem(domains, rows, {name: i for i, name in enumerate(names)})


class Provider:
    """resolvelib's view of a problem of requests and dependencies: a requirement is (name, allowed), a candidate
    (name, position)."""

    def __init__(self, problem: Problem) -> None:
        self.rank: Any = problem.rank
        self.full = {name: domain.full for name, domain in problem.domains.items()}
        self.root: list[tuple[str, int]] = []
        self.needs: dict[str, list[tuple[int, tuple[str, int]]]] = {name: [] for name in problem.domains}
        for row in sorted(problem.rows, key=lambda row: row.terms):
            *condition, (name, mask) = row.terms
            requirement = (name, self.full[name] & ~mask)
            if condition:
                self.needs[condition[0][0]].append((condition[0][1], requirement))
            else:
                self.root.append(requirement)

    def identify(self, requirement_or_candidate: tuple[str, int]) -> str:
        return requirement_or_candidate[0]

    def get_preference(self, identifier: str, *_: object, **__: object) -> int:
        return int(self.rank[identifier])

    def narrow_requirement_selection(self, identifiers: Iterable[str], *_: object, **__: object) -> Iterable[str]:
        return identifiers

    def find_matches(
        self,
        identifier: str,
        requirements: Mapping[str, Iterator[tuple[str, int]]],
        incompatibilities: Mapping[str, Iterator[tuple[str, int]]],
    ) -> Callable[[], Iterator[tuple[str, int]]]:
        allowed = self.full[identifier] & ~1
        for _, mask in requirements[identifier]:
            allowed &= mask
        for _, position in incompatibilities[identifier]:
            allowed &= ~(1 << position)

        def newest_first() -> Iterator[tuple[str, int]]:
            left = allowed
            while left:
                position = left.bit_length() - 1
                left ^= 1 << position
                yield identifier, position

        return newest_first

    def is_satisfied_by(self, requirement: tuple[str, int], candidate: tuple[str, int]) -> bool:
        return bool(requirement[1] >> candidate[1] & 1)

    def get_dependencies(self, candidate: tuple[str, int]) -> list[tuple[str, int]]:
        name, position = candidate
        return [requirement for mask, requirement in self.needs[name] if mask >> position & 1]


def resolvelib_answer(provider: Provider) -> dict[str, int] | str | None:
    """Position per name; None for a conflict; a word where it gave up."""
    import resolvelib

    try:
        result = resolvelib.Resolver(provider, resolvelib.BaseReporter()).resolve(provider.root, max_rounds=ROUNDS)
    except resolvelib.ResolutionTooDeep:
        return "gave up"
    except resolvelib.ResolutionImpossible:
        return None
    return {name: candidate[1] for name, candidate in result.mapping.items()}


def timed(run: Callable[[], Any], repeat: int) -> tuple[float, Any]:
    """Median seconds of processor time (this machine may be busy) and the last result."""
    seconds = []
    for _ in range(repeat):
        start = time.process_time()
        result = run()
        seconds.append(time.process_time() - start)
    return statistics.median(seconds), result


def compare(seeds: Iterable[int], repeat: int) -> dict[str, Any]:
    ratios, ours_all, same = [], [], 0
    gave_up = impossible = 0
    for seed in seeds:
        problem = make_problem(seed)
        provider = Provider(problem)
        ours, found = timed(lambda problem=problem: solve(problem), repeat)  # type: ignore[misc]
        theirs, other = timed(lambda provider=provider: resolvelib_answer(provider), 1)  # type: ignore[misc]
        if theirs < 0.3:
            theirs, other = timed(lambda provider=provider: resolvelib_answer(provider), repeat)  # type: ignore[misc]
        ratios.append(theirs / ours)
        ours_all.append(ours)
        mine = {n: v for n, v in found.values.items() if v} if isinstance(found, Solution) else None
        gave_up += other == "gave up"
        impossible += mine is None
        same += other == mine
        print(
            f"seed {seed}: ours {ours * 1e3:8.2f} ms, resolvelib {theirs * 1e3:9.2f} ms, {found.stats} {other if isinstance(other, str) else other is not None}",
            file=sys.stderr,
        )
    return {
        "problems": len(ratios),
        "unsolvable": impossible,
        "same_answer": same,
        "resolvelib_gave_up": gave_up,
        "ours_ms": {"median": statistics.median(ours_all) * 1e3, "max": max(ours_all) * 1e3},
        "times_faster": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
    }


def growth(seeds: Sequence[int], repeat: int) -> dict[str, float]:
    """How many times longer the same kind of problem takes, sums over all seeds."""

    def total(**size: int) -> float:
        return sum(timed(lambda p=make_problem(seed, **size): solve(p), repeat)[0] for seed in seeds)  # type: ignore[misc]

    base = total()
    return {
        "base_ms": base / len(seeds) * 1e3,
        "releases_x10": total(releases=2000) / base,
        "releases_and_rows_x10": total(releases=2000, runs=200) / base,
        "packages_x10": total(packages=300) / base,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the search alone.")
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--problems", type=int, default=40)
    options = parser.parse_args()
    figures = {
        "against_resolvelib": compare(range(options.problems), options.repeat),
        "growth": growth(range(10), options.repeat),
    }
    text = json.dumps(figures, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
