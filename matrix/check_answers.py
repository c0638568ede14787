"""Holds the rows against questions with known answers (matrix/evidence/answers.yaml) and against what was measured.

Each answer was written down apart from the rows, so a slip in one of the two shows. Only shipped rows are asked: a
layer may change them on purpose. A question about something that has no row any more is a finding too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from envforge.errors import DataError
from envforge.matrix.check import Book, number
from envforge.matrix.check_hardware import _rank as release_rank
from envforge.matrix.check_rules import boxes, values
from envforge.matrix.check_torch import matching
from envforge.matrix.meaning import IDENTITY, VIRTUAL, Row

ANSWERS = Path(__file__).parent / "evidence" / "answers.yaml"
ANSWERS_SCHEMA = Path(__file__).parent / "schema" / "answers.json"
WHERE = "matrix/evidence/answers.yaml"
SOURCES = Path(__file__).parent / "evidence" / "sources.json"
SOURCES_WHERE = "matrix/evidence/sources.json"
RECORD = "record it after reading it once more: python -m envforge.matrix.edges --write"
DO = f"one of the two is wrong: correct the row, or the answer in {WHERE} with the reason"


@lru_cache(maxsize=4)
def load_answers(path: Path = ANSWERS) -> dict[str, Any]:
    """The known answers.

    Raises:
        DataError: the file is malformed.
    """
    import json

    from envforge.matrix.strictyaml import load_checked, read_text

    schema = json.loads(ANSWERS_SCHEMA.read_text(encoding="utf-8"))
    data, _ = load_checked(read_text(path), WHERE, schema)
    return dict(data)


def known_answers(book: Book) -> None:
    """Ask everything."""
    if any(row.data.get("layer") for table in book.rows.values() for row in table):
        return
    try:
        answers = load_answers()
    except DataError as error:
        book.tell_file("answers", WHERE, error.cause, error.hint)
        return
    for ask in (_hardware, _gpus, _code, _libraries, _bases, _order, _models, _rules):
        ask(book, answers)


def _table(
    book: Book, what: str, rows: Iterable[tuple[str, str, Row, str]], known: Mapping[str, str], sep: str = ""
) -> None:
    """Compare (key, value, row, field) with the known values; keys that only one side has are told as well."""
    seen = set()
    for key, value, row, field in rows:
        seen.add(key)
        if key not in known:
            do = f"add it to {WHERE}, from a source of its own"
            book.tell("answers", row, f"{what} {key}: there is no known answer for it", do, field)
        elif known[key] != value:
            book.tell("answers", row, f"{what} {key}: known to be {known[key]!r}, here {value!r}", DO, field)
    for key in known:
        if key not in seen:
            book.tell_file("answers", WHERE, f"{what} {key}: the rows have none", DO)


def _hardware(book: Book, answers: Mapping[str, Any]) -> None:
    toolkits = []
    for cuda, rows in book.toolkits.items():
        ordered = sorted(rows, key=lambda row: release_rank(row.data["release"]))
        text = ", ".join(f"{row.data['release']} {row.data['driver'] or '-'}" for row in ordered)
        toolkits.append((cuda, text, rows[0], "driver"))
    _table(book, "the drivers of CUDA", toolkits, answers["toolkits"])
    floors = [(str(r.data["major"]), r.data["min_driver"], r, "min_driver") for r in book.rows["families"]]
    _table(book, "the driver floor of CUDA", floors, answers["families"])
    branches = []
    for row in book.rows["branches"]:
        life = [row.data[key] for key in ("type", "eol") if row.data.get(key)]
        branches.append((str(row.data["branch"]), " ".join([row.data["cuda"], *life]), row, "cuda"))
    _table(book, "driver branch", branches, answers["branches"])
    generations = []
    for row in book.rows["architectures"]:
        data = row.data
        text = f"{data['name']}; {data['first_cuda']} {data.get('last_cuda') or '-'} {data.get('last_branch') or '-'}"
        generations.append((data["sm"], text, row, "sm"))
    _table(book, "generation", generations, answers["architectures"])


def _gpus(book: Book, answers: Mapping[str, Any]) -> None:
    models = [
        (row.data["name"], " ".join([row.data["sm"], *map(str, row.data["memory_gib"])]), row, "sm")
        for row in book.rows["gpus"]
    ]
    _table(book, "GPU", models, answers["gpus"])
    names = [
        (name, row.data["name"], row, "aliases") for row in book.rows["gpus"] for name in row.data.get("aliases", ())
    ]
    _table(book, "GPU name", names, answers["other_names"])


def _code(book: Book, answers: Mapping[str, Any]) -> None:
    known = {
        f"{minor} {item['variant']} {item['arch']}": item["code"]
        for item in answers["code"]
        for minor in item["torch"].split()
    }
    rows = []
    for row in book.rows["torch"]:
        data = row.data
        code = " ".join([*data["sm"].split(), *(f"+{ptx}" for ptx in data.get("ptx", "").split())])
        rows.append((f"{data['torch']} {data['variant']} {data['arch']}", code, row, "sm"))
    _table(book, "GPU code of torch", rows, known)
    defaults = {
        f"{minor} {arch}": variant
        for arch, table in answers["defaults"].items()
        for variant, minors in table.items()
        for minor in minors.split()
    }
    plain = [
        (f"{row.data['torch']} {row.data['arch']}", row.data["variant"], row, "default")
        for row in book.rows["torch"]
        if row.data.get("default")
    ]
    _table(book, "the default build of torch", plain, defaults)


def _libraries(book: Book, answers: Mapping[str, Any]) -> None:
    for item in answers["libraries"]:
        package, version = item["release"].split()
        rows = [
            row
            for row in book.rows["native"]
            if row.data["package"] == package and version in matching(book.releases(package), row.data["versions"])
        ]
        known = {part.strip() for part in item["sets"].split(";") if part.strip()}
        here = {_libraries_of(row): row for row in rows}
        for text, row in here.items():
            if text not in known or row.data["match"] != item["match"]:
                what = f"libraries of {item['release']}: known to be {item['match']} {item['sets']!r}, here {text!r}"
                book.tell("answers", row, what, DO, "versions")
        if known - set(here) and book.releases(package):
            what = f"libraries of {item['release']}: no row has {sorted(known - set(here))[0]!r}"
            book.tell_file("answers", WHERE, what, DO)


def _libraries_of(row: Row) -> str:
    code = " ".join([*row.data.get("sm", "").split(), *(f"+{ptx}" for ptx in row.data.get("ptx", "").split())])
    return f"{row.data.get('cuda') or '-'}: {code or '?'}"


def _bases(book: Book, answers: Mapping[str, Any]) -> None:
    rows = book.rows["bases"]
    digests = [(row.data["ref"], row.data["digest"], row, "digest") for row in rows if row.data.get("digest")]
    _table(book, "digest of", digests, answers["digests"])
    texts = [(r.data["ref"], f"{r.data['os']} {r.data['glibc']} {r.data['pythons']}", r, "os") for r in rows]
    _table(book, "base image", texts, answers["bases"])
    systems = [(r.data["os"], f"{r.data['glibc']} {r.data['pythons']}", r, "glibc") for r in book.rows["systems"]]
    _table(book, "system", systems, answers["systems"])
    tags: dict[str, list[Row]] = {}
    for row in book.rows["cuda_images"]:
        tags.setdefault(row.data["os"], []).append(row)
    listed = []
    for os, of_os in tags.items():
        ordered = sorted((row.data["cuda"] for row in of_os), key=number, reverse=True)
        listed.append((os, " ".join(ordered), of_os[0], "cuda"))
    _table(book, "nvidia/cuda images for", listed, answers["cuda_tags"])


def _order(book: Book, answers: Mapping[str, Any]) -> None:
    ranked = sorted(book.packages.values(), key=lambda row: int(row.data["rank"]))
    wanted = answers["order"].split()
    for row, name in zip(ranked, wanted, strict=False):
        if row.data["name"] != name:
            book.tell("answers", row, f"{name} is known to decide at this place", DO, "rank")
            break
    if len(ranked) != len(wanted):
        book.tell_file("answers", WHERE, f"order names {len(wanted)} packages, the rows {len(ranked)}", DO)
    role_of = {name: role for role, names in answers["roles"].items() for name in names.split()}
    roles = [(name, row.data["role"], row, "role") for name, row in book.packages.items()]
    _table(book, "the role of", roles, role_of)


def _models(book: Book, answers: Mapping[str, Any]) -> None:
    for item in answers["models"]:
        row = next((r for r in book.rows["remote_models"] if r.data["family"] == item["family"]), None)
        if row is None:
            book.tell_file("answers", WHERE, f"model family {item['family']} has no row", DO)
            continue
        if not any(word in item["id"].lower() for word in row.data["match"]):
            book.tell("answers", row, f"{item['id']} is not found by match", DO, "match")
        if item["id"] == item["id"].lower() and item["id"] not in row.data["match"] and "/" not in item["id"]:
            book.tell("answers", row, f"the model type {item['id']} is not in match", DO, "match")
        for key, wanted in (("fits", True), ("breaks", False)):
            package, version = item[key].split()
            met = version in matching(book.releases(package), row.data["needs"].get(package, ""))
            if met != wanted and book.releases(package):
                book.tell("answers", row, f"{item['id']} {key} with {item[key]}", DO, "needs")


def _rules(book: Book, answers: Mapping[str, Any]) -> None:
    by_id = {row.data["id"]: row for row in book.rows["rules"]}
    asked = set()
    for item in answers["rules"]:
        row = by_id.get(item["rule"])
        asked.add(item["rule"])
        if row is None:
            book.tell_file("answers", WHERE, f"rule {item['rule']} has no row", DO)
            continue
        for key in ("level", "warning"):
            if row.data.get(key) != item.get(key):
                book.tell("answers", row, f"{key} is known to be {item.get(key)}", DO, key)
        if any(book.damaged.get(name) for name in row.data["when"]):
            continue
        for expected, sets in ((True, item["broken"]), (False, item.get("fine", ()))):
            for text in sets:
                if _asks_unknown(book, text):
                    book.tell("answers", row, f"{text}: a value in it is not known any more", DO, "when")
                elif _refuses(book, row, text) != expected:
                    verb = "refuse" if row.data["level"] == "hard" else "warn of"
                    what = f"it must {'' if expected else 'not '}{verb} {text}"
                    book.tell("answers", row, what, DO, "when")
    for id, row in by_id.items():
        if id not in asked and not _is_derived(row):
            do = f"add sets at its edges to {WHERE}: some that it refuses, some that it lets through"
            book.tell("answers", row, "no known answer asks for this rule", do, "id")


def _set(text: str) -> dict[str, str]:
    return dict(part.split(" ", 1) for part in text.split(", "))


def _asks_unknown(book: Book, text: str) -> bool:
    return any(value != "none" and value not in values(book, name) for name, value in _set(text).items())


def _refuses(book: Book, row: Row, text: str) -> bool:
    """Whether one rule forbids a set; "none" says that a package is not there."""
    given = _set(text)
    if any(all(given.get(name) in good for name, good in box.items()) for box in boxes(book, row)):
        return True
    for name, wanted in row.data.get("requires", {}).items():
        when = all(
            given.get(n) in matching(book.releases(n), t) for n, t in row.data["when"].items() if n not in VIRTUAL
        )
        if when and (given.get(name, "none") == "none" or given[name] not in matching(book.releases(name), wanted)):
            return True
    return False


def sources_of(book: Book) -> dict[str, list[str]]:
    """Source and confidence -> the shipped rows that rest on it."""
    found: dict[str, list[str]] = {}
    for section, rows in book.rows.items():
        for row in rows:
            text, confidence = row.data["source"]
            found.setdefault(f"{text} ({confidence})", []).append(f"{section} {_key(section, row)}")
    return {source: sorted(rows) for source, rows in sorted(found.items())}


def _key(section: str, row: Row) -> str:
    return " ".join(str(row.data.get(field, "")) for field in IDENTITY[section])


@lru_cache(maxsize=1)
def _recorded() -> dict[str, str]:
    """Row -> the source that it is recorded to rest on."""
    import json

    try:
        data = json.loads(SOURCES.read_text(encoding="utf-8"))
        return {row: source for source, rows in data.items() for row in rows}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise DataError(f"{SOURCES.name}: damaged ({error})", RECORD) from error


def attributed(book: Book) -> None:
    """No row changes what it rests on unseen: its source and confidence are recorded beside the evidence."""
    if any(row.data.get("layer") for table in book.rows.values() for row in table):
        return
    try:
        recorded = _recorded()
    except DataError as error:
        book.tell_file("source", SOURCES_WHERE, error.cause, error.hint)
        return
    seen = set()
    for section, rows in book.rows.items():
        for row in rows:
            name = f"{section} {_key(section, row)}"
            seen.add(name)
            text, confidence = row.data["source"]
            if name not in recorded:
                book.tell("source", row, f"{name} is a new row", RECORD, "source")
            elif recorded[name] != f"{text} ({confidence})":
                book.tell("source", row, f"recorded to rest on: {recorded[name]}", f"correct it, or {RECORD}", "source")
    for name in recorded:
        if name not in seen:
            book.tell_file("source", SOURCES_WHERE, f"{name} is recorded, but there is no such row", RECORD)


def _is_derived(row: Row) -> bool:
    return row.where.endswith("import-rules.yaml") and not row.data.get("layer")


def derived(book: Book) -> None:
    """The rules that follow from measured pairs are in import-rules.yaml, and no hard rule denies a working pair."""
    rows = [row for row in book.rows["rules"] if _is_derived(row)]
    if not rows:
        return
    try:
        matrices, wanted = _measured()
    except DataError as error:
        book.tell_file("derived", "matrix/evidence/import_matrices.yaml", error.cause, error.hint)
        return
    do = "write it again: python -m envforge.matrix.derive --write"
    have = {row.data["id"]: row for row in rows}
    for id, rule in wanted.items():
        row = have.get(id)
        if row is None:
            book.tell_file("derived", rows[0].where, f"rule {id} follows from the measured pairs but is missing", do)
            continue
        for key in ("level", "when", "needs", "source"):
            if row.data[key] != rule[key]:
                book.tell("derived", row, f"{key} does not follow from the measured pairs: {rule[key]}", do, key)
    for id, row in have.items():
        if id not in wanted:
            book.tell("derived", row, "does not follow from the measured pairs", do, "id")
    _cells(book, matrices)


def _cells(book: Book, matrices: Iterable[Any]) -> None:
    """Every measured pair: a failing one is refused by some hard rule, a working one by none."""
    hard = [(row, box) for row in book.rows["rules"] if row.data["level"] == "hard" for box in boxes(book, row)]
    for matrix in matrices:
        pair = {matrix.row, matrix.column}
        able = [(row, box) for row, box in hard if set(box) <= pair]
        for (first, second), error in matrix.cells.items():
            given = {matrix.row: first, matrix.column: second}
            if any(v not in values(book, n) for n, v in given.items()):
                continue  # measured, but not on the index any more
            by = [row for row, box in able if all(given[name] in good for name, good in box.items())]
            text = f"{matrix.column} {second} with {matrix.row} {first}"
            if error is None and by:
                book.tell("measured", by[0], f"{text} was measured to work ({matrix.what})", DO, "when")
            elif error is not None and not by:
                what = f"{text} was measured to fail ({error}), and no hard rule refuses it"
                book.tell_file("measured", "matrix/evidence/import_matrices.yaml", what, "derive the rules again")


@lru_cache(maxsize=1)
def _measured() -> tuple[tuple[Any, ...], dict[str, dict[str, Any]]]:
    """The measured matrices, and the rules that follow from them by id."""
    from envforge.matrix.derive import load_matrices, rules_file
    from envforge.matrix.strictyaml import load_strict

    matrices = load_matrices()
    data, _ = load_strict(rules_file(matrices), "derived rules")
    sources = {name: [row["text"], row["confidence"]] for name, row in data["sources"].items()}
    return matrices, {rule["id"]: {**rule, "source": sources[rule["source"]]} for rule in data["rules"]}


CHECKS = (known_answers, derived, attributed)
