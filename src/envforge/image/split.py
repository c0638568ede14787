"""Divides the lock into the parts that become layers: torch with all that it needs, the stack, and what is compiled."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from envforge.image.values import LockLike
from envforge.resolver.plan import Plan

_NAME = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)")
_VIA = re.compile(r"^\s+#\s+(?:via\s+)?([A-Za-z0-9][A-Za-z0-9._-]*)\s*$")
_INLINE_VIA = re.compile(r"#\s+via\s+(.+)$")
_SOURCE = re.compile(r"^# (\S+) is built from source when it is installed$", re.MULTILINE)  # the lock's own remark
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")

# Where a lock carries no "via" remarks: what torch's Linux wheels have needed, by name.
_TORCH_NEEDS = frozenset(
    {"torch", "triton", "pytorch-triton", "filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx"}
    | {"setuptools", "sympy", "typing-extensions"}
)


@dataclass(frozen=True, slots=True)
class Requirement:
    """One locked line: normalised name, exact version, hex SHA-256 of every accepted file, the text as it stands."""

    name: str
    version: str
    hashes: tuple[str, ...]
    text: str
    via: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Parts:
    """The texts of the parts, each itself a hashed requirements file (empty where nothing belongs there).

    They are installed from wheels only; a package that is published as source only (and is no compile of ours) is let
    through by an option line of its part.
    """

    torch: str
    stack: str
    compile: str


def normalise(name: str) -> str:
    """PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def parse_lock(text: str) -> tuple[Requirement, ...]:
    """The requirements of a hashed requirements.txt, in order; options (`--index-url ...`) and comments left out."""
    blocks: list[list[str]] = []
    for line in text.splitlines():
        if _NAME.match(line):
            blocks.append([line])
        elif blocks and (line.startswith((" ", "\t"))):
            blocks[-1].append(line)
    return tuple(_requirement(block) for block in blocks)


def _requirement(block: list[str]) -> Requirement:
    head = block[0].split("#", 1)[0].rstrip(" \\")
    name = _NAME.match(head)
    assert name is not None  # parse_lock starts a block only at a name
    version = re.search(r"===?\s*([^\s;\\]+)", head)
    via: list[str] = []
    for line in block:
        inline = _INLINE_VIA.search(line)
        remark = _VIA.match(line)
        if inline:
            via += [normalise(part.strip()) for part in inline.group(1).split(",") if not part.strip().startswith("-r")]
        elif remark:
            via.append(normalise(remark.group(1)))
    # Text without the remarks: who needs a package must not change the bytes that a layer is cached by.
    kept = [line.split(" #", 1)[0].rstrip() for line in block if not line.lstrip().startswith("#")]
    if kept[-1].endswith("\\"):
        kept[-1] = kept[-1].rstrip(" \\")
    text = "\n".join(kept) + "\n"
    found = version.group(1) if version else ""
    return Requirement(normalise(name.group(1)), found, tuple(_HASH.findall(text)), text, tuple(via))


def torch_closure(requirements: tuple[Requirement, ...]) -> frozenset[str]:
    """Names of torch and of everything that is there because torch needs it.

    A package that torch and others need belongs to torch's layer: the same torch then gives the same layer whatever
    stands on it, as long as the versions agree.
    """
    names = {requirement.name for requirement in requirements}
    if "torch" not in names:
        return frozenset()
    if any(requirement.via for requirement in requirements):
        closure = {"torch"}
        grown = True
        while grown:
            more = {r.name for r in requirements if r.name not in closure and closure.intersection(r.via)}
            grown = bool(more)
            closure |= more
        return frozenset(closure)
    return frozenset(name for name in names if name in _TORCH_NEEDS or name.startswith(("nvidia-", "cuda-")))


def to_compile(plan: Plan, lock: LockLike) -> tuple[str, ...]:
    """What of the plan must be compiled: it has no wheel of its own, and the lock found no ready-made one either."""
    wheels = {
        package.name
        for package in getattr(lock, "packages", ())
        if package.kind != "source" and package.file.endswith(".whl")
    }
    return tuple(name for name in plan.source_only if normalise(name) not in wheels)


def split_lock(text: str, source_only: tuple[str, ...] = ()) -> Parts:
    """Hashed requirements -> the parts. `source_only` names what has no wheel for the target and is compiled."""
    requirements = parse_lock(text)
    torch = torch_closure(requirements)
    compiled = {normalise(name) for name in source_only}
    sources = {normalise(name) for name in _SOURCE.findall(text)} - compiled

    def part(chosen: Iterable[Requirement]) -> str:
        lines = list(chosen)
        return "".join([*(f"--no-binary {r.name}\n" for r in lines if r.name in sources), *(r.text for r in lines)])

    return Parts(
        torch=part(r for r in requirements if r.name in torch and r.name not in compiled),
        stack=part(r for r in requirements if r.name not in torch and r.name not in compiled),
        compile=part(r for r in requirements if r.name in compiled),
    )
