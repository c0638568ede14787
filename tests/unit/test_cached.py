"""What is kept in the user's cache folder: whole or not there, never an error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from envforge.cached import Cache, cache_folder


def test_what_was_written_comes_back_until_a_byte_differs(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "new" / "folder")
    assert cache.read("a") is None
    cache.write("a", b"one\ntwo")
    assert cache.read("a") == b"one\ntwo"
    path = tmp_path / "new" / "folder" / "a"
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at])
        assert cache.read("a") is None, f"cut at {at}"
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert cache.read("a") is None, f"changed at {at}"
    cache.write("a", b"three")
    assert cache.read("a") == b"three"
    assert [path.name for path in path.parent.iterdir()] == ["a"]


def test_only_the_latest_are_kept(tmp_path: Path) -> None:
    cache = Cache(tmp_path, most=2)
    for number in range(4):
        cache.write(str(number), b"x")
        os.utime(tmp_path / str(number), (number, number))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]


def test_a_place_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", None):
        cache = Cache(folder)
        cache.write("a", b"x")
        assert cache.read("a") is None


def test_the_folder_can_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ENVFORGE_CACHE_DIR", str(tmp_path))
    assert cache_folder("rows") == tmp_path / "rows"
    monkeypatch.delenv("ENVFORGE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder("rows") == tmp_path / "xdg" / "envforge" / "rows"
