"""Two receipts side by side: which versions differ, which figures got better or worse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# figure -> +1 where more is better, -1 where less is; what is not named is shown without a judgement.
DIRECTION = {
    "tokens_per_second": 1, "bus_gib_per_s": 1, "free_mib": 1, "seconds_per_step": -1, "load_seconds": -1,
    "allocated_mib": -1, "reserved_mib": -1, "peak_resident_mib": -1, "peak_mib": -1, "creep_mib": -1,
    "milliseconds": -1, "pass_seconds": -1, "relative_error": -1, "difference": -1, "loss": -1, "last": -1,
}  # fmt: skip
NOISE = 0.05  # figures closer than this share are the same: no two runs are


def read_receipt(path: Path) -> dict[str, Any]:
    """A receipt from disk.

    Raises:
        ValueError: not there, or not a receipt.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(data, dict) or data.get("kind") != "receipt" or "layers" not in data:
        raise ValueError(f"{path}: not a receipt (make one with envforge verify --json FILE)")
    return data


def compare(one: dict[str, Any], two: dict[str, Any]) -> dict[str, Any]:
    """What differs from the first receipt to the second, as plain data."""
    heads = (
        "passed",
        "grade",
        "stack",
        "device",
        "model",
        "plan_hash",
        "lock_hash",
        "image_digest",
        "settings",
        "host",
    )
    found = {name: [one.get(name), two.get(name)] for name in heads if one.get(name) != two.get(name)}
    for name in ("settings", "host", "model"):
        if name in found:
            first, second = one.get(name) or {}, two.get(name) or {}
            found[name] = [{k: v.get(k) for k in sorted({*first, *second}) if first.get(k) != second.get(k)}
                           for v in (first, second)]  # fmt: skip
    versions = {name: [value.get("versions", {}).get(name) for value in (one, two)]
                for name in sorted({*one.get("versions", {}), *two.get("versions", {})})}  # fmt: skip
    checks: list[dict[str, Any]] = []
    figures: list[dict[str, Any]] = []
    before, after = by_id(one), by_id(two)
    for name in list(dict.fromkeys([*before, *after])):
        first, second = before.get(name, {}), after.get(name, {})
        states = [first.get("status"), second.get("status")]
        if states[0] != states[1]:
            checks.append({"check": name, "status": states, "text": second.get("text") or first.get("text")})
        figures += figure_rows(name, first.get("figures", {}), second.get("figures", {}))
    losses = [value.get("losses") or [] for value in (one, two)]
    if losses[0] and losses[1]:
        figures += figure_rows("training.steps", {"loss": losses[0][-1]}, {"loss": losses[1][-1]})
    worse = [f"{row['check']} {row['figure']}" for row in figures if row["verdict"] == "worse"]
    return {
        "schema": 1,
        "differs": found,
        "versions": {name: pair for name, pair in versions.items() if pair[0] != pair[1]},
        "checks": checks,
        "figures": figures,
        "worse": worse
        + [str(row["check"]) for row in checks if after.get(str(row["check"]), {}).get("status") == "fail"],
    }


def by_id(receipt: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Checks by their id."""
    return {check["id"]: check for layer in receipt["layers"] for check in layer["checks"]}


def figure_rows(check: str, first: dict[str, Any], second: dict[str, Any]) -> list[dict[str, Any]]:
    """Numbers that both have and that differ by more than noise."""
    rows = []
    for name in first:
        a, b = first[name], second.get(name)
        if isinstance(a, bool) or isinstance(b, bool):
            continue
        if not isinstance(a, (int, float)) or not isinstance(b, (int, float)):
            continue
        if abs(b - a) <= NOISE * max(abs(a), abs(b)):
            continue
        way = DIRECTION.get(name, 0) * (1 if b > a else -1)
        rows.append({"check": check, "figure": name, "values": [a, b], "verdict": {1: "better", -1: "worse"}.get(way)})
    return rows


def render(found: dict[str, Any], names: tuple[str, str]) -> str:
    """As text: what differs, then the figures."""
    lines = [f"A {names[0]}", f"B {names[1]}", ""]
    for name, (a, b) in found["differs"].items():
        lines.append(f"{name:<14} {short(a)} -> {short(b)}")
    if found["versions"]:
        lines += ["", "versions"]
        lines += [f"  {name:<20} {a or 'none'} -> {b or 'none'}" for name, (a, b) in found["versions"].items()]
    if found["checks"]:
        lines += ["", "checks"]
        for row in found["checks"]:
            a, b = row["status"]
            lines.append(f"  {row['check']:<28} {a or 'absent'} -> {b or 'absent'}  {row['text'] or ''}".rstrip())
    if found["figures"]:
        lines += ["", f"figures that differ by more than {100 * NOISE:.0f} %"]
        for row in found["figures"]:
            a, b = row["values"]
            lines.append(
                f"  {row['check'] + ' ' + row['figure']:<44} {a:>12g} {b:>12g}  {row['verdict'] or ''}".rstrip()
            )
    if len(lines) == 3:
        lines.append("no difference beyond noise")
    return "\n".join(lines)


def short(value: Any) -> str:
    """One value on one line."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 100 else text[:97] + "..."
