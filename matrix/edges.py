"""The sets at the edges of a rule: the last that it refuses and the first that it lets through, for answers.yaml.

`python -m envforge.matrix.edges` prints the entries of rules that no known answer asks for; `--write` appends them.
Read them before: each line is a claim about releases, and one that is not true there is not true in the rule either.
`--write` also records what every row rests on (sources.json), so that a later change of a source is seen.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from envforge.files import write_atomic
from envforge.matrix.check import Book, read_book
from envforge.matrix.check_answers import ANSWERS, SOURCES, load_answers, sources_of
from envforge.matrix.check_rules import allowed, clauses, values
from envforge.matrix.check_torch import final
from envforge.matrix.meaning import VIRTUAL, Row

Set = dict[str, str]


def entry(book: Book, row: Row) -> str:
    """The entry of one rule as YAML text."""
    rule = row.data
    broken: list[str] = []
    fine: list[str] = []
    for field in ("needs", "requires"):
        for name, text in rule.get(field, {}).items():
            for refused, given in _sets(book, rule, name, text, pulled_in=field == "requires"):
                (broken if refused else fine).append(", ".join(f"{n} {v}" for n, v in given.items()))
    lines = [f"- rule: {rule['id']}", f"  level: {rule['level']}"]
    if rule.get("warning"):
        lines.append(f"  warning: {rule['warning']}")
    for key, sets in (("broken", broken), ("fine", fine)):
        lines += [f"  {key}:", *(f"  - {one}" for one in dict.fromkeys(sets))]
    return "\n".join(lines) + "\n"


def _sets(
    book: Book, rule: dict[str, dict[str, str]], name: str, text: str, *, pulled_in: bool
) -> Iterator[tuple[bool, Set]]:
    """(refused, set) around one `needs` or `requires`."""
    when = {other: edges(book, other, spec) for other, spec in rule["when"].items()}
    base = {other: inner[0] for other, (inner, _) in when.items() if other != name}
    good, bad = edges(book, name, text)
    if name in when:  # one package on both sides: the releases that meet `when` and not `needs`
        within = allowed(book, name, rule["when"][name]) - allowed(book, name, text)
        bad = [value for value in values(book, name) if value in within]
        bad = [bad[0], bad[-1]]
    worst = "none" if pulled_in else (bad or [values(book, name)[-1]])[0 if name not in when else -1]
    for value in [*(bad or [worst]), *(["none"] if pulled_in else [])]:
        yield True, {**base, name: value}
    for value in good:
        yield False, {**base, name: value}
    for other, (inner, outer) in when.items():
        if other != name:
            for value in inner:
                yield True, {**base, other: value, name: worst}
            for value in outer:
                yield False, {**base, other: value, name: worst}


def edges(book: Book, name: str, text: str) -> tuple[list[str], list[str]]:
    """The outermost values that a specifier allows, and those next to them that it does not."""
    known = list(values(book, name))
    if name not in VIRTUAL and not any(re.search(r"(a|b|rc)\d", version) for _, version in clauses(text)):
        usable = {release.version for release in final(book.releases(name))}
        known = [value for value in known if value in usable]
    good = allowed(book, name, text)
    inner, outer = [], []
    for at, value in enumerate(known):
        near = [known[i] in good for i in (at - 1, at + 1) if 0 <= i < len(known)]
        if value in good and (not all(near) or at in (0, len(known) - 1)):
            inner.append(value)
        elif value not in good and any(near):
            outer.append(value)
    return inner, outer


def missing() -> list[str]:
    """The entries of all rules that no known answer asks for."""
    book = read_book()
    asked = {item["rule"] for item in load_answers()["rules"]}
    rows = [row for row in book.rows["rules"] if not row.where.endswith("import-rules.yaml")]
    return [entry(book, row) for row in rows if row.data["id"] not in asked]


if __name__ == "__main__":
    import sys

    found = "".join(missing())
    sys.stdout.write(found)
    if "--write" in sys.argv[1:]:
        write_atomic(ANSWERS, ANSWERS.read_text(encoding="utf-8") + found)
        text = json.dumps(sources_of(read_book()), indent=1, ensure_ascii=False) + "\n"
        write_atomic(SOURCES, text)
