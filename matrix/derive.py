"""Turns measured pairs of releases into range rules.

matrix/evidence/import_matrices.yaml holds what was run: for releases of two packages, whether they work together.
`derive` covers the failing cells with as few rectangles of version ranges as it finds, never one that holds a working
cell. Between two measured releases that agree, the ones between count alike. Where they disagree, the untested ones
count as failing only as far as a hand-stated range (`declared`) says so; without one the range ends at the failing
release. Beyond the outermost measured releases a range stays open.

`python -m envforge.matrix.derive` prints the rules file that belongs to the evidence; `--write` stores it. A test
keeps both equal.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from envforge.matrix.strictyaml import load_checked, read_text

EVIDENCE = Path(__file__).parent / "evidence" / "import_matrices.yaml"
EVIDENCE_SCHEMA = Path(__file__).parent / "schema" / "import_matrices.json"
RULES = Path(__file__).parent / "data" / "import-rules.yaml"

Cell = tuple[str, str]  # (row version, column version)


@dataclass(frozen=True, slots=True)
class ImportMatrix:
    """Measured cells of two packages.

    cells: None where the pair works, else the error. declared: ranges that are stated by hand to fail together, as
    {package: specifier} for both packages.
    """

    id: str
    row: str
    column: str
    what: str
    environment: str
    source: str
    cells: Mapping[Cell, str | None]
    declared: tuple[Mapping[str, str], ...]


@dataclass(frozen=True, slots=True)
class Block:
    """Ranges of both packages that fail together: specifiers for rows and columns, and the errors seen inside."""

    rows: str
    columns: str
    errors: tuple[str, ...]


def load_matrices(path: Path = EVIDENCE) -> tuple[ImportMatrix, ...]:
    """The measured matrices of an evidence file.

    Raises:
        DataError: the file is malformed.
    """
    import json

    schema = json.loads(EVIDENCE_SCHEMA.read_text(encoding="utf-8"))
    data, _ = load_checked(read_text(path), path.name, schema)
    return tuple(_matrix(item) for item in data["matrices"])


def _matrix(item: Mapping[str, Any]) -> ImportMatrix:
    cells: dict[Cell, str | None] = {}
    for run in item["cells"]:
        cells |= {(run["row"], version): None for version in run.get("ok", "").split()}
        for fail in run.get("fail", ()):
            cells |= {(run["row"], version): fail["error"] for version in fail["versions"].split()}
    return ImportMatrix(
        id=item["id"],
        row=item["rows"],
        column=item["columns"],
        what=item["what"],
        environment=item["environment"],
        source=item["source"],
        cells=cells,
        declared=tuple(entry["bad"] for entry in item.get("declared", ())),
    )


def derive(matrix: ImportMatrix) -> tuple[Block, ...]:
    """Ranges that hold every failing cell of the matrix and no working one."""
    rows = sorted({row for row, _ in matrix.cells}, key=Version)
    columns = sorted({column for _, column in matrix.cells}, key=Version)
    grid = _Grid(matrix, rows, columns)
    left = {(i, j) for i, j in grid.bad}
    found = []
    while left:
        box = max(grid.clean_boxes(), key=lambda box: (len(grid.inside(box) & left), [-n for n in box]))
        new = grid.inside(box) & left
        left -= new
        found.append(grid.block(new))  # only what no other range holds yet: the box may span cells that were not run
    return tuple(found)


Box = tuple[int, int, int, int]  # first row, last row, first column, last column


def _hull(cells: Iterable[tuple[int, int]]) -> Box:
    rows, columns = zip(*cells, strict=True)
    return min(rows), max(rows), min(columns), max(columns)


class _Grid:
    """The cells by position, with the searches that `derive` needs."""

    def __init__(self, matrix: ImportMatrix, rows: Sequence[str], columns: Sequence[str]) -> None:
        self.matrix, self.rows, self.columns = matrix, rows, columns
        place = {(row, column): (i, j) for i, row in enumerate(rows) for j, column in enumerate(columns)}
        self.bad = {place[cell]: error for cell, error in matrix.cells.items() if error is not None}
        self.good = {place[cell] for cell, error in matrix.cells.items() if error is None}
        known = dict.fromkeys(self.bad, False) | dict.fromkeys(self.good, True)
        known |= {cell: False for cell in place.values() if cell not in known and self._stated(cell)}
        for one_sided in (False, True):
            while filled := self._fill(known, [cell for cell in place.values() if cell not in known], one_sided):
                known |= filled
        # A range must not hold these: what works, and what was not run and is not known to fail.
        self.open = {cell for cell in place.values() if known.get(cell, True)}
        self.boxes: list[Box] | None = None

    def _stated(self, cell: tuple[int, int]) -> bool:
        return any(self._touches(region, [cell]) for region in self.matrix.declared)

    def _fill(
        self, known: Mapping[tuple[int, int], bool], cells: Sequence[tuple[int, int]], one_sided: bool
    ) -> dict[tuple[int, int], bool]:
        """What cells that were not run count as: like the nearest known ones on both sides, where those agree.

        one_sided: beyond the outermost known cell of a row or column, where there is a neighbour on one side only.
        """
        found = {}
        for i, j in cells:
            sides = (
                (
                    self._nearest(known, ((i, k) for k in range(j - 1, -1, -1))),
                    self._nearest(known, ((i, k) for k in range(j + 1, len(self.columns)))),
                ),
                (
                    self._nearest(known, ((k, j) for k in range(i - 1, -1, -1))),
                    self._nearest(known, ((k, j) for k in range(i + 1, len(self.rows)))),
                ),
            )
            if one_sided:
                words = {one for pair in sides if None in pair for one in pair if one is not None}
            else:
                words = {one for one, other in sides if one is not None and one == other}
            if len(words) == 1:
                found[(i, j)] = words.pop()
        return found

    @staticmethod
    def _nearest(known: Mapping[tuple[int, int], bool], cells: Iterable[tuple[int, int]]) -> bool | None:
        """Whether the first known cell works; None when none is known."""
        return next((known[cell] for cell in cells if cell in known), None)

    def inside(self, box: Box) -> set[tuple[int, int]]:
        """Failing cells in a box."""
        top, bottom, first, last = box
        return {(i, j) for i, j in self.bad if top <= i <= bottom and first <= j <= last}

    def clean_boxes(self) -> list[Box]:
        """Every box of failing cells that cannot grow in columns, for every span of rows."""
        if self.boxes is None:
            self.boxes = []
            for top in range(len(self.rows)):
                blocked: set[int] = set()
                for bottom in range(top, len(self.rows)):
                    blocked |= {j for i, j in self.open if i == bottom}
                    start = 0
                    for stop in [*sorted(blocked), len(self.columns)]:
                        if start < stop and self.inside((top, bottom, start, stop - 1)):
                            self.boxes.append((top, bottom, start, stop - 1))
                        start = stop + 1
        return self.boxes

    def block(self, cells: set[tuple[int, int]]) -> Block:
        """The ranges around some failing cells, with their edges placed between the measured releases."""
        top, bottom, first, last = _hull(cells)
        cross_rows = {i: any(first <= j <= last for r, j in self.open if r == i) for i in range(len(self.rows))}
        cross_columns = {j: any(top <= i <= bottom for i, c in self.open if c == j) for j in range(len(self.columns))}
        regions = [region for region in self.matrix.declared if self._touches(region, cells)]
        return Block(
            rows=_range(self.rows, top, bottom, cross_rows, [SpecifierSet(r[self.matrix.row]) for r in regions]),
            columns=_range(
                self.columns, first, last, cross_columns, [SpecifierSet(r[self.matrix.column]) for r in regions]
            ),
            errors=tuple(dict.fromkeys(self.bad[cell] for cell in sorted(cells))),
        )

    def _touches(self, region: Mapping[str, str], cells: Iterable[tuple[int, int]]) -> bool:
        rows, columns = SpecifierSet(region[self.matrix.row]), SpecifierSet(region[self.matrix.column])
        return any(self.rows[i] in rows and self.columns[j] in columns for i, j in cells)


def _range(
    versions: Sequence[str], first: int, last: int, works: Mapping[int, bool], declared: Sequence[SpecifierSet]
) -> str:
    """A specifier from the first to the last failing release; open where nothing works beyond."""
    stated = sorted({Version(one.version) for spec in declared for one in spec})
    below = next((i for i in range(first - 1, -1, -1) if works[i]), None)
    above = next((i for i in range(last + 1, len(versions)) if works[i]), None)
    parts = []
    if below is not None:
        edge = [v for v in stated if Version(versions[below]) < v <= Version(versions[first])]
        parts.append(f">={edge[-1] if edge else versions[first]}")
    if above is not None:
        edge = [v for v in stated if Version(versions[last]) < v <= Version(versions[above])]
        parts.append(f"<{edge[0]}" if edge else f"<={versions[last]}")
    return ",".join(parts)


_OPPOSITE = {">=": "<", "<": ">=", "<=": ">", ">": "<="}


def _outside(spec: str) -> str | None:
    """The specifier of everything outside a half-open range; None when that is no single range."""
    parts = list(SpecifierSet(spec))
    return f"{_OPPOSITE[parts[0].operator]}{parts[0].version}" if len(parts) == 1 else None


def as_rule(matrix: ImportMatrix, block: Block) -> dict[str, Any]:
    """A block as a row of the rules section (its source named by the matrix's id)."""
    rows, columns = block.rows, block.columns
    when: dict[str, str]
    if columns and _outside(rows):
        when, needs = {matrix.column: columns}, {matrix.row: str(_outside(rows))}
    elif rows and _outside(columns):
        when, needs = {matrix.row: rows}, {matrix.column: str(_outside(columns))}
    else:
        # Bounded on both sides: nothing inside may stand together, and the next release up is the way out.
        when = {matrix.column: columns, matrix.row: rows}
        ends = [one.version for one in SpecifierSet(columns) if one.operator in ("<", "<=")]
        needs = {matrix.column: f">={ends[0]}" if "<=" not in columns else f">{ends[0]}"}
    errors = "; ".join(block.errors[:2])
    return {
        "id": f"{matrix.column}{_slug(columns)}-{matrix.row}{_slug(rows)}",
        "level": "hard",
        "when": when,
        "needs": needs,
        "text": f"{matrix.column} {columns} and {matrix.row} {rows} fail together ({matrix.what}): {errors}.",
        "source": matrix.id,
    }


def _slug(spec: str) -> str:
    words = {">=": "from", "<": "before", "<=": "to", ">": "after"}
    ordered = sorted(SpecifierSet(spec), key=lambda one: one.operator not in (">=", ">"))
    return "".join(f"-{words[one.operator]}-{one.version}" for one in ordered) or "-any"


def rules_file(matrices: Sequence[ImportMatrix]) -> str:
    """The text of data/import-rules.yaml."""
    lines = [
        "# Derived from matrix/evidence/import_matrices.yaml. Do not edit: change the evidence, then run",
        "#   python -m envforge.matrix.derive --write",
        "sources:",
    ]
    for matrix in matrices:
        text = f"measured: {matrix.what}; {matrix.environment}; {matrix.source}"
        lines.append(f"  {matrix.id}: {{text: {_quote(text)}, confidence: verified-by-execution}}")
    lines += ["", "rules:"]
    for matrix in matrices:
        lines.append(f"# --- {matrix.column} against {matrix.row}")
        for block in derive(matrix):
            rule = as_rule(matrix, block)
            lines.append(f"- id: {rule['id']}")
            lines.append(f"  level: {rule['level']}")
            for field in ("when", "needs"):
                pairs = ", ".join(f"{name}: {_quote(spec)}" for name, spec in rule[field].items())
                lines.append(f"  {field}: {{{pairs}}}")
            lines.append("  text: >-")
            lines += textwrap.wrap(
                rule["text"],
                116,
                initial_indent="    ",
                subsequent_indent="    ",
                break_long_words=False,
                break_on_hyphens=False,
            )
            lines.append(f"  source: {rule['source']}")
    return "\n".join(lines) + "\n"


def _quote(text: str) -> str:
    import json

    return json.dumps(text, ensure_ascii=False)


if __name__ == "__main__":
    import sys

    new = rules_file(load_matrices())
    if "--write" in sys.argv[1:]:
        RULES.write_text(new, encoding="utf-8")
    else:
        sys.stdout.write(new)
