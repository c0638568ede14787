"""Strict YAML: for the matrix's own files, for `matrix.d` layers, and for what users write (image specs, fleets).

Plain YAML forgives too much for files that decide what gets installed: a key written twice silently wins, `3.10`
becomes the number 3.1, an alias can blow a small file up to gigabytes, a tag can ask for an object. All of that is
refused here, every fault is collected before anything is raised, and each says file, line, row and field.

Scalars follow the small YAML 1.2 core only: `true`/`false`, `null`/`~`, whole numbers, decimal numbers. Everything
else, including dates and `yes`/`no`, is text.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from envforge.errors import DataError

YamlPath = tuple[str | int, ...]  # ("gpus", 3, "sm"): keys and 0-based positions from the top of the document
Lines = Mapping[YamlPath, int]  # 1-based line of the key (in a mapping) or of the item (in a list)

MAX_BYTES = 2_000_000
MAX_DEPTH = 24

_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z|[-+]?\.(inf|Inf|INF)\Z|\.(nan|NaN|NAN)\Z")
_TYPES = {
    "string": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "a mapping",
    "null": "null",
}


class FloatScalar(float):
    """A decimal number that remembers how it was written: `3.10` stays recognisable as a version without quotes."""

    text: str

    def __new__(cls, text: str) -> FloatScalar:
        number = super().__new__(cls, text.replace(".inf", "inf").replace(".nan", "nan").lower().strip())
        number.text = text
        return number

    def __reduce__(self) -> tuple[type[FloatScalar], tuple[str]]:
        return FloatScalar, (self.text,)


def read_text(path: Path, *, max_bytes: int = MAX_BYTES) -> str:
    """The text of a file.

    Raises:
        DataError: missing, unreadable, a folder, larger than `max_bytes`, or not UTF-8.
    """
    try:
        if path.stat().st_size > max_bytes:
            raise DataError(f"{path}: larger than {max_bytes} bytes", "give a smaller file")
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text (byte {error.start})", "save the file as UTF-8") from error
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def load_strict(
    text: str, where: str, *, max_bytes: int = MAX_BYTES, floats: bool = False
) -> tuple[Any, dict[YamlPath, int]]:
    """Parse one YAML document into plain data and the line of every path in it.

    Args:
        text: the document.
        where: name used in messages, usually the file's.
        max_bytes: refuse larger documents.
        floats: let decimal numbers through (as `FloatScalar`); without it each is refused with "write it in quotes".

    Returns:
        (data, lines): dict, list, str, int, bool, None; `lines[path]` is 1-based, `lines[()]` the first line.

    Raises:
        DataError: every fault found, one per line of `cause`: duplicate keys, keys that are not text, aliases, anchors,
            tags, several documents, too deep, too large, not YAML.
    """
    data, lines, faults = parse_strict(text, where, max_bytes=max_bytes, floats=floats)
    raise_faults(faults)
    return data, lines


def load_checked(
    text: str, where: str, schema: Mapping[str, Any], *, max_bytes: int = MAX_BYTES
) -> tuple[Any, dict[YamlPath, int]]:
    """`load_strict` and `validate` in one: all faults of both together.

    Raises:
        DataError: see `load_strict` and `validate`.
    """
    data, lines, faults = parse_strict(text, where, max_bytes=max_bytes, floats=True)
    if lines:  # empty when the text is no YAML at all: then there is nothing to hold against the schema
        faults += validate(data, lines, schema, where)
    raise_faults(faults)
    return data, lines


def raise_faults(faults: Sequence[str], hint: str = "correct the lines named above") -> None:
    """Raise one DataError that lists all of `faults` (in order, duplicates once); nothing when there are none."""
    if faults:
        raise DataError("\n".join(dict.fromkeys(faults)), hint)


def parse_strict(
    text: str, where: str, *, max_bytes: int = MAX_BYTES, floats: bool = False
) -> tuple[Any, dict[YamlPath, int], list[str]]:
    """`load_strict` that returns the faults instead of raising them; `lines` is empty when the text is not YAML."""
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        return None, {}, [f"{where}:{text.count(chr(10), 0, error.start) + 1}: not valid Unicode text"]
    if size > max_bytes:
        return None, {}, [f"{where}:1: {size} bytes; at most {max_bytes} are read"]
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    builder = _Builder(where, floats)
    try:
        for event in yaml.parse(text, Loader=loader):
            if not builder.take(event):
                return None, {}, builder.faults
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        return None, {}, [*builder.faults, f"{where}:{line}: not YAML: {error.problem or error.context}"]
    except yaml.YAMLError as error:
        position = getattr(error, "position", 0) or 0
        line = text.count("\n", 0, position) + 1
        return None, {}, [*builder.faults, f"{where}:{line}: not YAML: {getattr(error, 'reason', error)}"]
    for mapping, key in builder.refused:
        mapping.pop(key, None)
    return builder.data, builder.lines, builder.faults


class _Builder:
    """Builds plain data from parser events, so that nothing forbidden is ever expanded or constructed."""

    def __init__(self, where: str, floats: bool) -> None:
        self.where = where
        self.floats = floats
        self.faults: list[str] = []
        self.lines: dict[YamlPath, int] = {(): 1}
        self.data: Any = None
        self.documents = 0
        self.stack: list[tuple[YamlPath, Any]] = []  # open collections
        self.keys: list[str | None] = []  # pending key of each open collection; None = next scalar is a key
        self.refused: list[tuple[dict[str, Any], str]] = []  # entries that were reported and must not be reported again

    def fault(self, event: Any, text: str) -> None:
        self.faults.append(f"{self.where}:{event.start_mark.line + 1}: {text}")

    def take(self, event: Any) -> bool:
        """One event; False when parsing must stop."""
        kind = type(event).__name__
        if kind == "AliasEvent":
            self.fault(event, f"alias *{event.anchor}: aliases are not allowed, write the value out")
            self.put(event, None)
        elif kind == "ScalarEvent":
            self.marks(event)
            self.scalar(event)
        elif kind in ("MappingStartEvent", "SequenceStartEvent"):
            self.marks(event)
            if len(self.stack) >= MAX_DEPTH:
                self.fault(event, f"nested more than {MAX_DEPTH} levels deep")
                return False
            self.open(event, {} if kind == "MappingStartEvent" else [])
        elif kind in ("MappingEndEvent", "SequenceEndEvent"):
            self.stack.pop()
            self.keys.pop()
        elif kind == "DocumentStartEvent":
            self.documents += 1
            if self.documents > 1:
                self.fault(event, "a second document (---) begins here; one per file is allowed")
                return False
        return True

    def marks(self, event: Any) -> None:
        if event.anchor is not None:
            self.fault(event, f"anchor &{event.anchor}: anchors are not allowed")
        if event.tag is not None:
            self.fault(event, f"tag {event.tag.replace('tag:yaml.org,2002:', '!!')}: tags are not allowed")

    def in_key(self) -> bool:
        return bool(self.stack) and isinstance(self.stack[-1][1], dict) and self.keys[-1] is None

    def scalar(self, event: Any) -> None:
        value = event.value if event.style else _plain(event.value)  # style is set for quoted and block scalars
        if not self.in_key():
            if isinstance(value, FloatScalar) and not self.floats:
                self.fault(event, f'{value.text} would be read as a number: write it in quotes, "{value.text}"')
            self.put(event, value)
            return
        path, mapping = self.stack[-1]
        if not isinstance(value, str):
            self.fault(event, f'key {event.value or "(empty)"} is not text: write it in quotes, "{event.value}"')
            value = event.value
            self.refused.append((mapping, value))
        if value in mapping:
            here = (*path, value)
            first = self.lines[here]
            self.fault(event, f"key {value} appears twice, first on line {first}")
            value = f"{value} (again, line {event.start_mark.line + 1})"
            self.refused.append((mapping, value))
        mapping[value] = None
        here = (*path, value)
        self.lines[here] = event.start_mark.line + 1
        self.keys[-1] = value

    def put(self, event: Any, value: Any) -> YamlPath:
        """Store a value where the document stands -> its path."""
        if not self.stack:
            self.data = value
            self.lines[()] = event.start_mark.line + 1
            return ()
        path, parent = self.stack[-1]
        if isinstance(parent, list):
            here = (*path, len(parent))
            self.lines[here] = event.start_mark.line + 1
            parent.append(value)
            return here
        key = self.keys[-1]
        if key is None:
            self.fault(event, "a list or mapping is used as a key; keys are text")
            key = f"(key, line {event.start_mark.line + 1})"
            here = (*path, key)
            self.lines[here] = event.start_mark.line + 1
            self.refused.append((parent, key))
            # The value that follows belongs to this key; what stood in its place is only parsed.
            parent[key] = None
            self.keys[-1] = key
            return here
        parent[key] = value
        self.keys[-1] = None
        return (*path, key)

    def open(self, event: Any, value: Any) -> None:
        path = self.put(event, value)
        self.stack.append((path, value))
        self.keys.append(None)


def _plain(text: str) -> Any:
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in ("true", "True", "TRUE"):
        return True
    if text in ("false", "False", "FALSE"):
        return False
    if _INT.match(text) and len(text) < 20:
        return int(text)
    if _FLOAT.match(text) and ("." in text or "e" in text or "E" in text):
        return FloatScalar(text)
    return text


def validate(data: Any, lines: Lines, schema: Mapping[str, Any], where: str) -> list[str]:
    """Hold data against a JSON schema (draft 2020-12).

    A schema may carry `description` on a field: it is used as "must be DESCRIPTION" where a pattern fails.

    Returns:
        Every fault as "FILE:LINE: SECTION row N field X: what is wrong, what is allowed", in line order.
    """
    from jsonschema import Draft202012Validator

    validator = Draft202012Validator(schema)
    found: list[tuple[int, str]] = []
    for error in validator.iter_errors(data):
        for path, text in _tell(error):
            line = line_of(lines, path)
            place = place_of(path)
            found.append((line, f"{where}:{line}: {place + ': ' if place else ''}{text}"))
    return list(dict.fromkeys(text for _, text in sorted(found)))


def line_of(lines: Lines, path: Sequence[str | int]) -> int:
    """The line of a path, or of the nearest thing around it that stands in the file."""
    where = tuple(path)
    while where and where not in lines:
        where = where[:-1]
    return lines.get(where, 1)


def place_of(path: Sequence[str | int]) -> str:
    """A path in words: ("gpus", 3, "sm") is "gpus row 4 field sm", ("verify", "steps") is "field verify.steps"."""
    words: list[str] = []
    fields: list[str] = []
    rows = False
    for step in path:
        if isinstance(step, int):
            words.append(
                f"{'.'.join(fields)} row {step + 1}".strip() if not rows else f"{'.'.join(fields)}[{step + 1}]"
            )
            rows, fields = True, []
        else:
            fields.append(step)
    if fields:
        words.append("field " + ".".join(fields))
    elif rows and len(words) > 1:
        words[-1] = "field " + words[-1]
    return " ".join(words)


def nearest(name: str, known: Sequence[str]) -> str:
    """ "; did you mean X?" for the known name most like `name`, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _tell(error: Any) -> Iterator[tuple[YamlPath, str]]:
    """(path, sentence) for one jsonschema error."""
    from jsonschema.exceptions import best_match

    path: YamlPath = tuple(error.absolute_path)
    kind, wanted, value = error.validator, error.validator_value, error.instance
    if kind in ("anyOf", "oneOf"):
        inner = [e for e in error.context or () if len(e.path)]  # a branch that fits the kind of value
        best = best_match(iter(inner)) if inner else None
        if best is not None:
            yield from _tell(best)
            return
        types = [t for branch in wanted for t in _as_list(branch.get("type", []))]
        allowed = " or ".join(_TYPES.get(t, t) for t in dict.fromkeys(types))
        yield (
            path,
            f"{_show(value)} is not allowed{_hint_quote(value, types)}" + (f", must be {allowed}" if allowed else ""),
        )
    elif kind in ("additionalProperties", "unevaluatedProperties"):
        known = sorted(error.schema.get("properties", {}))
        patterns = error.schema.get("patternProperties", {})
        for key in value:
            if key not in known and not any(re.search(p, key) for p in patterns):
                yield (*path, key), f"unknown field{nearest(key, known)} (known: {', '.join(known)})"
    elif kind == "required":
        missing = [key for key in wanted if key not in value]
        # jsonschema reports each missing key on its own; the message names it first, in quotes.
        name = next((key for key in missing if error.message.startswith(repr(key))), missing[0])
        yield path, f"field {name} is missing"
    elif kind == "type":
        types = _as_list(wanted)
        allowed = " or ".join(_TYPES.get(t, t) for t in types)
        yield path, f"{_show(value)} is {_kind(value)}, must be {allowed}{_hint_quote(value, types)}"
    elif kind == "enum":
        names = ["null" if v is None else str(v) for v in wanted]
        yield path, f"{_show(value)} is not allowed; allowed: {', '.join(names)}{nearest(str(value), names)}"
    elif kind == "const":
        yield path, f"{_show(value)} is not allowed; must be {wanted}"
    elif kind == "propertyNames":
        yield (*path, str(value)), f"{_show(value)} is not allowed as a name"
    elif kind in ("pattern", "format"):
        yield path, f"{_show(value)} is not {error.schema.get('description') or f'of the form {wanted}'}"
    elif kind in ("minItems", "minLength", "minProperties"):
        yield path, "is empty" if wanted == 1 else f"needs at least {wanted} entries or characters"
    elif kind in ("maxItems", "maxLength", "maxProperties"):
        yield path, f"is longer than {wanted}"
    elif kind in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        sign = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}[kind]
        yield path, f"{_show(value)} is out of range, must be {sign} {wanted}"
    elif kind == "uniqueItems":
        yield path, "holds the same value twice"
    else:
        yield path, str(error.message)[:200]


def _as_list(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    for python, name in ((int, "a number"), (float, "a number"), (str, "text"), (list, "a list"), (dict, "a mapping")):
        if isinstance(value, python):
            return name
    return "empty"


def _show(value: Any) -> str:
    if isinstance(value, FloatScalar):
        return value.text
    text = (
        {True: "true", False: "false", None: "null"}.get(value)
        if value is None or value is True or value is False
        else None
    )
    text = text or (f'"{value}"' if isinstance(value, str) else str(value))
    return text if len(text) <= 60 else text[:57] + "..."


def _hint_quote(value: Any, types: Sequence[str]) -> str:
    """Numbers and words of YAML where text is wanted were meant as text: say how to write it."""
    if "string" not in types or not isinstance(value, (int, float)):
        return ""
    return f': write it in quotes, "{value.text if isinstance(value, FloatScalar) else _show(value)}"'
