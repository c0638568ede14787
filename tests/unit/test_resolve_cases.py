"""The cases of tests/cases/resolve: a request on a host, and what an expert would answer."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from envforge.matrix.load import load_matrix
from envforge.matrix.model import Matrix
from envforge.resolver.encoding import Options
from envforge.resolver.explain import MAX_SAID, Conflict
from envforge.resolver.hosts import known, make_host
from envforge.resolver.plan import Plan
from envforge.resolver.request import parse_request
from envforge.resolver.resolve import Answer, Wish, resolve

CASES = Path(__file__).parents[1] / "cases" / "resolve"
KEYS = {"id", "why", "ask", "driver", "gpus", "glibc", "arch", "python", "variant", "as_of", "no_compile", "limits"}
OK = {"variant", "tier", "python", "pins", "has", "absent", "warnings", "says", "source_only"}
NO = {"parties", "says", "fixes"}
INTERNAL = ("torch-variant", "host:", "Requires-Dist")


@cache
def matrix() -> Matrix:
    return load_matrix()


def cases() -> list[Any]:
    rows = [row for path in sorted(CASES.glob("*.yaml")) for row in yaml.safe_load(path.read_text(encoding="utf-8"))]
    return [pytest.param(row, id=row["id"]) for row in rows]


def answer(case: dict[str, Any]) -> Answer:
    host = make_host(
        "h", case.get("driver", "none"), case.get("gpus", ()), case.get("glibc"), case.get("arch", "x86_64")
    )
    options = Options(
        variant=case.get("variant", "auto"),
        pythons=(case["python"],) if "python" in case else (),
        no_compile=case.get("no_compile", False),
        limits=tuple(parse_request(line, "limits.txt") for line in case.get("limits", ())),
    )
    requests = tuple(parse_request(line) for line in case["ask"])
    return resolve(matrix(), Wish(requests, (known(host, matrix()),), options, case.get("as_of")))


def test_every_case_has_an_id_of_its_own_and_says_why() -> None:
    rows = [param.values[0] for param in cases()]
    assert len(rows) >= 60 and len({row["id"] for row in rows}) == len(rows)
    for row in rows:
        wanted = row.keys() & {"ok", "conflict"}
        assert len(wanted) == 1 and row["why"] and not row.keys() - KEYS - wanted, row["id"]
        assert not (row.get("ok") or {}).keys() - OK and not (row.get("conflict") or {}).keys() - NO, row["id"]


@pytest.mark.parametrize("case", cases())
def test_case(case: dict[str, Any]) -> None:
    found = answer(case)
    if "ok" in case:
        assert found.plan is not None, found.conflict and found.conflict.text
        check_plan(found.plan, case["ok"])
    else:
        assert found.conflict is not None, found.plan and found.plan.pins
        check_conflict(found.conflict, case["conflict"])


def check_plan(plan: Plan, want: dict[str, Any]) -> None:
    assert plan.variant in want.get("variant", [plan.variant])
    assert plan.tier in want.get("tier", [plan.tier])
    assert plan.python in want.get("python", [plan.python])
    for name, specifier in want.get("pins", {}).items():
        assert SpecifierSet(specifier).contains(plan.pins[name], prereleases=True), f"{name} {plan.pins[name]}"
    assert set(want.get("has", ())) <= set(plan.pins)
    assert not set(want.get("absent", ())) & set(plan.pins)
    assert set(want.get("source_only", ())) <= set(plan.source_only)
    assert set(want.get("warnings", ())) <= {warning.id for warning in plan.warnings}
    said = " ".join(warning.text for warning in plan.warnings)
    for words in want.get("says", ()):
        assert words in said
    assert not any(word in said for word in INTERNAL)


def check_conflict(conflict: Conflict, want: dict[str, Any]) -> None:
    assert set(want.get("parties", ())) <= set(conflict.parties), conflict.parties
    for words in want.get("says", ()):
        assert words in conflict.text, conflict.text
    fixes = " | ".join(fix.text for fix in conflict.fixes)
    if want.get("fixes"):
        assert any(words in fixes for words in want["fixes"]), fixes
    assert len(conflict.lines) <= MAX_SAID + 1 and not any(word in conflict.text for word in INTERNAL)
    assert len({fix.change for fix in conflict.fixes}) == len(conflict.fixes)
