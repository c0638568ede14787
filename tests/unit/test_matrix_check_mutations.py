"""Break the shipped matrix one value at a time: nearly every slip must be noticed by load or check.

A sample is run; ENVFORGE_ALL_MUTATIONS=300 (or another number) runs a larger one and prints what was not noticed.
What counts: a finding; or harmless, because the value is prose, or because the mutated rows mean the same (the order of
packages, the releases in a range).
"""

from __future__ import annotations

import os
from typing import Any

from matrix_mutations import Matrix, Mutation

from envforge.matrix.check import Book
from envforge.matrix.check_rules import boxes
from envforge.matrix.check_torch import matching
from envforge.matrix.load import File
from envforge.matrix.meaning import Parsed, place_rows
from envforge.matrix.releases import known_packages, load_releases

MATRIX = Matrix()


def book(files: list[tuple[File, Parsed]]) -> Book:
    placed = place_rows([(file.where, file.layer, parsed) for file, parsed in files])
    assert not placed.faults, placed.faults
    return Book(placed, load_releases, known_packages())


def effect(files: list[tuple[File, Parsed]]) -> Any:
    """What the rows mean, without the ways of writing it: ranks as an order, ranges as sets of releases."""
    own = book(files)
    meaning: dict[str, Any] = {}
    for section, rows in own.rows.items():
        for number, row in enumerate(rows):
            data = {key: value for key, value in row.data.items() if key not in ("rank", "text", "summary", "about")}
            if section == "rules":
                data |= {
                    "when": None,
                    "needs": [sorted(map(repr, box.items())) for box in map(sorted_box, boxes(own, row))],
                }
            if section == "native":
                data["versions"] = sorted(matching(load_releases(data["package"]), data["versions"]))
            meaning[f"{section} {number}"] = data
    meaning["order"] = sorted(own.packages, key=lambda name: int(own.packages[name].data["rank"]))
    meaning["policy"] = own.placed.policy
    return meaning


def sorted_box(box: dict[str, frozenset[str]]) -> dict[str, list[str]]:
    return {name: sorted(values) for name, values in box.items()}


def test_slips_are_noticed() -> None:
    count = int(os.environ.get("ENVFORGE_ALL_MUTATIONS", "50"))
    seed = int(os.environ.get("ENVFORGE_MUTATION_SEED", "20261130"))
    meaning = effect(MATRIX.files)
    tally = {"load or check": 0, "harmless": 0, "missed": 0}
    missed: list[Mutation] = []
    for mutation in MATRIX.mutations(count, seed):
        how = "missed"
        if mutation.free_text:
            how = "harmless"
        elif MATRIX.findings(mutation):
            how = "load or check"
        elif effect(MATRIX.broken(mutation)) == meaning:
            how = "harmless"
        else:
            missed.append(mutation)
        tally[how] += 1
    print(count, "mutations:", tally, *missed, sep="\n  ")
    assert tally["missed"] <= 0.05 * count, (tally, [str(mutation) for mutation in missed])
