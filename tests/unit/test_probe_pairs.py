"""The probing tool's own logic, and what was probed against the rules. Nothing is installed here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from envforge.errors import DataError
from envforge.matrix.load import load_matrix
from envforge.matrix.model import Rule, Source

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "benchmarks" / "first_try")]

import first_try  # noqa: E402
import probe_pairs  # noqa: E402
import tiny_check  # noqa: E402

SOURCE = Source("a test", "inferred")


def rule(id: str = "r", **fields: Any) -> Rule:
    """A hard rule of its `when`, `needs` and `requires`."""
    filled = {"when": {}, "needs": {}, "requires": {}, **fields}
    return Rule(id=id, level="hard", text="", warning=None, source=SOURCE, **filled)


def record(works: bool, **more: Any) -> dict[str, Any]:
    row = {"probe": "a==1 | trainer a", "pins": {"a": "1.0"}, "works": works, "environment": "e", "date": "2026-11-30"}
    return {**row, **({} if works else {"error": "ImportError: no"}), **more}


def test_a_line_is_read_with_its_pair_its_rest_and_its_date() -> None:
    probe = probe_pairs.parse("import datasets trl:SFTTrainer | trl==0.7.11 datasets==2.14.7 scipy numpy<2 @2024-02-01")
    assert probe.step == "import" and probe.imports == ("datasets", "trl:SFTTrainer") and probe.torch
    assert probe.pins == (("datasets", "2.14.7"), ("trl", "0.7.11"))
    assert probe.also == ("numpy<2", "scipy") and probe.date == "2024-02-01"
    assert probe.key == "datasets==2.14.7 trl==0.7.11 numpy<2 scipy @2024-02-01 | import datasets trl:SFTTrainer"
    assert not probe_pairs.parse("notorch import numpy | numpy==1.26.4").torch


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("import numpy", "STEP"),
        ("prove | numpy==1", "STEP"),
        ("import numpy | numpy", "pins nothing"),
        ("import numpy | numpy==1.0 numpy==2.0", "twice"),
        ("import numpy | numpy==x", "name==version"),
        ("import numpy | numpy==1.0 @yesterday", "yesterday"),
    ],
)
def test_a_line_that_is_none_is_told(line: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        probe_pairs.parse(line)


def test_every_line_of_the_list_is_read_and_none_stands_twice() -> None:
    lines = [x for x in probe_pairs.LINES.read_text(encoding="utf-8").splitlines() if x and not x.startswith("#")]
    keys = [probe_pairs.parse(line).key for line in lines]
    assert len(keys) >= 30 and len(set(keys)) == len(keys)


def test_records_are_sorted_and_read_back(tmp_path: Path) -> None:
    folder = tmp_path / "matrix" / "evidence"
    folder.mkdir(parents=True)
    (tmp_path / "matrix" / "schema").symlink_to(ROOT / "matrix" / "schema")
    path = folder / "probes.yaml"
    second = record(False, probe="b==1 | import b", error='ImportError: "x": y', metadata=["b requires c>2"])
    probe_pairs.add(second, path)
    probe_pairs.add(record(True), path)
    assert probe_pairs.read(path) == [record(True), second]
    probe_pairs.add({**second, "works": True, "error": "still"}, path)
    with pytest.raises(DataError):  # an error beside "works" is a fault of the file
        probe_pairs.read(path)


def test_why_a_row_needs_no_rule_outlives_a_new_run(tmp_path: Path) -> None:
    folder = tmp_path / "matrix" / "evidence"
    folder.mkdir(parents=True)
    (tmp_path / "matrix" / "schema").symlink_to(ROOT / "matrix" / "schema")
    path = folder / "probes.yaml"
    path.write_text(probe_pairs.text_of([record(False, unruled="needs a GPU")]), encoding="utf-8")
    probe_pairs.add(record(False, error="ImportError: another"), path)
    assert probe_pairs.read(path) == [record(False, error="ImportError: another", unruled="needs a GPU")]


def test_contradictions_are_told_on_both_sides() -> None:
    rules = [rule(when={"a": "<2"}, needs={"b": ">=3"})]
    assert probe_pairs.contradictions([record(True, **{"with": {"b": "3.1"}})], rules) == []
    assert "r refuses it" in probe_pairs.contradictions([record(True, **{"with": {"b": "2"}})], rules)[0]
    imported = {"probe": "a==1 | import a", "with": {"b": "2"}}
    assert probe_pairs.contradictions([record(True, **imported)], rules) == []  # the rule may speak of a later step
    pinned = {"probe": "a==1 b==2 | import a", "pins": {"a": "1.0", "b": "2"}}
    assert "r refuses it" in probe_pairs.contradictions([record(True, **pinned)], rules)[0]
    assert "nothing refuses" in probe_pairs.contradictions([record(False, **{"with": {"b": "3"}})], rules)[0]
    assert probe_pairs.contradictions([record(False, metadata=["a requires b>9"])], rules) == []
    assert probe_pairs.contradictions([record(False, unruled="needs a GPU")], rules) == []


def test_a_missing_or_wrong_required_package_counts_as_refused() -> None:
    rules = [rule(when={"a": "<2"}, requires={"scipy": ">=1.0"})]
    assert probe_pairs.refusing(record(False), rules) == ["r"]
    assert probe_pairs.refusing(record(False, **{"with": {"scipy": "0.9"}}), rules) == ["r"]
    assert probe_pairs.refusing(record(True, **{"with": {"scipy": "1.2"}}), rules) == []


def test_what_was_probed_agrees_with_the_rules() -> None:
    records = probe_pairs.read()
    assert len(records) >= 30
    assert any(row["works"] for row in records) and any(not row["works"] for row in records)
    assert probe_pairs.contradictions(records, load_matrix().rules) == []
    text = probe_pairs.EVIDENCE.read_text(encoding="utf-8")
    assert text == probe_pairs.text_of(records), "written by the tool, sorted"


def test_an_error_is_one_line_without_paths() -> None:
    lazy = RuntimeError(
        "Failed to import transformers.trainer because of the following error (look up to see its traceback):\n"
        "cannot import name 'x' from 'y' (/tmp/env/lib/python3.11/site-packages/y/__init__.py)"
    )
    assert tiny_check.words(lazy) == "RuntimeError: cannot import name 'x' from 'y' __init__.py"
    assert tiny_check.words(KeyError()) == "KeyError"


def test_the_check_tells_failure_from_success() -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, tiny_check.__file__, *words], capture_output=True, text=True, check=False
        )

    good, bad = run("import", "json:dumps"), run("import", "json:nothing_there")
    assert good.returncode == 0 and '"ok": true' in good.stdout
    assert bad.returncode == 1 and "AttributeError" in bad.stdout and "nothing_there" in bad.stdout


def test_a_refusal_counts_only_where_it_names_the_pin() -> None:
    words = ["bitsandbytes==0.38.1", "transformers"]
    assert first_try.names_pin(words, "you ask for bitsandbytes==0.38.1, which needs torch <2")
    assert first_try.names_pin(words, "bitsandbytes 0.38.1 needs torch <2")
    assert not first_try.names_pin(words, "bitsandbytes 0.38.10 needs torch <2")
    assert not first_try.names_pin(words, "transformers 5.1 needs torch >=2.4")


def test_the_table_counts_each_side() -> None:
    row = {"status": "proven", "text": "", "date": "2026-11-30", "versions": {"peft": "0.5.0"}}
    bad = {"status": "failed", "text": "ImportError: a | b", "date": "2026-11-30"}
    text = first_try.table({"peft==0.5.0 transformers": {"ours": row, "uv": bad}})
    assert "envforge: 1 proven, 0 refused, 0 failed of 1" in text
    assert "uv alone: 0 proven, 0 refused, 1 failed of 1" in text
    assert "| peft==0.5.0 transformers | proven | failed: ImportError: a / b |" in text
