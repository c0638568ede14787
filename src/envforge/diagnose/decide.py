"""From what was seen to what is told: conditions, confidence, texts, and the order of cause and consequence."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from envforge.diagnose.engine import Seen, Tally
from envforge.diagnose.facts import PREDICATES, Facts
from envforge.diagnose.model import SEVERITY, STRENGTH, Case, Confidence, Finding, Hit, Rule, Rules

MAX_EVIDENCE = 6
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


def decide(rules: Rules, seen: Seen, facts: Facts) -> tuple[Finding, ...]:
    """Findings, most likely first."""
    asked: dict[str, bool] = {}

    def holds(term: str) -> bool:
        return any(_word(word) for word in term.split("|"))

    def _word(word: str) -> bool:
        name = word.lstrip("!")
        if name not in asked:
            asked[name] = name in seen.signals or (name in PREDICATES and PREDICATES[name](facts))
        return asked[name] is not word.startswith("!")

    known: dict[str, str] = {}  # groups of signals, then facts: what any text may name
    for tally in seen.signals.values():
        for hit in tally.first:
            known = {**hit.groups, **known}
    if seen.cases:
        known |= facts.values()
    found: list[Finding] = []
    for i, rule in enumerate(rules.rules):
        parts: dict[str, list[tuple[Confidence, int, Case, Tally]]] = {}
        for j, case in enumerate(rule.cases):
            keyed = seen.cases.get((i, j))
            if not keyed or not all(holds(term) for term in case.conditions):
                continue
            for key, tally in keyed.items():
                if tally.count >= case.min_count:
                    sure = _confidence(case, tally, holds)
                    parts.setdefault(key if case.per else "", []).append((sure, j, case, tally))
        found += [_finding(rule, some, known) for some in parts.values()]
    return _order(_related(found, rules))


def _confidence(case: Case, tally: Tally, holds: object) -> Confidence:
    own = [hit.confidence for hit in tally.hits if hit.confidence]
    confidence = max(own, key=STRENGTH.__getitem__) if own else case.confidence
    for row in case.adjust:
        if all(holds(term) for term in row.conditions):  # type: ignore[operator]
            return row.to
    return confidence


def _finding(rule: Rule, parts: Sequence[tuple[Confidence, int, Case, Tally]], values: Mapping[str, str]) -> Finding:
    """One finding of all cases of a rule that hold; the surest speaks first."""
    ordered = sorted(parts, key=lambda part: (-STRENGTH[part[0]], part[1]))
    hits: list[Hit] = []
    fixes: list[str] = []
    next_: list[str] = []
    cause = ""
    told: set[int] = set()  # lines that a surer case has spoken of
    for _, _, case, tally in ordered:
        lines = {hit.line for hit in tally.hits}
        if lines <= told:
            continue
        told |= lines
        groups = dict(values)
        for hit in reversed(tally.hits):
            groups |= hit.groups
        hits += tally.hits
        cause = cause or _first(case.cause, groups)
        fixes += filter(None, (_first(step, groups) for step in case.fixes))
        next_ += _filled(case.next, groups)
    return Finding(
        id=rule.id,
        title=rule.title,
        confidence=ordered[0][0],
        owner=rule.owner,
        retryable=rule.retryable,
        severity=rule.severity,
        evidence=_evidence(hits),
        count=max(tally.count for *_, tally in parts),
        cause=cause or rule.title,
        fixes=tuple(dict.fromkeys(fixes)),
        source=rule.source,
        next=tuple(dict.fromkeys(next_)),
    )


def _evidence(hits: Sequence[Hit]) -> tuple[Hit, ...]:
    """Distinct lines in order; when there are many, the first ones and the last."""
    unique = list({(hit.line, hit.text): hit for hit in sorted(hits, key=lambda hit: hit.line)}.values())
    if len(unique) > MAX_EVIDENCE:
        unique = [*unique[: MAX_EVIDENCE - 1], unique[-1]]
    return tuple(unique)


def _first(texts: Sequence[str], groups: Mapping[str, str]) -> str:
    return next(iter(_filled(texts, groups)), "")


def _filled(texts: Sequence[str], groups: Mapping[str, str]) -> list[str]:
    """Texts with their placeholders filled in; one that names something unknown is left out."""
    return [
        _PLACEHOLDER.sub(lambda m: groups[m[1]], text)
        for text in texts
        if all(name in groups for name in _PLACEHOLDER.findall(text))
    ]


def _related(found: Sequence[Finding], rules: Rules) -> list[Finding]:
    """Leave out what others say better, and note what follows from what."""
    by_id = {rule.id: rule for rule in rules.rules}
    sure = {finding.id for finding in found if STRENGTH[finding.confidence] >= STRENGTH["likely"]}
    strong = [finding for finding in found if not sure.intersection(by_id[finding.id].hidden_by)]
    kept: list[Finding] = []
    for finding in strong:
        explained = by_id[finding.id].consequence_of
        causes = [
            other.id
            for other in strong
            if other.id != finding.id
            and other.severity == "fatal"
            and STRENGTH[other.confidence] >= min(STRENGTH["likely"], STRENGTH[finding.confidence])
            and (other.id in explained or ("*" in explained and "*" not in by_id[other.id].consequence_of))
        ]
        kept.append(replace(finding, consequence_of=tuple(dict.fromkeys(causes))))
    return kept


def _order(found: Sequence[Finding]) -> tuple[Finding, ...]:
    """Fatal before degraded before notices; causes before consequences; then by confidence and position."""
    return tuple(
        sorted(
            found,
            key=lambda finding: (
                SEVERITY[finding.severity],
                bool(finding.consequence_of),
                -STRENGTH[finding.confidence],
                finding.evidence[0].line if finding.evidence else 0,
            ),
        )
    )
