"""One pass over a log: each candidate line goes to the patterns whose literal it holds; little is kept of it."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import BinaryIO, cast

from envforge.diagnose import facts as f
from envforge.diagnose.checks import CHECKS, Context
from envforge.diagnose.model import STRENGTH, Confidence, Hit, Pattern, Rules
from envforge.diagnose.prefix import strip
from envforge.diagnose.scan import Candidate, scan
from envforge.diagnose.trackers import SIGNAL_TRACKERS, TRACKERS, Tracker

FIRST, LAST = 4, 2  # hits kept of one pattern
MAX_KEYS = 6  # distinct values of a `per` group that become findings of their own
MAX_WINDOWS = 600  # context windows that one pattern may ask for: they cost more than the line
ENOUGH = 150  # matches of one pattern after which only the last one of each block is looked at
SHOWN = 300  # characters of an evidence line

CaseKey = tuple[int, int]  # positions of rule and case


def _joined(one: Hit, other: Hit) -> Hit:
    surest = max((hit.confidence for hit in (one, other) if hit.confidence), key=STRENGTH.__getitem__, default=None)
    text = one.text if len(one.text) >= len(other.text) else other.text
    return Hit(one.line, text, {**other.groups, **one.groups}, one.rank, surest)


@dataclass(slots=True)
class Tally:
    """What one case saw: a count, the first and last hits."""

    count: int = 0
    first: list[Hit] = field(default_factory=list)
    last: deque[Hit] = field(default_factory=lambda: deque(maxlen=LAST))

    def add(self, hit: Hit) -> None:
        """Keep a hit; several patterns that meet on one line are one hit with the groups of all."""
        kept = self.last or self.first
        if kept and kept[-1].line == hit.line:
            kept[-1] = _joined(kept[-1], hit)
            return
        self.count += 1
        if len(self.first) < FIRST:
            self.first.append(hit)
        else:
            self.last.append(hit)

    @property
    def hits(self) -> list[Hit]:
        """First and last ones, in order."""
        return [*self.first, *self.last]


@dataclass(slots=True)
class Seen:
    """Everything that the pass kept."""

    cases: dict[CaseKey, dict[str, Tally]] = field(default_factory=dict)
    signals: dict[str, Tally] = field(default_factory=dict)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE)


class _Probe:
    """A pattern at work."""

    __slots__ = ("check", "compiled", "matches", "near", "pattern", "per", "unless", "where", "windows")

    def __init__(
        self, pattern: Pattern, where: CaseKey | str, check: str | None = None, per: str | None = None
    ) -> None:
        self.pattern, self.where, self.check, self.per = pattern, where, check, per
        self.compiled: re.Pattern[str] | None = None
        self.near: re.Pattern[str] | None = None
        self.unless: re.Pattern[str] | None = None
        self.windows = 0
        self.matches = 0

    def look(self, line: Candidate, text: str, rank: str | None) -> tuple[str, Hit] | None:
        """(key, hit) when the line is meant."""
        if self.compiled is None:  # most patterns never see a line
            self.compiled = _compiled(self.pattern.re)
            self.near = _compiled(self.pattern.near) if self.pattern.near else None
            self.unless = _compiled(self.pattern.unless) if self.pattern.unless else None
        found = self.compiled.search(text)
        if not found:
            return None
        if self.near or self.unless:
            if self.windows >= MAX_WINDOWS:
                return None
            self.windows += 1
            window = line.around(self.pattern.before, self.pattern.after)
            if (self.near and not self.near.search(window)) or (self.unless and self.unless.search(window)):
                return None
        groups = {name: value for name, value in found.groupdict().items() if value}
        confidence: str | None = None
        if self.check:
            if self.windows >= MAX_WINDOWS * 2:
                return None
            self.windows += 1
            extra = CHECKS[self.check](Context(found, text, line.around))
            if extra is None:
                return None
            groups |= extra
            confidence = groups.pop("confidence", None)
        key = groups.get(self.per, "") if self.per else ""
        self.matches += 1
        return key, Hit(line.number, excerpt(text, found), groups, rank, cast("Confidence | None", confidence))


class _Desk:
    """Everything that waits for one literal."""

    __slots__ = ("probes", "readings", "trackers")

    def __init__(self) -> None:
        self.probes: list[_Probe] = []
        self.readings: list[_Reader] = []
        self.trackers: list[Tracker] = []

    def satisfied(self) -> bool:
        """More lines with this literal would say nothing new."""
        return (
            not self.readings
            and all(tracker.satisfied for tracker in self.trackers)
            and all(probe.matches >= ENOUGH for probe in self.probes)
        )


class _Reader:
    """A fact pattern at work."""

    __slots__ = ("count", "pattern", "weight")

    def __init__(self, reading: f.Reading) -> None:
        self.pattern = reading.re
        self.weight = reading.weight
        self.count = 0


def run(stream: BinaryIO, rules: Rules, facts: f.Facts) -> Seen:
    """Read the whole stream once; `facts` takes what the log says of versions and devices."""
    seen = Seen()
    desks: dict[str, _Desk] = {}
    owners: list[tuple[CaseKey | str, Tracker]] = []

    def desk(literal: str) -> _Desk:
        return desks.setdefault(literal, _Desk())

    for name, patterns in rules.signals.items():
        for pattern in patterns:
            desk(pattern.literal).probes.append(_Probe(pattern, name))
    for i, rule in enumerate(rules.rules):
        for j, case in enumerate(rule.cases):
            for pattern in case.patterns:
                desk(pattern.literal).probes.append(_Probe(pattern, (i, j), case.check, case.per))
            if case.tracker:
                tracker = TRACKERS[case.tracker]()
                owners.append(((i, j), tracker))
                for literal in tracker.literals:
                    desk(literal).trackers.append(tracker)
    for reading in f.readings():
        desk(reading.literal).readings.append(_Reader(reading))
    last_only: set[str] = set()
    for name, kind in SIGNAL_TRACKERS.items():
        tracker = kind()
        owners.append((name, tracker))
        last_only.update(literal for literal in tracker.literals if literal not in desks)
        for literal in tracker.literals:
            desk(literal).trackers.append(tracker)
    literals = sorted(desks)
    ordered = [desks[literal] for literal in literals]
    known = {index for index, literal in enumerate(literals) if literal in last_only}
    for line in scan(stream, [literal.encode() for literal in literals], known):
        _line(line, ordered, seen, facts, known)
    for where, tracker in owners:
        for hit in tracker.hits():
            _keep(seen, where, "", hit)
    return seen


def _line(line: Candidate, desks: list[_Desk], seen: Seen, facts: f.Facts, known: set[int]) -> None:
    text, rank = strip(line.text)
    fed: list[Tracker] = []
    for index in line.literals:
        waiting = desks[index]
        changed = False
        for probe in waiting.probes:
            result = probe.look(line, text, rank)
            if result:
                _keep(seen, probe.where, *result)
                changed = changed or probe.matches >= ENOUGH
        for tracker in waiting.trackers:
            if tracker not in fed:
                fed.append(tracker)
                tracker.feed(line.number, text, rank)
            changed = changed or tracker.satisfied
        if waiting.readings:
            for reader in waiting.readings:
                reader.count += 1
                for match in _some(_compiled(reader.pattern).finditer(text), 4):
                    facts.take(match.groupdict(), reader.weight, text)
            waiting.readings = [reader for reader in waiting.readings if reader.count < f.MAX_HITS]
            changed = changed or not waiting.readings
        if changed and index not in known and waiting.satisfied():
            known.add(index)


def _some(matches: Iterable[re.Match[str]], count: int) -> Iterable[re.Match[str]]:
    for _, match in zip(range(count), matches, strict=False):
        yield match


def _keep(seen: Seen, where: CaseKey | str, key: str, hit: Hit) -> None:
    if isinstance(where, str):
        seen.signals.setdefault(where, Tally()).add(hit)
        return
    keyed = seen.cases.setdefault(where, {})
    if key not in keyed and len(keyed) >= MAX_KEYS:
        return
    keyed.setdefault(key, Tally()).add(hit)


def excerpt(text: str, found: re.Match[str]) -> str:
    """A readable piece of the line around the match: no control characters, at most SHOWN characters."""
    text, low, high = text.strip("\n"), found.start(), found.end()
    if len(text) > SHOWN:
        start = max(0, min(low - 40, high - SHOWN + 20))
        text = ("..." if start else "") + text[start : start + SHOWN] + ("..." if start + SHOWN < len(text) else "")
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "", text).strip()
