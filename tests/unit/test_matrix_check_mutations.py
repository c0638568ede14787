"""Break the shipped matrix one value at a time: nearly every slip must be noticed by load or check.

A sample is run; ENVFORGE_ALL_MUTATIONS=300 (or another number) runs a larger one and prints what was not noticed.
What counts: a finding; a change of what a row rests on, as recorded in golden/matrix_sources.json; or harmless, because
the value is prose, or because the mutated rows mean the same (the order of packages, the releases in a range).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from matrix_mutations import Matrix, Mutation

from envforge.matrix.check import Book
from envforge.matrix.check_rules import boxes
from envforge.matrix.check_torch import matching
from envforge.matrix.load import File
from envforge.matrix.meaning import IDENTITY, Parsed, place_rows
from envforge.matrix.releases import known_packages, load_releases

GOLDEN = Path(__file__).parents[1] / "golden" / "matrix_sources.json"
MATRIX = Matrix()


def book(files: list[tuple[File, Parsed]]) -> Book:
    placed = place_rows([(file.where, file.layer, parsed) for file, parsed in files])
    assert not placed.faults, placed.faults
    return Book(placed, load_releases, known_packages())


def sources(files: list[tuple[File, Parsed]]) -> dict[str, list[str]]:
    """Source and confidence -> the rows that rest on it."""
    found: dict[str, list[str]] = {}
    for section, rows in book(files).rows.items():
        for row in rows:
            text, confidence = row.data["source"]
            name = " ".join(str(row.data.get(key, "")) for key in IDENTITY[section])
            found.setdefault(f"{text} ({confidence})", []).append(f"{section} {name}")
    return {source: sorted(rows) for source, rows in sorted(found.items())}


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


def test_every_row_rests_on_the_source_that_is_recorded() -> None:
    """Regenerate with ENVFORGE_WRITE_GOLDEN=1 and read the difference: a row must not change its source unseen."""
    now = sources(MATRIX.files)
    if os.environ.get("ENVFORGE_WRITE_GOLDEN"):
        GOLDEN.write_text(json.dumps(now, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    assert now == json.loads(GOLDEN.read_text(encoding="utf-8"))


def test_slips_are_noticed() -> None:
    count = int(os.environ.get("ENVFORGE_ALL_MUTATIONS", "50"))
    seed = int(os.environ.get("ENVFORGE_MUTATION_SEED", "20261130"))
    recorded, meaning = sources(MATRIX.files), effect(MATRIX.files)
    tally = {"load or check": 0, "recorded source": 0, "harmless": 0, "missed": 0}
    missed: list[Mutation] = []
    for mutation in MATRIX.mutations(count, seed):
        how = "missed"
        if mutation.free_text:
            how = "harmless"
        elif MATRIX.findings(mutation):
            how = "load or check"
        else:
            files = MATRIX.broken(mutation)
            if sources(files) != recorded:
                how = "recorded source"
            elif effect(files) == meaning:
                how = "harmless"
            else:
                missed.append(mutation)
        tally[how] += 1
    print(count, "mutations:", tally, *missed, sep="\n  ")
    assert tally["missed"] <= 0.05 * count, (tally, [str(mutation) for mutation in missed])
