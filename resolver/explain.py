"""A conflict's facts -> sentences, and the smallest changes that would make the request solvable.

The facts come from the search's derivation, minimised so that leaving out any one of them makes the rest solvable.
Sentences speak of hosts and packages, never of variables or masks. A fix is printed only after it was solved.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from envforge.resolver.constraints import DRIVER, GLIBC, PYTHON, VARIANT, Encoding, sm_name, variant_cuda
from envforge.resolver.facts import Fact
from envforge.resolver.request import Request
from envforge.resolver.solve import Row

if TYPE_CHECKING:
    from envforge.resolver.plan import Plan


@dataclass(frozen=True, slots=True)
class Statement:
    """One fact of the explanation: its sentence, where it is known from, its kind."""

    text: str
    source: str
    kind: str


@dataclass(frozen=True, slots=True)
class Fix:
    """A change that was solved: `change` is what to write instead, `text` says it with what follows from it."""

    change: str
    text: str


@dataclass(frozen=True, slots=True)
class Conflict:
    """Why there is no answer: the parties (request lines, host facts), the statements, and the fixes."""

    parties: tuple[str, ...]
    statements: tuple[Statement, ...]
    fixes: tuple[Fix, ...]

    @property
    def text(self) -> str:
        """The explanation as one paragraph."""
        return "; ".join(s.text for s in self.statements) + "."


_ORDER = ("option", "driver", "gpu", "glibc", "request")


def statements(enc: Encoding, rows: Sequence[Row], given: Mapping[str, int] | None = None) -> tuple[Statement, ...]:
    """The sentences of a core, what was asked and what the hosts are first. `given`: masks of what is fixed anyway,
    so that a sentence speaks of those releases only."""
    groups: dict[object, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.origin.key, []).append(row)
    asked = {
        row.origin.a: enc.domains[row.origin.a].outside(row.terms[-1][1])
        for row in rows
        if row.origin.kind == "request" and row.terms[-1][0] == row.origin.a
    } | dict(given or {})
    found = [_statement(enc, group, asked) for group in groups.values()]
    rank = {kind: i for i, kind in enumerate(_ORDER)}
    return tuple(sorted(found, key=lambda s: (rank.get(s.kind, len(_ORDER)), s.text)))


def parties(rows: Sequence[Row]) -> tuple[str, ...]:
    """Request lines and host facts among the rows, as a machine may want them."""
    found: dict[str, None] = {}
    for row in rows:
        fact: Fact = row.origin
        if fact.kind == "request":
            found[fact.text] = None
        elif fact.kind == "driver":
            found[f"host:driver {fact.a}"] = None
        elif fact.kind == "gpu":
            found[sm_name(fact.a)] = None
        elif fact.kind == "glibc":
            found[f"host:glibc {fact.a}"] = None
        elif fact.kind == "option" and fact.b not in ("", "cuda"):
            found[f"{fact.a.removeprefix('torch-')} {fact.b}"] = None
    return tuple(found)


def _statement(enc: Encoding, rows: list[Row], asked: Mapping[str, int]) -> Statement:
    fact: Fact = rows[0].origin
    sources = sorted({row.origin.source for row in rows if row.origin.source})
    return Statement(_sentence(enc, fact, rows, asked), "; ".join(sources), fact.kind)


def _union(rows: list[Row], name: str) -> int:
    mask = 0
    for row in rows:
        for variable, term in row.terms:
            if variable == name:
                mask |= term
    return mask


def _versions(enc: Encoding, name: str, mask: int, asked: Mapping[str, int] | None = None) -> str:
    """ "unsloth >=2024.9", or "every unsloth release". Of what a request line in the same explanation leaves out
    nothing is said."""
    domain = enc.domains[name]
    mask &= domain.all_mask
    if asked and name in asked and mask & asked[name]:
        mask &= asked[name]
    shown = enc.extras.get(name, name)
    extra = name[len(shown) :]
    if mask == domain.all_mask:
        return f"every {shown}{extra} release"
    return f"{shown}{extra} {domain.describe(mask)}"


def _sentence(enc: Encoding, fact: Fact, rows: list[Row], asked: Mapping[str, int]) -> str:
    if fact.kind == "request":
        return _request_sentence(enc, fact)
    if fact.kind in ("dependency",):
        return _dependency_sentence(enc, fact, rows, asked)
    if fact.kind == "requires-python":
        who = _versions(enc, fact.a, _union(rows, fact.a), asked)
        allowed = enc.domains[PYTHON].all_mask & ~_intersection(rows, PYTHON)
        return f"{who} needs python {_pythons(enc, allowed)}"
    if fact.kind == "wheels" and fact.b == PYTHON:
        who = _versions(enc, fact.a, _union(rows, fact.a), asked)
        allowed = enc.domains[PYTHON].all_mask & ~_intersection(rows, PYTHON)
        return f"{who} has wheels for python {_pythons(enc, allowed)} only"
    if fact.kind == "wheels":
        floors = sorted({row.origin.data for row in rows}, key=lambda v: tuple(map(int, v.split("."))))
        tags = ", ".join(f"manylinux_{f.replace('.', '_')}" for f in floors)
        return f"the wheels of {_versions(enc, fact.a, _union(rows, fact.a), asked)} need glibc >={floors[0]} ({tags})"
    if fact.kind == "builds":
        who = _versions(enc, "torch", _union(rows, "torch"), asked)
        have = enc.domains[VARIANT].all_mask & ~_intersection(rows, VARIANT)
        return f"{who} is built for {_labels(enc, have)} only"
    if fact.kind == "code":
        return _code_sentence(enc, fact, rows, asked)
    if fact.kind == "native":
        who = _versions(enc, fact.a, _union(rows, fact.a), asked)
        return f"{who} has no library for {_labels(enc, _union(rows, VARIANT), cuda=True)}"
    if fact.kind == "floor":
        variants = _labels(enc, _union(rows, VARIANT), cuda=True)
        return f"CUDA {fact.key[1]!s} builds ({variants}) need driver >={fact.data}"  # type: ignore[index]
    if fact.kind == "inherited":
        return "; ".join(sorted({row.origin.text for row in rows}))
    return fact.text or str(fact.key)


def _request_sentence(enc: Encoding, fact: Fact) -> str:
    request: Request = fact.data
    domain = enc.domains[request.name]
    if not domain.mask(request.specifier, prereleases=bool(request.pinned)):
        newest = domain.values[-1]
        return f"you ask for {fact.text}, but no such release is known (the newest {request.name} is {newest})"
    return f"you ask for {fact.text}"


def _dependency_sentence(enc: Encoding, fact: Fact, rows: list[Row], asked: Mapping[str, int]) -> str:
    target = enc.domains[fact.b]
    forbidden = _intersection(rows, fact.b)
    allowed = target.all_mask & ~forbidden
    who = _versions(enc, fact.a, _union(rows, fact.a), asked)
    pythons = {mask for row in rows for name, mask in row.terms if name == PYTHON}
    where = f" on python {_pythons(enc, next(iter(pythons)))}" if len(pythons) == 1 else ""
    name = enc.extras.get(fact.b, fact.b)
    if allowed == target.all_mask:
        return f"{who} needs {name}{where}"
    if not allowed:
        return f"{who} needs a {name} that no known release offers{where}"
    return f"{who} needs {name} {target.describe(allowed)}{where}"


def _code_sentence(enc: Encoding, fact: Fact, rows: list[Row], asked: Mapping[str, int]) -> str:
    who = _versions(enc, fact.a, _union(rows, fact.a), asked)
    sm = str(fact.data)
    variants = _labels(enc, _union(rows, VARIANT), cuda=True)
    generation = next((a.name for a in enc.matrix.architectures if sm in a.sm), None)
    gpu = f"sm_{sm.replace('.', '')}" + (f" ({generation})" if generation else "")
    text = f"{who} has no code for {gpu} in its {variants} build{'s' if ',' in variants else ''}"
    extra = sorted({row.origin.text for row in rows if row.origin.text})
    return f"{text} ({'; '.join(extra)})" if extra else text


def _intersection(rows: list[Row], name: str) -> int:
    """What every row of the group forbids of `name`."""
    masks = [mask for row in rows for variable, mask in row.terms if variable == name]
    result = masks[0] if masks else 0
    for mask in masks[1:]:
        result &= mask
    return result


def _labels(enc: Encoding, mask: int, cuda: bool = False) -> str:
    domain = enc.domains[VARIANT]
    names = [v for i, v in enumerate(domain.values, 1) if mask >> i & 1]
    if len(names) > 4 and cuda:
        return f"{names[0]} to {names[-1]}"
    return ", ".join(f"{n} (CUDA {variant_cuda(n)})" if cuda and n != "cpu" else n for n in names) or "nothing known"


def _pythons(enc: Encoding, mask: int) -> str:
    domain = enc.domains[PYTHON]
    names = [v for i, v in enumerate(domain.values, 1) if mask >> i & 1]
    if len(names) > 2:
        minors = [int(n.split(".")[1]) for n in names]
        if minors == list(range(minors[0], minors[-1] + 1)):
            return f"{names[0]} to {names[-1]}"
    return " or ".join(names) or "that is not in the matrix"


# --- fixes ---------------------------------------------------------------------------------------------------------

Solver = Callable[..., "Plan | None"]


@dataclass(frozen=True, slots=True)
class Relaxation:
    """One thing that could give way: how little it changes (`cost`), and the request or facts to leave out."""

    cost: int
    kind: str
    key: object
    request: int | None = None


def relaxations(enc: Encoding, rows: Sequence[Row]) -> list[Relaxation]:
    """Everything in a core that the user could change."""
    found: dict[object, Relaxation] = {}
    for row in rows:
        fact: Fact = row.origin
        if fact.kind == "request":
            request: Request = fact.data
            index = int(fact.key[1])  # type: ignore[index]
            if request.specifier or request.local:
                found[fact.key] = Relaxation(0, "range", fact.key, index)
            if len(enc.requests) > 1:
                found[("drop", index)] = Relaxation(6, "drop", fact.key, index)
        elif fact.kind == "driver":
            found[fact.key] = Relaxation(1, "driver", fact.key)
        elif fact.kind == "option" and fact.a == VARIANT and fact.b not in ("cuda",):
            found[fact.key] = Relaxation(2, "variant", fact.key)
        elif fact.kind == "gpu":
            found[fact.key] = Relaxation(3, "gpu", fact.key)
        elif fact.kind == "option" and fact.a == PYTHON and enc.options.pythons:
            found[fact.key] = Relaxation(4, "python", fact.key)
        elif fact.kind == "glibc":
            found[fact.key] = Relaxation(5, "glibc", fact.key)
        elif fact.kind == "inherited":
            found["uncapped"] = Relaxation(7, "uncapped", fact.key)
    return sorted(found.values(), key=lambda r: (r.cost, str(r.key)))


def range_around(enc: Encoding, request: Request, version: str) -> str:
    """How to ask for `version` with the least change to a request line."""
    domain = enc.domains[request.name]
    asked = domain.mask(request.specifier, prereleases=True) & domain.all_mask
    bit = 1 << domain.bit(version)
    extras = f"[{','.join(request.extras)}]" if request.extras else ""
    name = f"{request.name}{extras}"
    if asked and bit < (asked & -asked):
        return f"{name}{domain.describe((asked & -asked) - 1)}"
    if asked and bit > asked and len(re.findall(r"[<>=!~]=?", request.specifier)) and not request.pinned:
        return f"{name}{domain.describe(domain.all_mask >> asked.bit_length() << asked.bit_length())}"
    return f"{name}=={version}"


def with_line(request: Request, line: str) -> Request:
    """The request with another specifier."""
    specifier = re.sub(r"^[A-Za-z0-9._-]+(\[[^\]]*\])?", "", line)
    return replace(request, specifier=specifier, local=None, text=line)


def driver_words(old: str, new: str, floor: bool) -> str:
    """ "driver >=525.60.13" or "driver 580.65.06 or older"."""
    return f"driver >={new}" if floor else f"a driver of branch {new.split('.')[0]} (such as {new}) instead of {old}"


__all__ = [
    "DRIVER",
    "GLIBC",
    "Conflict",
    "Fix",
    "Relaxation",
    "Statement",
    "driver_words",
    "parties",
    "range_around",
    "relaxations",
    "statements",
    "with_line",
]
