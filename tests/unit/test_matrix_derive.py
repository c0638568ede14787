"""Measured pairs of releases and the rules that are derived from them say the same."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from envforge.errors import DataError
from envforge.matrix.derive import RULES, ImportMatrix, as_rule, derive, load_matrices, rules_file
from envforge.matrix.load import load_matrix
from envforge.matrix.model import Rule
from envforge.matrix.releases import load_releases

MATRICES = load_matrices()
HARD = [rule for rule in load_matrix(use_cache=False).rules if rule.level == "hard"]


def refuses(when: Mapping[str, str], needs: Mapping[str, str], pins: Mapping[str, str]) -> bool:
    """The semantics of Rule for pins alone: all `when` hold and some `needs` of a package that is there does not."""
    if not all(name in pins and SpecifierSet(spec).contains(pins[name], True) for name, spec in when.items()):
        return False
    return any(name in pins and not SpecifierSet(spec).contains(pins[name], True) for name, spec in needs.items())


def refused_by(pins: Mapping[str, str], rules: list[Rule] = HARD) -> list[str]:
    return [rule.id for rule in rules if refuses(rule.when, rule.needs, pins)]


def cells() -> list[tuple[str, dict[str, str], str | None]]:
    return [
        (matrix.id, {matrix.row: row, matrix.column: column}, error)
        for matrix in MATRICES
        for (row, column), error in matrix.cells.items()
    ]


def test_the_evidence_is_all_there() -> None:
    counts = {matrix.id: len(matrix.cells) for matrix in MATRICES}
    assert counts == {"peft-x-transformers": 217, "accelerate-x-transformers": 207, "trl-x-transformers": 211}


def test_every_failing_cell_is_refused_and_no_working_one() -> None:
    wrong = [
        (pins, error, rules)
        for _, pins, error in cells()
        if bool(rules := refused_by({**pins, "torch": "2.13.0", "python": "3.11"})) != (error is not None)
    ]
    assert wrong == []


def test_hand_stated_ranges_are_covered_for_every_known_release() -> None:
    for matrix in MATRICES:
        derived = [as_rule(matrix, block) for block in derive(matrix)]
        for region in matrix.declared:
            known = {
                name: [r.version for r in load_releases(name) if SpecifierSet(spec).contains(r.version)]
                for name, spec in region.items()
            }
            if not all(known.values()):
                pytest.skip("release files of these packages are not there")
            measured = {matrix.row: [r for r, _ in matrix.cells], matrix.column: [c for _, c in matrix.cells]}
            low = {name: min(versions, key=Version) for name, versions in measured.items()}
            for pair in itertools.product(*known.values()):
                pins = dict(zip(known, pair, strict=True))
                if any(Version(pins[name]) < Version(low[name]) for name in pins):
                    continue  # older than anything that was run
                assert any(refuses(r["when"], r["needs"], pins) for r in derived), (region, pins)


def test_the_rules_file_belongs_to_the_evidence() -> None:
    assert RULES.read_text(encoding="utf-8") == rules_file(MATRICES), "run python -m envforge.matrix.derive --write"


def matrix_of(rows: Mapping[str, str], columns: str, *declared: Mapping[str, str]) -> ImportMatrix:
    """Rows of marks, one per column: o works, x fails, . was not run."""
    names = columns.split()
    found = {
        (row, names[i]): None if mark == "o" else "boom"
        for row, marks in rows.items()
        for i, mark in enumerate(marks)
        if mark != "."
    }
    return ImportMatrix("m", "lib", "tool", "run", "here", "now", found, declared)


def ranges(matrix: ImportMatrix) -> set[tuple[str, str]]:
    return {(block.rows, block.columns) for block in derive(matrix)}


def test_no_failure_no_rule() -> None:
    assert derive(matrix_of({"1.0": "oo", "2.0": "oo"}, "1.0 2.0")) == ()


def test_edges_without_a_hand_stated_range_end_at_the_failing_release() -> None:
    assert ranges(matrix_of({"1.0": "oox", "2.0": "ooo"}, "1.0 2.0 3.0")) == {("<=1.0", ">=3.0")}


def test_a_hand_stated_range_places_the_edge_between_the_measured_releases() -> None:
    stated = {"lib": "<1.5", "tool": ">=2.5"}
    assert ranges(matrix_of({"1.0": "oox", "2.0": "ooo"}, "1.0 2.0 3.0", stated)) == {("<1.5", ">=2.5")}


def test_a_hand_stated_range_beyond_a_working_release_does_not_count() -> None:
    stated = {"lib": "<2.5", "tool": ">=1.5"}
    assert ranges(matrix_of({"1.0": "oox", "2.0": "ooo"}, "1.0 2.0 3.0", stated)) == {("<=1.0", ">=3.0")}


def test_releases_between_two_failing_ones_fail_and_between_two_working_ones_work() -> None:
    assert ranges(matrix_of({"1.0": "oxo", "2.0": "...", "3.0": "oxo"}, "1.0 2.0 3.0")) == {("", ">=2.0,<=2.0")}
    # Works by its row, fails by its column: not known, so not in a range.
    found = ranges(matrix_of({"1.0": "oxo", "2.0": "o.o", "3.0": "oxo"}, "1.0 2.0 3.0"))
    assert found == {("<=1.0", ">=2.0,<=2.0"), (">=3.0", ">=2.0,<=2.0")}


def test_cells_that_were_not_run_are_not_swept_into_a_range() -> None:
    # lib 2.0 was not run with tool 2.0, and its neighbours disagree in both directions.
    found = ranges(matrix_of({"1.0": "oxx", "2.0": "o.x", "3.0": "ooo"}, "1.0 2.0 3.0"))
    assert found == {("<=1.0", ">=2.0"), ("<=2.0", ">=3.0")}


def test_a_cell_that_was_not_run_follows_a_hand_stated_range() -> None:
    stated = {"lib": "<2.5", "tool": ">=2.0"}
    found = ranges(matrix_of({"1.0": "oxx", "2.0": "o.x", "3.0": "ooo"}, "1.0 2.0 3.0", stated))
    assert found == {("<2.5", ">=2.0")}


def test_a_hole_bounded_on_all_sides_is_a_known_bad_pair() -> None:
    matrix = matrix_of({"1.0": "ooo", "2.0": "oxo", "3.0": "ooo"}, "1.0 2.0 3.0")
    [block] = derive(matrix)
    rule = as_rule(matrix, block)
    assert rule["when"] == {"tool": ">=2.0,<=2.0", "lib": ">=2.0,<=2.0"}
    for (row, column), error in matrix.cells.items():
        assert refuses(rule["when"], rule["needs"], {"lib": row, "tool": column}) == (error is not None)


def test_a_malformed_evidence_file_names_line_and_field(tmp_path: Path) -> None:
    path = tmp_path / "evidence.yaml"
    path.write_text("matrices:\n- id: a-b\n  rows: a\n  columns: b\n  what: w\n  environment: e\n  cells: []\n")
    with pytest.raises(DataError) as caught:
        load_matrices(path)
    assert caught.value.cause.splitlines() == [
        "evidence.yaml:2: matrices row 1: field source is missing",
        "evidence.yaml:7: matrices row 1 field cells: is empty",
    ]
