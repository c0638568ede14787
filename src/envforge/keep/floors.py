"""Run-time floors of new transformers releases, read from inside their wheels and turned into rows.

The metadata of a release does not say what the code refuses. A row that already says it is left alone; a missing one is
written; where the code asks for less than the rows, a hand is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from envforge.files import write_atomic
from envforge.matrix.check import Finding
from envforge.matrix.load import DATA

if TYPE_CHECKING:
    from envforge.harvest import Floors
    from envforge.matrix.model import Level, Matrix, Rule
    from envforge.matrix.releases import Release

FILE = "transformers-floors.yaml"
MAX_WHEELS = 12  # of one update: after a long pause the newest decide
WHEELS = "wheel contents"  # what the sources of rows read this way say

#: package -> (level, how the floor shows). A hard one was seen to stop an import or the Trainer.
SUBJECTS: dict[str, tuple[Level, str]] = {
    "torch": ("hard", "with torch {below} transformers silently switches PyTorch off, and models fail to load"),
    "accelerate": ("hard", "the Trainer refuses accelerate {below} (checked at run time)"),
    "peft": (
        "warn",
        "loading adapters through transformers asks for peft {floor}; get_peft_model itself is not checked",
    ),
    "bitsandbytes": ("warn", "4-bit and 8-bit loading through transformers asks for bitsandbytes {floor}"),
    "torchao": ("warn", "torchao quantisation through transformers asks for torchao {floor}"),
    "kernels": ("warn", "kernels from the hub need the package kernels {floor}"),
}


@dataclass(frozen=True, slots=True)
class FloorRow:
    """A rule that the matrix lacks: `transformers` from `version` on checks `package` against `minimum` itself."""

    version: str
    package: str
    minimum: str

    @property
    def text(self) -> str:
        """The row's sentence, without the full stop."""
        shows = SUBJECTS[self.package][1].format(below=f"<{self.minimum}", floor=f">={self.minimum}")
        return f"transformers {self.version} and newer: {shows}"


def read_floors(floors: Floors) -> dict[str, str]:
    """The floors of one release by package, of those packages that rows are kept for."""
    found = {name: floors.minimums[name] for name in SUBJECTS if name in floors.minimums}
    found |= {"torch": floors.torch} if floors.torch else {}
    return found | ({"peft": floors.peft} if floors.peft else {})


def compare(
    all_floors: Sequence[Floors], matrix: Matrix, load: Callable[[str], tuple[Release, ...]]
) -> tuple[tuple[FloorRow, ...], tuple[Finding, ...]]:
    """What the rows lack, and where they ask for more than the code does.

    A floor is there when the newest release below it is refused or warned of beside this transformers, by any row.

    Args:
        all_floors: one per new release, ascending.
        matrix: the rows as they are. load: the releases of a package.
    """
    from packaging.version import Version

    from envforge.matrix.check_torch import final

    rows: list[FloorRow] = []
    findings = []
    for floors in all_floors:
        for package, stated in read_floors(floors).items():
            known = [r.version for r in final(load(package))]
            below = [one for one in known if Version(one) < Version(stated)]
            # a floor between two releases is the upper one: rows name releases that exist, or are still to come
            reached = next((one for one in known if Version(one) >= Version(stated)), stated)
            minimum = stated if Version(reached) == Version(stated) else reached
            stronger = [row for row in rows if row.package == package and Version(row.minimum) >= Version(minimum)]
            pair = {"transformers": floors.version, package: max(below, key=Version, default="0")}
            if below and not stronger and not _stands_against(matrix, pair):
                rows.append(FloorRow(floors.version, package, minimum))
            for low, rule in _own_floors(matrix, floors.version, package):
                if Version(low) > Version(minimum):
                    what = f"transformers {floors.version} checks {package} >={stated} only, the row says >={low}"
                    do = "end the row's range before this release"
                    findings.append(Finding("floor", f"matrix/data/{FILE}", 1, rule.id, what, do))
    return tuple(rows), tuple(findings)


def _stands_against(matrix: Matrix, pair: dict[str, str]) -> bool:
    """Some row about these two packages alone refuses the pair, or warns of it where a warning is all that is kept."""
    levels = {SUBJECTS[name][0] for name in pair if name in SUBJECTS} | {"hard"}
    for rule in matrix.rules:
        if rule.level in levels and rule.needs and {*rule.when, *rule.needs} <= set(pair):
            meets = all(_within(pair[name], spec) for name, spec in rule.when.items())
            if meets and not all(_within(pair[name], spec) for name, spec in rule.needs.items()):
                return True
    return False


def _own_floors(matrix: Matrix, version: str, package: str) -> list[tuple[str, Rule]]:
    """The lower bounds on `package` that rows read from wheels state for this transformers release."""
    from packaging.specifiers import SpecifierSet

    found = []
    for rule in matrix.rules:
        read = WHEELS in rule.source.text and rule.level == SUBJECTS[package][0] and set(rule.when) == {"transformers"}
        if read and package in rule.needs and _within(version, rule.when["transformers"]):
            found += [(s.version, rule) for s in SpecifierSet(rule.needs[package]) if s.operator == ">="]
    return found


def _within(version: str, spec: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(spec).contains(version, prereleases=True)


def write_rows(rows: Sequence[FloorRow], today: str, data: Path = DATA) -> Path | None:
    """Put new rules at the end of the file's rules, each with the wheel as its source; the whole file is replaced.

    Raises:
        DataError, UsageError: as `files.write_atomic`, or the file has not the two headings that it had.
    """
    from envforge.errors import DataError

    if not rows:
        return None
    path = data / FILE
    text = path.read_text(encoding="utf-8")
    if text.count("\nnotes:\n") != 1 or text.count("sources:\n") != 1:
        raise DataError(f"{path}: no one place for new rules", "keep its headings sources:, rules: and notes:")
    sources = "".join(
        f'  wheel-{version}: {{text: "transformers {version} wheel contents (dependency table, utils/import_utils, '
        f'integrations/peft), read {today}", confidence: verified-from-metadata}}\n'
        for version in dict.fromkeys(row.version for row in rows)
    )
    rules = "".join(_yaml(row) for row in rows)
    text = text.replace("sources:\n", f"sources:\n{sources}", 1).replace("\nnotes:\n", f"{rules}\nnotes:\n", 1)
    write_atomic(path, text)
    return path


def _yaml(row: FloorRow) -> str:
    level = SUBJECTS[row.package][0]
    warning = "  warning: transformers-table\n" if level == "warn" else ""
    return (
        f"- id: transformers-{row.package}-{row.version}\n  level: {level}\n"
        f'  when: {{transformers: ">={row.version}"}}\n  needs: {{{row.package}: ">={row.minimum}"}}\n'
        f"  text: >-\n    {row.text}.\n{warning}  source: wheel-{row.version}\n"
    )
