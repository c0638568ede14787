"""Receipts as evidence: what is kept of them, what they say of an answer, and `--prefer verified`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from envforge import settings
from envforge.errors import DataError
from envforge.keep.receipts import add_receipt, check_receipts
from envforge.matrix.evidence import Receipt, cells, load_receipts, preferred, read_receipt

# The shape of what `verify` writes, with everything that must not be kept.
RECEIPT: dict[str, Any] = {
    "schema": 1,
    "kind": "receipt",
    "grade": "full",
    "passed": True,
    "pending": None,
    "first_failure": None,
    "started": "2026-12-01T10:11:12Z",
    "seconds": 12.5,
    "device": "cuda",
    "stack": "transformers",
    "model": {"id": "/home/jane/models/llama", "revision": None, "expect": None},
    "plan_hash": "0" * 64,
    "lock_hash": "1" * 64,
    "image_digest": None,
    "plan": {"variant": "cu126", "tier": "native", "python": "3.12", "cuda": "12.6", "as_of": None},
    "versions": {"torch": "2.6.0+cu126", "transformers": "4.51.3", "peft": "0.15.2", "Huggingface_Hub": "0.30.2"},
    "host": {
        "os": "debian12",
        "python": "3.12.4",
        "driver": "560.35.05",
        "prefix": "/home/jane/envs/x",
        "uid": 1234,
        "gpus": ["NVIDIA A100-SXM4-80GB, 8.0, 81920", "NVIDIA A100-SXM4-80GB, 8.0, 81920"],
    },
    "layers": [{"name": "environment", "checks": [{"text": "on node jane-box"}]}],
}


def receipt(**changes: Any) -> Receipt:
    return read_receipt(json.dumps({**RECEIPT, **changes}), "receipt.json")


def test_only_what_is_evidence_is_kept() -> None:
    kept = receipt()
    assert (kept.date, kept.stack, kept.grade, kept.passed, kept.variant) == (
        "2026-12-01",
        "transformers",
        "full",
        True,
        "cu126",
    )
    assert (kept.sm, kept.driver, kept.python, kept.tier, kept.cuda) == (
        ("8.0",),
        "560.35.05",
        "3.12",
        "native",
        "12.6",
    )
    assert kept.versions == {"huggingface-hub": "0.30.2", "peft": "0.15.2", "torch": "2.6.0", "transformers": "4.51.3"}
    text = kept.dumps()
    for private in ("jane", "/home", "1234", "llama", "node"):
        assert private not in text
    assert len(text) < 1000
    assert kept.dumps() == receipt().dumps()


def test_the_variant_comes_from_torch_where_no_plan_says_it() -> None:
    assert receipt(plan=None).variant == "cu126"
    assert (
        receipt(plan=None, versions={"torch": "2.13.0+cpu"}, device="cpu", host={"python": "3.11.2"}).variant == "cpu"
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "plan"}, "not a receipt"),
        ({"schema": 9}, "not a receipt"),
        ({"versions": {"torch": "2.6.0", "my_host": "/home/jane"}}, "no package and version"),
        ({"versions": {"peft": "0.1"}}, "names no torch"),
        ({"versions": []}, "names no torch"),
        ({"stack": "jane's box"}, "field stack"),
        ({"grade": "great"}, "field grade"),
        ({"passed": "yes"}, "field passed"),
        ({"started": None}, "field date"),
        ({"host": {**RECEIPT["host"], "driver": "jane"}}, "field driver"),
        ({"plan": None, "versions": {"torch": "2.6.0"}}, "field variant"),
        ({"passed": False, "first_failure": {"layer": "x", "check": "/home/jane"}}, "field failure"),
    ],
)
def test_what_has_not_the_form_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        receipt(**changes)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"kind": "receipt"}', "[" * 100_000])
def test_garbage_is_refused(text: str) -> None:
    with pytest.raises(DataError, match=r"receipt\.json"):
        read_receipt(text, "receipt.json")


def test_the_same_receipt_twice_is_one_file(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "receipts"
    path, new = add_receipt(receipt(), folder)
    assert new and path.name == f"{receipt().id}.json"
    assert add_receipt(receipt(), folder) == (path, False)
    add_receipt(receipt(started="2026-12-02T00:00:00Z"), folder)
    found, faults = load_receipts((folder,))
    assert [r.date for r in found] == ["2026-12-02", "2026-12-01"]
    assert found[1] == receipt() and faults == ()


def test_damaged_evidence_is_named_and_the_rest_counts(tmp_path: Path) -> None:
    path, _ = add_receipt(receipt(), tmp_path)
    (tmp_path / "cut.json").write_text(path.read_text()[:100])
    (tmp_path / "changed.json").write_text(path.read_text().replace("4.51.3", "4.51.4"))
    load_receipts.cache_clear()
    found, faults = load_receipts((tmp_path,))
    assert len(found) == 1
    assert [fault.split(":")[0] for fault in faults] == ["changed.json", "cut.json"]
    assert [f.where for f in check_receipts((tmp_path,))] == [
        "matrix/evidence/receipts/changed.json",
        "matrix/evidence/receipts/cut.json",
    ]


ROLES = {"unsloth": "trainer", "transformers": "framework", "peft": "framework", "torch": "torch", "numpy": "library"}
PINS = {"torch": "2.6.0", "transformers": "4.51.3", "peft": "0.15.2", "numpy": "2.2.0"}


def states(*receipts: Receipt, variant: str = "cu126", warned: dict[str, str] | None = None) -> dict[str, str]:
    return {cell.name: cell.state for cell in cells(PINS, variant, ROLES, receipts, warned)}


def test_states_of_the_cells() -> None:
    full = receipt()
    failed = receipt(passed=False, first_failure={"layer": "training", "check": "loss-falls", "text": "..."})
    assert states() == {"transformers": "declared", "peft": "declared"}
    assert states(full) == {"transformers": "verified", "peft": "verified"}
    assert states(full, variant="cu124")["peft"] == "declared"
    assert states(replace(full, versions={**full.versions, "peft": "0.15.1"})) == {
        "transformers": "verified",
        "peft": "declared",
    }
    assert states(replace(full, grade="static"))["peft"] == "declared"
    assert states(failed)["peft"] == "known-bad"
    assert states(failed, full)["peft"] == "verified"
    assert states(warned={"peft": "a table"}) == {"transformers": "declared", "peft": "known-bad"}
    assert cells({"numpy": "1.26"}, "cpu", ROLES, [full]) == ()
    [cell, _] = cells(PINS, "cu126", ROLES, [failed])
    assert "failed at training/loss-falls" in cell.source and "sm 8.0" in cell.source


def test_what_is_tried_first_is_full_passed_and_complete() -> None:
    good = receipt()
    newer = receipt(versions={**RECEIPT["versions"], "torch": "2.7.0+cu126"})
    assert preferred([good, newer, replace(newer, passed=False), replace(newer, grade="static")], ["peft"]) == (
        newer,
        good,
    )
    assert preferred([good], ["unsloth"]) == ()


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(settings, "SITE", tmp_path / "site")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "user" / "envforge" / "matrix.d" / "receipts"


def run(*words: str) -> tuple[int, str]:
    from typer import Typer

    from envforge.cli import matrix, resolve

    app = Typer()
    for module in (matrix, resolve):
        module.register(app)
    result = CliRunner().invoke(app, list(words))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


ASK = ("resolve", "transformers", "peft", "--driver", "560.35.05", "--gpu", "sm_80")


def test_add_evidence_and_prefer_verified(user: Path, tmp_path: Path) -> None:
    path = tmp_path / "receipt.json"
    path.write_text(json.dumps(RECEIPT))
    code, out = run("matrix", "add-evidence", str(path), "--folder", str(user), "--json")
    assert code == 0 and json.loads(out)["receipts"][0]["new"] is True
    code, out = run(*ASK, "--json")
    plain = json.loads(out)
    assert code == 0 and plain["pins"]["torch"] != "2.6.0", "without being asked, evidence changes nothing"
    assert {cell["state"] for cell in plain["evidence"]} == {"declared"}
    code, out = run(*ASK, "--prefer", "verified", "--json")
    found = json.loads(out)
    assert {name: found["pins"][name] for name in ("torch", "transformers", "peft")} == {
        "torch": "2.6.0", "transformers": "4.51.3", "peft": "0.15.2",
    }  # fmt: skip
    assert (found["variant"], found["python"]) == ("cu126", "3.12")
    state = {cell["cell"]: cell["state"] for cell in found["evidence"]}
    assert state["torch 2.6.0 x peft 0.15.2 x cu126"] == "verified"
    code, out = run(*ASK, "--prefer", "verified")
    assert "# evidence: verified: torch 2.6.0 x transformers 4.51.3 x cu126 (receipt" in out


def test_a_proven_set_that_the_request_excludes_is_not_forced(user: Path, tmp_path: Path) -> None:
    add_receipt(receipt(), user)
    code, out = run(ASK[0], "transformers>=5", *ASK[2:], "--prefer", "verified", "--json")
    found = json.loads(out)
    assert code == 0 and found["pins"]["transformers"].startswith("5.")


def test_all_receipts_or_none(user: Path, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(RECEIPT))
    bad.write_text("{}")
    with pytest.raises(DataError, match=r"bad\.json: not a receipt"):
        run("matrix", "add-evidence", str(good), str(bad), "--folder", str(user))
    assert not user.exists()
