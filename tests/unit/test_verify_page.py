"""The receipt for people: the page, the picture, and what of this machine does not get into a receipt."""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import pytest

from envforge.verify import page
from envforge.verify.process import Run
from envforge.verify.receipt import make_receipt, public
from envforge.verify.record import FAIL, PASS, Check
from envforge.verify.settings import Settings
from envforge.verify.supervise import Layer


def receipt(text: str = "8 steps", **more: Any) -> dict[str, Any]:
    """A receipt with a training layer."""
    check = Check(id="training.steps", layer="training", status=more.pop("status", PASS), text=text)
    check.figures = {"tokens_per_second": 12.5, "list": [1, 2]}
    layer = Layer("training", check.status, [check], more.pop("runs", []))
    layer.notes = {"losses": [3.0, float("nan"), 1.0], "chat": {"answer": "<b>Paris</b> & so on"}, **more}
    settings = Settings(workdir="/scratch/run-1", model="/data/models/mine", model_id="mine")
    return make_receipt(settings, [layer], 0.0, 1.0)


def test_the_page_stands_alone_and_escapes_what_came_from_outside(tmp_path: Path) -> None:
    made = receipt("<script>alert(1)</script>")
    made["findings"] = [
        {"id": "nan-loss", "title": "the <loss>", "confidence": "certain", "owner": "data", "retryable": False,
         "cause": "a & b", "fixes": ["lower <it>"]}
    ]  # fmt: skip
    page.write_page(tmp_path / "out" / "page.html", made)
    text = (tmp_path / "out" / "page.html").read_text()
    assert "<script>" not in text and "&lt;script&gt;" in text and "lower &lt;it&gt;" in text
    assert "&lt;b&gt;Paris&lt;/b&gt; &amp; so on" in text
    assert "<svg" in text and text.count("<circle") == 2 and "1 losses are not finite" in text
    assert "tokens_per_second 12.5" in text
    for outside in ("http:", "https:", "src=", "@import", "url("):
        assert outside not in text
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["page.html"]


def test_a_page_of_a_receipt_from_disk(tmp_path: Path) -> None:
    """There a loss that is no number is the word nan."""
    from envforge.verify.receipt import dumps
    from envforge.verify.report import render

    made = json.loads(dumps(receipt()))
    assert page.page(made).count("<circle") == 2
    assert "3.0000" in render(made)


def test_without_losses_there_is_no_plot() -> None:
    assert "<svg" not in page.page(receipt(losses=[]))
    assert page.points([float("nan")], 10, 10) == ([], 0.0, 0.0)
    assert page.points([2.0], 10, 10)[0] == [(0.0, 10.0)]


def test_a_picture_needs_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs Pillow"):
        page.write_page(tmp_path / "a.png", receipt())
    with pytest.raises(ValueError, match=r"\.html or a \.png"):
        page.write_page(tmp_path / "a.pdf", receipt())
    assert list(tmp_path.iterdir()) == []


def test_a_picture(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    page.write_page(tmp_path / "a.png", receipt())
    made = image.open(tmp_path / "a.png")
    assert made.size[0] == 1240 and len(made.getcolors(1 << 20)) > 5


def test_folders_and_the_name_of_this_machine_are_words() -> None:
    home = os.path.realpath(os.path.expanduser("~"))  # noqa: PTH111
    log = f"File {sys.prefix}/lib/x.py\n/scratch/run-1/merged\n/data/models/mine/config.json\n{home}/.cache\n"
    log += f"{platform.node()}:4012:4120 [0] NCCL INFO NET/Socket : Using [0]eth0:10.1.2.3<0>\n"
    run = Run("training", False, outcome="crash", log_tail=log)
    raw = receipt("broke in /data/models/mine", status=FAIL, runs=[run])
    assert raw["first_failure"]["text"] == "broke in /data/models/mine"  # the person here sees where
    made = public(raw)
    text = json.dumps(made, ensure_ascii=False)
    for hidden in (sys.prefix, "/scratch/run-1", "/data/models/mine", platform.node() + ":", "10.1.2.3"):
        assert hidden not in text
    said = made["layers"][0]["runs"][0]["log_tail"]
    assert "<prefix>/lib/x.py" in said and "<scratch>/merged" in said and "<model>/config.json" in said
    assert "~/.cache" in said
    assert made["first_failure"]["text"] == "broke in <model>"
