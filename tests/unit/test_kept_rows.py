"""Rows that lie in the cache folder give the same answers as rows that are made anew."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from envforge.keep import rows
from envforge.keep.newer import Newer
from envforge.keep.rows import RowFolder, keep_rows
from envforge.matrix.load import load_matrix
from envforge.matrix.releases import RELEASES, load_releases
from envforge.resolver import packages
from envforge.resolver.constraints import Options, encode
from envforge.resolver.hosts import known, make_host
from envforge.resolver.passes import Wish
from envforge.resolver.pieces import Piece, read_piece
from envforge.resolver.request import parse_request
from envforge.resolver.resolve import Answer, resolve

MATRIX = load_matrix()
NEWER = Newer()
ASKED = [
    ("unsloth bitsandbytes transformers peft trl", "580.65.06", "8.0", Options(pythons=("3.11",))),
    ("torch==2.1.2 transformers==4.36.2 xtuner", "535.104.05", "8.0", Options(pythons=("3.10",))),
    ("xtuner==0.1.23 deepspeed", "550.54.15", "9.0", Options(no_compile=True)),
    ("transformers[torch] datasets", None, None, Options()),
    ("flash-attn unsloth", "470.57.02", "7.0", Options()),  # no answer: the explanation must be the same too
]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    packages._SHELVES.clear()
    yield
    packages._SHELVES.clear()


def answer(at: int) -> Answer:
    """The answer of a new process: nothing made before is in memory."""
    line, driver, sm, options = ASKED[at]
    host = known(make_host("h", driver, [sm] if sm else [], "2.35"), MATRIX)
    return resolve(MATRIX, Wish(tuple(map(parse_request, line.split())), (host,), options), NEWER.load)


@pytest.mark.parametrize("at", range(len(ASKED)))
def test_the_same_answer_from_kept_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    plain = answer(at)
    packages._SHELVES.clear()
    keep_rows(MATRIX, NEWER, cache=tmp_path)
    assert answer(at) == plain
    assert len(list(tmp_path.rglob("*.json"))) > 5, "a file for each package"
    packages._SHELVES.clear()
    keep_rows(MATRIX, NEWER, cache=tmp_path)
    monkeypatch.setattr(packages._Work, "make", None)  # nothing is made again
    assert answer(at) == plain


def test_a_piece_survives_being_written(tmp_path: Path) -> None:
    keep_rows(MATRIX, NEWER, cache=tmp_path)
    for at in range(len(ASKED)):
        answer(at)
    pieces = list(packages.shelf(MATRIX, NEWER.load).pieces.values())
    assert len(pieces) > 60
    for piece in pieces:
        again = read_piece(piece.dumps())
        assert again == piece
        assert [row.origin.data for row in again.rows] == [row.origin.data for row in piece.rows]  # type: ignore[attr-defined]


@pytest.mark.parametrize("damage", [b"", b"{}", b"0" * 64 + b"\n{}", b"\xff\xfe\n", None])
def test_a_damaged_file_is_made_again(tmp_path: Path, damage: bytes | None) -> None:
    keep_rows(MATRIX, NEWER, cache=tmp_path)
    plain = answer(0)
    for path in tmp_path.rglob("*.json"):
        if damage is None:  # what was written, and more
            path.write_bytes(path.read_bytes() + b" ")
        else:
            path.write_bytes(damage)
    packages._SHELVES.clear()
    keep_rows(MATRIX, NEWER, cache=tmp_path)
    assert answer(0) == plain
    fresh = RowFolder(next(path for path in tmp_path.iterdir()))
    assert sum(fresh.read(at) is not None for at in packages.shelf(MATRIX, NEWER.load).pieces) > 20, "mended too"


def test_a_text_of_another_shape_is_made_again() -> None:
    class Odd:
        def read(self, at: object) -> str:
            return '{"facts": [[1]], "rows": 3}'

        def write(self, at: object, text: str) -> None:
            pass

    plain = answer(0)
    packages._SHELVES.clear()
    packages.shelf(MATRIX, NEWER.load).store = Odd()
    assert answer(0) == plain


def test_a_changed_release_file_matrix_or_code_is_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    releases = tmp_path / "releases"
    shutil.copytree(RELEASES, releases)
    names = {rows._made_of("hash", releases)}
    os.utime(releases / "peft.json", ns=(1, 1))
    names.add(rows._made_of("hash", releases))
    (releases / "new-package.json").write_text("{}")
    names.add(rows._made_of("hash", releases))
    names.add(rows._made_of("other hash", releases))
    monkeypatch.setattr("packaging.__version__", "0")
    names.add(rows._made_of("hash", releases))
    assert len(names) == 5
    assert rows._made_of("hash", releases) in names, "and the same where nothing changed"


def test_releases_that_were_looked_up_are_not_kept(tmp_path: Path) -> None:
    newer = Newer({"peft": load_releases("peft")[-1:]})
    keep_rows(MATRIX, newer, cache=tmp_path)
    assert packages.shelf(MATRIX, newer.load).store is None


def test_an_unwritable_folder_costs_nothing_but_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    keep_rows(MATRIX, NEWER, cache=tmp_path / "file")
    assert answer(0).plan is not None


def test_old_folders_are_removed(tmp_path: Path) -> None:
    for number in range(6):
        folder = tmp_path / f"old-{number}"
        folder.mkdir()
        os.utime(folder, (number, number))
    RowFolder(tmp_path / "new").write(("a",), "{}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old-4", "old-5"]


def test_a_piece_forbids_nothing_with_an_empty_mask() -> None:
    from envforge.resolver.facts import Fact

    piece = Piece()
    piece.add(Fact("rule", ("r",)), ("torch", 2), ("peft", 0))
    assert piece.rows == []
    matrix_rows = encode(MATRIX, [parse_request("peft")], [make_host("h", None)], Options(), NEWER.load).rows
    assert all(mask for row in matrix_rows for _, mask in row.terms)
