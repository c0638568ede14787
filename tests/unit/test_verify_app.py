"""The command line of the proof: exit codes, grades, receipts. Runs without torch."""

from __future__ import annotations

import ast
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from envforge.verify import app, receipt, report
from envforge.verify.models import ModelMissingError, find_model, folder_fault, known_answer
from envforge.verify.record import PASS, SKIP, Check
from envforge.verify.settings import Settings, read_plan
from envforge.verify.supervise import Layer

SOURCES = Path(app.__file__).parent


def plan_file(folder: Path, variant: str = "cpu", **pins: str) -> Path:
    """A plan with these pins, as far as the proof reads one."""
    target = {"sm": [] if variant == "cpu" else ["8.0"], "driver_floor": None}
    plan = {"schema": 1, "variant": variant, "cuda": None, "pins": pins, "target": target, "python": "3.11"}
    path = folder / "plan.json"
    path.write_text(json.dumps(plan))
    return path


def test_the_proof_parses_on_python_3_8() -> None:
    for path in SOURCES.rglob("*.py"):
        ast.parse(path.read_text(encoding="utf-8"), filename=str(path), feature_version=(3, 8))


def test_the_proof_imports_nothing_else_of_envforge() -> None:
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                assert not name.startswith("envforge") or name.startswith("envforge.verify"), f"{path.name}: {name}"


def test_importing_the_policy_does_not_import_torch() -> None:
    code = "import sys, envforge.verify; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("device", "grade", "variant", "torch", "answer"),
    [
        ("auto", "auto", "cpu", {"cuda": None, "usable": False}, ("cpu", "full")),
        ("auto", "auto", "cu126", {"cuda": "12.6", "usable": True}, ("cuda", "full")),
        ("auto", "auto", "cu126", {"cuda": "12.6", "usable": False}, ("cpu", "static")),
        ("auto", "full", "cu126", {"cuda": None, "usable": False}, ("cpu", "full")),
        ("auto", "auto", "cpu", {"cuda": "12.6", "usable": True}, ("cpu", "full")),
        ("auto", "auto", None, {"cuda": "12.6", "usable": True}, ("cuda", "full")),
        ("auto", "auto", None, {"cuda": "12.6", "usable": False}, ("cpu", "static")),
        ("auto", "auto", None, {"cuda": None, "usable": False}, ("cpu", "full")),
        ("auto", "auto", "cpu", {}, ("cpu", "full")),
    ],
)
def test_device_and_grade(
    device: str, grade: str, variant: str | None, torch: dict[str, object], answer: tuple[str, str]
) -> None:
    plan = None if variant is None else {"variant": variant}
    assert app.device_and_grade(device, grade, plan, torch) == answer


def test_no_model_is_exit_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ENVFORGE_MODEL", raising=False)
    monkeypatch.setattr(app, "probe_torch", dict)
    assert app.main(["--plan", str(plan_file(tmp_path, torch="2.13.0"))]) == 3
    assert "no model was given" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["no-such-folder", "./no/such", "empty"])
