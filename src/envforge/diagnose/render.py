"""A report as text for people: cause first, then evidence, then what to do."""

from __future__ import annotations

import textwrap

from envforge.diagnose.model import Finding, Report

WIDTH = 110
_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"


def text(report: Report, colour: bool = False) -> str:
    """The whole answer; ends with a newline."""
    parts = [_finding(number, finding, colour) for number, finding in enumerate(report.findings, 1)]
    if not parts:
        parts = ["Nothing known was found. That does not mean that nothing is wrong: it is not known.\n"]
    if report.facts:
        parts.append("judged with: " + ", ".join(f"{name} {value}" for name, value in report.facts.items()) + "\n")
    if report.next:
        parts.append("what to run next:\n" + "".join(_item(step) for step in report.next))
    return "\n".join(parts)


def _finding(number: int, finding: Finding, colour: bool) -> str:
    title = f"{number}. {finding.title}"
    retry = "a retry may help" if finding.retryable else "a retry does not help"
    lines = [
        f"{_BOLD}{title}{_PLAIN}" if colour else title,
        f"   {finding.id}: {finding.confidence}; owner: {finding.owner}; {retry}",
    ]
    if finding.severity != "fatal":
        lines[-1] += "; not fatal"
    if finding.consequence_of:
        lines.append(f"   follows from: {', '.join(finding.consequence_of)}")
    lines += ["", *_wrapped(finding.cause, "   "), ""]
    for hit in finding.evidence:
        rank = f" [rank {hit.rank}]" if hit.rank else ""
        place = f"{hit.file} line {hit.line}" if hit.file else f"line {hit.line}"
        lines.append(f"   {place}{rank}: {textwrap.shorten(hit.text, WIDTH + 60, placeholder=' ...')}")
    if finding.count > len(finding.evidence):
        lines.append(f"   ({finding.count} lines like these)")
    if finding.fixes:
        lines += ["", "   what to do:"]
        lines += [row for fix in finding.fixes for row in _item(fix, "   ").rstrip("\n").split("\n")]
    lines += [f"   source: {finding.source}", ""]
    return "\n".join(lines)


def _wrapped(value: str, indent: str) -> list[str]:
    return textwrap.wrap(
        value, WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _item(value: str, indent: str = "") -> str:
    rows = textwrap.wrap(
        value,
        WIDTH,
        initial_indent=indent + "- ",
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(rows) + "\n"
