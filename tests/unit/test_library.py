"""Which images suit a host and which may go, by their labels alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from envforge.errors import DataError
from envforge.image.adopt import differences
from envforge.image.engines import ImageInfo
from envforge.image.library import Book, plan_of, shelve, unsuited, unused
from envforge.image.render import pack_plan
from envforge.image.state import folder_of, note_user
from envforge.resolver.hosts import Host, HostGpu
from envforge.resolver.plan import Plan, Target
from envforge.settings import layered_matrix

PLAN = Plan(
    "3.11", "cu126", "minor", {"torch": "2.7.1"}, ("torch",),
    Target("x86_64", "2.36", "550.54.15", "525.60.13", ("8.0",)), cuda="12.6",
)  # fmt: skip
LABELS = {"envforge.driver-floor": "525.60.13"}


def host(driver: str | None = "550.54.15", sm: str | None = "8.0", **changes: object) -> Host:
    gpus = (HostGpu(None, sm),) if sm else ()
    return replace(Host("node", driver, gpus), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (host(), ()),
        (host(glibc="2.17"), ()),  # the image brings its own
        (host("470.57.02"), ("needs driver 525.60.13",)),
        (host("580.65.06", "12.0"), ("sm_120",)),
        (host(None, None), ("has no GPU",)),
        (host(arch="aarch64"), ("built for x86_64",)),
    ],
)
def test_why_an_image_does_not_suit(where: Host, words: tuple[str, ...]) -> None:
    found = unsuited(PLAN, LABELS, where, layered_matrix())
    assert bool(found) is bool(words)
    for word in words:
        assert any(word in text for text in found), found


def test_a_cpu_image_is_for_hosts_without_a_gpu() -> None:
    plan = replace(PLAN, variant="cpu", tier="cpu", cuda=None, target=Target("x86_64", None, None, None))
    assert unsuited(plan, {}, host(None, None), layered_matrix()) == ()
    assert "CPU build" in unsuited(plan, {}, host(), layered_matrix())[0]


def image(number: int, *names: str, stack: str = "s", created: str = "") -> ImageInfo:
    labels = {"envforge.address": f"{number:064x}", "envforge.stack": stack, "envforge.variant": "cpu"}
    return ImageInfo(f"sha256:{number:064x}", names, labels, 1, created or f"2026-01-0{number}")


def gone(books: tuple[Book, ...], every: bool = False) -> list[int]:
    return sorted(int(row.book.image.id[7:], 16) for row in unused(books, every))


def test_what_nobody_needs_may_go_and_nothing_else(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "build.json").write_text(json.dumps({"address": f"{3:064x}"}))
    folder_of(tmp_path, f"{3:064x}").mkdir()
    note_user(folder_of(tmp_path, f"{3:064x}"), project)
    images = [
        image(1, "envforge/s:old", "r.example/team/s:old"),  # the same name below a registry is no other name
        image(2, "envforge/s:mine", "mine:1"),
        image(3, "envforge/s:used"),
        image(4, "envforge/s:new"),
        image(5, stack="failed"),
        image(6, "envforge/t:alone", stack="t"),
    ]
    books = shelve(images, tmp_path)
    assert [book.image.id for book in books] == [one.id for one in reversed(images)]
    assert gone(books) == [1, 5]
    assert gone(books, every=True) == [1, 4, 5, 6]
    # The project was built anew on something else.
    (project / "build.json").write_text(json.dumps({"address": "other"}))
    assert gone(shelve(images, tmp_path)) == [1, 3, 5]


def test_images_of_one_moment_all_stay(tmp_path: Path) -> None:
    """Reproducible builds have no times of their own: none of them is the newer."""
    same = [image(n, f"envforge/s:{n}", created="1970-01-01T00:00:00Z") for n in (1, 2)]
    assert gone(shelve(same, tmp_path)) == []


def test_a_plan_label_is_held_to_its_hash() -> None:
    labels = {"envforge.plan": pack_plan(PLAN), "envforge.plan-hash": PLAN.hash()}
    assert plan_of(labels, "x") == PLAN
    assert plan_of({}, "x") is None
    with pytest.raises(DataError, match="hash"):
        plan_of({**labels, "envforge.plan-hash": "0" * 64}, "x")
    with pytest.raises(DataError):
        plan_of({"envforge.plan": "zlib+base64:???"}, "x")


def test_every_difference_from_a_plan_is_named() -> None:
    assert differences(PLAN, "3.11", {"torch": "2.7.1+cu126"}) == []
    assert differences(PLAN, "3.11", {"torch": "2.7.1"}) == []  # the index of that day did not say
    found = " ".join(differences(PLAN, "3.12", {"torch": "2.7.0+cpu"}))
    for word in ("Python is 3.12", "torch is 2.7.0+cpu", "built for cpu"):
        assert word in found
    assert differences(PLAN, "3.11", {}) == ["torch 2.7.1 is not installed"]