def test_a_model_that_is_none_is_exit_3(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(app, "probe_torch", dict)
    (tmp_path / "empty").mkdir()
    assert app.main(["--model", name]) == 3
    assert name.split("/")[-1] in capsys.readouterr().err


def test_a_hub_id_that_cannot_be_had_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # An endpoint that refuses connections stands in for a machine without a network.
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(ModelMissingError, match=r"some/model.*(hub|huggingface_hub)"):
        find_model("some/model", None, tmp_path)


@pytest.mark.parametrize(
    "argv",
    [
        ["--layers", "nonsense"],
        ["--limit", "nonsense=3"],
        ["--plan", "missing.json"],
        ["--lock", "missing.txt"],
        ["--settings", "missing.json"],
        ["--model", "owner/name", "--trust-remote-code"],
    ],
)
def test_bad_usage_is_exit_2(argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(app, "probe_torch", dict)
    assert app.main(argv) == 2


def test_unknown_keys_in_a_settings_file_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "verify.json").write_text('{"stack": "transformers", "stepz": 3}')
    assert app.main(["--settings", str(tmp_path / "verify.json")]) == 2
    assert "stepz" in capsys.readouterr().err


def test_settings_file_gives_defaults_that_options_override(tmp_path: Path) -> None:
    parser = app.parser()
    parser.set_defaults(steps=3, stack="unsloth")
    options = parser.parse_args(["--steps", "5"])
    assert (options.steps, options.stack) == (5, "unsloth")


def test_a_missing_pin_fails_the_environment_layer_and_writes_the_receipt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENVFORGE_IMAGE_DIGEST", "sha256:abc")
    plan = plan_file(tmp_path, **{"no-such-package-here": "1.0", "pytest": "0.0.1"})
    out = tmp_path / "receipts" / "r.json"
    code = app.main(["--plan", str(plan), "--layers", "environment", "--json", str(out)])
    assert code == 1
    data = json.loads(out.read_text())
    assert data["passed"] is False and data["schema"] == 1
    assert data["first_failure"]["layer"] == "environment"
    assert data["first_failure"]["check"] == "environment.pins"
    assert "no-such-package-here==1.0 is not installed" in data["first_failure"]["text"]
    assert f"pytest: 0.0.1 is pinned, {pytest.__version__} is installed" in data["first_failure"]["text"]
    assert data["image_digest"] == "sha256:abc"
    assert data["plan_hash"] == read_plan(plan)[1]
    assert [path.name for path in out.parent.iterdir()] == ["r.json"]
    assert "FAILED in the environment layer, environment.pins" in capsys.readouterr().out


def test_the_plan_hash_is_the_resolvers(tmp_path: Path) -> None:
    from envforge.resolver.plan import Plan, Target

    target = Target(arch="x86_64", glibc=None, driver=None, driver_floor=None)
    plan = Plan(python="3.11", variant="cpu", tier="cpu", pins={"torch": "2.13.0"}, requests=("torch",), target=target)
    path = tmp_path / "plan.json"
    path.write_text(plan.dumps())
    assert read_plan(path)[1] == plan.hash()


def test_a_static_proof_is_the_environment_layer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(names: list[str], settings: Settings, keep_going: bool) -> list[Layer]:
        return [Layer(name, PASS, [Check(id=f"{name}.x", layer=name)]) for name in names]

    monkeypatch.setattr(app, "run_layers", fake)
    wanted = ["environment", "data", "distributed", "effect"]
    static = app.prove(Settings(grade="static"), wanted, False)
    assert [(layer.name, layer.status) for layer in static] == [("environment", PASS)] + [(n, SKIP) for n in wanted[1:]]
    alone = app.prove(Settings(), wanted, False)
    assert [layer.status for layer in alone] == [PASS, PASS, SKIP, PASS]
    assert "--processes 2" in alone[2].checks[0].text
    assert all(layer.status == PASS for layer in app.prove(Settings(processes=2), wanted, False))


def test_a_torch_without_cuda_is_not_imported_to_ask_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for torch: importing the first would end the test."""
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "version.py").write_text("from typing import Optional\ncuda: Optional[str] = None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert app.probe_torch() == {"cuda": None, "usable": False}
    (package / "version.py").write_text("cuda = '12.6'\n")
    assert app.probe_torch() == {}
    asked = "import types\ncuda = types.SimpleNamespace(is_available=lambda: True, device_count=lambda: 4)\n"
    (package / "__init__.py").write_text(asked + "from . import version\n")
    assert app.probe_torch() == {"cuda": "12.6", "usable": True, "count": 4}


def test_each_rank_wants_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(app, "probe_torch", lambda: {"cuda": "12.6", "usable": True, "count": 4})
    assert app.main(["--processes", "8", "--layers", "environment"]) == 2
    assert "--processes 8: each wants a GPU, torch sees 4" in capsys.readouterr().err


def weights(size: int = 4) -> bytes:
    head = json.dumps(
        {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "__metadata__": {"a": "b"}}
    ).encode()
    return len(head).to_bytes(8, "little") + head + b"\0" * size


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", b"{", "config.json that cannot be read"),
        ("config.json", b"[]", "no mapping"),
        ("tokenizer.json", None, "no tokenizer"),
        ("model.safetensors", None, "no weights"),
        ("model.safetensors", weights(3), "cut short"),
        ("model.safetensors", b"", "has no head"),
        ("model.safetensors", b"\xff" * 100, "has no head"),
        ("model.safetensors.index.json", b'{"weight_map": {"w": "model-1.safetensors"}}', "lacks model-1.safetensors"),
        ("model.safetensors.index.json", b"[]", "cannot be read"),
        ("model.safetensors.index.json", b'{"weight_map": {"w": "model.safetensors"}}', None),
    ],
)
def test_a_model_that_is_not_whole_is_told_from_a_bad_environment(
    tmp_path: Path, name: str, content: bytes | None, said: str | None
) -> None:
    for file, whole in {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": weights()}.items():
        (tmp_path / file).write_bytes(whole)
    assert folder_fault(tmp_path) is None
    (tmp_path / name).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    if said is None:
        assert find_model(str(tmp_path), None, tmp_path) == tmp_path.resolve()
        return
    with pytest.raises(ModelMissingError, match=said):
        find_model(str(tmp_path), None, tmp_path)


def test_a_receipt_holds_no_invalid_json(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    receipt.write_atomic(path, {"losses": [1.0, math.nan, math.inf], "a": {"b": (1, 2)}})
    data = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert data == {"losses": [1.0, "nan", "inf"], "a": {"b": [1, 2]}}


def test_a_receipt_goes_into_a_pipe_and_not_in_its_place(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    receipt.write_atomic(pipe, {"passed": True})
    assert pipe.is_fifo() and json.loads(os.read(reader, 1000)) == {"passed": True}
    os.close(reader)


def test_a_receipt_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    class Unwritable:
        def __str__(self) -> str:
            raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        receipt.write_atomic(tmp_path / "r.json", {"x": Unwritable()})
    assert list(tmp_path.iterdir()) == []


def test_a_static_proof_says_that_the_gpu_proof_is_pending() -> None:
    layers = [Layer("environment", PASS, [Check(id="environment.a", layer="environment")])]
    made = receipt.make_receipt(Settings(grade="static"), layers, 0.0, 1.0)
    assert made["passed"] and "pending" in made["pending"]
    assert "pending" in report.render(made)
    full = receipt.make_receipt(Settings(grade="full"), layers, 0.0, 1.0)
    assert full["pending"] is None


def test_the_report_shows_answers_and_the_loss_line() -> None:
    layer = Layer("training", PASS, [Check(id="training.steps", layer="training", text="8 steps")])
    layer.notes = {"losses": [3.0, 2.0, 1.0], "chat": {"answer": "Paris."}, "chat_merged": {"answer": "Paris!"}}
    text = report.render(receipt.make_receipt(Settings(), [layer], 0.0, 1.0))
    assert "loss    3.0000 █▅▁ 1.0000" in text
    assert "base    Paris." in text and "merged  Paris!" in text
    assert text.splitlines()[-1].startswith("passed (full, transformers on cpu")


def test_spark_marks_what_is_not_a_number() -> None:
    assert report.spark([1.0, math.nan, 2.0]) == "▁!█"
    assert report.spark([math.nan]) == "!"
    assert report.spark([1.0, 1.0]) == "▁▁"


def test_known_answer_belongs_to_its_prompt(tmp_path: Path) -> None:
    marker = {"name": "x", "source": "y", "expect": {"prompt": "What?", "contains": "That"}}
    (tmp_path / "envforge-model.json").write_text(json.dumps(marker))
    assert known_answer(tmp_path, "What?") == "That"
    assert known_answer(tmp_path, "Who?") == ""
    assert known_answer(tmp_path / "other", "What?") == ""
