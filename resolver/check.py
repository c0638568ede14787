"""Does a given set of pins run on given hosts? Every row of the matrix that it breaks, and what it lacks.

The same rows as a resolve, but nothing is searched: the values are given. Names that are not among the pins are
unknown rather than absent, so a dependency on one is reported as missing only when the set claims to be whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from envforge.matrix.releases import Release, load_releases
from envforge.resolver.constraints import PYTHON, VARIANT, Encoding, Options, encode, minor_of
from envforge.resolver.explain import Statement, statements
from envforge.resolver.facts import fact_of
from envforge.resolver.hosts import Host, covers, key
from envforge.resolver.request import Request
from envforge.resolver.solve import Row

if TYPE_CHECKING:
    from envforge.matrix.model import Matrix


@dataclass(frozen=True)
class Verdict:
    """`broken`: rows that the set breaks. `missing`: dependencies that are not in it. `unknown`: pins that the matrix
    does not know, by package or by version. `decides`: rows between the given values that the set meets."""

    broken: tuple[Statement, ...]
    missing: tuple[Statement, ...]
    unknown: tuple[str, ...]
    decides: tuple[Statement, ...] = ()

    @property
    def ok(self) -> bool:
        """Nothing is broken; missing and unknown are told beside it."""
        return not self.broken


def judge(
    matrix: Matrix,
    pins: Mapping[str, str],
    hosts: Sequence[Host],
    python: str | None = None,
    variant: str | None = None,
    any_variant: bool = False,
    load: Callable[[str], tuple[Release, ...]] = load_releases,
) -> Verdict:
    """Hold pins (versions without local part), python ("3.11") and variant ("cu126", "cpu") against every row.

    any_variant: no host is meant, so that CPU and CUDA builds are equally good.
    """
    requests = tuple(Request(name, f"=={version}", f"{name}=={version}") for name, version in sorted(pins.items()))
    options = Options(variant=variant or "auto", pythons=(python,) if python else (), allow_uncapped=True)
    enc = encode(matrix, requests, hosts, options, load)
    values, unknown = _values(enc, pins, python, variant)
    broken: list[Row] = []
    missing: list[Row] = []
    for row in enc.rows:
        if fact_of(row).kind == "request" or (any_variant and fact_of(row).key == ("option", VARIANT)):
            continue
        state = _state(enc, row, values)
        if state == "broken":
            broken.append(row)
        elif state == "missing" and fact_of(row).kind != "option":
            missing.append(row)
    if variant is None:
        broken += _no_value(enc, values, VARIANT, any_variant)
    if python is None:
        broken += _no_value(enc, values, PYTHON, any_variant)
    given = {name: 1 << position for name, position in values.items()}
    met = statements(enc, _deciding(enc, values), given)
    return Verdict(
        statements(enc, broken, given), statements(enc, missing, given), unknown, (*met, *_codes(enc, values))
    )


# Kinds of rows whose sentence is about what is there; rows on GPU code speak of what is lacking, see `_codes`.
_TELLING = ("dependency", "requires-python", "builds", "rule", "native", "generation")


def _deciding(enc: Encoding, values: Mapping[str, int]) -> list[Row]:
    """Rows that one of the given values alone keeps from being broken; with another value there, the set would be."""
    found: list[Row] = []
    for row in enc.rows:
        fact = fact_of(row)
        if fact.kind not in _TELLING or any(name in enc.extras for name, _ in row.terms):
            continue
        open_ = [name for name, _ in row.terms if name not in values]
        failing = [name for name, mask in row.terms if name in values and not mask >> values[name] & 1]
        if not open_ and len(failing) == 1 and failing[0] != fact.a:
            found.append(row)
        elif open_ and set(open_) <= {VARIANT, PYTHON} and not failing and fact.kind in ("builds", "requires-python"):
            found.append(row)  # nobody gave a variant or a python: what the set allows of them
    return found


def _codes(enc: Encoding, values: Mapping[str, int]) -> tuple[Statement, ...]:
    """Driver floors of the given torch's builds that the host meets, and for each GPU the builds with code for it."""
    if "torch" not in values:
        return ()
    version = enc.domains["torch"].value(values["torch"]) or ""
    given = enc.domains[VARIANT].value(values.get(VARIANT, 0))
    found = []
    for family in enc.matrix.families if enc.driver else ():
        variants = sorted(
            build.variant
            for build in enc.matrix.torch_builds
            if build.torch == minor_of(version)
            and build.arch == enc.arch
            and given in (None, build.variant)
            and build.cuda
            and key(build.cuda)[0] == family.major
        )
        if variants and enc.driver and key(enc.driver) >= key(family.min_driver):
            names = ", ".join(variants)
            text = f"CUDA {family.major} builds ({names}) need driver >={family.min_driver}; it is {enc.driver}"
            found.append(Statement(text, family.source.text, "floor"))
    for sm in enc.sms:
        builds = [
            build
            for build in enc.matrix.torch_builds
            if build.torch == minor_of(version) and build.arch == enc.arch and given in (None, build.variant)
        ]
        able = [build for build in builds if build.cuda and covers(build.sm, build.ptx, sm, jit=True)]
        if able:
            names = " and ".join(sorted(build.variant for build in able))
            text = f"torch {version} has code for sm_{sm.replace('.', '')} in its build for {names}"
            found.append(Statement(text, "; ".join(sorted({build.source.text for build in able})), "code"))
    return tuple(found)


def _values(
    enc: Encoding, pins: Mapping[str, str], python: str | None, variant: str | None
) -> tuple[dict[str, int], tuple[str, ...]]:
    values: dict[str, int] = {}
    unknown = []
    for name, version in sorted(pins.items()):
        try:
            values[name] = enc.domains[name].bit(version)
        except KeyError:
            unknown.append(f"{name}=={version}")
    for name, value in ((PYTHON, python), (VARIANT, variant)):
        if value is not None and value in enc.domains[name].values:
            values[name] = enc.domains[name].bit(value)
    for name, domain in enc.domains.items():
        if name == "host:driver" and enc.driver:
            values[name] = domain.bit(enc.driver)
        elif name == "host:glibc" and enc.glibc:
            values[name] = domain.bit(enc.glibc)
        elif name.startswith("host:sm_"):
            values[name] = 1
    return values, tuple(unknown)


def _state(enc: Encoding, row: Row, values: Mapping[str, int]) -> str:
    """broken: every term holds for known values; missing: all but the activated one do, and that is not in the set."""
    for name, mask in row.terms:
        if name not in values:
            if name == row.activates and name not in enc.extras:
                continue
            return "open"
        if not mask >> values[name] & 1:
            return "met"
    return "missing" if row.activates is not None and row.activates not in values else "broken"


def _no_value(enc: Encoding, values: Mapping[str, int], name: str, any_variant: bool) -> list[Row]:
    """Rows that together leave no value for a variable that nobody gave: no variant or no python fits the set."""
    left = enc.domains[name].all_mask
    used: list[Row] = []
    for row in enc.rows:
        if any_variant and fact_of(row).key == ("option", VARIANT):
            continue
        others = [(n, m) for n, m in row.terms if n != name]
        own = [m for n, m in row.terms if n == name]
        if own and all(n in values and m >> values[n] & 1 for n, m in others):
            if left & own[0]:
                used.append(row)
            left &= ~own[0]
    return used if not left else []
