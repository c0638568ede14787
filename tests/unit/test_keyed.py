"""Mounted folders carry the hash of their content in their names (for builders whose cache reads the text alone)."""

from __future__ import annotations

from pathlib import Path

from envforge.image.engines.keyed import key_mounts, tree_hash

TEXT = """FROM base
RUN --mount=type=bind,source=build/scripts,target=/run/envforge/scripts \\
    --mount=type=bind,source=build/parts/torch,target=/run/envforge/parts/torch \\
    --mount=type=secret,id=uv.toml \\
    ["/bin/sh", "/run/envforge/scripts/install.sh", "build/scripts"]
RUN --mount=type=bind,source=build/scripts,target=/run/envforge/scripts \\
    --mount=type=bind,from=compile,source=/run/envforge/compiled,target=/run/envforge/compiled \\
    ["/bin/sh", "x"]
"""


def context(folder: Path, part: str = "torch==1", compiled: str = "flash-attn==1") -> str:
    """The Dockerfile of a context whose parts hold these."""
    for name, text in (("scripts", "s"), ("parts/torch", part), ("parts/compile", compiled)):
        place = folder / "build" / name
        place.mkdir(parents=True)
        (place / "requirements.txt").write_text(text)
    (folder / "Dockerfile").write_text(TEXT)
    key_mounts(folder)
    return (folder / "Dockerfile").read_text()


def test_the_text_follows_the_content(tmp_path: Path) -> None:
    first, same = context(tmp_path / "1"), context(tmp_path / "2")
    assert first == same
    other = context(tmp_path / "3", part="torch==2").splitlines()
    changed = [old for old, new in zip(first.splitlines(), other, strict=True) if old != new]
    assert len(changed) == 1 and "parts/torch-" in changed[0]
    # What another stage made follows from its part, which is shown beside it.
    other = context(tmp_path / "4", compiled="flash-attn==2").splitlines()
    changed = [old for old, new in zip(first.splitlines(), other, strict=True) if old != new]
    assert len(changed) == 1 and "parts/compile-" in changed[0]


def test_every_mount_is_there_and_nothing_else_changes(tmp_path: Path) -> None:
    text = context(tmp_path)
    for line in text.splitlines():
        if "type=bind,source=" in line:
            assert (tmp_path / line.split("source=")[1].split(",")[0]).is_dir(), line
    assert '"build/scripts"]' in text
    assert "from=compile,source=/run/envforge/compiled,target=" in text


def test_the_hash_sees_names_modes_and_bytes_but_not_inside_wheels(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    hashes = [tree_hash(tmp_path)]
    (tmp_path / "a").write_text("2")
    hashes.append(tree_hash(tmp_path))
    (tmp_path / "a").chmod(0o755)
    hashes.append(tree_hash(tmp_path))
    (tmp_path / "a").rename(tmp_path / "b")
    hashes.append(tree_hash(tmp_path))
    (tmp_path / "x.whl").write_text("12")
    hashes.append(tree_hash(tmp_path))
    assert len(set(hashes)) == 5
    (tmp_path / "x.whl").write_text("34")
    assert tree_hash(tmp_path) == hashes[-1]
