"""The report for people: one line per check, the answers, and the losses as a small line."""

from __future__ import annotations

import math
from typing import Any

MARKS = {"pass": "ok  ", "fail": "FAIL", "skip": "skip", "warn": "warn"}
BARS = "▁▂▃▄▅▆▇█"


def spark(values: list[float]) -> str:
    """Numbers as a line of bars; what is not finite shows as "!"."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "!" * len(values)
    low, high = min(finite), max(finite)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] if math.isfinite(value) else "!" for value in values)


def render(receipt: dict[str, Any]) -> str:
    """The whole report as text."""
    lines = []
    for layer in receipt["layers"]:
        lines.append(f"{layer['layer']} ({layer['seconds']:.1f} s)")
        for check in layer["checks"]:
            name = check["id"].partition(".")[2]
            lines.append(f"  {MARKS[check['status']]} {name:<20} {check['text']}".rstrip())
    lines.append("")
    chat = receipt["chat"]
    if chat["base"] is not None:
        lines.append(f"prompt  {chat['prompt']}")
        for key, label in (("base", "base"), ("four_bit", "4-bit"), ("merged", "merged")):
            if chat[key] is not None:
                lines.append(f"{label:<7} {chat[key]}")
    losses = [float(value) for value in receipt["losses"]]  # JSON has no NaN: from disk they are words
    if losses:
        lines.append(f"loss    {losses[0]:.4f} {spark(losses)} {losses[-1]:.4f}")
    if lines[-1]:
        lines.append("")
    lines.append(verdict_line(receipt))
    lines += finding_lines(receipt.get("findings") or [])
    return "\n".join(lines)


def finding_lines(findings: list[dict[str, Any]]) -> list[str]:
    """What diagnose says of a failure, most likely first."""
    lines: list[str] = []
    for row in findings:
        retry = "a retry may help" if row["retryable"] else "a retry does not help"
        lines += ["", f"{row['title']}", f"  {row['id']}: {row['confidence']}; owner: {row['owner']}; {retry}"]
        lines.append(f"  {row['cause']}")
        lines += [f"  - {fix}" for fix in row.get("fixes", ())]
    return lines


def verdict_line(receipt: dict[str, Any]) -> str:
    """The last line."""
    if receipt["passed"]:
        text = f"passed ({receipt['grade']}, {receipt['stack']} on {receipt['device']}, {receipt['seconds']:.0f} s)"
        return text + (f"; {receipt['pending']}" if receipt["pending"] else "")
    first = receipt["first_failure"]
    return f"FAILED in the {first['layer']} layer, {first['check']}: {first['text']}"
