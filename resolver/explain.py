"""A conflict's facts -> sentences about hosts and packages, never about variables or masks.

The facts come from the search's derivation, minimised so that leaving out any one of them makes the rest solvable. Of
these, what goes without saying (which pythons there are, that a GPU wants a CUDA build) is left unsaid.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from envforge.resolver.constraints import forward_eligible
from envforge.resolver.encoding import PYTHON, VARIANT, Encoding, sm_name, variant_cuda
from envforge.resolver.facts import Fact, fact_of
from envforge.resolver.hosts import key
from envforge.resolver.request import Request
from envforge.resolver.solve import Row

MAX_SAID = 8


class Statement(NamedTuple):
    """One fact of the explanation: its sentence, where it is known from, its kind."""

    text: str
    source: str
    kind: str


class Fix(NamedTuple):
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
    def lines(self) -> tuple[str, ...]:
        """The explanation a sentence a line, not more than a reader takes in."""
        said = [s.text for s in self.statements[:MAX_SAID]]
        more = len(self.statements) - len(said)
        return (*said, f"and {more} more facts, see the facts of --json") if more > 0 else tuple(said)

    @property
    def text(self) -> str:
        """The explanation as one paragraph."""
        return "; ".join(line.rstrip(".") for line in self.lines) + "."


_ORDER = ("option", "driver", "gpu", "glibc", "request")


def statements(enc: Encoding, rows: Sequence[Row], given: Mapping[str, int] | None = None) -> tuple[Statement, ...]:
    """The sentences of a core, what was asked and what the hosts are first. `given`: masks of what is fixed anyway,
    so that a sentence speaks of those releases only."""
    groups: dict[Hashable, list[Row]] = {}
    for row in rows:
        groups.setdefault(fact_of(row).key, []).append(row)
    asked = {
        fact_of(row).a: enc.domains[fact_of(row).a].outside(row.terms[-1][1])
        for row in rows
        if fact_of(row).kind == "request" and row.terms[-1][0] == fact_of(row).a
    } | dict(given or {})
    found = [_statement(enc, group, asked) for group in _worth_saying(enc, groups)]
    floors = _floors(enc, [group for group in groups.values() if fact_of(group[0]).kind == "floor"])
    rank = {kind: i for i, kind in enumerate(_ORDER)}
    return tuple(sorted([*found, *floors], key=lambda s: (rank.get(s.kind, len(_ORDER)), s.text)))


def _worth_saying(enc: Encoding, groups: Mapping[Hashable, list[Row]]) -> list[list[Row]]:
    """Without what goes without saying, and what another sentence says already."""
    facts = {at: fact_of(group[0]) for at, group in groups.items()}
    python_asked = bool(enc.options.pythons) and ("option", PYTHON) in groups
    capped = {(fact.a, fact.b) for fact in facts.values() if fact.kind == "inherited"}
    glibc = {fact.a for fact in facts.values() if fact.kind == "wheels" and fact.b != PYTHON}
    said = {fact.kind for fact in facts.values()}
    kept = []
    for at, group in groups.items():
        fact = facts[at]
        if fact.kind == "option" and fact.a == PYTHON and not enc.options.pythons and len(groups) > 1:
            continue
        if fact.kind == "option" and fact.b == "cuda" and said & {"gpu", "driver", "builds", "code", "native", "rule"}:
            continue
        if fact.kind == "floor" or (fact.kind == "dependency" and (fact.a, fact.b) in capped):
            continue
        if fact.b == PYTHON and fact.kind in ("wheels", "requires-python") and fact.a in glibc and not python_asked:
            continue
        kept.append(group)
    return kept


def parties(rows: Sequence[Row]) -> tuple[str, ...]:
    """Request lines and host facts among the rows, as a machine may want them."""
    found: dict[str, None] = {}
    for row in rows:
        fact = fact_of(row)
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
        elif fact.kind == "archive" and fact.b == "no-compile":
            found["option --no-compile"] = None
        elif fact.kind == "rule" and fact.key[0] in ("limit", "banned"):  # type: ignore[index]
            found[fact.text] = None
    return tuple(found)


def _statement(enc: Encoding, rows: list[Row], asked: Mapping[str, int]) -> Statement:
    fact = fact_of(rows[0])
    sources = sorted({fact_of(row).source for row in rows if fact_of(row).source})
    return Statement(_sentence(enc, fact, rows, asked), "; ".join(sources), fact.kind)


def _union(rows: list[Row], name: str) -> int:
    mask = 0
    for row in rows:
        for variable, term in row.terms:
            if variable == name:
                mask |= term
    return mask


def _intersection(rows: list[Row], name: str) -> int:
    """What every row of the group forbids of `name`."""
    masks = [mask for row in rows for variable, mask in row.terms if variable == name]
    result = masks[0] if masks else 0
    for mask in masks[1:]:
        result &= mask
    return result


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
    return f"{shown}{extra} {span(enc, name, mask)}"


def span(enc: Encoding, name: str, mask: int) -> str:
    """A set of versions in a sentence: a single one by itself, also where a range would mean no other."""
    if mask and not mask & (mask - 1):
        return enc.domains[name].values[mask.bit_length() - 2]
    text = enc.domains[name].describe(mask)
    return text[2:] if text.startswith("==") and "," not in text and "*" not in text else text


def _sentence(enc: Encoding, fact: Fact, rows: list[Row], asked: Mapping[str, int]) -> str:
    if fact.kind == "request":
        return _request_sentence(enc, fact)
    if fact.kind == "dependency":
        return _dependency_sentence(enc, fact, rows, asked)
    if fact.kind == "inherited":
        version, allowed = fact.data
        needs = f"{fact.b} {span(enc, fact.b, allowed)}"
        return f"{fact.a} {version}, the newest, needs {needs}, and older releases are held to that"
    if fact.kind == "wheels" and fact.b != PYTHON:
        floors = sorted({fact_of(row).data for row in rows}, key=key)
        tags = ", ".join(f"manylinux_{f.replace('.', '_')}" for f in floors)
        return f"the wheels of {_versions(enc, fact.a, _union(rows, fact.a), asked)} need glibc >={floors[0]} ({tags})"
    if fact.kind in ("requires-python", "wheels"):
        who = _versions(enc, fact.a, _union(rows, fact.a), asked)
        allowed = enc.domains[PYTHON].all_mask & ~_intersection(rows, PYTHON)
        pythons = _pythons(enc, allowed)
        return f"{who} needs python {pythons}" if fact.kind[0] == "r" else f"{who} has wheels for python {pythons} only"
    if fact.kind == "archive":
        return f"{_versions(enc, fact.a, _union(rows, fact.a), asked)} {fact.text}"
    if fact.kind == "builds":
        return _builds_sentence(enc, fact, rows, asked)
    if fact.kind == "code":
        return _code_sentence(enc, fact, rows, asked)
    if fact.kind == "native" and not fact.text:
        who = _versions(enc, fact.a, _union(rows, fact.a), asked)
        return f"{who} has no library for {_labels(enc, _union(rows, VARIANT), cuda=True)}"
    return (fact.text or str(fact.key)).rstrip(".")


def _request_sentence(enc: Encoding, fact: Fact) -> str:
    request: Request = fact.data
    text = fact.text if len(fact.text) <= 120 else fact.text[:117] + "..."
    domain = enc.domains[request.name]
    if not domain.mask(request.specifier, prereleases=bool(request.pinned)):
        newest = domain.values[-1]
        return f"you ask for {text}, but no such release is known (the newest {request.name} is {newest})"
    if request.local and request.local not in enc.domains[VARIANT].values:
        known = ", ".join(reversed(enc.domains[VARIANT].values))
        return f"you ask for {text}, but no build is called {request.local} (there are {known})"
    return f"you ask for {text}"


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
    return f"{who} needs {name} {span(enc, fact.b, allowed)}{where}"


def _builds_sentence(enc: Encoding, fact: Fact, rows: list[Row], asked: Mapping[str, int]) -> str:
    who = _versions(enc, fact.a, _union(rows, fact.a), asked)
    have = enc.domains[VARIANT].all_mask & ~_intersection(rows, VARIANT)
    gpu_only = have & ~enc.domains[VARIANT].mask_of(["cpu"])
    if not enc.cpu and gpu_only:
        have = gpu_only
    beside = f" (it belongs to torch {fact.data})" if fact.a != "torch" and fact.data and len(rows) == 1 else ""
    where = "" if enc.arch == "x86_64" else f" on {enc.arch}"
    useless = "" if enc.cpu or gpu_only else ", and the target has a GPU"
    return f"{who} is built for {_labels(enc, have)} only{where}{beside}{useless}"


def _code_sentence(enc: Encoding, fact: Fact, rows: list[Row], asked: Mapping[str, int]) -> str:
    who = _versions(enc, fact.a, _union(rows, fact.a), asked)
    sm = str(fact.data)
    mask = _union(rows, VARIANT)
    generation = next((a.name for a in enc.matrix.architectures if sm in a.sm), None)
    gpu = f"sm_{sm.replace('.', '')}" + (f" ({generation})" if generation else "")
    text = f"{who} has no code for {gpu} in its {_labels(enc, mask)} build{'s' if mask.bit_count() > 1 else ''}"
    extra = sorted({fact_of(row).text for row in rows if fact_of(row).text})
    return f"{text} ({'; '.join(extra)})" if extra else text


def _floors(enc: Encoding, groups: list[list[Row]]) -> list[Statement]:
    """What the CUDA families ask of the driver, as one sentence."""
    if not groups:
        return []
    said, sources = [], set()
    for group in sorted(groups, key=lambda g: str(fact_of(g[0]).key)):
        fact = fact_of(group[0])
        builds = _labels(enc, _union(group, VARIANT))
        major = int(fact.key[1])  # type: ignore[index]
        said.append(f"CUDA {major} builds ({builds}) need driver >={fact.data}{_compat(enc, major)}")
        sources.add(fact.source)
    return [Statement(", ".join(said), "; ".join(sorted(sources)), "floor")]


def _compat(enc: Encoding, major: int) -> str:
    """Where cuda-compat would lift the driver, but the GPU may not use it."""
    if not enc.driver or enc.options.forward or forward_eligible(enc):
        return ""
    branch = key(enc.driver)[0]
    if not any(key(row.cuda)[0] == major and branch in row.branches for row in enc.matrix.forward):
        return ""
    known = all(g.name for h in enc.hosts for g in h.gpus)
    who = "which this GPU may not use" if known else "which only data-centre GPUs named by product may use"
    return f"; driver {branch} runs them only with cuda-compat, {who}"


def _labels(enc: Encoding, mask: int, cuda: bool = False) -> str:
    domain = enc.domains[VARIANT]
    names = [v for i, v in enumerate(domain.values, 1) if mask >> i & 1]
    if len(names) > 4:
        return f"{names[0]} to {names[-1]}"
    shown = [f"{n} (CUDA {variant_cuda(n)})" if cuda and n != "cpu" else n for n in names]
    return " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1]))) if shown else "nothing known"


def _pythons(enc: Encoding, mask: int) -> str:
    domain = enc.domains[PYTHON]
    names = [v for i, v in enumerate(domain.values, 1) if mask >> i & 1]
    if len(names) > 2:
        minors = [int(n.split(".")[1]) for n in names]
        if minors == list(range(minors[0], minors[-1] + 1)):
            return f"{names[0]} to {names[-1]}"
    return " or ".join(names) or "that is not in the matrix"
