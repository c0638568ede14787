"""A project folder: image.yaml, plan.json, pylock.toml, requirements.txt, build.json, receipts/; relative paths."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envforge.errors import UsageError
from envforge.files import write_atomic
from envforge.resolver.constraints import PYTHON, VARIANT
from envforge.resolver.plan import Plan, load_plan
from envforge.resolver.request import normalise
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
        raise UsageError(f"cannot read {path}: {_why(error)}") from error
    return load_plan(text, str(path))


def write_plan(folder: Path, plan: Plan) -> None:
    """Freeze the plan in the folder."""
    write_atomic(folder / PLAN_FILE, plan.dumps())


def kept(plan: Plan | None, upgrade: Iterable[str] = ()) -> tuple[tuple[str, str], ...]:
    """What a new resolve should try first so that it changes least; `upgrade` names packages that may move."""
    if plan is None:
        return ()
    free = set(upgrade)
    pins = {name: version.split("+")[0] for name, version in plan.pins.items() if name not in free}
    return tuple(sorted({**pins, PYTHON: plan.python, VARIANT: plan.variant}.items()))


def starting_point(
    start: Path | None, project: Path | None, upgrade: Iterable[str] = ()
) -> tuple[tuple[str, str], ...]:
    """What a new resolve tries first: `start` (a plan, a project folder, what `resolve --json` printed, a pylock.toml,
    or a file of pins), else the project's own plan. `upgrade`: the packages that may move.

    Raises:
        UsageError: nothing to start from although `upgrade` names something, or a name that is not in it.
    """
    free = [normalise(name) for name in upgrade]
    if start is None:
        plan = read_plan(project) if project else None
        have = dict(kept(plan))
    else:
        have = dict(_pins_of(start))
    if free and not have:
        raise UsageError(
            f"--upgrade {free[0]}: there is no earlier plan to move it from", "name a project folder or --from FILE"
        )
    for name in free:
        if name not in have:
            import difflib

            near = difflib.get_close_matches(name, have, 3, 0.6)
            hint = f"did you mean {', '.join(near)}?" if near else "it pins: " + ", ".join(sorted(have)[:12])
            raise UsageError(f"--upgrade {name[:60]!r}: the earlier plan does not pin it", hint)
    return tuple(sorted((name, version) for name, version in have.items() if name not in free))


def _pins_of(path: Path) -> tuple[tuple[str, str], ...]:
    if path.is_dir():
        return kept(plan_of(path))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read {path}: {_why(error)}", "--from takes a plan, a lock or a file of pins"
        ) from error
    if text.lstrip().startswith("{"):
        return kept(plan_of(path))
    if path.suffix == ".toml" or re.search(r"^\[\[packages?\]\]", text, re.MULTILINE):
        return _lock_pins(text, path)
    from envforge.intake import read_requirements

    found = [(r.name, r.pinned, r.local) for r in read_requirements(path)[0] if r.pinned]
    return _as_kept(found, None, path)


def _why(error: OSError | UnicodeDecodeError) -> str:
    return str(error.strerror) if isinstance(error, OSError) else f"it is no UTF-8 text (byte {error.start})"


def _lock_pins(text: str, path: Path) -> tuple[tuple[str, str], ...]:
    """A pylock.toml (PEP 751), or the lock of uv, Poetry or PDM: all list names and versions."""
    import sys

    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{path}: not TOML: {error}") from error
    rows = data.get("packages") if "lock-version" in data else data.get("package")
    if not isinstance(rows, list):
        raise UsageError(f"{path} is no pylock.toml and no other lock", "a lock has lock-version and packages")
    found = []
    for row in rows:
        name, version = (row.get("name"), row.get("version")) if isinstance(row, dict) else (None, None)
        if isinstance(name, str) and isinstance(version, str):
            public, _, local = version.partition("+")
            found.append((normalise(name), public, local or None))
    # The lower bound of a range: uv writes the python that it locked for, and any lock holds for its lowest one.
    python = re.search(r"3\.[0-9]+", str(data.get("requires-python", "")))
    return _as_kept(found, python[0] if python else None, path)


def _as_kept(
    found: Iterable[tuple[str, str, str | None]], python: str | None, path: Path
) -> tuple[tuple[str, str], ...]:
    pins = {name: version for name, version, _ in found} if (found := list(found)) else {}
    if not pins:
        raise UsageError(f"{path} pins nothing", "--from takes a plan, a lock or a file of pins")
    variant = next((local for name, _, local in found if name == "torch" and local), None)
    if variant and re.fullmatch(r"cu[0-9]{3}|cpu", variant):
        pins[VARIANT] = variant
    if python:
        pins[PYTHON] = python
    return tuple(sorted(pins.items()))


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
    rows: list[dict[str, Any]] = []
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
        raise UsageError(f"cannot read {path}: {_why(error)}") from error
    try:
        data = json.loads(text)
    except ValueError:
        data = None
    if isinstance(data, dict) and isinstance(data.get("plan"), dict):
        text = json.dumps(data["plan"])
    return load_plan(text, str(path))
