"""What the numbers of an out-of-memory message say: both generations of PyTorch's text, and bare ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

GIB = 1024.0  # everything is counted in MiB
_UNITS = {
    "bytes": 1 / (1024 * 1024),
    "kib": 1 / 1024,
    "kb": 1 / 1024,
    "mib": 1.0,
    "mb": 1.0,
    "gib": GIB,
    "gb": GIB,
    "tib": GIB * 1024,
}
_SIZE = r"(\d{1,9}(?:\.\d{1,6})?)\s?(bytes|[KMGT]i?B)"
_WANTED = re.compile(r"Tried to allocate " + _SIZE, re.IGNORECASE)
_NEW = {
    "total": re.compile(r"total capac\w*y of " + _SIZE, re.IGNORECASE),
    "free": re.compile(r"of which " + _SIZE + r" is free", re.IGNORECASE),
    "this": re.compile(r"this process has " + _SIZE + r" memory in use", re.IGNORECASE),
    "allocated": re.compile(r"allocated memory " + _SIZE + r" is allocated by PyTorch", re.IGNORECASE),
    "graphs": re.compile(r"with " + _SIZE + r" allocated in private pools", re.IGNORECASE),
    "unused": re.compile(_SIZE + r" is reserved by PyTorch but unallocated", re.IGNORECASE),
    "allowed": re.compile(_SIZE + r" allowed;", re.IGNORECASE),
}
_OLD = {
    "total": re.compile(_SIZE + r" total capacity", re.IGNORECASE),
    "allocated": re.compile(_SIZE + r" already allocated", re.IGNORECASE),
    "free": re.compile(_SIZE + r" free", re.IGNORECASE),
    "reserved": re.compile(_SIZE + r" reserved in total by PyTorch", re.IGNORECASE),
}
_OTHERS = re.compile(r"(?<!this )\bprocess (\d+) has " + _SIZE + r" memory in use", re.IGNORECASE)
_CONTEXT = 1.2 * GIB  # a CUDA context with its libraries: memory of one's own that PyTorch does not count
_DEVICE = re.compile(r"\bGPU (\d+)\b")


@dataclass(frozen=True, slots=True)
class Judgement:
    """verdicts: what the numbers allow, each with its confidence ("" = the rule's own)."""

    verdicts: Mapping[str, str]
    facts: Mapping[str, str]

    def groups(self, verdict: str) -> dict[str, str]:
        """Named groups for the texts, with the confidence where the numbers set one."""
        confidence = self.verdicts[verdict]
        return dict(self.facts) | ({"confidence": confidence} if confidence else {})


def judge(text: str, around: Callable[[int, int], str]) -> Judgement:
    """Judge one message; `around` gives further lines when a logger has wrapped it."""
    if "Tried to allocate" in text and not re.search(r"unallocated|reserved in total", text):
        text = " ".join(around(0, 6).split("\n"))
        text = text[text.find("Tried to allocate") - 60 if "Tried to allocate" in text[60:] else 0 :]
    wanted = _size(_WANTED.search(text))
    numbers = _read(text, _NEW)
    if "total" not in numbers:
        numbers = _read(text, _OLD)
        if "reserved" in numbers and "allocated" in numbers:
            numbers["unused"] = max(0.0, numbers["reserved"] - numbers["allocated"])
    if wanted is None or "total" not in numbers or "free" not in numbers:
        return Judgement({"unknown": ""}, {} if wanted is None else {"wanted": _show(wanted)})
    others = _others(text, numbers)
    facts = {"wanted": _show(wanted), "total": _show(numbers["total"]), "free": _show(numbers["free"])}
    facts["unused"] = _show(numbers.get("unused", 0.0))
    facts["mine"] = _show(numbers.get("allocated", 0.0))
    device = _DEVICE.search(text)
    if device:
        facts["device"] = device[1]
    facts |= _name_others(text, others)
    if "allowed" in numbers:
        facts["allowed"] = _show(numbers["allowed"])
    return Judgement(_decide(wanted, numbers, others), facts)


def _decide(wanted: float, numbers: Mapping[str, float], others: float) -> dict[str, str]:
    total, free, unused = numbers["total"], numbers["free"], numbers.get("unused", 0.0)
    own = numbers.get("this", numbers.get("allocated", 0.0) + unused)
    blamed = free + others >= wanted  # without the others the request would have been met
    if unused >= wanted * 1.2 and unused >= 0.05 * total:
        verdicts = {"fragmentation": "certain"}
    elif blamed and others >= 0.2 * total:
        sure = "certain" if "this" in numbers else "likely"
        if others >= own or others >= 0.5 * total:
            return {"other-process": sure}
        return {"other-process": "likely", "capacity": "likely"}
    elif free + unused < wanted:
        verdicts = {"capacity": "certain"}
    elif unused > 0.3 * wanted:
        verdicts = {"capacity": "likely", "fragmentation": "possible"}
    else:
        verdicts = {"capacity": "likely"}
    if blamed and others >= 0.05 * total:
        verdicts["other-process"] = "possible"
    return verdicts


def _others(text: str, numbers: Mapping[str, float]) -> float:
    """MiB that other processes hold. A process cannot always tell itself from others: inside a container the message
    names its own host pid as if it were another one."""
    used = max(0.0, numbers["total"] - numbers["free"])
    if "this" in numbers:
        return max(0.0, used - numbers["this"])
    own = numbers.get("reserved", numbers.get("allocated", 0.0) + numbers.get("unused", 0.0))
    listed = [_mib(m[2], m[3]) for m in _OTHERS.finditer(text)]
    itself = [size for size in listed if own <= size <= own + _CONTEXT]
    if itself:
        return max(0.0, sum(listed) - itself[0])
    rest = used - own
    return rest - _CONTEXT if rest > _CONTEXT else 0.0


def _name_others(text: str, others: float) -> dict[str, str]:
    if others < 256:
        return {}
    facts = {"others": _show(others)}
    holders = sorted(((_mib(m[2], m[3]), m[1]) for m in _OTHERS.finditer(text)), reverse=True)
    if holders:
        facts["pid"] = holders[0][1]
        facts["pids"] = " ".join(dict.fromkeys(pid for _, pid in holders))
    return facts


def _read(text: str, patterns: Mapping[str, re.Pattern[str]]) -> dict[str, float]:
    return {name: size for name, pattern in patterns.items() if (size := _size(pattern.search(text))) is not None}


def _size(found: re.Match[str] | None) -> float | None:
    return _mib(found[1], found[2]) if found else None


def _mib(number: str, unit: str) -> float:
    return float(number) * _UNITS[unit.lower()]


def _show(mib: float) -> str:
    return f"{mib / GIB:.2f} GiB" if mib >= GIB else f"{mib:.0f} MiB"
