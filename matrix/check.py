"""What the matrix's rows mean beside each other and beside the harvested releases: every fault, with its place.

`load` refuses what is malformed; here is what is well-formed and wrong: versions that do not exist, rules that never
fire, tables that contradict each other or the metadata. Nothing here needs the resolver or the network; what does is
in `envforge.keep`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from envforge.errors import DataError
from envforge.matrix.load import DATA, SCHEMA, File, collect
from envforge.matrix.meaning import Parsed, Placed, Row, parse_file, place_rows
from envforge.matrix.releases import RELEASES, Release, known_packages, load_releases
from envforge.matrix.strictyaml import line_of, place_of, raise_faults

_FAULT = re.compile(
    r"(?P<where>.+?):(?P<line>\d+): (?:(?P<row>(?:[a-z_]+ row \d+|field|policy)[^:]*): )?(?P<what>.*)", re.S
)
NAME_FIELDS = ("id", "name", "ref", "family", "package", "torch", "os", "cuda", "major", "branch")


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault: where it stands, in which row, what is wrong, and what to do. `id` names the check that found it."""

    id: str
    where: str
    line: int
    row: str
    what: str
    do: str

    def text(self) -> str:
        """ "file:line: row: what; what to do" """
        row = f"{self.row}: " if self.row else ""
        return f"{self.where}:{self.line}: {row}{self.what}" + (f"\n    {self.do}" if self.do else "")

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass
class Book:
    """The rows with their places, the releases, and the findings so far."""

    placed: Placed
    load: Callable[[str], tuple[Release, ...]]
    released: tuple[str, ...]  # packages with a release file
    findings: list[Finding] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)
    memory: dict[Any, Any] = field(default_factory=dict)  # what the checks worked out and need again

    @property
    def rows(self) -> Mapping[str, list[Row]]:
        """Section -> rows."""
        return self.placed.rows

    def tell(self, id: str, row: Row, what: str, do: str, *fields: str) -> None:
        """A finding about (a field of) a row."""
        path = (*row.path, *fields)
        name = next((str(row.data[key]) for key in NAME_FIELDS if key in row.data), "")
        place = place_of(row.path) + (f" ({name})" if name else "") + (f" field {'.'.join(fields)}" if fields else "")
        self.findings.append(Finding(id, row.where, line_of(row.lines, path), place.strip(), what, do))

    def tell_file(self, id: str, where: str, what: str, do: str) -> None:
        """A finding about a whole file."""
        self.findings.append(Finding(id, where, 1, "", what, do))

    def releases(self, name: str) -> tuple[Release, ...]:
        """The releases of a package; a damaged file is a finding, told once, and counts as empty."""
        if name in self.damaged:
            return ()
        try:
            return self.load(name)
        except DataError as error:
            self.damaged[name] = error.cause
            self.tell_file("damaged", f"matrix/releases/{name}.json", error.cause, error.hint)
            return ()

    @cached_property
    def packages(self) -> dict[str, Row]:
        """Package rows by name."""
        return {row.data["name"]: row for row in self.rows["packages"]}

    @cached_property
    def toolkits(self) -> dict[str, list[Row]]:
        """Toolkit rows by CUDA version."""
        found: dict[str, list[Row]] = {}
        for row in self.rows["toolkits"]:
            found.setdefault(row.data["cuda"], []).append(row)
        return found

    @cached_property
    def sms(self) -> dict[str, Row]:
        """Architecture rows by compute capability."""
        return {sm: row for row in self.rows["architectures"] for sm in row.data["sm"].split()}

    @cached_property
    def variants(self) -> tuple[str, ...]:
        """Every variant of a torch build."""
        return tuple(sorted({row.data["variant"] for row in self.rows["torch"]}))

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """The texts of all notes."""
        return tuple(row.data["text"] for row in self.rows["notes"])


def number(text: str) -> tuple[int, ...]:
    """Dotted numbers as a tuple: drivers, CUDA versions, capabilities."""
    return tuple(int(part) for part in text.split("."))


def read_book(folder: Path = DATA, releases: Path = RELEASES) -> Book:
    """The rows of a folder and its releases, for a closer look.

    Raises:
        DataError: a file is malformed.
    """
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    placed = place_rows([(f.where, f.layer, parse_file(f.where, f.raw, schema)) for f in collect(folder, ())])
    raise_faults(placed.faults)
    return Book(placed, lambda name: load_releases(name, releases), known_packages(releases))


def check_matrix(
    folder: Path = DATA,
    layers: tuple[Path, ...] = (),
    releases: Path = RELEASES,
    *,
    schema: Mapping[str, Any] | None = None,
    files: Sequence[tuple[File, Parsed]] | None = None,
    load: Callable[[str], tuple[Release, ...]] | None = None,
    released: tuple[str, ...] | None = None,
) -> list[Finding]:
    """Every finding about the rows of `folder` with `layers` on top, in file order.

    Args:
        folder, layers: as for `load_matrix`.
        releases: the folder of the release files.
        schema: of one file; the shipped one unless given.
        files: the files, parsed already (then neither `folder` nor `layers` is read).
        load, released: releases by package, and the packages that have some, instead of those in `releases`.
    """
    if files is None:
        schema = schema or json.loads(SCHEMA.read_text(encoding="utf-8"))
        files = [(file, parse_file(file.where, file.raw, schema)) for file in collect(folder, layers)]
    placed = place_rows([(file.where, file.layer, parsed) for file, parsed in files])
    if placed.faults:
        return [_from_fault(text) for text in dict.fromkeys(placed.faults)]
    load = load or (lambda name: load_releases(name, releases))
    book = Book(placed, load, known_packages(releases) if released is None else released)
    for check in _checks():
        check(book)
    order = {file.where: i for i, (file, _) in enumerate(files)}
    return sorted(dict.fromkeys(book.findings), key=lambda f: (order.get(f.where, len(order)), f.where, f.line, f.what))


def _checks() -> Iterator[Callable[[Book], None]]:
    from envforge.matrix import check_answers, check_hardware, check_rules, check_torch

    for module in (check_hardware, check_torch, check_rules, check_answers):
        yield from module.CHECKS


def _from_fault(text: str) -> Finding:
    """A fault of the loader, as a finding."""
    match = _FAULT.fullmatch(text)
    if not match:
        return Finding("load", text.partition(":")[0], 1, "", text, "correct the file")
    return Finding("load", match["where"], int(match["line"]), match["row"] or "", match["what"], "correct this line")
