"""Reads the rules of matrix/data/diagnoses.yaml: strict when the file is new, almost free when it was seen before.

A cold load parses, validates and derives each pattern's literal; the result is kept in the user's cache folder under
the hash of everything it came from. A missing, damaged or unwritable cache only costs time.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from envforge import matrix
from envforge.cached import Cache, cache_folder
from envforge.diagnose.literals import MIN_LENGTH, required_literal
from envforge.diagnose.model import Adjust, Case, Pattern, Rule, Rules
from envforge.errors import DataError

MATRIX = Path(matrix.__file__).parent
DATA = MATRIX / "data" / "diagnoses.yaml"
SCHEMA = MATRIX / "schema" / "diagnoses.json"
_HERE = Path(__file__).parent
KEEP = 4  # parsed files that are left lying


@lru_cache(maxsize=4)
def load_rules(path: Path = DATA, *, cache: Path | None = None, use_cache: bool = True) -> Rules:
    """The rules of a file.

    Args:
        path: the YAML file.
        cache: folder for the parsed form; the user's cache folder unless given.
        use_cache: False parses the file whatever is cached.

    Raises:
        DataError: the file is missing or faulty; every fault with its line and field.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path.name}: cannot be read ({error})") from error
    kept = Cache((cache or cache_folder("diagnoses")) if use_cache else None, KEEP)
    name = f"{_key(text)}.json"
    rows = kept.read_json(name)
    if not isinstance(rows, dict) or not rows.keys() >= {"rules", "signals", "next"}:
        rows = _parse(text, path.name)
        kept.write_json(name, rows)
    return _build(rows)


def _key(text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for part in (SCHEMA, _HERE / "rules.py", _HERE / "literals.py"):
        digest.update(part.read_bytes())
    return digest.hexdigest()[:32]


def _parse(text: str, where: str) -> dict[str, Any]:
    from envforge.matrix.strictyaml import load_checked, raise_faults

    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    data, lines = load_checked(text, where, schema)
    faults: list[str] = []
    ids = [rule["id"] for rule in data["rules"]]
    conditions = _known_conditions(data["signals"])

    def fault(path: tuple[str | int, ...], message: str) -> None:
        faults.append(f"{where}:{lines.get(path, 1)}: {message}")

    for name, patterns in data["signals"].items():
        for i, raw in enumerate(patterns):
            patterns[i] = _pattern(raw, ("signals", name, i), fault)
    for i, rule in enumerate(data["rules"]):
        if ids.index(rule["id"]) != i:
            fault(("rules", i), f"rule {rule['id']} appears twice")
        for field in ("consequence_of", "hidden_by"):
            for other in rule.get(field, []):
                if other != "*" and other not in ids:
                    fault(("rules", i, field), f"rule {rule['id']}: {field} names {other}, which is no rule")
        for j, case in enumerate(rule["cases"]):
            _case(case, ("rules", i, "cases", j), rule["id"], conditions, fault)
    raise_faults(faults)
    return {"rules": data["rules"], "signals": data["signals"], "next": data["next"]}


def _case(case: dict[str, Any], path: tuple[str | int, ...], name: str, conditions: set[str], fault: Any) -> None:
    from envforge.diagnose.checks import CHECKS
    from envforge.diagnose.trackers import TRACKERS

    case["patterns"] = [_pattern(raw, (*path, "patterns", k), fault) for k, raw in enumerate(case.get("patterns", []))]
    if bool(case["patterns"]) == bool(case.get("tracker")):
        fault(path, f"rule {name}: a case has either patterns or a tracker")
    for key, known in (("check", CHECKS), ("tracker", TRACKERS)):
        if case.get(key) and case[key] not in known:
            fault((*path, key), f"rule {name}: unknown {key} {case[key]} (known: {', '.join(sorted(known))})")
    for term in (*case.get("if", []), *(t for row in case.get("adjust", []) for t in row["if"])):
        for word in term.split("|"):
            if word.lstrip("!") not in conditions:
                fault(path, f"rule {name}: unknown condition {word}")


def _pattern(raw: Any, path: tuple[str | int, ...], fault: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"re": raw} if isinstance(raw, str) else dict(raw)
    for key in ("re", "near", "unless"):
        if row.get(key):
            try:
                re.compile(row[key], re.IGNORECASE)
            except re.error as error:
                fault(path, f"{key} {row[key]!r} is not a regular expression: {error}")
    literal = str(row.pop("text", "")).lower() or required_literal(row["re"])
    if not literal or not literal.isascii():
        fault(path, f"{row['re']!r} has no plain text of {MIN_LENGTH} or more characters outside groups: split it")
    row["literal"] = literal or ""
    return row


def _known_conditions(signals: Iterable[str]) -> set[str]:
    from envforge.diagnose.facts import PREDICATES
    from envforge.diagnose.trackers import SIGNAL_TRACKERS

    return {*signals, *PREDICATES, *SIGNAL_TRACKERS}


def _build(rows: Mapping[str, Any]) -> Rules:
    return Rules(
        tuple(_rule(row) for row in rows["rules"]),
        {name: _patterns(patterns) for name, patterns in rows["signals"].items()},
        tuple(rows["next"]),
    )


def _patterns(rows: Sequence[Mapping[str, Any]]) -> tuple[Pattern, ...]:
    return tuple(Pattern(**row) for row in rows)


def _rule(row: Mapping[str, Any]) -> Rule:
    return Rule(
        id=row["id"],
        title=row["title"],
        owner=row["owner"],
        retryable=row["retryable"],
        severity=row.get("severity", "fatal"),
        consequence_of=tuple(row.get("consequence_of", ())),
        hidden_by=tuple(row.get("hidden_by", ())),
        source=row["source"],
        cases=tuple(
            Case(
                patterns=_patterns(case["patterns"]),
                tracker=case.get("tracker"),
                check=case.get("check"),
                conditions=tuple(case.get("if", ())),
                confidence=case["confidence"],
                adjust=tuple(Adjust(a["to"], tuple(a["if"])) for a in case.get("adjust", ())),
                min_count=case.get("min_count", 1),
                per=case.get("per"),
                cause=_texts(case["cause"]),
                fixes=tuple(_texts(step) for step in case.get("fixes", row.get("fixes", ()))),
                next=_texts(case.get("next", row.get("next", ()))),
            )
            for case in row["cases"]
        ),
    )


def _texts(value: str | Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)
