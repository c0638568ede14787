"""Rules, bans, constraint lines and learned closures -> incompatibilities."""

from __future__ import annotations

from typing import TYPE_CHECKING

from envforge.resolver.encoding import DRIVER, GLIBC, PRESENT, PYTHON, VARIANT, Encoding, sm_name, variant_cuda
from envforge.resolver.facts import Fact
from envforge.resolver.hosts import key
from envforge.resolver.packages import python_allowed

if TYPE_CHECKING:
    from envforge.matrix.model import Rule


def rule_rows(enc: Encoding) -> None:
    """Every hard rule that speaks of what is in the game, and what the settings and constraint lines forbid."""
    for rule in enc.matrix.rules:
        if rule.level == "hard":
            _one_rule(enc, rule)
    for name, specifier in enc.options.banned:
        if name in enc.domains:
            fact = Fact(
                "rule",
                ("banned", name, specifier),
                name,
                text=f"{name} {specifier} is banned by your settings",
                source="settings",
            )
            enc.add(fact, (name, enc.domains[name].mask(specifier, prereleases=True)))
    for index, limit in enumerate(enc.options.limits):
        if limit.name in enc.domains:
            domain = enc.domains[limit.name]
            text = f"{limit.text} is a constraint ({limit.origin})"
            fact = Fact("rule", ("limit", index), limit.name, text=text, source=limit.origin)
            enc.add(fact, (limit.name, domain.all_mask & ~domain.mask(limit.specifier, bool(limit.pinned))))
    for learned in enc.options.learned:
        terms = [(n, enc.domains[n].mask(f"=={v}", True)) for n, v in learned.pins if n in enc.domains]
        terms += [(PYTHON, enc.domains[PYTHON].mask_of([learned.python]))]
        terms += [(VARIANT, enc.domains[VARIANT].mask_of([learned.variant]))]
        enc.add(Fact("learned", ("learned", learned.pins), text=learned.text, source="uv"), *terms)


def _one_rule(enc: Encoding, rule: Rule) -> None:
    conditions = rule_terms(enc, rule)
    if conditions is None:
        return
    fact = Fact("rule", ("rule", rule.id), rule.id, text=rule.text, source=rule.source.text)
    for terms in conditions:
        for name, specifier in rule.needs.items():
            for need in violated_terms(enc, name, specifier, sm_of(terms)):
                if need is None:
                    enc.add(fact, *terms)
                else:
                    enc.add(fact, *_join(terms, need))
        for name, specifier in rule.requires.items():
            if name in enc.domains:
                domain = enc.domains[name]
                enc.add(fact, *terms, (name, domain.full & ~domain.mask(specifier)), activates=name)


def _join(terms: tuple[tuple[str, int], ...], need: tuple[str, int]) -> tuple[tuple[str, int], ...]:
    """Two terms on one variable become their intersection."""
    rest = tuple(term for term in terms if term[0] != need[0])
    same = [mask for name, mask in terms if name == need[0]]
    mask = need[1]
    for other in same:
        mask &= other
    return (*rest, (need[0], mask))


def rule_terms(enc: Encoding, rule: Rule) -> list[tuple[tuple[str, int], ...]] | None:
    """The `when` of a rule as alternatives of terms; None when it speaks of a package that is not in the game."""
    alternatives: list[tuple[tuple[str, int], ...]] = [()]
    for name, specifier in rule.when.items():
        found: list[tuple[str, int]] = []
        if name == "sm":
            found = [(sm_name(sm), PRESENT) for sm in enc.sms if _number_in(sm, specifier)]
        elif name in ("variant", "cuda", "driver", "glibc", "python"):
            term = _virtual_term(enc, name, specifier)
            found = [term] if term else []
        elif name in enc.domains:
            found = [(name, enc.domains[name].mask(specifier, prereleases=True))]
        if not found:
            return None
        alternatives = [(*terms, term) for terms in alternatives for term in found]
    return alternatives


def sm_of(terms: tuple[tuple[str, int], ...]) -> str | None:
    """The capability that one alternative of a rule's `when` speaks of."""
    names = [name.removeprefix("host:sm_") for name, _ in terms if name.startswith("host:sm_")]
    return f"{names[0][:-1]}.{names[0][-1]}" if names else None


def violated_terms(enc: Encoding, name: str, specifier: str, sm: str | None = None) -> list[tuple[str, int] | None]:
    """The terms under which a `needs` is broken; an empty list when it cannot be. None stands for "in any case".
    With `sm` a need on the driver is one on the driver of the hosts that have this GPU."""
    if name == "driver" and sm is not None:
        own = enc.driver_term(sm, lambda version: not _number_in(version, specifier))
        return [] if own is None else [own[0]] if own else [None]
    if name == "sm":
        return [(sm_name(sm), PRESENT) for sm in enc.sms if not _number_in(sm, specifier)]
    if name in ("variant", "cuda", "driver", "glibc", "python"):
        term = _virtual_term(enc, name, specifier)
        if term is None:
            return []
        domain = enc.domains[term[0]]
        bad = domain.all_mask & ~term[1]
        if name == "cuda":
            bad &= ~domain.mask_of(["cpu"])  # no CUDA at all: nothing to be too old
        return [(term[0], bad)] if bad else []
    if name in enc.domains:
        domain = enc.domains[name]
        bad = domain.all_mask & ~domain.mask(specifier, prereleases=True)
        return [(name, bad)] if bad else []
    return []


def _virtual_term(enc: Encoding, name: str, specifier: str) -> tuple[str, int] | None:
    variable = {"variant": VARIANT, "cuda": VARIANT, "driver": DRIVER, "glibc": GLIBC, "python": PYTHON}[name]
    domain = enc.domains.get(variable)
    if domain is None:
        return None
    if name == "variant":
        wanted = [v.strip() for v in specifier.split(",")]
        return variable, domain.mask_of(v for v in domain.values if v in wanted)
    if name == "cuda":
        return variable, domain.mask_of(v for v in domain.values if (c := variant_cuda(v)) and _number_in(c, specifier))
    if name == "python":
        return variable, domain.mask_of(v for v in domain.values if python_allowed(v, specifier))
    return variable, domain.mask_of(v for v in domain.values if _number_in(v, specifier))


def _number_in(value: str, specifier: str) -> bool:
    """Dotted numbers against a PEP 440 style specifier: drivers have leading zeros and three parts, so not versions."""
    for part in specifier.split(","):
        part = part.strip()
        for operator in (">=", "<=", "==", "!=", ">", "<"):
            if part.startswith(operator):
                want = part[len(operator) :].strip()
                if want.endswith(".*"):
                    same = key(value)[: len(key(want[:-2]))] == key(want[:-2])
                    holds = same if operator == "==" else not same
                else:
                    a, b = key(value), key(want)
                    size = max(len(a), len(b))
                    a, b = a + (0,) * (size - len(a)), b + (0,) * (size - len(b))
                    holds = {">=": a >= b, "<=": a <= b, "==": a == b, "!=": a != b, ">": a > b, "<": a < b}[operator]
                if not holds:
                    return False
                break
    return True
