"""What the tests of the layers share: copies of a model with another configuration, and what checks say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from envforge.verify.policy import TrainingPolicy
from envforge.verify.record import FAIL, Check
from envforge.verify.stacks.hf import HfStack

Run = Callable[..., dict[str, Check]]


def copy_of(folder: Path, place: Path, **config: Any) -> Path:
    """A copy of a model folder with other values in its config.json."""
    made = place / "changed"
    shutil.copytree(folder, made)
    path = made / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return made


def states(checks: dict[str, Check]) -> dict[str, str]:
    return {name: check.status for name, check in checks.items()}


def only_failure(checks: dict[str, Check]) -> Check:
    failed = [check for check in checks.values() if check.status == FAIL]
    assert len(failed) == 1, states(checks)
    return failed[0]


def broken(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], None]) -> None:
    """`change` is done to every model that is made ready for training."""
    original = HfStack.training_model

    def changed(self: HfStack, policy: TrainingPolicy) -> Any:
        model = original(self, policy)
        change(model)
        return model

    monkeypatch.setattr(HfStack, "training_model", changed)
