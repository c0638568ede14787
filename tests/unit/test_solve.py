"""The search on small stories that can be checked by eye."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import pytest

from envforge.resolver.solve import (
    BudgetError,
    Conflict,
    Problem,
    Row,
    Solution,
    Unreached,
    leaves,
    minimal_core,
    solve,
    steps,
)
from envforge.resolver.versions import ABSENT, Domain

TRAINER = Domain("trainer", ["1.0", "2.0", "3.0"])
TORCH = Domain("torch", ["2.1", "2.2", "2.3", "2.4"])
VARIANT = Domain("torch-variant", ["cu118", "cu121", "cu126"])
DRIVER = Domain("host:driver", ["470.57.02", "525.60.13", "550.54.14"])
PYTHON = Domain("python", ["3.9", "3.10", "3.12"])
DOMAINS = {domain.name: domain for domain in (TRAINER, TORCH, VARIANT, DRIVER, PYTHON)}
RANK = {"trainer": 0, "torch": 1, "torch-variant": 2, "python": 3, "host:driver": 4}


def asks(domain: Domain, specifier: str, origin: object = None) -> Row:
    return Row(
        ((domain.name, domain.outside(domain.mask(specifier))),), origin or f"{domain.name}{specifier}", domain.name
    )


def needs(one: Domain, when: str, other: Domain, what: str, *guard: tuple[str, int]) -> Row:
    terms = ((one.name, one.mask(when)), (other.name, other.outside(other.mask(what))), *guard)
    return Row(terms, f"{one.name}{when} needs {other.name}{what}", other.name)


def clash(one: Domain, first: str, other: Domain, second: str) -> Row:
    return Row(
        ((one.name, one.mask(first)), (other.name, other.mask(second))),
        f"{one.name}{first} breaks {other.name}{second}",
    )


def answer(*rows: Row, prefer: Mapping[str, Sequence[int]] | None = None) -> dict[str, str]:
    found = solve(Problem(DOMAINS, rows, RANK, prefer))
    assert isinstance(found, Solution)
    return {name: DOMAINS[name].values[position - 1] for name, position in found.values.items() if position}


def refusal(*rows: Row) -> Conflict:
    found = solve(Problem(DOMAINS, rows, RANK))
    assert isinstance(found, Conflict)
    return found


def origins(rows: Sequence[Row]) -> set[object]:
    return {row.origin for row in rows}


def test_nothing_asked_is_answered_with_nothing() -> None:
    assert answer() == {}
    assert answer(clash(TRAINER, ">=1", TORCH, ">=2")) == {}


def test_newest_first_and_only_what_is_asked_for() -> None:
    assert answer(asks(TRAINER, "")) == {"trainer": "3.0"}
    assert answer(asks(TRAINER, "<3"), needs(TRAINER, ">=3", TORCH, "")) == {"trainer": "2.0"}
    assert answer(asks(TRAINER, ""), needs(TRAINER, ">=3", TORCH, "<2.3")) == {"trainer": "3.0", "torch": "2.2"}


def test_higher_rank_keeps_its_newest_release() -> None:
    rows = [asks(TORCH, ""), asks(TRAINER, ""), clash(TRAINER, "==3.0", TORCH, ">=2.2")]
    assert answer(*rows) == {"trainer": "3.0", "torch": "2.1"}


def test_order_of_preference() -> None:
    rows = [asks(TRAINER, ""), asks(TORCH, "")]
    assert answer(*rows, prefer={"torch": [2, 1], "trainer": [1]}) == {"trainer": "1.0", "torch": "2.2"}
    barred = Row((("torch", TORCH.mask("<2.3")),), "banned")
    assert answer(*rows, barred, prefer={"torch": [2, 1]})["torch"] == "2.4", (
        "what is left out comes last, newest first"
    )


def test_preference_may_depend_on_what_is_decided() -> None:
    seen: list[tuple[str, dict[str, int]]] = []

    def prefer(name: str, decided: Mapping[str, int]) -> Sequence[int]:
        seen.append((name, dict(decided)))
        return [1] if name == "torch" and decided.get("trainer") == 3 else []

    found = solve(Problem(DOMAINS, [asks(TRAINER, ""), asks(TORCH, "")], RANK, prefer))
    assert isinstance(found, Solution)
    assert (found.values["trainer"], found.values["torch"]) == (3, 1)
    assert seen == [("trainer", {}), ("torch", {"trainer": 3})]
    assert found.order == ("trainer", "torch")


def test_a_marker_is_a_third_term() -> None:
    only_old = needs(TRAINER, ">=1", TORCH, "", ("python", PYTHON.mask("<3.10")))
    assert "torch" not in answer(asks(TRAINER, ""), asks(PYTHON, ""), only_old)
    assert answer(asks(TRAINER, ""), asks(PYTHON, "==3.9"), only_old)["torch"] == "2.4"


def test_a_driver_chooses_the_variant_and_the_variant_chooses_torch() -> None:
    rows = [
        asks(DRIVER, "==470.57.02"),
        asks(TORCH, ""),
        asks(VARIANT, ""),
        Row(
            (("host:driver", DRIVER.mask("<525")), ("torch-variant", VARIANT.mask("cu121,cu126"))), "CUDA 12 needs 525"
        ),
        Row((("torch", TORCH.mask(">=2.3")), ("torch-variant", VARIANT.mask("cu118"))), "2.3 has no cu118"),
    ]
    assert answer(*rows) == {"host:driver": "470.57.02", "torch": "2.2", "torch-variant": "cu118"}
    conflict = refusal(*rows, asks(TRAINER, ""), needs(TRAINER, ">=1", TORCH, ">=2.4"))
    core = minimal_core(Problem(DOMAINS, []), leaves(conflict))
    assert origins(core) == {
        "host:driver==470.57.02",
        "CUDA 12 needs 525",
        "2.3 has no cu118",
        "trainer",
        "trainer>=1 needs torch>=2.4",
        "torch-variant",
    }


def test_a_cycle_is_met_once_and_pulls_nothing_by_itself() -> None:
    cycle = [needs(TRAINER, ">=1", TORCH, ">=2.2"), needs(TORCH, ">=2.2", TRAINER, "<=2")]
    assert answer(*cycle) == {}
    assert answer(*cycle, asks(TORCH, "")) == {"torch": "2.4", "trainer": "2.0"}


def test_a_package_that_asks_for_itself() -> None:
    itself = Row(
        (("trainer", TRAINER.mask(">=2")), ("trainer", TRAINER.outside(TRAINER.mask("<3")))), "itself", "trainer"
    )
    assert answer(itself) == {}
    assert answer(itself, asks(TRAINER, "")) == {"trainer": "2.0"}


def test_terms_without_values_and_terms_that_always_hold() -> None:
    never = Row((("trainer", 0), ("torch", TORCH.full)), "never")
    always = Row((("torch-variant", VARIANT.full), ("torch", TORCH.mask(">=2.3"))), "no torch 2.3 anywhere")
    assert answer(never, always, asks(TORCH, "")) == {"torch": "2.2"}


def test_a_dependency_that_no_release_meets_rules_its_asker_out() -> None:
    assert answer(asks(TRAINER, ""), needs(TRAINER, ">=2", TORCH, ">=9")) == {"trainer": "1.0"}
    assert origins(leaves(refusal(asks(TRAINER, ">=2"), needs(TRAINER, ">=2", TORCH, ">=9")))) == {
        "trainer>=2",
        "trainer>=2 needs torch>=9",
    }


def test_one_row_alone_can_be_impossible() -> None:
    conflict = refusal(asks(TORCH, ">=9"), asks(TRAINER, ""))
    assert origins(leaves(conflict)) == {"torch>=9"}
    assert steps(conflict) == () or steps(conflict)[-1].terms == ()


def test_absence_that_only_a_merged_row_forbids() -> None:
    """Such a row activates nothing, so what it asks for must come from elsewhere; else its asker is ruled out."""
    merged = Row((("trainer", TRAINER.mask(">=2")), ("torch", TORCH.outside(TORCH.mask(">=2.3")))), "merged")
    assert answer(asks(TRAINER, ""), merged) == {"trainer": "1.0"}
    assert answer(asks(TRAINER, ""), merged, needs(TRAINER, ">=3", TORCH, "")) == {"trainer": "3.0", "torch": "2.4"}
    conflict = refusal(asks(TRAINER, ">=2"), merged)
    assert origins(leaves(conflict)) == {"trainer>=2", "merged"}
    premises = [premise for step in steps(conflict) for premise in (step.left, step.right)]
    assert Unreached("torch") in [premise.origin for premise in premises if isinstance(premise, Row)]


def test_the_proof_reads_from_leaves_to_the_empty_row() -> None:
    conflict = refusal(
        asks(TRAINER, ">=2"),
        asks(TORCH, "<2.3"),
        needs(TRAINER, "==2.0", TORCH, ">=2.3"),
        needs(TRAINER, ">2", TORCH, ">=2.4"),
    )
    proof = steps(conflict)
    assert proof[-1].terms == ()
    assert proof[-1] is conflict.derivation
    merged = (("trainer", TRAINER.mask(">=2")), ("torch", TORCH.outside(TORCH.mask(">=2.3"))))
    assert merged in [step.terms for step in proof], "rows that strike together are said as one"


def test_a_core_keeps_groups_whole_and_needs_each() -> None:
    rows = [
        asks(TRAINER, "", "user"),
        asks(TORCH, "<2.3", "user"),
        asks(PYTHON, "", "elsewhere"),
        Row(needs(TRAINER, "<3", TORCH, ">=2.3").terms, "trainer", "torch"),
        Row(needs(TRAINER, ">=3", TORCH, ">=2.4").terms, "trainer", "torch"),
    ]
    core = minimal_core(Problem(DOMAINS, rows), rows)
    assert [row.origin for row in core] == ["user", "user", "trainer", "trainer"]
    with pytest.raises(ValueError, match="have an answer"):
        minimal_core(Problem(DOMAINS, rows), rows[:3])


def test_core_in_spite_of_rows_whose_absence_makes_things_worse() -> None:
    """Without the request for torch the merged row could not be met at all: leaving rows out is not always a relief."""
    rows = [
        asks(TRAINER, ">=2"),
        asks(TORCH, ""),
        Row((("trainer", TRAINER.mask(">=2")), ("torch", TORCH.outside(TORCH.mask(">=2.3")))), "merged"),
        Row((("torch", TORCH.mask(">=2.3")),), "no torch 2.3"),
    ]
    core = minimal_core(Problem(DOMAINS, rows), rows)
    assert isinstance(solve(Problem(DOMAINS, core)), Conflict)
    for row in core:
        assert isinstance(solve(Problem(DOMAINS, [other for other in core if other is not row])), Solution)


def test_equal_rows_are_one_and_the_first_origin_speaks() -> None:
    rows = [asks(TORCH, ">=9", origin) for origin in ("c", "a", "b")]
    for order in (rows, rows[::-1], [rows[1], rows[0], rows[2]]):
        assert [row.origin for row in leaves(refusal(*order))] == ["a"]


def test_rows_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="names numpy"):
        solve(Problem(DOMAINS, [Row((("numpy", 2),))]))
    with pytest.raises(ValueError, match="must forbid its absence"):
        solve(Problem(DOMAINS, [Row((("torch", 2),), activates="torch")]))
    with pytest.raises(ValueError, match="must forbid its absence"):
        solve(Problem(DOMAINS, [Row((("torch", 2),), activates="trainer")]))


def test_the_budget_counts_conflicts() -> None:
    one = Domain("a", [str(i) for i in range(8)])
    two = Domain("b", [str(i) for i in range(8)])
    rows = [Row(((name, ABSENT),), name, name) for name in "ab"]
    rows += [Row((("a", 2 << i), ("b", two.all_mask & ~(2 << j))), (i, j)) for i in range(8) for j in (i, (i + 1) % 8)]
    problem = Problem({"a": one, "b": two}, rows)
    found = solve(problem)
    assert isinstance(found, Conflict)
    assert isinstance(solve(problem, budget=found.stats.conflicts), Conflict)
    with pytest.raises(BudgetError):
        solve(problem, budget=found.stats.conflicts - 1)


def test_a_long_proof_needs_no_recursion() -> None:
    """A chain of 3,000 packages, each of which needs the next, and the last one cannot be had."""
    domains = {f"p{i:04}": Domain(f"p{i:04}", ["1", "2"]) for i in range(3000)}
    names = list(domains)
    rows = [Row(((names[0], ABSENT),), "request", names[0])]
    for one, two in pairwise(names):
        rows += [Row(((one, 2), (two, 0b011)), (one, 1), two), Row(((one, 4), (two, 0b101)), (one, 2), two)]
    rows.append(Row(((names[-1], 0b110),), "gone"))
    conflict = solve(Problem(domains, rows))
    assert isinstance(conflict, Conflict)
    assert len(leaves(conflict)) == len(rows)
    assert steps(conflict)[-1].terms == ()
