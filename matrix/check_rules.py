"""Checks of the rules: their versions exist, their sentence names them, each can fire and adds something.

A rule forbids boxes: one set of values per package or host fact. Two rules are compared by their boxes, so that it does
not matter which of two packages a row calls `when` and which `needs`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from envforge.matrix.check import Book, number
from envforge.matrix.check_torch import final, matching, minor, parsed
from envforge.matrix.meaning import VIRTUAL, Row

Box = dict[str, frozenset[str]]
_CLAUSE = re.compile(r"\s*(~=|===|==|!=|<=|>=|<|>)\s*([^,\s]+)\s*")


def clauses(text: str) -> list[tuple[str, str]]:
    """ ">=2.4,<3" -> [(">=", "2.4"), ("<", "3")]."""
    return [(m[1], m[2]) for part in text.split(",") if (m := _CLAUSE.fullmatch(part))]


def values(book: Book, name: str) -> tuple[str, ...]:
    """Every known value of a package or host fact, ascending."""
    found: tuple[str, ...] | None = book.memory.get(("values", name))
    if found is None:
        found = book.memory["values", name] = _values(book, name)
    return found


def _values(book: Book, name: str) -> tuple[str, ...]:
    if name == "variant":
        return book.variants
    if name == "cuda":
        return tuple(sorted({r.data["cuda"] for r in book.rows["torch"] if r.data.get("cuda")}, key=number))
    if name == "driver":
        drivers = {r.data["driver"] for r in book.rows["toolkits"] if r.data["driver"]}
        return tuple(sorted(drivers | {r.data["min_driver"] for r in book.rows["families"]}, key=number))
    if name == "sm":
        return tuple(sorted(book.sms, key=number))
    if name == "python":
        return tuple(sorted(book.placed.policy["pythons"].split(), key=number))
    if name == "glibc":
        have = {r.data["glibc"] for r in [*book.rows["systems"], *book.rows["bases"]]} | {
            "2.12",
            "2.17",
            "2.27",
            "2.28",
        }
        return tuple(sorted(have, key=number))
    return tuple(r.version for r in book.releases(name))


def allowed(book: Book, name: str, text: str) -> frozenset[str]:
    """The known values that a specifier allows."""
    found: frozenset[str] | None = book.memory.get((name, text))
    if found is None:
        found = book.memory[name, text] = _allowed(book, name, text)
    return found


def _allowed(book: Book, name: str, text: str) -> frozenset[str]:
    if name == "variant":
        return frozenset(part.strip() for part in text.split(",")) & frozenset(book.variants)
    if name in VIRTUAL:
        return frozenset(v for v in values(book, name) if all(_holds(v, op, want) for op, want in clauses(text)))
    return matching(book.releases(name), text)


def _holds(value: str, operator: str, want: str) -> bool:
    if want.endswith(".*"):
        prefix = number(want[:-2])
        same = number(value)[: len(prefix)] == prefix
        return same if operator == "==" else not same
    a, b = number(value), number(want)
    size = max(len(a), len(b))
    a, b = a + (0,) * (size - len(a)), b + (0,) * (size - len(b))
    return {">=": a >= b, "<=": a <= b, "==": a == b, "!=": a != b, ">": a > b, "<": a < b}.get(operator, False)


def _versions(book: Book) -> None:
    """Each bound of a rule, native row or model row cuts between known values, and exists on the side it names."""
    for section, fields in (("rules", ("when", "needs", "requires")), ("remote_models", ("needs",))):
        for row in book.rows[section]:
            for field in fields:
                for name, text in row.data.get(field, {}).items():
                    if name != "variant" and not (name not in VIRTUAL and not book.releases(name)):
                        _bounds(book, row, name, text, field, name)
    for row in book.rows["native"]:
        if book.releases(row.data["package"]):
            _bounds(book, row, row.data["package"], row.data["versions"], "versions")


def _bounds(book: Book, row: Row, name: str, text: str, *fields: str) -> None:
    known = values(book, name)
    virtual = name in VIRTUAL
    said = row.data.get("text", "")
    for operator, version in clauses(text):
        inside = allowed(book, name, f"{operator}{version}")
        if operator in ("==", "===") and not inside:
            book.tell("version", row, f"there is no {name} {version}", _nearest(name, version, known), *fields)
        elif operator in (">=", ">", "<=", "<", "~=") and not inside and "no release" not in said:
            what = f"{name} {operator}{version} is met by nothing known ({known[0]} to {known[-1]})"
            book.tell("version", row, what, 'correct it; or say in the text that there is "no release" yet', *fields)
        elif not virtual and 0 < len(inside) < len(known) and not _anchored(version.removesuffix(".*"), known):
            what = f"{version} is no release of {name} and begins none"
            book.tell("version", row, what, _nearest(name, version, known), *fields)
        elif name == "driver" and version not in known:
            book.tell("version", row, f"{version} is no driver of toolkits or families", "correct it", *fields)


def _anchored(version: str, known: tuple[str, ...]) -> bool:
    """The version is a release, or the beginning of some: 2.6 for 2.6.0."""
    if any(parsed(v) == parsed(version) for v in known):
        return True
    return any(
        v.startswith(f"{version}.") or re.match(re.escape(version) + r"(rc|a|b|\.post|post)\d", v) for v in known
    )


def _nearest(name: str, version: str, known: tuple[str, ...]) -> str:
    lower = [v for v in known if _less(v, version)]
    higher = [v for v in known if not _less(v, version)]
    near = " and ".join([*lower[-1:], *higher[:1]])
    return f"the nearest of {name} are {near}; correct it, or harvest the release: envforge matrix update {name}"


def _less(a: str, b: str) -> bool:
    return bool(parsed(a) < parsed(b.removesuffix(".*")))  # type: ignore[operator]


def _sentences(book: Book) -> None:
    """The sentence of a rule names the versions that its fields compare with: one of two slips stands out."""
    for row in book.rows["rules"]:
        for field in ("when", "needs", "requires"):
            for name, text in row.data.get(field, {}).items():
                for operator, version in clauses(text):
                    if not _said(book, name, operator, version, row.data["text"], field):
                        what = f"the text does not name {name} {operator}{version}"
                        book.tell("sentence", row, what, "correct the text or the version", field, name)
                if name == "variant" and not all(v.strip() in row.data["text"] for v in text.split(",")):
                    book.tell("sentence", row, f"the text does not name {text}", "correct one of them", field, name)


def _lower_major(operator: str, version: str) -> str:
    """The major that a sentence names for a bound at a major: 1 for <2, 2 for >=2; "none" for other bounds."""
    parts = number(version) if re.fullmatch(r"[\d.]+", version) else (0, 1)
    if any(parts[1:]) or operator not in ("<", ">="):
        return "none"
    return str(parts[0] - 1 if operator == "<" else parts[0])


def _said(book: Book, name: str, operator: str, version: str, text: str, field: str) -> bool:
    tokens = set(re.findall(r"\d+(?:\.\d+)*(?:\.?(?:post|rc)\d+)?", text))
    version = version.removesuffix(".*")
    known = values(book, name)
    inside = allowed(book, name, f"{operator}{version}")
    if field == "when" and len(inside) == len(known):
        return True  # "every release": the bound cuts nothing off
    if field == "requires" and len(inside) == len(known):
        return True
    if name == "sm" and version.replace(".", "") in tokens:
        return True
    if name not in VIRTUAL and re.search(
        rf"\b{re.escape(name)} {re.escape(_lower_major(operator, version))}(?![.\d])", text
    ):
        return True  # "numpy 1" for <2, "pydantic 2" for >=2
    if name in VIRTUAL:
        return any(number(t) == number(version) for t in tokens if re.fullmatch(r"[\d.]+", t))
    if any(parsed(t) == parsed(version) for t in tokens):
        return True
    if operator not in ("<", ">="):
        return False
    before = [v for v in known if _less(v, version) and not re.search(r"(a|b|rc)\d", v)]
    first = next((v for v in known if not _less(v, version)), "")
    if operator == "<" and before:  # "up to 0.14.0", "4.52-4.57"
        return any(_begins(t, before[-1]) and not _begins(t, first) for t in tokens if "." in t)
    return False


def _begins(token: str, version: str) -> bool:
    return version == token or version.startswith(f"{token}.")


def boxes(book: Book, row: Row) -> list[Box]:
    """What a rule forbids: for each `needs` one set of values per name, all of which together are refused."""
    known: list[Box] | None = book.memory.get(id(row))
    if known is None:
        known = book.memory[id(row)] = _boxes(book, row.data)
    return known


def _boxes(book: Book, row: Mapping[str, Any]) -> list[Box]:
    when = {name: allowed(book, name, text) for name, text in row["when"].items()}
    found = []
    for name, text in row.get("needs", {}).items():
        bad = frozenset(values(book, name)) - allowed(book, name, text)
        box = dict(when)
        box[name] = box[name] & bad if name in box else bad
        found.append(box)
    return found


def _fires(book: Book) -> None:
    """A rule can fire: its `when` is met by something, its `needs` leaves something out, and no other says it too."""
    all_boxes: list[tuple[Row, Box]] = []
    for row in book.rows["rules"]:
        data = row.data
        for name, text in data["when"].items():
            if not allowed(book, name, text) and values(book, name):
                what = f"{name} {text} is met by nothing known, so the rule never fires"
                book.tell("never", row, what, "correct it, or drop the rule", "when", name)
        _jointly(book, row)
        for field in ("needs", "requires"):
            for name, text in data.get(field, {}).items():
                known = frozenset(values(book, name))
                good = allowed(book, name, text)
                if known and field == "needs" and good == known:
                    what = f"every known {name} meets {text}, so the rule never refuses"
                    book.tell("never", row, what, "correct it, or drop the rule", field, name)
                if known and not good and "no release" not in data["text"]:
                    what = f"no known {name} meets {text}"
                    do = 'correct it; or say in the text that there is "no release" yet'
                    book.tell("never", row, what, do, field, name)
        if data["level"] == "warn" and not data.get("warning"):
            book.tell(
                "warning", row, "a rule of level warn has no warning id", "name one, for resolve to print", "level"
            )
        all_boxes += [(row, box) for box in boxes(book, row)]
    for row, box in all_boxes:
        for other, larger in all_boxes:
            if other is row or not _inside(box, larger):
                continue
            if row.data["level"] == "hard" and other.data["level"] == "warn":
                continue
            if _inside(larger, box) and (other.where, other.path) > (row.where, row.path):
                continue  # equal rules: told at the later one
            if (
                row.data["level"] == "warn"
                and other.data["level"] == "warn"
                and row.data.get("warning") != other.data.get("warning")
            ):
                continue
            what = f"rule {other.data['id']} ({other.where}) refuses all of this already"
            book.tell("shadow", row, what, "drop one of the two, or correct its versions", "when")


def _jointly(book: Book, row: Row) -> None:
    """A rule on torch and a variant (or CUDA) speaks of builds that exist."""
    when = row.data["when"]
    if "torch" in when and ("variant" in when or "cuda" in when):
        minors = {minor(v) for v in allowed(book, "torch", when["torch"])}
        variants = allowed(book, "variant", when["variant"]) if "variant" in when else None
        cudas = allowed(book, "cuda", when["cuda"]) if "cuda" in when else None
        if not any(
            r.data["torch"] in minors
            and (variants is None or r.data["variant"] in variants)
            and (cudas is None or r.data.get("cuda") in cudas)
            for r in book.rows["torch"]
        ):
            book.tell("never", row, "no torch build meets all of `when`", "correct it, or drop the rule", "when")


def _inside(box: Box, larger: Box) -> bool:
    """Everything in `box` is in `larger`, which therefore speaks of no other names."""
    return bool(all(box.values())) and all(name in box and box[name] <= wide for name, wide in larger.items())


def _metadata(book: Book) -> None:
    """No hard rule asks of a package what its own metadata forbids, for any release that the rule is about."""
    for row in book.rows["rules"]:
        data = row.data
        if data["level"] != "hard":
            continue
        for name, text in data["when"].items():
            if name in VIRTUAL:
                continue
            covered = matching(book.releases(name), text)
            for other, need in {**data.get("needs", {}), **data.get("requires", {})}.items():
                if other in VIRTUAL or other == name:
                    continue
                good = allowed(book, other, need)
                for release in final(book.releases(name)):
                    if release.version not in covered:
                        continue
                    own = declared(release.requires, other)
                    met = matching(book.releases(other), own) if own is not None else frozenset()
                    if met and good and not met & good:
                        what = f"{name} {release.version} itself declares {other} {own or 'of any version'}"
                        do = f"the rule wants {other} {need}: limit its versions to where both can be met"
                        book.tell("contradiction", row, what, do, "needs", other)
                        break


_DECLARED: dict[tuple[int, str], tuple[tuple[str, ...], str | None]] = {}


def declared(requires: tuple[str, ...], name: str) -> str | None:
    """The range on `name` that a release declares on every python and without extras; None where it does not."""
    key = (id(requires), name)  # releases share their requirements; the entry keeps them alive
    found = _DECLARED.get(key)
    if found is None:
        found = _DECLARED[key] = (requires, _declared(requires, name))
    return found[1]


def _declared(requires: tuple[str, ...], name: str) -> str | None:
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    for line in requires:
        if not line.lower().replace("_", "-").startswith(name) or ";" in line:
            continue
        try:
            found = Requirement(line)
        except InvalidRequirement:
            continue
        if canonicalize_name(found.name) == name:
            return str(found.specifier)
    return None


# What the text of a source must name for its confidence to be believed.
_EVIDENCE = {
    "verified-by-execution": r"execut|measured|install",
    "verified-from-metadata": r"METADATA|Requires-|metadata|wheel|file list|file name|sdist|directory",
    "from-issue-report": r"issue|PR |thread|report|discussion|forum",
}


def _sources(book: Book) -> None:
    """A source names what its confidence claims, and one of a release branch or a GPU page is about that row."""
    for section, table in book.rows.items():
        for row in table:
            text, confidence = row.data["source"]
            wanted = _EVIDENCE.get(confidence)
            if wanted and not re.search(wanted, text):
                what = f'"{text[:60]}" names nothing that is {confidence}'
                book.tell("source", row, what, "correct the confidence, or say in the source what was read", "source")
            if re.match(r"(executed|measured)\b", text) and confidence != "verified-by-execution":
                what = f'"{text[:60]}" was run, so it is verified-by-execution'
                book.tell("source", row, what, "correct the confidence", "source")
            if re.fullmatch(r"[\w.-]+(==\S+)? (METADATA|Requires-Dist|file list|wheel contents)", text) and (
                confidence != "verified-from-metadata"
            ):
                what = f'"{text[:60]}" is metadata, so it is verified-from-metadata'
                book.tell("source", row, what, "correct the confidence", "source")
            branch = re.search(r"pytorch/builder release/(\d+\.\d+) ", text)
            if section == "torch" and branch and branch[1] != row.data["torch"]:
                what = f"the build script of torch {branch[1]} says nothing about {row.data['torch']}"
                book.tell("source", row, what, "name the source of this row", "source")
            if section == "torch" and row.data["variant"] == "cpu" and "cpu" not in text.lower():
                book.tell("source", row, f'"{text[:60]}" is not about cpu builds', "name the source", "source")
            if section == "gpus" and "compute capability page" in text and "class" in text.partition(";")[0]:
                legacy = number(row.data["sm"]) < (7, 5)
                if legacy != ("legacy" in text):
                    what = f"capability {row.data['sm']} is on the {'legacy' if legacy else 'current'} page"
                    book.tell("source", row, what, "name the page that lists it", "source")


CHECKS = (_versions, _sentences, _fires, _metadata, _sources)
