"""A project keeps its plan and lock as long as its request comes to them. Stood in for: the resolver."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from envforge.cli.planned import frozen
from envforge.lock.formats import LockedPackage, lock_hash
from envforge.project import write_plan
from envforge.resolver.plan import Plan, Reason, Target, Warning_
from envforge.resolver.request import parse_request

PLAN = Plan("3.11", "cpu", "cpu", {"torch": "2.13.0"}, ("torch",), Target("x86_64", "2.36", None, None))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a plan and its lock of one wheel on an index."""
    write_plan(tmp_path, PLAN)
    write_lock(tmp_path, PLAN, 'url = "https://index.example/torch-2.13.0-py3-none-any.whl"')
    return tmp_path


def write_lock(folder: Path, plan: Plan, where: str) -> None:
    """The lock, its wheel at an address or a path."""
    package = LockedPackage("torch", "2.13.0", "default", (f"sha256:{'a' * 64}",), "torch.whl")
    (folder / "pylock.toml").write_text(
        'lock-version = "1.0"\n[[packages]]\nname = "torch"\nversion = "2.13.0"\n'
        f'wheels = [{{{where}, hashes = {{sha256 = "{"a" * 64}"}}}}]\n'
        f'[tool.envforge]\nlock = "{lock_hash([package])}"\nplan = "{plan.hash()}"\n'
    )


def answer(project: Path | None, plan: Plan | None, *lines: str) -> Any:
    """What the resolver says."""
    intake = SimpleNamespace(project=project, lines=tuple(map(parse_request, lines)))
    return SimpleNamespace(intake=intake, answer=SimpleNamespace(plan=plan))


def test_what_still_answers_the_request_is_kept(project: Path) -> None:
    found = frozen(answer(project, PLAN))
    assert found is not None
    assert found[0] == PLAN
    assert [package.name for package in found[1].packages] == ["torch"]
    # Why it is so, and from which state of the matrix, changes nothing in the environment.
    told = replace(PLAN, reasons={"torch": (Reason("newest", "x"),)}, warnings=(Warning_("a", "b"),), matrix_hash="new")
    assert frozen(answer(project, told)) is not None


@pytest.mark.parametrize(
    "plan",
    [
        replace(PLAN, pins={"torch": "2.12.0"}),
        replace(PLAN, requests=("torch", "peft")),
        replace(PLAN, target=replace(PLAN.target, glibc="2.31")),
        replace(PLAN, python="3.12"),
        None,
    ],
)
def test_what_is_new_is_locked_anew(project: Path, plan: Plan | None) -> None:
    assert frozen(answer(project, plan)) is None


def test_without_a_lock_of_its_own_nothing_is_kept(project: Path, tmp_path: Path) -> None:
    assert frozen(answer(None, PLAN)) is None
    assert frozen(answer(project, PLAN, "peft @ git+https://x.example/peft@abc")) is None
    write_lock(project, replace(PLAN, python="3.12"), 'url = "https://index.example/torch.whl"')
    assert frozen(answer(project, PLAN)) is None
    write_lock(project, PLAN, f'path = "{tmp_path}/gone/torch.whl"')
    assert frozen(answer(project, PLAN)) is None, "a wheel that is not here any more"
    (project / "pylock.toml").unlink()
    assert frozen(answer(project, PLAN)) is None


def test_a_lock_that_was_changed_by_hand_is_not_replaced_without_a_word(project: Path) -> None:
    lock = project / "pylock.toml"
    lock.write_text(lock.read_text().replace("a" * 64, "b" * 64))
    said: list[str] = []
    assert frozen(answer(project, PLAN), lambda event: said.append(event.text)) is None
    assert len(said) == 1 and "pylock.toml" in said[0] and "locked anew" in said[0]
