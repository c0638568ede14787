"""The values of a diagnosis: rules as they were read, hits as they were seen, findings as they are told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Confidence = Literal["certain", "likely", "possible"]
Owner = Literal["code", "data", "image", "node", "cluster"]
Severity = Literal["fatal", "degraded", "notice"]

STRENGTH: Mapping[str, int] = {"possible": 0, "likely": 1, "certain": 2}
SEVERITY: Mapping[str, int] = {"fatal": 0, "degraded": 1, "notice": 2}


@dataclass(frozen=True, slots=True)
class Pattern:
    """A regex (case-insensitive, with named groups) and what must or must not stand near its line.

    `literal` is the plain text that every match contains; `near` must be found and `unless` must not be found within
    `before` lines above and `after` lines below.
    """

    re: str
    literal: str
    near: str | None = None
    unless: str | None = None
    before: int = 25
    after: int = 0


@dataclass(frozen=True, slots=True)
class Adjust:
    """Another confidence where all conditions hold."""

    to: Confidence
    conditions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """One way in which a rule shows: its evidence, its conditions, and what it means then."""

    patterns: tuple[Pattern, ...]
    tracker: str | None
    check: str | None
    conditions: tuple[str, ...]
    confidence: Confidence
    adjust: tuple[Adjust, ...]
    min_count: int
    per: str | None  # named group: one finding for each of its values
    cause: tuple[str, ...]  # the first whose placeholders are all known
    fixes: tuple[tuple[str, ...], ...]  # steps; of each, the first wording whose placeholders are all known
    next: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """One finding id."""

    id: str
    title: str
    owner: Owner
    retryable: bool
    severity: Severity
    consequence_of: tuple[str, ...]  # ids that explain this one; "*" is every other fatal one
    hidden_by: tuple[str, ...]  # ids that say the same better
    source: str
    cases: tuple[Case, ...]


@dataclass(frozen=True, slots=True)
class Rules:
    """All rules, and the signals: named patterns that conditions speak of."""

    rules: tuple[Rule, ...]
    signals: Mapping[str, tuple[Pattern, ...]]
    next: tuple[str, ...]  # what to run next when nothing is known


@dataclass(frozen=True, slots=True)
class Hit:
    """One matched line: number, a readable excerpt, the named groups, the rank that printed it where that is known."""

    line: int
    text: str
    groups: Mapping[str, str] = field(default_factory=dict)
    rank: str | None = None
    confidence: Confidence | None = None
    file: str | None = None  # where several files are one log; `line` counts in it then


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong, how sure that is, who can cure it and how."""

    id: str
    title: str
    confidence: Confidence
    owner: Owner
    retryable: bool
    severity: Severity
    evidence: tuple[Hit, ...]
    count: int
    cause: str
    fixes: tuple[str, ...]
    source: str
    consequence_of: tuple[str, ...] = ()
    next: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The documented shape."""
        return {
            "id": self.id,
            "title": self.title,
            "confidence": self.confidence,
            "severity": self.severity,
            "owner": self.owner,
            "retryable": self.retryable,
            "evidence": [
                {"line": hit.line, "text": hit.text}
                | ({"rank": hit.rank} if hit.rank else {})
                | ({"file": hit.file} if hit.file else {})
                for hit in self.evidence
            ],
            "count": self.count,
            "cause": self.cause,
            "fixes": list(self.fixes),
            "next": list(self.next),
            "consequence_of": list(self.consequence_of),
            "source": self.source,
        }


@dataclass(frozen=True, slots=True)
class Report:
    """The answer: findings, most likely first; the facts they were judged with; what to run next; notes to the user."""

    findings: tuple[Finding, ...]
    facts: Mapping[str, str]
    next: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The documented shape (schema 1)."""
        return {
            "schema": 1,
            "findings": [finding.to_json() for finding in self.findings],
            "facts": dict(self.facts),
            "next": list(self.next),
            "notes": list(self.notes),
        }
