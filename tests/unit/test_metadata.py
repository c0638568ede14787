"""Requires-Dist lines, markers and wheel tags, held against packaging."""

from __future__ import annotations

import itertools

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.tags import Tag, parse_tag

from envforge.matrix.releases import known_packages, load_releases
from envforge.resolver.metadata import environment, marker_pythons, parse_line, wheel_fits
from envforge.resolver.request import normalise

PYTHONS = ("3.8", "3.9", "3.10", "3.11", "3.12", "3.13", "3.14", "3.15")


def every_line() -> list[str]:
    return sorted({line for name in known_packages() for row in load_releases(name) for line in row.requires})


def test_every_known_line_reads_as_packaging_reads_it() -> None:
    lines = every_line()
    assert len(lines) > 500
    for line in lines:
        ours, theirs = parse_line(line), Requirement(line)
        assert ours is not None, line
        assert ours.name == normalise(theirs.name), line
        assert set(ours.extras) == {normalise(e) for e in theirs.extras}, line
        specifiers = {part.strip().replace(" ", "") for part in ours.specifier.split(",") if part.strip()}
        assert specifiers == {str(s) for s in theirs.specifier}, line


@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
def test_every_known_marker_holds_where_packaging_says_so(arch: str) -> None:
    for line in every_line():
        ours, theirs = parse_line(line), Requirement(line)
        assert ours is not None
        if theirs.marker is None:
            assert ours.marker is None and ours.extra is None
            continue
        extra = ours.extra or ""
        wanted = tuple(theirs.marker.evaluate({**environment(p, arch), "extra": extra}) for p in PYTHONS)
        assert marker_pythons(ours.marker, PYTHONS, arch, extra) == wanted, line


def test_simple_markers_in_all_combinations() -> None:
    parts = ["python_version >= '3.10'", 'python_version < "3.13"', "sys_platform == 'linux'", "os_name != 'nt'"]
    parts += ["platform_machine == 'x86_64'", "python_full_version < '3.11.3'", "platform_system == 'Windows'"]
    for a, b in itertools.permutations(parts, 2):
        marker = f"{a} and {b}"
        wanted = tuple(Marker(marker).evaluate(environment(p, "x86_64")) for p in PYTHONS)
        assert marker_pythons(marker, PYTHONS, "x86_64") == wanted, marker


def test_a_line_that_no_tool_accepts_is_left_out() -> None:
    assert parse_line("torch >= ; ???") is None


def supported(python: str, glibc: tuple[int, int], arch: str) -> set[Tag]:
    """What CPython of that minor takes on a Linux with that glibc (PEP 425, 600), written down independently."""
    minor = int(python.split(".")[1])
    platforms = [f"manylinux_2_{n}_{arch}" for n in range(5, glibc[1] + 1)] + [f"linux_{arch}"]
    if arch == "x86_64":
        platforms += [name for name, n in (("manylinux1_x86_64", 5), ("manylinux2010_x86_64", 12)) if glibc[1] >= n]
    platforms += [f"manylinux2014_{arch}"] if glibc[1] >= 17 else []
    tags = {Tag(f"cp3{minor}", abi, p) for abi in (f"cp3{minor}", "abi3", "none") for p in platforms}
    tags |= {Tag(f"cp3{n}", "abi3", p) for n in range(2, minor) for p in platforms}
    tags |= {Tag(f"py3{n}" if n else "py3", "none", p) for n in (*range(minor + 1),) for p in (*platforms, "any")}
    return tags | {Tag("py3", "none", "any")}


@pytest.mark.parametrize("glibc", [(2, 17), (2, 28), (2, 35)])
def test_every_known_wheel_tag_fits_where_the_tags_say_so(glibc: tuple[int, int]) -> None:
    tags = sorted({tag for name in known_packages() for row in load_releases(name) for tag in row.wheels})
    assert len(tags) > 50
    for arch in ("x86_64", "aarch64"):
        for python in PYTHONS:
            allowed = supported(python, glibc, arch)
            for tag in tags:
                floor, (fits,) = wheel_fits(tag, (python,), arch)
                ours = floor is not None and floor <= glibc and fits
                assert ours == bool(allowed & parse_tag(tag)), (tag, python, arch)
