"""Strict YAML: what plain YAML would let through must be refused, with the place named."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from envforge.errors import DataError
from envforge.matrix.strictyaml import (
    FloatScalar,
    load_checked,
    load_strict,
    nearest,
    parse_strict,
    place_of,
    read_text,
    validate,
)

SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["cards"],
    "properties": {
        "rate": {"type": "number", "exclusiveMinimum": 0},
        "card": {"anyOf": [{"type": "string"}, {"type": "object", "required": ["sm"]}]},
        "cards": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["name", "sm"],
                "properties": {
                    "name": {"type": "string", "minLength": 1},
                    "sm": {"type": "string", "pattern": r"^\d+\.\d$", "description": "a capability such as 8.6"},
                    "arch": {"enum": ["x86_64", "aarch64", None]},
                    "memory": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
                },
            },
        },
    },
}


def faults_of(text: str, schema: dict | None = None) -> list[str]:
    with pytest.raises(DataError) as caught:
        load_checked(text, "f.yaml", schema) if schema else load_strict(text, "f.yaml")
    return caught.value.cause.splitlines()


def test_plain_data_and_the_line_of_every_path() -> None:
    data, lines = load_strict('a: 1\nb:\n  - x\n  - {c: "3.10", d: true}\ne: |\n  two\n  lines\n', "f.yaml")
    assert data == {"a": 1, "b": ["x", {"c": "3.10", "d": True}], "e": "two\nlines\n"}
    assert lines[()] == 1
    assert (lines[("a",)], lines[("b",)], lines[("b", 1)], lines[("b", 1, "c")], lines[("e",)]) == (1, 2, 4, 4, 5)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2026-11-30", "2026-11-30"),  # no date objects
        ("yes", "yes"),
        ("no", "no"),
        ("010", "010"),  # not octal
        ("0x1f", "0x1f"),
        ("1:30", "1:30"),  # not base 60
        ("1_000", "1_000"),
        ("~", None),
        ("", None),
        ("-7", -7),
        ("False", False),
        ("9" * 30, "9" * 30),
        ('"12"', "12"),
        ("'true'", "true"),
    ],
)
def test_scalars_mean_what_they_look_like(text: str, value: object) -> None:
    data, _ = load_strict(f"k: {text}\n", "f.yaml")
    assert data == {"k": value}
    assert type(data["k"]) is type(value)


@pytest.mark.parametrize("version", ["3.10", "12.0", "1e5", ".5", "2.", "-0.5", ".inf"])
def test_a_version_without_quotes_never_becomes_a_number(version: str) -> None:
    [fault] = faults_of(f"python: {version}\n")
    assert fault == f'f.yaml:1: {version} would be read as a number: write it in quotes, "{version}"'


def test_numbers_pass_where_the_schema_wants_them_and_only_there() -> None:
    data, _ = load_checked('cards: [{name: a, sm: "8.6"}]\nrate: 2.0e-4\n', "f.yaml", SCHEMA)
    assert data["rate"] == pytest.approx(2e-4)
    data, _ = load_checked('cards: [{name: a, sm: "8.6"}]\nrate: 1e-4\n', "f.yaml", SCHEMA)
    assert data["rate"] == pytest.approx(1e-4)
    [fault] = faults_of("cards:\n- name: a\n  sm: 8.60\n", SCHEMA)
    assert fault == 'f.yaml:3: cards row 1 field sm: 8.60 is a number, must be text: write it in quotes, "8.60"'
    [fault] = faults_of("cards: [{name: 3, sm: '8.6'}]\n", SCHEMA)
    assert fault.endswith('3 is a number, must be text: write it in quotes, "3"')


def test_a_float_survives_copying_with_its_text() -> None:
    again = pickle.loads(pickle.dumps(FloatScalar("3.10")))
    assert again == 3.1
    assert again.text == "3.10"


def test_every_structural_fault_is_reported_together() -> None:
    text = "a: 1\na: 2\nb: &x {c: 1}\nd: *x\ne: !!python/object:os.system f\n12: g\ntrue: h\n? [i]\n: j\nk: 1\n"
    assert faults_of(text) == [
        "f.yaml:2: key a appears twice, first on line 1",
        "f.yaml:3: anchor &x: anchors are not allowed",
        "f.yaml:4: alias *x: aliases are not allowed, write the value out",
        "f.yaml:5: tag !!python/object:os.system: tags are not allowed",
        'f.yaml:6: key 12 is not text: write it in quotes, "12"',
        'f.yaml:7: key true is not text: write it in quotes, "true"',
        "f.yaml:8: a list or mapping is used as a key; keys are text",
    ]


def test_an_alias_bomb_is_refused_before_it_grows() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    assert any("alias" in fault for fault in faults_of("\n".join(lines)))


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        ("a: [1, 2", 2, "not YAML"),
        ("a: 1\nb: c: d\n", 2, "not YAML"),
        ("a: 1\n---\nb: 2\n", 2, "second document"),
        ("a: 1\nb: \x07\n", 2, "not YAML"),
        ("a: 1\n\tb: 2\n", 2, "not YAML"),
        ("[" * 60 + "]" * 60, 1, "levels deep"),
        ("a: 1\nb: '\ud800'\n", 2, "Unicode"),
    ],
)
def test_text_that_is_not_usable_names_its_line(text: str, line: int, word: str) -> None:
    [fault] = faults_of(text)
    assert fault.startswith(f"f.yaml:{line}: ")
    assert word in fault


def test_too_large() -> None:
    with pytest.raises(DataError, match=r"f\.yaml:1: 101 bytes; at most 100"):
        load_strict("#" * 101, "f.yaml", max_bytes=100)


def test_an_empty_document_is_nothing() -> None:
    assert load_strict("# only a comment\n", "f.yaml") == (None, {(): 1})
    assert faults_of("", SCHEMA) == ["f.yaml:1: null is empty, must be a mapping"]


def test_all_faults_of_schema_and_structure_at_once_with_row_and_field() -> None:
    text = (
        "cards:\n"
        '- {name: A, sm: "86"}\n'
        '- {nmae: B, sm: "8.6"}\n'
        '- {name: C, name: D, sm: "8.6", arch: x86-64}\n'
        '- {name: E, sm: "8.6", memory: [1, x, 2, 2]}\n'
        "- text\n"
        "rate: 0\n"
        "extra: 1\n"
    )
    assert faults_of(text, SCHEMA) == [
        "f.yaml:4: key name appears twice, first on line 4",
        'f.yaml:2: cards row 1 field sm: "86" is not a capability such as 8.6',
        "f.yaml:3: cards row 2 field nmae: unknown field; did you mean name? (known: arch, memory, name, sm)",
        "f.yaml:3: cards row 2: field name is missing",
        'f.yaml:4: cards row 3 field arch: "x86-64" is not allowed; allowed: x86_64, aarch64, null; '
        "did you mean x86_64?",
        "f.yaml:5: cards row 4 field memory: holds the same value twice",
        'f.yaml:5: cards row 4 field memory[2]: "x" is text, must be a whole number',
        'f.yaml:6: cards row 5: "text" is text, must be a mapping',
        "f.yaml:7: field rate: 0 is out of range, must be > 0",
        "f.yaml:8: field extra: unknown field (known: card, cards, rate)",
    ]


def test_alternatives_name_the_kinds_that_are_allowed() -> None:
    [fault] = faults_of('cards: [{name: a, sm: "8.6"}]\ncard: 5\n', SCHEMA)
    assert fault == 'f.yaml:2: field card: 5 is not allowed: write it in quotes, "5", must be text or a mapping'


def test_a_long_value_is_not_printed_whole() -> None:
    [fault] = faults_of(f'cards: [{{name: a, sm: "{"9" * 500}"}}]\n', SCHEMA)
    assert len(fault) < 160


def test_validate_without_lines_still_names_the_place() -> None:
    assert validate({"cards": []}, {}, SCHEMA, "memory") == ["memory:1: field cards: is empty"]


def test_places_in_words() -> None:
    assert place_of(("gpus", 3, "sm")) == "gpus row 4 field sm"
    assert place_of(("verify", "steps")) == "field verify.steps"
    assert place_of(("rules", 0, "when", "torch")) == "rules row 1 field when.torch"
    assert place_of((2,)) == "row 3"
    assert place_of(()) == ""


def test_nearest_known_name() -> None:
    assert nearest("transfomers", ["torch", "transformers"]) == "; did you mean transformers?"
    assert nearest("qqq", ["torch"]) == ""


def test_parse_returns_faults_instead_of_raising() -> None:
    data, lines, faults = parse_strict("a: 1\na: 2\n", "f.yaml")
    assert (data, lines[("a",)], len(faults)) == ({"a": 1}, 1, 1)


def test_reading_files(tmp_path: Path) -> None:
    good = tmp_path / "bom.yaml"
    good.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read_text(good) == "a: 1\n"
    bad = tmp_path / "latin.yaml"
    bad.write_bytes(b"a: \xe9\n")
    with pytest.raises(DataError, match="not UTF-8"):
        read_text(bad)
    with pytest.raises(DataError, match="no such file"):
        read_text(tmp_path / "none.yaml")
    with pytest.raises(DataError, match="cannot be read"):
        read_text(tmp_path)
    with pytest.raises(DataError, match="larger than 3 bytes"):
        read_text(good, max_bytes=3)
