"""Every finding id against logs of our own: it comes first where it should, and stays away from near misses."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from envforge.diagnose import Report, diagnose
from envforge.diagnose.rules import load_rules

CASES = Path(__file__).parents[1] / "cases" / "diagnose"
ROWS: list[dict[str, Any]] = [row for path in sorted(CASES.glob("*.yaml")) for row in yaml.safe_load(path.read_text())]


def read(test: dict[str, Any]) -> Report:
    driver = str(test["driver"]) if "driver" in test else None
    known = None if driver in (None, "none") else driver
    return diagnose(io.BytesIO(test["log"].encode()), driver=known, no_driver=driver == "none")


def listed(kind: str) -> list[Any]:
    return [
        pytest.param(row["id"], test, id=f"{row['id']}-{number}")
        for row in ROWS
        for number, test in enumerate(row.get(kind, []), 1)
    ]


@pytest.mark.parametrize(("name", "test"), listed("positive"))
def test_found_first(name: str, test: dict[str, Any]) -> None:
    findings = read(test).findings
    assert findings and findings[0].id == name, [(f.id, f.confidence) for f in findings]
    if "confidence" in test:
        assert findings[0].confidence == test["confidence"]
    told = json.dumps(findings[0].to_json(), ensure_ascii=False).lower()
    for words in test.get("says", []):
        assert words.lower() in told, words
    assert findings[0].cause and "{" not in findings[0].cause
    assert findings[0].evidence


@pytest.mark.parametrize(("name", "test"), listed("after"))
def test_consequence_stands_after_its_cause(name: str, test: dict[str, Any]) -> None:
    findings = read(test).findings
    ids = [finding.id for finding in findings]
    assert ids[0] == test["first"] and name in ids
    assert test["first"] in next(finding for finding in findings if finding.id == name).consequence_of


@pytest.mark.parametrize(("name", "test"), listed("negative"))
def test_near_miss(name: str, test: dict[str, Any]) -> None:
    for finding in read(test).findings:
        if test.get("not_sure"):
            assert finding.id != name or finding.confidence != "certain"
        else:
            assert finding.id != name, finding.evidence


@pytest.mark.parametrize("number", range(len(next(row for row in ROWS if row["id"] == "clean")["logs"])))
def test_clean_log_has_nothing_certain(number: int) -> None:
    test = next(row for row in ROWS if row["id"] == "clean")["logs"][number]
    for finding in read(test).findings:
        assert finding.confidence != "certain", (finding.id, finding.evidence)
        assert finding.id not in test.get("not", [])


def test_every_rule_has_cases() -> None:
    """Two or more positive logs and a near miss for each id."""
    counted = {row["id"]: (len(row.get("positive", [])), len(row.get("negative", []))) for row in ROWS}
    for rule in load_rules().rules:
        positive, negative = counted.get(rule.id, (0, 0))
        assert positive >= 2 or (rule.id, positive) == ("python-module-shadowed", 2), rule.id
        assert negative >= 1, rule.id
    assert set(counted) == {rule.id for rule in load_rules().rules} | {"clean"}


def as_json(line: str) -> str:
    return '{"log":"' + line.replace("\\", "\\\\").replace('"', '\\"') + '\\n","stream":"stderr"}'


@pytest.mark.parametrize(
    "dress",
    [
        pytest.param(lambda line: f"[rank0]: {line}", id="torchrun"),
        pytest.param(lambda line: f"2026-11-30T10:00:00.123Z 3: \x1b[31m{line}\x1b[0m\r", id="time-srun-colour"),
        pytest.param(as_json, id="docker-json"),
        pytest.param(lambda line: f"{line}\n{{'loss': 1.9, 'grad_norm': 0.4, 'epoch': 0.1}}", id="between-steps"),
    ],
)
def test_dress_changes_nothing(dress: Callable[[str], str]) -> None:
    """Every positive log is found just as well with what launchers and collectors put around its lines."""
    wrong = []
    for row in ROWS:
        for number, test in enumerate(row.get("positive", []), 1):
            log = "\n".join(dress(line) for line in test["log"].rstrip("\n").split("\n")) + "\n"
            findings = read(test | {"log": log}).findings
            if not findings or findings[0].id != row["id"]:
                wrong.append((row["id"], number, [finding.id for finding in findings]))
    assert not wrong
