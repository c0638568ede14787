"""The search against plain backtracking on random small problems, and its proofs against a checker of proofs.

ENVFORGE_ORACLE_CASES sets how many problems are tried (default 1,000).
"""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from oracle import answer, small_problem

from envforge.resolver.solve import (
    Conflict,
    Derived,
    Problem,
    Row,
    Solution,
    Unreached,
    leaves,
    minimal_core,
    solve,
    steps,
)

CASES = int(os.environ.get("ENVFORGE_ORACLE_CASES", "1000"))
CHUNKS = 10


def alone(problem: Problem, rows: list[Row]) -> Problem:
    return Problem(problem.domains, rows, problem.rank, problem.prefer)


def check_proof(problem: Problem, conflict: Conflict) -> None:
    """Each step follows from its premises, each premise is a given row or a true statement on reachability."""

    def terms(premise: Row | Derived) -> dict[str, int]:
        named: dict[str, int] = {}
        for name, mask in premise.terms:
            named[name] = named.get(name, problem.domains[name].full) & mask
        return {name: mask for name, mask in named.items() if mask != problem.domains[name].full}

    given = {id(row) for row in problem.rows}
    proven: set[int] = set()
    for step in steps(conflict):
        left, right = terms(step.left), terms(step.right)
        assert step.pivot in left and step.pivot in right
        expected = {}
        for name in {*left, *right}:
            full = problem.domains[name].full
            one, two = left.get(name, full), right.get(name, full)
            mask = one | two if name == step.pivot else one & two
            if mask != full:
                expected[name] = mask
        assert terms(step) == expected
        for premise in (step.left, step.right):
            if isinstance(premise, Derived):
                assert id(premise) in proven
            elif isinstance(premise.origin, Unreached):
                check_unreached(problem, premise)
            else:
                assert id(premise) in given
        proven.add(id(step))
    assert terms(conflict.derivation) == {}


def check_unreached(problem: Problem, row: Row) -> None:
    """With its decisions nothing activates the name: a fixed point of activation leaves it out."""
    assert isinstance(row.origin, Unreached)
    decided = {name: mask for name, mask in row.terms if name != row.origin.name}
    assert all(mask.bit_count() == 1 and mask != 1 for mask in decided.values())
    for other in problem.rows:
        if other.activates == row.origin.name:
            assert any(
                not mask & 1  # it asks for itself
                if name == other.activates
                else mask != problem.domains[name].full and (name not in decided or not mask & decided[name])
                for name, mask in other.terms
            )


def check(seed: int) -> str:
    """Compare one problem; -> what came out, for statistics and for comparing whole runs."""
    problem = small_problem(seed)
    expected = answer(problem)
    found = solve(problem)
    rows = list(problem.rows)
    random.Random(seed).shuffle(rows)
    again = solve(alone(problem, rows))
    if isinstance(found, Solution):
        assert found.values == expected, f"seed {seed}"
        assert again == found, f"seed {seed}"
        return repr((found.values, found.order, found.stats))
    assert expected is None, f"seed {seed}"
    check_proof(problem, found)
    assert isinstance(again, Conflict)
    assert [(s.terms, s.pivot) for s in steps(again)] == [(s.terms, s.pivot) for s in steps(found)], f"seed {seed}"
    assert leaves(again) == leaves(found), f"seed {seed}"
    assert answer(alone(problem, list(leaves(found)))) is None, f"seed {seed}"

    def group(origin: object) -> int:
        return int(str(origin)) // 2

    core = minimal_core(problem, leaves(found), group)
    assert answer(alone(problem, list(core))) is None, f"seed {seed}"
    for key in {group(row.origin) for row in core}:
        rest = [row for row in core if group(row.origin) != key]
        assert answer(alone(problem, rest)) is not None, f"seed {seed}: group {key} is not needed"
    return repr([(row.terms, row.origin) for row in core])


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_same_answer_as_plain_backtracking(chunk: int) -> None:
    solved = 0
    seeds = range(chunk, CASES, CHUNKS)
    for seed in seeds:
        solved += check(seed).startswith("(")
    assert len(seeds) // 4 < solved < len(seeds) * 3 // 4, "the problems have become too easy or too hard to tell much"


def digest(cases: int) -> str:
    return hashlib.sha256("\n".join(check(seed) for seed in range(cases)).encode()).hexdigest()


def test_hash_seed_changes_nothing() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import test_solve_oracle as t; print(t.digest(150))"
    outputs = set()
    for hash_seed in ("0", "1", "4242"):
        run = subprocess.run(
            [sys.executable, "-c", code, str(Path(__file__).parent)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        outputs.add(run.stdout)
    assert len(outputs) == 1
