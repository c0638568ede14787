"""Files are written as a whole or not at all, and only where a file belongs."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from envforge.errors import DiskFullError, OutsideError, UsageError
from envforge.files import LOCK_HEAD, check_lock_place, write_atomic
from envforge.image.engines.venv import MARKER, VenvEngine


def test_a_pipe_is_written_into_and_stays_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write_atomic(pipe, "answer")
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    reader.join(10)
    assert read == ["answer"]


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="this system has no /dev/full")
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    link = tmp_path / "out"  # the link is written through: should the code ever rename, only the link is lost
    link.symlink_to("/dev/full")
    with pytest.raises(DiskFullError, match="no space left"):
        write_atomic(link, "answer")
    assert list(tmp_path.iterdir()) == [link]


def test_a_folder_in_the_way_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match="cannot write"):
        write_atomic(tmp_path / "out", "answer")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_somebodys_own_requirements_are_not_replaced_by_a_lock(tmp_path: Path) -> None:
    check_lock_place(tmp_path / "none")
    check_lock_place(tmp_path)
    (tmp_path / "requirements.txt").write_text("torch\n")
    for check in (check_lock_place, lambda folder: VenvEngine(folder).check_folder()):
        with pytest.raises(UsageError, match=r"requirements\.txt is no lock of envforge"):
            check(tmp_path)
    (tmp_path / "requirements.txt").write_text(f"{LOCK_HEAD}: Python 3.12\n")
    check_lock_place(tmp_path)
    VenvEngine(tmp_path).check_folder()


def test_somebodys_own_environment_is_not_replaced(tmp_path: Path) -> None:
    env = tmp_path / "env"
    env.mkdir()
    VenvEngine(tmp_path).check_folder()
    (env / "pyvenv.cfg").write_text("mine")
    with pytest.raises(UsageError, match="env was not made by envforge"):
        VenvEngine(tmp_path).check_folder()
    (env / MARKER).write_text("{}")
    VenvEngine(tmp_path).check_folder()


def test_a_cache_that_cannot_be_kept_is_no_missing_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "file" / "cache"))
    for ask in (VenvEngine().pythons, lambda: VenvEngine().base("", "3.12")):
        with pytest.raises(OutsideError, match="uv cannot keep its cache"):
            ask()
