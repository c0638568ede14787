"""Receipts as evidence: what was proven to run together, kept small and without anything about whose machine it was.

A receipt of `verify` becomes one JSON file in matrix/evidence/receipts (or in the `receipts` folder of a matrix.d
layer): versions, variant, python, tier, grade, outcome, GPU capability, driver, day, stack. Everything else stays out,
and every text must have the form of its field, so that no host name, user name or path slips through. A cell is one
torch release with one trainer or framework release in one variant:

- verified: a `full` receipt passed with exactly these;
- known-bad: a receipt failed with them and none passed, or a rule that was seen to fail warns of them;
- declared: everything else that metadata and documents allow. A `static` receipt (no GPU) says so but proves no more.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from envforge.errors import DataError

RECEIPTS = Path(__file__).parent / "evidence" / "receipts"
SCHEMA = 1
ROLES = ("trainer", "framework")
MAX_BYTES = 4_000_000

State = Literal["verified", "declared", "known-bad"]

_VERSION = r"[0-9][A-Za-z0-9.!_-]{0,40}"
_FORMS = {
    "date": r"\d{4}-\d\d-\d\d",
    "stack": r"[a-z0-9-]{1,40}",
    "grade": r"static|full",
    "variant": r"cpu|cu\d{2,4}",
    "tier": r"native|minor|forward|cpu",
    "cuda": r"\d{1,2}\.\d{1,2}",
    "python": r"3\.\d{1,2}",
    "driver": r"\d{3,4}(\.\d{1,3}){1,2}",
    "device": r"cuda|cpu",
}
_MAY_LACK = ("tier", "cuda", "driver")


@dataclass(frozen=True, slots=True)
class Receipt:
    """One proof. versions: packages without local part; sm: capabilities of the GPUs; failure: layer/check or None."""

    date: str
    stack: str
    grade: str
    passed: bool
    variant: str
    python: str
    device: str
    versions: Mapping[str, str]
    sm: tuple[str, ...] = ()
    tier: str | None = None
    cuda: str | None = None
    driver: str | None = None
    failure: str | None = None

    @property
    def id(self) -> str:
        """Short hash of the content."""
        return hashlib.sha256(self.dumps().encode()).hexdigest()[:16]

    def dumps(self) -> str:
        """Canonical text: equal receipts give equal bytes."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, sort_keys=True, indent=1, ensure_ascii=True) + "\n"

    def words(self) -> str:
        """ "full, 2026-12-01, sm 8.0, driver 550.54.15" """
        parts = [self.grade, self.date]
        parts += [f"sm {' '.join(self.sm)}"] if self.sm else []
        parts += [f"driver {self.driver}"] if self.driver else []
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of an answer, what is known of it, and from where."""

    torch: str
    name: str
    version: str
    variant: str
    state: State
    source: str = ""

    def words(self) -> str:
        """ "torch 2.6.0 x trl 0.15.0 x cu126" """
        return f"torch {self.torch} x {self.name} {self.version} x {self.variant}"

    def to_json(self) -> dict[str, str]:
        """Plain data."""
        return {"cell": self.words(), "state": self.state, "source": self.source}


def read_receipt(text: str, where: str) -> Receipt:
    """A receipt that `verify` wrote, reduced to what is kept.

    Raises:
        DataError: not a receipt, or a field without the form that it must have.
    """
    hint = "give the file that envforge verify --json wrote"
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error})", hint) from error
    if not isinstance(data, dict) or data.get("kind") != "receipt" or data.get("schema") != 1:
        raise DataError(f"{where}: not a receipt of envforge verify", hint)
    plan, host, first = (_mapping(data.get(key)) for key in ("plan", "host", "first_failure"))
    versions = data.get("versions")
    if not isinstance(versions, dict) or not isinstance(versions.get("torch"), str):
        raise DataError(
            f"{where}: field versions: names no torch", "a receipt of an environment without torch is no use"
        )
    local = versions["torch"].partition("+")[2]
    raw = {
        "date": str(data.get("started") or "")[:10],
        "stack": data.get("stack"),
        "grade": data.get("grade"),
        "passed": data.get("passed"),
        "variant": plan.get("variant") or (local if re.fullmatch(_FORMS["variant"], local) else None),
        "python": ".".join(str(plan.get("python") or host.get("python") or "").split(".")[:2]),
        "device": "cuda" if str(data.get("device") or "").startswith("cuda") else data.get("device"),
        "versions": {_name(name): str(version).partition("+")[0] for name, version in versions.items() if version},
        "sm": _capabilities(host.get("gpus")),
        "tier": plan.get("tier"),
        "cuda": plan.get("cuda"),
        "driver": host.get("driver") if data.get("device") != "cpu" else None,
        "failure": f"{first.get('layer')}/{first.get('check')}" if first else None,
    }
    return _checked(raw, where)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _name(name: Any) -> str:
    return re.sub(r"[-_.]+", "-", str(name)).lower()


def _capabilities(lines: Any) -> tuple[str, ...]:
    """From "NVIDIA A100-SXM4-80GB, 8.0, 81920" lines."""
    found = set()
    for line in lines if isinstance(lines, list) else []:
        parts = [part.strip() for part in str(line).split(",")]
        if len(parts) >= 2 and re.fullmatch(r"\d{1,2}\.\d", parts[1]):
            found.add(parts[1])
    return tuple(sorted(found, key=lambda sm: tuple(map(int, sm.split(".")))))


def _checked(raw: dict[str, Any], where: str) -> Receipt:
    faults = []
    for key, form in _FORMS.items():
        value = raw.get(key)
        if value is None and key in _MAY_LACK:
            continue
        if not isinstance(value, str) or not re.fullmatch(form, value):
            faults.append(f"{where}: field {key}: {str(value)[:40]!r} is not of the form {form}")
    if not isinstance(raw.get("passed"), bool):
        faults.append(f"{where}: field passed: must be true or false")
    versions = raw.get("versions")
    for name, version in versions.items() if isinstance(versions, dict) else ():
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,60}", str(name)) or not re.fullmatch(_VERSION, str(version)):
            faults.append(f"{where}: field versions: {str(name)[:40]} {str(version)[:40]!r} is no package and version")
    if not isinstance(versions, dict) or "torch" not in versions:
        faults.append(f"{where}: field versions: names no torch")
    if not all(isinstance(sm, str) and re.fullmatch(r"\d{1,2}\.\d", sm) for sm in raw.get("sm") or ()):
        faults.append(f"{where}: field sm: not a list of compute capabilities")
    failure = raw.get("failure")
    if failure is not None and not re.fullmatch(r"[a-z0-9_-]{1,40}/[a-z0-9_.-]{1,60}", str(failure)):
        faults.append(f"{where}: field failure: {str(failure)[:40]!r} is not of the form layer/check")
    if faults:
        raise DataError("\n".join(faults), "correct the file, or make the receipt again")
    return Receipt(**{**raw, "sm": tuple(raw.get("sm") or ()), "versions": dict(sorted(raw["versions"].items()))})


@lru_cache(maxsize=8)
def load_receipts(folders: tuple[Path, ...] = (RECEIPTS,)) -> tuple[tuple[Receipt, ...], tuple[str, ...]]:
    """The kept receipts of some folders, newest first; and a fault for each damaged file, which counts as not there."""
    found: dict[str, Receipt] = {}
    faults: list[str] = []
    for folder in folders:
        for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
            try:
                receipt = _load(path)
                found[receipt.id] = receipt
            except DataError as error:
                faults.append(error.cause)
            except (OSError, ValueError, RecursionError) as error:
                faults.append(f"{path.name}: damaged evidence ({error})")
    return tuple(sorted(found.values(), key=lambda r: (r.date, r.id), reverse=True)), tuple(faults)


def _load(path: Path) -> Receipt:
    data = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA:
        raise ValueError("unknown schema")
    known = set(Receipt.__dataclass_fields__)
    if set(data) != known:
        raise ValueError(f"fields {sorted(set(data) ^ known)}")
    receipt = _checked(data, path.name)
    if path.stem != receipt.id:
        raise ValueError(f"its name is not the hash of its content ({receipt.id})")
    return receipt


def cells(
    pins: Mapping[str, str],
    variant: str,
    roles: Mapping[str, str],
    receipts: Iterable[Receipt],
    warned: Mapping[str, str] | None = None,
) -> tuple[Cell, ...]:
    """What is known of an answer, a cell per trainer and framework package, trainers first.

    Args:
        pins: the answer's versions. roles: the role of each package of the matrix, in the order of decisions.
        warned: packages that a known-bad rule warns of in this answer -> its source.
    """
    torch = pins.get("torch")
    if torch is None:
        return ()
    here = [r for r in receipts if r.versions.get("torch") == torch and r.variant == variant]
    found = []
    for name, role in roles.items():
        if role not in ROLES or name not in pins:
            continue
        same = [r for r in here if r.versions.get(name) == pins[name]]
        state, source = _state(same, (warned or {}).get(name))
        found.append(Cell(torch, name, pins[name], variant, state, source))
    return tuple(found)


def _state(receipts: list[Receipt], warning: str | None) -> tuple[State, str]:
    proven = next((r for r in receipts if r.passed and r.grade == "full"), None)
    if proven:
        return "verified", f"receipt {proven.id} ({proven.words()})"
    failed = next((r for r in receipts if not r.passed), None)
    if failed:
        return "known-bad", f"receipt {failed.id} failed at {failed.failure} ({failed.words()})"
    if warning:
        return "known-bad", warning
    static = next((r for r in receipts if r.passed), None)
    return "declared", f"receipt {static.id} ({static.words()}: no GPU proof)" if static else "metadata and documents"


def preferred(receipts: Iterable[Receipt], named: Iterable[str]) -> tuple[Receipt, ...]:
    """Receipts worth trying first for a request: full, passed, with every named package, newest torch first."""
    from packaging.version import Version

    names = set(named)
    fit = [r for r in receipts if r.passed and r.grade == "full" and names <= set(r.versions)]
    return tuple(sorted(fit, key=lambda r: (Version(r.versions["torch"]), r.date, r.id), reverse=True))
