"""What a converted model's files say to releases of transformers on both sides of 5."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from envforge.verify.convert import known_class


@pytest.mark.parametrize(("saved", "kept"), [("TokenizersBackend", "PreTrainedTokenizerFast"), ("Llama", "Llama")])
def test_a_tokenizer_class_that_every_release_knows(saved: str, kept: str, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({"tokenizer_class": saved, "eos_token": "é"}))
    known_class(file)
    assert json.loads(file.read_text()) == {"tokenizer_class": kept, "eos_token": "é"}
