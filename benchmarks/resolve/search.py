"""The search alone: against resolvelib on the same constraints, and as the matrix grows.

    python benchmarks/resolve/search.py [matrix] [made-up] [growth] [--json FILE] [--repeat N] [--every N]

Needs `pip install resolvelib`. Times are processor time from the rows to the answer or the conflict, both solvers
reading the same rows; ratios are taken per problem in one run. Problems that resolvelib does not finish within its
rounds count with the time until then, so those ratios are lower bounds; how many there are is printed. Our answers are
checked against every row; where verdicts differ, resolvelib missed an answer (its way back skips some).

matrix: every image x 12 driver branches x every compute capability of the matrix's GPUs, newest first.
made-up: release histories of 30 packages x 200 releases, some 4,500 rows.
growth: the same with ten times the releases, ten times the releases and rows, ten times the packages.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from resolvelib_adapter import resolvelib_answer

from envforge.resolver.solve import Problem, Row, Solution, solve
from envforge.resolver.versions import Domain

ROUNDS = 300
IMAGES = Path(__file__).resolve().parents[2] / "images"


def make_problem(seed: int, packages: int = 30, releases: int = 200, dependencies: int = 8, runs: int = 20) -> Problem:
    """About `packages * dependencies * runs` rows over `packages` domains of `releases` values.

    Packages release at their own pace over the same years (time 0 to 1). Each release asks for others from some time
    before it on; a quarter of the packages also cap half of what they ask for, some time after. Neighbouring releases
    share their ranges: `runs` distinct rows per dependency. Dependencies go from lower to higher numbers (trainers to
    libraries) but for a few, so that there are cycles. Three packages are requested and, two times in three, a fourth is
    pinned or capped.
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
        capping = rng.random() < 0.25
        near = range(i + 1, min(packages, i + 40))
        targets = rng.sample(near, min(dependencies, len(near)))
        if i and rng.random() < 0.1 * dependencies:
            targets.append(rng.randrange(max(0, i - 20), i))
        for target in targets:
            other = names[target]
            window = rng.uniform(0.05, 0.3)
            edges = sorted(rng.sample(range(1, releases), runs - 1))
            for low, high in zip([0, *edges], [*edges, releases], strict=True):
                at = times[name][low]
                allowed = since(other, at - window * rng.uniform(0.5, 1.0))
                if capping and rng.random() < 0.5:
                    allowed &= ~since(other, at + window * rng.uniform(0.3, 1.0))
                allowed = allowed or domains[other].all_mask
                terms = ((name, (2 << high) - (2 << low)), (other, domains[other].outside(allowed)))
                rows.append(Row(terms, (name, low, other), activates=other))
    for name in rng.sample(names[: max(3, packages // 2)], 3):
        rows.append(Row(((name, 1),), ("request", name), activates=name))
    kind = rng.random()
    if kind < 0.67:
        pinned = rng.choice(names[: max(4, packages // 2)])
        at_release = rng.randint(releases // 3, releases)
        allowed = 1 << at_release if kind < 0.33 else (2 << at_release) - 2
        rows.append(Row(((pinned, domains[pinned].outside(allowed)),), ("request", pinned, kind), activates=pinned))
    return Problem(domains, rows, {name: i for i, name in enumerate(names)})


def matrix_problems(every: int) -> Iterator[tuple[str, Problem]]:
    """(what it is, problem) for the images on all hosts; every n-th of them."""
    import yaml

    from envforge.matrix.load import load_matrix
    from envforge.resolver.constraints import encode
    from envforge.resolver.encoding import Options
    from envforge.resolver.hosts import Host, HostGpu, known
    from envforge.resolver.passes import ranks
    from envforge.resolver.request import parse_request

    matrix = load_matrix()
    drivers = {toolkit.branch: toolkit.driver for toolkit in matrix.toolkits if toolkit.driver}
    gpus = {gpu.sm: gpu.name for gpu in matrix.gpus if gpu.arch != "aarch64"}
    count = 0
    for spec in sorted(IMAGES.glob("*/image.yaml")):
        requests = tuple(parse_request(line) for line in yaml.safe_load(spec.read_text(encoding="utf-8"))["requests"])
        for branch in sorted(drivers)[-12:]:
            for name in gpus.values():
                count += 1
                if count % every:
                    continue
                host = known(Host("host", drivers[branch], (HostGpu(name, None),), glibc="2.35"), matrix)
                enc = encode(matrix, requests, (host,), Options())
                yield (
                    f"{spec.parent.name}, driver {drivers[branch]}, {name}",
                    Problem(enc.domains, enc.rows, ranks(enc)),
                )


def made_up(every: int) -> Iterator[tuple[str, Problem]]:
    for seed in range(0, 40, every):
        yield f"seed {seed}", make_problem(seed)


def timed(run: Callable[[], Any], repeat: int) -> tuple[float, Any]:
    """Median seconds of processor time, and the last result. What exists before is hidden from the garbage collector, so
    that a run pays for its own objects only."""
    gc.collect()
    gc.freeze()
    seconds = []
    for _ in range(repeat):
        start = time.process_time()
        result = run()
        seconds.append(time.process_time() - start)
    return statistics.median(seconds), result


def compare(problems: Iterable[tuple[str, Problem]], repeat: int) -> dict[str, Any]:
    ratios: list[float] = []
    ours_all: list[float] = []
    gave_up = crashed = impossible = other_answer = other_verdict = 0
    for words, problem in problems:
        ours, found = timed(lambda problem=problem: solve(problem), repeat)  # type: ignore[misc]
        theirs, other = timed(lambda problem=problem: resolvelib_answer(problem, ROUNDS), 1)  # type: ignore[misc]
        if theirs < 0.1 and repeat > 1:
            theirs, other = timed(lambda problem=problem: resolvelib_answer(problem, ROUNDS), repeat)  # type: ignore[misc]
        ratios.append(theirs / ours)
        ours_all.append(ours)
        mine = None
        if isinstance(found, Solution):
            if any(all(mask >> found.values[name] & 1 for name, mask in row.terms) for row in problem.rows):
                raise AssertionError(f"{words}: the answer breaks a row")
            mine = {name: at for name, at in found.values.items() if at}
        impossible += mine is None
        gave_up += other == "gave up"
        crashed += other == "crashed"
        if not isinstance(other, str):
            other_verdict += (other is None) != (mine is None)
            other_answer += other is not None and mine is not None and any(other.get(n) != p for n, p in mine.items())
        print(f"{words}: {ours * 1e3:.2f} ms, resolvelib {theirs * 1e3:.2f} ms, {found.stats}", file=sys.stderr)
    median = statistics.median(ours_all)
    return {
        "problems": len(ratios),
        "without_answer": impossible,
        "resolvelib_gave_up": gave_up,
        "resolvelib_crashed": crashed,
        "other_verdict": other_verdict,
        "other_answer": other_answer,
        "ours_ms": {"median": round(median * 1e3, 2), "max": round(max(ours_all) * 1e3, 2)},
        "slowest_over_median": round(max(ours_all) / median, 1),
        "times_faster": {
            "median": round(statistics.median(ratios), 1),
            "min": round(min(ratios), 1),
            "max": round(max(ratios), 1),
        },
    }


def growth(repeat: int) -> dict[str, float]:
    """How many times longer the same kind of problem takes: the median of ten ratios, small and large measured in turn."""

    def one(seed: int, **size: int) -> float:
        problem = make_problem(seed, **size)
        return timed(lambda: solve(problem), repeat)[0]

    figures: dict[str, float] = {}
    for words, size in (
        ("releases_x10", {"releases": 2000}),
        ("releases_and_rows_x10", {"releases": 2000, "runs": 200}),
        ("packages_x10", {"packages": 300}),
    ):
        figures[words] = round(statistics.median([one(seed, **size) / one(seed) for seed in range(10)]), 1)
    rows = [sum(len(make_problem(seed, packages=n).rows) for seed in range(3)) for n in (30, 300)]
    return {**figures, "packages_x10_rows": round(rows[1] / rows[0], 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the search alone.")
    parser.add_argument("parts", nargs="*", choices=["matrix", "made-up", "growth", []], default=[])
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--every", type=int, default=1, help="take every n-th problem only")
    options = parser.parse_args()
    parts = options.parts or ["matrix", "made-up", "growth"]
    figures: dict[str, Any] = {}
    if "matrix" in parts:
        figures["matrix"] = compare(matrix_problems(options.every), options.repeat)
    if "made-up" in parts:
        figures["made-up"] = compare(made_up(options.every), options.repeat)
    if "growth" in parts:
        figures["growth"] = growth(min(3, options.repeat))
    text = json.dumps(figures, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
