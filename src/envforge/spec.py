"""A spec (image.yaml): what a ready-made or a user's own stack asks for, read strictly.

Nothing from a spec is ever passed through a shell. Values that end up in a Dockerfile may hold any printable text; a
newline or another control character in them is refused here, where its line can still be named.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from envforge.errors import DataError, UsageError
from envforge.resolver.hosts import Host, make_host
from envforge.resolver.request import Request, parse_request
from envforge.words import control_character

IMAGES = Path(__file__).parent / "images"
SPEC_FILE = "image.yaml"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The base model of a stack: a hub id with its revision, and whether the small test model may stand in."""

    id: str
    revision: str | None = None
    small: bool = True


@dataclass(frozen=True, slots=True)
class VerifySpec:
    """What `verify` is asked to do: stack adapter, LoRA steps, length cap in tokens, prompt."""

    stack: str = "transformers"
    steps: int = 8
    max_length: int = 1024
    prompt: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Spec:
    """One stack. `cpu_requests`, where given, replaces `requests` for a CPU target (other torch builds exist there)."""

    name: str
    summary: str = ""
    requests: tuple[Request, ...] = ()
    cpu_requests: tuple[Request, ...] | None = None
    python: tuple[str, ...] = ()
    cpu_python: tuple[str, ...] = ()
    system_packages: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    model: ModelSpec | None = None
    remote_code: str | None = None  # pinned revision when remote code is allowed
    verify: VerifySpec = field(default_factory=VerifySpec)
    hosts: tuple[Host, ...] = ()
    folder: Path | None = None

    def requests_for(self, variant_is_cpu: bool) -> tuple[Request, ...]:
        """The request lines for a CPU or a GPU target."""
        return self.cpu_requests if variant_is_cpu and self.cpu_requests is not None else self.requests

    def pythons_for(self, variant_is_cpu: bool) -> tuple[str, ...]:
        """Python versions allowed for a CPU or a GPU target; empty = the matrix's own order."""
        return self.cpu_python if variant_is_cpu and self.cpu_python else self.python


@lru_cache(maxsize=1)
def spec_schema() -> dict[str, Any]:
    """The JSON schema of image.yaml."""
    data: dict[str, Any] = json.loads((Path(__file__).parent / "schemas" / "image.json").read_text(encoding="utf-8"))
    return data


def spec_names(images: Path = IMAGES) -> tuple[str, ...]:
    """Names of the shipped stacks."""
    return tuple(sorted(path.parent.name for path in images.glob(f"*/{SPEC_FILE}")))


def find_spec(name: str, images: Path = IMAGES) -> Path:
    """A shipped stack by name, or a file, or a folder that holds an image.yaml.

    Raises:
        UsageError: nothing of that name (lists the nearest known ones).
    """
    shipped = images / name / SPEC_FILE
    if "/" not in name and shipped.is_file():
        return shipped
    path = Path(name)
    if path.is_dir() and (path / SPEC_FILE).is_file():
        return path / SPEC_FILE
    if path.is_file():
        return path
    import difflib

    known = spec_names(images)
    near = difflib.get_close_matches(name, known, 3, 0.4) or known
    raise UsageError(f"no stack and no file is named {name!r}", f"known stacks: {', '.join(near)}; or give a path")


def load_spec(path: Path) -> Spec:
    """Read and check one image.yaml.

    Raises:
        DataError: every fault at once, each as file:line and field.
        UsageError: the file cannot be read.
    """
    from envforge.matrix.strictyaml import load_strict, validate

    where = str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {where}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    data, lines = load_strict(text, where)
    faults = validate(data, lines, spec_schema(), where)
    if not faults:
        faults = _text_faults(data, lines, where)
    if faults:
        raise DataError("\n".join(faults), "the keys of image.yaml are described in docs/images.md")
    return _spec(data, path, lines)


def _text_faults(data: Any, lines: Any, where: str, path: tuple[str | int, ...] = ()) -> list[str]:
    """Control characters anywhere in the file: they have no business in names, values or Dockerfiles."""
    if isinstance(data, dict):
        found = [f for key, value in data.items() for f in _text_faults(value, lines, where, (*path, key))]
        return found + [f for key in data for f in _text_faults(key, lines, where, path)]
    if isinstance(data, list):
        return [f for i, value in enumerate(data) for f in _text_faults(value, lines, where, (*path, i))]
    if isinstance(data, str) and (bad := control_character(data)):
        line = lines.get(path, 1)
        return [f"{where}:{line}: {'.'.join(map(str, path))}: holds a line break or control character ({bad})"]
    return []


def _spec(data: dict[str, Any], path: Path, lines: Any) -> Spec:
    faults: list[str] = []

    def requests(key: str) -> tuple[Request, ...]:
        found = []
        for i, line in enumerate(data.get(key) or ()):
            where = f"{path}:{lines.get((key, i), 1)}"
            try:
                found.append(parse_request(line, origin=where))
            except UsageError as error:
                faults.append(f"{where}: {key} {i + 1}: {error.cause}")
        return tuple(found)

    def hosts() -> tuple[Host, ...]:
        found = []
        for i, row in enumerate(data.get("hosts") or ()):
            try:
                found.append(make_host(**{**row, "gpus": tuple(row.get("gpus") or ())}))
            except UsageError as error:
                faults.append(f"{path}:{lines.get(('hosts', i), 1)}: hosts {i + 1}: {error.cause}")
        return tuple(found)

    def pythons(key: str) -> tuple[str, ...]:
        value = data.get(key) or ()
        return (value,) if isinstance(value, str) else tuple(value)

    remote = data.get("remote_code") or {}
    spec = Spec(
        name=data["name"],
        summary=data.get("summary", ""),
        requests=requests("requests"),
        cpu_requests=requests("cpu_requests") if "cpu_requests" in data else None,
        python=pythons("python"),
        cpu_python=pythons("cpu_python"),
        system_packages=tuple(data.get("system_packages") or ()),
        env=dict(data.get("env") or {}),
        files=dict(data.get("files") or {}),
        model=ModelSpec(**data["model"]) if data.get("model") else None,
        remote_code=remote.get("revision") if remote.get("allow") else None,
        verify=VerifySpec(**(data.get("verify") or {})),
        hosts=hosts(),
        folder=path.parent,
    )
    if faults:
        raise DataError("\n".join(faults))
    return spec
