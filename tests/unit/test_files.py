"""Files are written as a whole or not at all, and only where a file belongs."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from envforge.errors import DiskFullError, UsageError
from envforge.files import write_atomic


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
