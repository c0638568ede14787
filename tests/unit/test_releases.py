"""The release files: what is written loads as it was; what is damaged is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from envforge.errors import DataError
from envforge.matrix.releases import Release, known_packages, load_releases, render_releases

LINES = st.sampled_from([f"package-{i}>={j}" for i in range(6) for j in range(3)])
ROWS = st.builds(
    Release,
    version=st.just("1"),
    uploaded=st.just("2024-01-01"),
    python=st.sampled_from(["", ">=3.8"]),
    requires=st.frozensets(LINES).map(lambda lines: tuple(sorted(lines))),
    wheels=st.frozensets(st.sampled_from(["py3-none-any", "cp39-cp39-linux_x86_64"])).map(
        lambda tags: tuple(sorted(tags))
    ),
    sdist=st.booleans(),
    yanked=st.booleans(),
    size=st.integers(0, 10**10),
    requires_from=st.sampled_from(["wheel", "sdist", "unknown"]),
)


def _plain(release: Release) -> tuple[object, ...]:
    values = {name: getattr(release, name) for name in Release.__slots__}
    return tuple({**values, "requires": tuple(sorted(release.requires))}.values())


@settings(max_examples=100, deadline=None)
@given(st.lists(ROWS, max_size=12))
def test_what_is_written_loads_as_it_was(tmp_path_factory: pytest.TempPathFactory, rows: list[Release]) -> None:
    folder = tmp_path_factory.getbasetemp()
    text = render_releases("some", rows, "2026-11-30", 1)
    (folder / "some.json").write_text(text, encoding="utf-8")
    load_releases.cache_clear()
    back = load_releases("some", folder)
    assert [_plain(release) for release in back] == [_plain(release) for release in rows]
    assert render_releases("some", back, "2026-11-30", 1) == text


def test_no_file_is_no_releases(tmp_path: Path) -> None:
    assert load_releases("some", tmp_path) == ()


SMALL = render_releases(
    "some",
    [Release(str(i), "2024-01-01", "", ("a", "b")[: i + 1], ("py3-none-any",), True, False, 1) for i in range(2)],
    "2026-11-30",
)


def _damaged(tmp_path: Path, text: str | bytes) -> None:
    (tmp_path / "some.json").write_bytes(text.encode() if isinstance(text, str) else text)
    load_releases.cache_clear()
    with pytest.raises(DataError) as caught:
        load_releases("some", tmp_path)
    assert caught.value.cause.startswith("some.json: ") and "some --write" in caught.value.hint


def test_every_truncation_names_the_file(tmp_path: Path) -> None:
    for length in range(len(SMALL.rstrip())):
        _damaged(tmp_path, SMALL[:length])


@pytest.mark.parametrize("key", sorted(json.loads(SMALL).keys() - {"rules", "harvested"}))
def test_a_wrong_or_missing_part_names_the_file(tmp_path: Path, key: str) -> None:
    data = json.loads(SMALL)
    for value in (None, 7, [[0, 99]], [[0, 99], [0, 1]], [{}]):
        _damaged(tmp_path, json.dumps({**data, key: value}))
    del data[key]
    _damaged(tmp_path, json.dumps(data))
    _damaged(tmp_path, b"\xff\xfe" + SMALL.encode())


@pytest.mark.parametrize("name", known_packages())
def test_shipped_rows_make_sense(name: str) -> None:
    releases = load_releases(name)
    versions = [Version(release.version) for release in releases]
    assert versions == sorted(set(versions)) and releases
    seen: set[str] = set()
    for release in releases:
        assert release.version == str(Version(release.version)) and Version(release.version).dev is None
        assert "2020-01-01" < release.uploaded < "2100"
        assert release.wheels or release.sdist
        assert (release.size > 0) == any(tag.endswith(("x86_64", "-any")) for tag in release.wheels)
        SpecifierSet(release.python)
        seen.update(release.requires)
    for line in seen:
        assert Requirement(line).url is None
