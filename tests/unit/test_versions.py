"""Version sets: PEP 440 as `packaging` reads it, in masks; and masks in words."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from envforge.resolver.versions import ABSENT, Domain

TORCH = [
    "1.13.0", "1.13.1", "2.0.0", "2.0.1", "2.1.0", "2.1.1", "2.1.2", "2.1.2+cu118", "2.1.2+cu121", "2.2.0", "2.2.1",
    "2.2.2", "2.3.0", "2.3.1", "2.4.0", "2.4.1", "2.5.0", "2.5.1", "2.6.0", "2.7.0", "2.7.1", "2.8.0", "2.9.0",
    "2.9.1", "2.10.0", "2.11.0.dev20260101", "2.11.0rc1", "2.11.0rc2", "2.11.0",
]  # fmt: skip
ODD = [
    "0.1.dev1", "0.1a1", "0.1a1.dev2", "0.1a1.post1", "0.1b2", "0.1rc1", "0.1rc1.post1.dev1", "0.1rc1.post1", "0.1",
    "0.1+local", "0.1.post1.dev1", "0.1.post1", "0.1.post1+cu118", "0.1.post2", "0.1.1.dev0", "0.1.1", "1.0.dev0",
    "1.0", "1.0+1", "1.0+abc.2", "1.0.post0", "1.0.0.1", "1.1", "1.10", "2", "2024.9", "2024.10.post1", "2025.1.1",
    "1!0.5", "1!1.0rc1", "1!1.0", "1!1.0.post1",
]  # fmt: skip


def numbers() -> st.SearchStrategy[str]:
    return st.lists(st.integers(0, 3), min_size=1, max_size=4).map(lambda parts: ".".join(map(str, parts)))


@st.composite
def versions(draw: st.DrawFn, local: bool = True) -> str:
    text = draw(st.sampled_from(["", "", "", "1!"])) + draw(numbers())
    text += draw(st.sampled_from(["", "", "", "a0", "a1", "b1", "rc1", "rc2"]))
    text += draw(st.sampled_from(["", "", "", ".post0", ".post1", ".post2"]))
    text += draw(st.sampled_from(["", "", "", ".dev0", ".dev1", ".dev20240101"]))
    if local:
        text += draw(st.sampled_from(["", "", "", "+cu118", "+1", "+cu121.1"]))
    return text


@st.composite
def clauses(draw: st.DrawFn, listed: tuple[str, ...] = ()) -> str:
    operator = draw(st.sampled_from(["==", "!=", ">=", "<=", ">", "<", "~=", "===", "==*", "!=*"]))
    if operator.endswith("*"):
        return f"{operator[:2]}{draw(st.sampled_from(['', '1!']))}{draw(numbers())}.*"
    version = draw(st.sampled_from(listed)) if listed and draw(st.booleans()) else draw(versions())
    if operator not in ("==", "!=", "==="):
        version = version.partition("+")[0]
    if operator == "~=":
        assume("." in Version(version).base_version.partition("!")[2] or "." in Version(version).base_version)
    return f"{operator}{draw(st.sampled_from(['', ' ']))}{version}"


def expected(values: tuple[str, ...], specifier: str, prereleases: bool) -> list[str]:
    """What packaging says of each version; that a set names a pre-release is read off its clauses."""
    wanted = SpecifierSet(specifier)
    named = any(
        clause.operator != "!=" and not clause.version.endswith(".*") and Version(clause.version).is_prerelease
        for clause in wanted
    )
    return [value for value in values if wanted.contains(value, prereleases=prereleases or named)]


def matched(domain: Domain, specifier: str, prereleases: bool = False) -> list[str]:
    mask = domain.mask(specifier, prereleases)
    assert not mask & ABSENT
    return [domain.values[position - 1] for position in domain.positions(mask)]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_masks_equal_packaging_on_any_list(data: st.DataObject) -> None:
    values = data.draw(st.lists(versions(), min_size=1, max_size=15, unique=True))
    domain = Domain("p", values)
    assert sorted(domain.values) == sorted(values)
    for _ in range(4):
        parts = data.draw(st.lists(clauses(domain.values), max_size=3))
        specifier = ",".join(parts)
        prereleases = data.draw(st.booleans())
        assert matched(domain, specifier, prereleases) == expected(domain.values, specifier, prereleases), specifier


@pytest.mark.parametrize("values", [TORCH, ODD], ids=["torch", "odd"])
def test_masks_equal_packaging_at_every_edge(values: list[str]) -> None:
    """Every operator at every version of the list and around it."""
    domain = Domain("p", values)
    edges = (
        {str(Version(v).public) for v in values} | {Version(v).base_version for v in values} | {"3", "0", "2.1", "1!0"}
    )
    for edge in sorted(edges):
        for operator in ("==", "!=", ">=", "<=", ">", "<", "~=", "==="):
            if operator == "~=" and len(Version(edge).release) < 2:
                continue
            for prereleases in (False, True):
                text = f"{operator}{edge}"
                assert matched(domain, text, prereleases) == expected(domain.values, text, prereleases), text
        base = Version(edge).base_version
        for text in (f"=={base}.*", f"!={base}.*"):
            assert matched(domain, text) == expected(domain.values, text, False), text


@pytest.mark.parametrize(
    ("specifier", "wanted"),
    [
        ("", "1.13.0 .. 2.11.0"),
        ("==2.1.2", "2.1.2 2.1.2+cu118 2.1.2+cu121"),
        ("==2.1.2+cu118", "2.1.2+cu118"),
        ("===2.1.2", "2.1.2"),
        (">2.1.2,<2.2.1", "2.2.0"),
        ("<=2.1.2,>=2.1.2", "2.1.2 2.1.2+cu118 2.1.2+cu121"),
        ("==2.1.*,!=2.1.2", "2.1.0 2.1.1"),
        ("~=2.10", "2.10.0 2.11.0"),
        ("~=2.9.0", "2.9.0 2.9.1"),
        (">=2.11.0rc1", "2.11.0rc1 2.11.0rc2 2.11.0"),
        (">2.10,<2.11", ""),
        ("==2.11.0rc9", ""),
        (">=3", ""),
    ],
)
def test_specifiers_on_torch(specifier: str, wanted: str) -> None:
    domain = Domain("torch", TORCH)
    if ".." in wanted:
        assert matched(domain, specifier) == [v for v in TORCH if not Version(v).is_prerelease]
    else:
        assert matched(domain, specifier) == wanted.split()


def test_prereleases_only_when_asked_for() -> None:
    only = Domain("p", ["1.0a1", "1.0b1"])
    assert only.mask(">=0.5") == 0, "that nothing else matches is no reason"
    assert only.mask(">=0.5", prereleases=True) == 0b110
    assert only.mask("!=1.0b1") == 0
    assert only.mask(">=1.0b1") == 0b100
    assert only.mask("<2", prereleases=True) == 0b110
    assert only.pre_mask == 0b110


@pytest.mark.parametrize(
    "bad", ["2.1", ">=", "=>1", ">=1.*", "~=1", "==1.*.2", ">=1.0+cu118", "torch", "==1..0", "1.0,"]
)
def test_bad_specifiers_are_refused(bad: str) -> None:
    with pytest.raises(InvalidSpecifier):
        Domain("p", TORCH).mask(bad)


def test_values_are_sorted_and_named_by_any_spelling() -> None:
    domain = Domain("p", ["2.0", "1.0", "10.0", "1.0.post1"])
    assert domain.values == ("1.0", "1.0.post1", "2.0", "10.0")
    assert [domain.bit(v) for v in ("1.0", "1.0.0", "v1.0-1", "2", "10")] == [1, 1, 2, 3, 4]
    assert domain.value(4) == "10.0"
    assert domain.value(0) is None
    assert domain.full == 0b11111
    assert domain.all_mask == 0b11110
    assert domain.outside(0b00110) == 0b11001
    assert domain.mask_of(["2", "1.0"]) == 0b1010
    for unknown in ("3.0", "cu118", ""):
        with pytest.raises(KeyError):
            domain.bit(unknown)


def test_lists_that_are_not_domains() -> None:
    with pytest.raises(ValueError, match=r"p: 1\.0 is listed twice"):
        Domain("p", ["1.0", "2.0", "1.0"])
    with pytest.raises(ValueError, match="cpu"):
        Domain("p", ["1.0", "cpu"])
    assert Domain("p", []).full == 1
    assert Domain("p", []).mask(">=1") == 0


def test_labels() -> None:
    domain = Domain("torch-variant", ["cpu", "cu118", "cu121", "cu126", "cu128"])
    assert domain.labels
    assert domain.mask("") == domain.all_mask
    assert domain.mask("cu118, cu126") == domain.mask_of(["cu118", "cu126"])
    assert domain.mask("==cu118") == domain.mask_of(["cu118"])
    assert domain.mask("!=cpu") == domain.all_mask & ~2
    assert domain.mask("cu999") == 0
    assert domain.describe(domain.all_mask) == "any"
    assert domain.describe(domain.mask("cu118, cu126")) == "cu118, cu126"
    assert domain.describe(domain.mask("!=cpu")) == "any but cpu"
    assert Domain("year", ["2024", "2023"], labels=True).values == ("2024", "2023")


@pytest.mark.parametrize(
    ("specifier", "words"),
    [
        ("", "any version"),
        (">=99", "no version"),
        ("==2.1.2", "==2.1.2"),
        ("===2.1.2", "2.1.2"),
        ("==2.1.1", "==2.1.1"),
        (">=2.4.0", ">=2.4"),
        ("<2.3", "<2.3"),
        ("<=2.1.0", "<=2.1.0"),
        ("<2.10", "<2.10"),
        ("==2.9.*", "==2.9.*"),
        (">=2.4,<2.6", ">=2.4,<2.6"),
        (">=2.4.1,<2.6", ">=2.4.1,<2.6"),
        ("!=2.4.0", "!=2.4.0"),
        ("!=2.4.*", "!=2.4.*"),
        (">=2.1,!=2.2.1", ">=2.1,!=2.2.1"),
        (">=2.1,!=2.2.*,!=2.5.0", ">=2.1,!=2.2.*,!=2.5.0"),
        (">=2.11.0rc1,<2.11.0rc9", ">=2.11.0rc1,<=2.11.0rc2"),
        ("==2.11.0rc1", "==2.11.0rc1"),
        (">=2.11.0", ">=2.11"),
        ("<2", "<2.0"),
    ],
)
def test_words(specifier: str, words: str) -> None:
    domain = Domain("torch", TORCH)
    assert domain.describe(domain.mask(specifier) | ABSENT) == words


def test_words_for_apart_runs() -> None:
    domain = Domain("p", [f"1.{i}.0" for i in range(20)])
    assert domain.describe(domain.mask_of(["1.2.0", "1.9.0"])) == "1.2.0, 1.9.0"
    assert domain.describe(domain.mask("<1.3") | domain.mask(">=1.10")) == "<1.3 or >=1.10"
    assert domain.describe(domain.mask("<1.3") | domain.mask("==1.5.0")) == "<1.3 or ==1.5.0"
    scattered = domain.mask_of([f"1.{i}.0" for i in range(0, 20, 2)])
    assert domain.describe(scattered) == "1.0.0, 1.2.0, 1.4.0, 1.6.0, 1.8.0 and 5 more"


def test_facts_of_the_host_keep_their_whole_numbers() -> None:
    domain = Domain("host:driver", ["450.80.02", "470.57.02", "525.60.13", "550.54.14"])
    assert domain.describe(domain.mask(">=525")) == ">=525.60.13"
    assert domain.describe(domain.mask_of(["450.80.02", "470.57.02"])) == "<=470.57.02"


def read(domain: Domain, words: str) -> int:
    """A description as a mask again."""
    if words == "no version":
        return 0
    if words == "any version":
        return domain.all_mask
    mask = 0
    for part in words.split(" or "):
        if part[0].isdigit():
            mask |= domain.mask_of(part.split(", "))
        else:
            mask |= domain.mask(part, prereleases=True)
    return mask


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_words_say_what_the_mask_says(data: st.DataObject) -> None:
    if data.draw(st.booleans()):
        values = data.draw(st.lists(versions(), min_size=1, max_size=12, unique_by=Version))
    else:
        values = data.draw(st.sampled_from([TORCH, ODD]))
    domain = Domain("p", values)
    mask = data.draw(st.integers(0, domain.all_mask)) & ~ABSENT
    if data.draw(st.booleans()):
        parts = data.draw(st.lists(clauses(domain.values), max_size=2))
        mask = domain.mask(",".join(parts), prereleases=data.draw(st.booleans()))
    words = domain.describe(mask)
    assert words
    if " more" in words:
        return
    known = domain.all_mask & ~domain.pre_mask
    if not mask & known:
        known = domain.all_mask
    assert read(domain, words) & known == mask & known, words
