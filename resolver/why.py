"""Why a plan's pins are what they are: for each, what stands in the way of a newer one, found by asking for it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from envforge.matrix.releases import load_releases
from envforge.resolver.encoding import PYTHON, VARIANT, Encoding, variant_cuda
from envforge.resolver.explain import statements
from envforge.resolver.fixes import core_of
from envforge.resolver.hosts import shipped_driver
from envforge.resolver.passes import Found, Loader, Wish, rank_of, search, tier_of
from envforge.resolver.plan import Reason
from envforge.resolver.request import Request

if TYPE_CHECKING:
    from envforge.matrix.model import Matrix

MAX_SAID = 4


def explain_pins(matrix: Matrix, wish: Wish, load: Loader = load_releases) -> dict[str, tuple[Reason, ...]]:
    """For what was asked for, trainers, torch, `variant` and `python`: what capped it and what a newer one would need.

    A package of which the newest release is taken has no entry; nor have the others, whose reason is in the plan: it
    is the row that keeps them beside these. Each entry costs a search. Empty for a conflict.
    """
    found = search(matrix, wish, load)
    if not isinstance(found, Found):
        return {}
    enc, reasons = found.enc, dict[str, tuple[Reason, ...]]()
    named = {request.name for request in wish.requests} | {"torch"}
    named |= {name for name, row in matrix.packages.items() if row.role == "trainer"}
    for name in sorted(n for n in enc.releases if n in named and found.values.get(n)):
        if found.values[name] < len(enc.domains[name].values):
            reasons[name] = (_newer(matrix, wish, found, name, load),)
    reasons["variant"] = (_variant(enc, found),)
    reasons["python"] = (_python(enc, found),)
    return reasons


def _newer(matrix: Matrix, wish: Wish, found: Found, name: str, load: Loader) -> Reason:
    version = found.value(name)
    line = f"{name}>{version}"
    asked = replace(wish, requests=(*wish.requests, Request(name, f">{version}", line)))
    other = search(matrix, asked, load)
    if not isinstance(other, Found):
        enc, rows = other
        said = [s for s in statements(enc, core_of(enc, rows)) if s.text != f"you ask for {line}"]
        bare = {f"you ask for {r.text}" for r in wish.requests if not (r.specifier or r.local)}
        plain = [s for s in said if s.kind != "driver" and s.text not in bare] or said
        if any(s.kind == "request" and s.text.startswith(f"you ask for {name}") for s in plain):
            plain = [s for s in plain if s.text.startswith(f"you ask for {name}")]
        text = "; ".join(s.text.rstrip(".") for s in plain[:MAX_SAID])
        return Reason(f"nothing newer than {version}: {text}", "; ".join(sorted({s.source for s in said if s.source})))
    newer = other.value(name)
    costs = _costs(found, other)
    if costs:
        return Reason(f"{newer} would need {', '.join(costs)}", "solved")
    if found.as_of:
        return Reason(f"the newest that was current on {found.as_of} ({newer} would do too)", "coherence date")
    return Reason(f"chosen before {newer}, which would do too", "solved")


def _costs(found: Found, other: Found) -> list[str]:
    """What the other answer is worse at: an older package that matters more, another build, tier or Python."""
    costs = []
    tiers = [tier_of(f.enc.matrix, f.value(VARIANT), f.enc.driver) for f in (found, other)]
    if found.value(VARIANT) != other.value(VARIANT):
        what = f"the {other.value(VARIANT)} build instead of {found.value(VARIANT)}"
        note = {"forward": " (with cuda-compat only)", "minor": " (in the minor tier)"}.get(tiers[1], "")
        costs.append(what + (note if tiers[0] != tiers[1] else ""))
    if found.value(PYTHON) != other.value(PYTHON):
        costs.append(f"python {other.value(PYTHON)}")
    old, new = found.pins(), other.pins()
    for name in sorted(old, key=lambda n: rank_of(found.enc, n)):
        if name not in new:
            continue
        domain = found.enc.domains[name]
        if new[name] in domain.values and domain.bit(new[name]) < domain.bit(old[name]):
            costs.append(f"{name} {new[name]} instead of {old[name]}")
    return costs[:3]


def _variant(enc: Encoding, found: Found) -> Reason:
    variant = found.value(VARIANT)
    cuda = variant_cuda(variant)
    if cuda is None:
        return Reason("the CPU build: no GPU is wanted", "target")
    tier = tier_of(enc.matrix, variant, enc.driver)
    own = shipped_driver(enc.matrix, cuda)
    text = {
        "native": f"driver {enc.driver} is at least as new as the one CUDA {cuda} shipped with ({own})",
        "minor": f"driver {enc.driver}, older than CUDA {cuda}'s own ({own}), runs it by minor-version compatibility",
        "forward": f"driver {enc.driver} runs CUDA {cuda} only with cuda-compat",
    }[tier]
    return Reason(text if enc.driver else f"CUDA {cuda}; no driver is known", "driver table of the matrix")


def _python(enc: Encoding, found: Found) -> Reason:
    if enc.options.pythons:
        return Reason(f"python {' or '.join(enc.options.pythons)} is asked for", "request")
    order = list(enc.matrix.policy.pythons)
    before = order[: order.index(found.value(PYTHON))]
    text = f"the first of {', '.join(order)} that fits" if before else "the preferred one"
    return Reason(text, "matrix policy")
