"""Sets of versions as integers.

The search never compares versions: it works on a package's *domain*, the finite list of values that the package can
have, and a set of them is one int. Bit 0 means that the package is not in the answer (`ABSENT`), bits 1 to n are the
known values in ascending order, so union, intersection and complement are `|`, `&` and `Domain.outside`, and "newest
allowed" is the highest bit. A single value is named by its *position* (0 to n), a set by its *mask*.

PEP 440 is applied in one place, `Domain.mask`, which turns a specifier into such an int and remembers it. Its meaning
is that of `packaging.specifiers.SpecifierSet`, tested against it; only the way is another: each clause is one or two
binary searches in the sorted list instead of a comparison per version.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import cache

from packaging.specifiers import Specifier
from packaging.version import InvalidVersion, Version

ABSENT = 1  # the mask that holds nothing but "not in the answer" (position 0)

# What nearly every clause in real metadata looks like. Anything else goes through packaging's own parser, which also
# words the error.
_PLAIN = re.compile(r"(~=|==|!=|<=|>=|<|>)\s*([0-9]+(?:\.[0-9]+)*)(\.\*)?")


@cache
def _clause(text: str) -> tuple[str, str, Version | None]:
    """Operator ("==.*" and "!=.*" for prefixes), version text and parsed version of one clause.

    Raises:
        packaging.specifiers.InvalidSpecifier: not a PEP 440 clause.
    """
    plain = _PLAIN.fullmatch(text)
    if plain and (plain[3] is None or plain[1] in ("==", "!=")) and (plain[1] != "~=" or "." in plain[2]):
        operator, version, star = plain.groups()
    else:
        specifier = Specifier(text)
        operator, version = specifier.operator, specifier.version
        star = version.endswith(".*") and operator in ("==", "!=")
        if star:
            version = version[:-2]
    if star:
        operator += ".*"
    if operator == "===":
        try:
            return operator, version, Version(version)
        except InvalidVersion:
            return operator, version, None
    return operator, version, Version(version)


def _before_next(version: Version, length: int) -> Version:
    """The lowest version above everything that starts with the first `length` numbers of `version`."""
    release = (*version.release, *(0,) * length)[:length]
    return Version(f"{version.epoch}!{'.'.join(map(str, (*release[:-1], release[-1] + 1)))}.dev0")


class Domain:
    """The finite list of values that one package can have.

    Args:
        name: the package, or a virtual one (`python`, `torch-variant`, `host:driver`).
        values: PEP 440 versions in any order (they are sorted), or labels such as "cu126", ascending as given.
        labels: say so when labels happen to look like versions; by default they are labels when none of them does.

    Raises:
        ValueError: a value is given twice, or only some values are versions.
    """

    __slots__ = (
        "_described",
        "_masks",
        "_positions",
        "_pre",
        "_versions",
        "all_mask",
        "exact",
        "full",
        "labels",
        "name",
        "values",
    )

    def __init__(self, name: str, values: Sequence[str], *, labels: bool | None = None) -> None:
        self.name = name
        versions: list[Version] = []
        if not labels:
            try:
                versions = [Version(value) for value in values]
            except InvalidVersion as error:
                if labels is False or any(_is_version(value) for value in values):
                    raise ValueError(f"{name}: {error}; the other values are versions") from error
                labels = True
        if versions and any(map(Version.__gt__, versions, versions[1:])):
            ordered = sorted(zip(versions, values, strict=True))
            versions, values = [pair[0] for pair in ordered], [pair[1] for pair in ordered]
        self.labels = bool(labels)
        self.exact = ":" in name  # a fact of the host: "driver >=525.60" would be a lie where 525.60.13 is meant
        self.values = tuple(values)
        self.full = (2 << len(self.values)) - 1  # every value and ABSENT
        self.all_mask = self.full ^ ABSENT
        self._versions = versions
        self._positions = {value: position for position, value in enumerate(self.values, 1)}
        if len(self._positions) != len(self.values):
            twice = next(value for value in self.values if self.values.count(value) > 1)
            raise ValueError(f"{name}: {twice} is listed twice")
        self._pre = 0
        for position, version in enumerate(versions, 1):
            if version.is_prerelease:
                self._pre |= 1 << position
        self._masks: dict[tuple[str, bool], int] = {}
        self._described: dict[int, str] = {}

    def __repr__(self) -> str:
        return f"Domain({self.name!r}, {len(self.values)} values)"

    @property
    def pre_mask(self) -> int:
        """The pre-releases (PEP 440: alpha, beta, candidate and development releases)."""
        return self._pre

    def outside(self, mask: int) -> int:
        """Everything that is not in `mask`, ABSENT included unless `mask` holds it."""
        return self.full & ~mask

    def value(self, position: int) -> str | None:
        """The value at a position, None for ABSENT."""
        return self.values[position - 1] if position else None

    def version(self, position: int) -> Version:
        """The parsed version at a position of a domain of versions."""
        return self._versions[position - 1]

    def bit(self, value: str) -> int:
        """The position of a value; any PEP 440 spelling of a version will do (1.0 for 1.0.0).

        Raises:
            KeyError: not a known value.
        """
        position = self._positions.get(value)
        if position is None and _is_version(value):
            wanted = Version(value)
            index = bisect_left(self._versions, wanted)
            if index < len(self._versions) and self._versions[index] == wanted:
                return index + 1
        if position is None:
            raise KeyError(value)
        return position

    def mask_of(self, values: Iterable[str]) -> int:
        """The set of the given values, each named as for `bit`."""
        mask = 0
        for value in values:
            mask |= 1 << self.bit(value)
        return mask

    def positions(self, mask: int) -> list[int]:
        """The positions in a mask, ascending."""
        found = []
        while mask:
            low = mask & -mask
            found.append(low.bit_length() - 1)
            mask ^= low
        return found

    def mask(self, specifier: str, prereleases: bool = False) -> int:
        """The values that a PEP 440 specifier allows, without ABSENT.

        Pre-releases are in only where `prereleases` says so or a clause other than `!=` names one. Where nothing else
        matches they stay out: the caller's conflict is clearer than a release that nobody asked for.
        In a domain of labels the specifier is a list of labels ("cu118,cu121"; "!=cpu" for all but one; "" for all),
        and labels that the domain does not have match nothing.

        Raises:
            packaging.specifiers.InvalidSpecifier: a clause is malformed (a ValueError).
        """
        key = (specifier, prereleases)
        known = self._masks.get(key)
        if known is not None:
            return known
        clauses = [text.strip() for text in specifier.split(",") if text.strip()]
        if self.labels:
            mask = self._label_mask(clauses)
        else:
            mask = self.all_mask
            for text in clauses:
                operator, version_text, version = _clause(text)
                mask &= self._clause_mask(operator, version_text, version)
                if operator != "!=" and version is not None and version.is_prerelease:
                    prereleases = True
            if not prereleases:
                mask &= ~self._pre
        self._masks[key] = mask
        return mask

    def _label_mask(self, clauses: list[str]) -> int:
        named, barred = 0, 0
        for text in clauses:
            label = text.lstrip("!=").strip()
            bit = 1 << self._positions[label] if label in self._positions else 0
            if text.startswith("!"):
                barred |= bit
            else:
                named |= bit
        only_barred = all(text.startswith("!") for text in clauses)
        return (self.all_mask if only_barred else named) & ~barred

    def _clause_mask(self, operator: str, text: str, version: Version | None) -> int:
        """One clause, pre-releases included: the versions from index `start` up to, not including, `stop`."""
        versions = self._versions
        start, stop = 0, len(versions)
        if operator == "===" or version is None:
            wanted = text.lower()
            return sum(1 << position for value, position in self._positions.items() if value.lower() == wanted)
        if operator == ">=":
            start = bisect_left(versions, version)
        elif operator == "<":
            # <2.0 leaves out the pre-releases of 2.0, <2.0rc1 does not.
            bound = version if version.is_prerelease else Version(f"{version}.dev0")
            stop = bisect_left(versions, bound)
        elif operator == "<=":
            stop = self._past_locals(version)
        elif operator == ">":
            start = self._past_posts(version)
        elif operator == "~=":
            start = bisect_left(versions, version)
            stop = bisect_left(versions, _before_next(version, len(version.release) - 1))
        elif operator in ("==.*", "!=.*"):
            start = bisect_left(versions, Version(f"{version}.dev0"))
            stop = bisect_left(versions, _before_next(version, len(version.release)))
        else:  # == and !=
            start = bisect_left(versions, version)
            stop = self._past_equal(version) if version.local else self._past_locals(version)
        mask = (2 << stop) - (2 << start) if stop > start else 0
        return self.all_mask & ~mask if operator.startswith("!=") else mask

    def _past_equal(self, version: Version) -> int:
        versions, index = self._versions, bisect_left(self._versions, version)
        while index < len(versions) and versions[index] == version:
            index += 1
        return index

    def _past_locals(self, version: Version) -> int:
        """The index after `version` and its local builds (2.1.2 and 2.1.2+cu118)."""
        versions, index = self._versions, self._past_equal(version)
        while index < len(versions) and versions[index].local and Version(versions[index].public) == version:
            index += 1
        return index

    def _past_posts(self, version: Version) -> int:
        """Where >V begins: past V, its local builds and, unless V names one itself, its post-releases."""
        if version.dev is not None or version.post is not None:
            return self._past_locals(version)
        versions, index = self._versions, bisect_left(self._versions, version)
        ceiling = _before_next(version, len(version.release))
        while index < len(versions) and versions[index] < ceiling:
            other = versions[index]
            if other.pre != version.pre or _trimmed(other) != _trimmed(version):
                break
            index += 1
        return index

    def describe(self, mask: int) -> str:
        """The shortest range in words: ">=0.46,<0.50", "==4.36.2", "2.1.0, 2.1.2", "any version".

        Bounds are chosen among round numbers that separate the *known* values in the mask from those outside it.
        Pre-releases count only where nothing else is in the mask. ABSENT is not part of the description.
        """
        known = self._described.get(mask)
        if known is None:
            from envforge.resolver.ranges import describe

            known = self._described[mask] = describe(self, mask & self.all_mask)
        return known


def _trimmed(version: Version) -> tuple[int, ...]:
    release = version.release
    while release and release[-1] == 0:
        release = release[:-1]
    return (version.epoch, *release)


@cache
def _is_version(value: str) -> bool:
    try:
        Version(value)
    except InvalidVersion:
        return False
    return True
