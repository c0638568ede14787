"""Recorded machines of tests/cases/detect, interpreted with the shipped matrix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from envforge.host import interpret, to_json
from envforge.host.names import gpu_finder
from envforge.matrix.load import load_matrix

FOLDER = Path(__file__).parent.parent / "cases" / "detect"
CASES = [(path.stem, case) for path in sorted(FOLDER.glob("*.yaml")) for case in yaml.safe_load(path.read_text())]
FIND_GPU = gpu_finder(load_matrix())


def differences(wanted: Any, got: Any, where: str) -> list[str]:
    """Every value of `wanted` must be in `got` at the same place; lists match position by position."""
    if isinstance(wanted, dict) and isinstance(got, dict):
        return [line for key, value in wanted.items() for line in differences(value, got.get(key), f"{where}.{key}")]
    if isinstance(wanted, list) and isinstance(got, list) and len(wanted) == len(got):
        return [
            line
            for number, (one, other) in enumerate(zip(wanted, got, strict=True))
            for line in differences(one, other, f"{where}[{number}]")
        ]
    return [] if wanted == got else [f"{where} is {got!r}, wanted {wanted!r}"]


@pytest.mark.parametrize(("file", "case"), CASES, ids=[f"{file}: {case['name']}" for file, case in CASES])
def test_recorded_machine(file: str, case: dict[str, Any]) -> None:
    assert set(case) == {"name", "recorded", "expect"} and set(case["expect"]) <= {"has", "problems", "says"}
    answer = to_json(interpret(case["recorded"], find_gpu=FIND_GPU))
    wrong = differences(case["expect"].get("has", {}), answer, "facts")
    assert not wrong, wrong
    assert sorted(row["id"] for row in answer["problems"]) == sorted(case["expect"]["problems"])
    said = json.dumps(answer["problems"], ensure_ascii=False).lower()
    for alternatives in case["expect"].get("says", ()):
        assert any(word.lower() in said for word in alternatives), (alternatives, said)
