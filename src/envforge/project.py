"""A project folder: image.yaml, plan.json, pylock.toml, requirements.txt, build.json, receipts/; relative paths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envforge.errors import UsageError
from envforge.files import write_atomic
from envforge.resolver.constraints import PYTHON, VARIANT
from envforge.resolver.plan import Plan, load_plan
from envforge.spec import SPEC_FILE

if TYPE_CHECKING:
    from collections.abc import Iterable

PLAN_FILE = "plan.json"


def read_plan(folder: Path) -> Plan | None:
    """The folder's plan, None when it has none yet.

    Raises:
        DataError: it is there but damaged.
    """
    path = folder / PLAN_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    return load_plan(text, str(path))


def write_plan(folder: Path, plan: Plan) -> None:
    """Freeze the plan in the folder."""
    write_atomic(folder / PLAN_FILE, plan.dumps())


def kept(plan: Plan | None, upgrade: Iterable[str] = ()) -> tuple[tuple[str, str], ...]:
    """What a new resolve should try first so that it changes least; `upgrade` names packages that may move."""
    if plan is None:
        return ()
    free = set(upgrade)
    pins = {name: version for name, version in plan.pins.items() if name not in free}
    return tuple(sorted({**pins, PYTHON: plan.python, VARIANT: plan.variant}.items()))


def init(folder: Path, spec_text: str) -> Path:
    """Make a project from the text of a spec.

    Raises:
        UsageError: the folder already is a project, or cannot be made.
    """
    path = folder / SPEC_FILE
    if path.exists():
        raise UsageError(f"{path} is there already", "envforge resolve works on it; remove the file to start anew")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make {folder}: {error.strerror}") from error
    write_atomic(path, spec_text)
    return path


def diff(old: Plan, new: Plan) -> list[dict[str, Any]]:
    """What changes from one plan to another, sorted by name: {"name", "old", "new"}; None where it is not there."""
    rows = []
    facts = (("python", old.python, new.python), ("variant", old.variant, new.variant), ("tier", old.tier, new.tier))
    rows += [{"name": name, "old": a, "new": b} for name, a, b in facts if a != b]
    for name in sorted({*old.pins, *new.pins}):
        a, b = old.pins.get(name), new.pins.get(name)
        if a != b:
            rows.append({"name": name, "old": a, "new": b})
    return rows


def plan_of(path: Path) -> Plan:
    """The plan in a project folder or a file: plan.json, or what `resolve --json` printed.

    Raises:
        UsageError: nothing there. DataError: not a plan.
    """
    if path.is_dir():
        plan = read_plan(path)
        if plan is None:
            raise UsageError(f"{path} holds no {PLAN_FILE}", f"make it: envforge resolve {path}")
        return plan
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    try:
        data = json.loads(text)
    except ValueError:
        data = None
    if isinstance(data, dict) and isinstance(data.get("plan"), dict):
        text = json.dumps(data["plan"])
    return load_plan(text, str(path))
