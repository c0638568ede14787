"""What was found -> the plan: pins, target, reasons, and everything the user should know although the plan stands."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from typing import TYPE_CHECKING

from envforge.resolver.encoding import (
    PYTHON,
    TORCH_FAMILY,
    VARIANT,
    Encoding,
    gpu_words,
    minor_of,
    python_mask,
    variant_cuda,
)
from envforge.resolver.explain import span, statements
from envforge.resolver.facts import fact_of
from envforge.resolver.fixes import core_of, with_line
from envforge.resolver.hosts import covers, family_floor, key, shipped_driver
from envforge.resolver.metadata import parse_line
from envforge.resolver.passes import FRAMEWORK, Found, Loader, Wish, asked_date, rank_of, search, tier_of
from envforge.resolver.plan import Plan, Reason, Target, Warning_
from envforge.resolver.request import Request, normalise
from envforge.resolver.rules import rule_terms, sm_of, violated_terms
from envforge.resolver.solve import Row

if TYPE_CHECKING:
    from envforge.matrix.model import Matrix, Rule
    from envforge.matrix.releases import Release


def make_plan(matrix: Matrix, wish: Wish, found: Found, load: Loader, light: bool = False) -> Plan:
    """The frozen plan. `light`: without reasons and warnings."""
    enc, values = found.enc, found.values
    pins = {
        name: enc.domains[name].values[bit - 1] for name, bit in sorted(values.items()) if bit and name in enc.releases
    }
    variant = _value(enc, values, VARIANT)
    python = _value(enc, values, PYTHON)
    tier = "cpu" if variant == "cpu" else tier_of(matrix, variant, enc.driver)
    extras: dict[str, tuple[str, ...]] = {}
    for name, bit in sorted(values.items()):
        if name in enc.extras and bit:
            base = enc.extras[name]
            extras[base] = (*extras.get(base, ()), name[len(base) + 1 : -1])
    undated = _undated(enc, pins, found.as_of)
    source_only = tuple(
        name for name, version in pins.items() if not enc.releases[name][_index(enc, name, version)].wheels
    )
    memory = [g.memory_mib for h in wish.hosts for g in h.gpus if g.memory_mib]
    cuda = variant_cuda(variant)
    target = Target(
        arch=enc.arch,
        glibc=enc.glibc,
        driver=enc.driver,
        driver_floor=driver_floor(matrix, variant, enc, pins),
        sm=enc.sms,
        hosts=tuple(sorted(h.name for h in wish.hosts)),
        memory_mib=min(memory) if memory else None,
    )
    return Plan(
        python=python,
        variant=variant,
        tier=tier,
        pins=pins,
        requests=tuple(sorted(r.text for r in enc.requests)),
        target=target,
        reasons={} if light else reasons(enc, values, found.as_of),
        warnings=() if light else warnings(matrix, wish, found, pins, tier, load),
        constraints=closure_constraints(enc, values),
        extras=extras,
        as_of=found.as_of,
        undated=undated,
        source_only=source_only,
        left_out=tuple(name for name in enc.left_out if name in enc.domains),
        cuda=cuda,
        matrix_hash=matrix.hash,
        matrix_as_of=matrix.policy.as_of,
    )


def _value(enc: Encoding, values: dict[str, int], name: str) -> str:
    return enc.domains[name].values[values[name] - 1]


def _index(enc: Encoding, name: str, version: str) -> int:
    return enc.domains[name].values.index(version)


def _undated(enc: Encoding, pins: dict[str, str], as_of: str | None) -> tuple[str, ...]:
    """What the closure must not cut off at the date: torch with its own needs, and pins that are newer than it."""
    if as_of is None:
        return ()
    names = {name for name in TORCH_FAMILY if name in pins}
    if "torch" in pins:
        release = enc.releases["torch"][_index(enc, "torch", pins["torch"])]
        names |= {d.name for line in release.requires if (d := parse_line(line)) and d.extra is None}
    names |= {n for n, v in pins.items() if enc.releases[n][_index(enc, n, v)].uploaded[:10] > as_of}
    return tuple(sorted(names))


def driver_floor(matrix: Matrix, variant: str, enc: Encoding, pins: dict[str, str]) -> str | None:
    """The lowest driver that the plan runs on: the family floor, the toolkit's own where only PTX fits a GPU, or with
    cuda-compat the driver that the plan is for."""
    cuda = variant_cuda(variant)
    if cuda is None:
        return None
    if tier_of(matrix, variant, enc.driver) == "forward":
        return enc.driver
    floor = family_floor(matrix, key(cuda)[0])
    build = next(
        (
            b
            for b in matrix.torch_builds
            if "torch" in pins and b.torch == minor_of(pins["torch"]) and b.variant == variant and b.arch == enc.arch
        ),
        None,
    )
    if build and any(covers(build.sm, build.ptx, sm, jit=True) == "ptx" for sm in enc.sms):
        return shipped_driver(matrix, cuda) or floor
    return floor


def reasons(enc: Encoding, values: dict[str, int], as_of: str | None) -> dict[str, tuple[Reason, ...]]:
    """For each pin: who asked for it, and what stands in the way of the next better release."""
    touching: dict[str, list[Row]] = {}
    for row in enc.rows:
        for name, _ in row.terms:
            touching.setdefault(name, []).append(row)
    result: dict[str, tuple[Reason, ...]] = {}
    for name in [*sorted(enc.releases), VARIANT, PYTHON]:
        bit = values.get(name, 0)
        if not bit:
            continue
        found: list[Reason] = []
        for row in touching.get(name, ()):
            fact = fact_of(row)
            if fact.kind == "request" and fact.a == name:
                found.append(Reason(f"you ask for {fact.text}", fact.source))
            elif row.activates == name and fact.kind == "dependency" and _holds(row, values, name):
                who = fact.a
                if enc.extras.get(who) == name:
                    continue  # fsspec[http] needs fsspec: no reason, and no document says it
                version = _value(enc, values, who)
                allowed = enc.domains[name].all_mask & ~dict(row.terms)[name]
                every = allowed == enc.domains[name].all_mask
                versions = "" if every else f" {span(enc, name, allowed)}"
                found.append(Reason(f"{who} {version} needs {name}{versions}", fact.source))
        blocked = _capped(enc, values, name, touching)
        if blocked:
            found.append(blocked)
        elif name in enc.releases and as_of and _newest_of_its_time(enc, name, bit, as_of):
            found.append(Reason(f"the newest that was current on {as_of}", "coherence date"))
        result["variant" if name == VARIANT else name] = tuple(dict.fromkeys(found))[:6]
    return result


def _newest_of_its_time(enc: Encoding, name: str, bit: int, as_of: str) -> bool:
    """There are newer releases, and all of them came after the date."""
    newer = enc.releases[name][bit:]
    return bool(newer) and all(release.uploaded[:10] > as_of for release in newer)


def _holds(row: Row, values: dict[str, int], besides: str) -> bool:
    return all(mask >> values.get(n, 0) & 1 for n, mask in row.terms if n != besides)


def _capped(enc: Encoding, values: dict[str, int], name: str, touching: dict[str, list[Row]]) -> Reason | None:
    """The row that refuses the next newer release when everything else stays as chosen."""
    bit = values[name]
    if name in (VARIANT, PYTHON) or bit >= len(enc.domains[name].values):
        return None
    version = enc.domains[name].values[bit]
    for row in touching.get(name, ()):
        if dict(row.terms)[name] >> (bit + 1) & 1 and _holds(row, values, name) and fact_of(row).kind != "request":
            text = statements(enc, [row])[0].text
            return Reason(f"{version} is refused: {text}", fact_of(row).source)
    return None


def _inside(values: dict[str, int], terms: Sequence[tuple[str, int]]) -> bool:
    return all(mask >> values.get(name, 0) & 1 for name, mask in terms)


def closure_constraints(enc: Encoding, values: dict[str, int]) -> tuple[str, ...]:
    """Rules about packages that are not in the game become constraints of the closure."""
    found: set[str] = set()
    for rule in enc.matrix.rules:
        if rule.level != "hard":
            continue
        for name, specifier in (*rule.needs.items(), *rule.requires.items()):
            outside = name not in enc.domains and name not in ("sm", "variant", "cuda", "driver", "glibc", "python")
            absent = name in enc.domains and not values.get(name, 0)
            if not (outside or absent):
                continue
            terms = rule_terms(enc, rule)
            if terms and any(_inside(values, t) for t in terms):
                found.add(f"{name}{specifier}" if specifier != "*" else name)
    return tuple(sorted(found))


def warnings(
    matrix: Matrix, wish: Wish, found: Found, pins: dict[str, str], tier: str, load: Loader
) -> tuple[Warning_, ...]:
    """Everything that the user should know although the plan stands."""
    enc, values = found.enc, found.values
    out: list[Warning_] = []
    for rule in matrix.rules:
        if rule.level != "warn":
            continue
        terms = rule_terms(enc, rule)
        if not terms:
            continue
        for term in terms:
            if _inside(values, term) and _violates(enc, rule, term, values):
                out.append(Warning_(rule.warning or rule.id, rule.text))
    if tier == "minor":
        out.append(Warning_("minor-tier", _minor_text(enc, _value(enc, values, VARIANT))))
    if tier == "forward":
        out.append(
            Warning_(
                "forward-tier",
                "this plan runs only with NVIDIA's cuda-compat libraries inside the image, "
                f"because driver {enc.driver} is older than CUDA {variant_cuda(_value(enc, values, VARIANT))} needs",
            )
        )
    for sm in enc.sms:
        text = _code_note(enc, values, pins, sm)
        if text:
            out.append(Warning_("gpu-code", text))
    addressed = {request.name for request in enc.requests if request.url}
    for name in pins:
        if not enc.release(name, values[name]).wheels and name not in addressed:
            out.append(Warning_("source-build", _build_text(enc, name, pins[name], _value(enc, values, VARIANT))))
    for name in enc.left_out:
        if name in enc.domains:
            text = f"{name} is left out: no CPU build of it can be had from here, and its CUDA build fails beside torch"
            out.append(Warning_("companion-left-out", f"{text}'s CPU build"))
    left_out: set[str] = set()
    for request in enc.requests:
        if request.marker and not python_mask(enc, request.marker) >> values.get(PYTHON, 0) & 1:
            python = _value(enc, values, PYTHON)
            text = f"{request.text} is left out: its marker does not hold on python {python}, Linux and {enc.arch}"
            out.append(Warning_("marker-not-met", text))
            left_out.add(request.text)
        elif request.url and not request.specifier and request.name in pins:
            out.append(Warning_("address", _address_text(request, pins[request.name])))
        for extra in request.extras if request.name in pins and not request.url else ():
            if not _has_extra(enc.release(request.name, values[request.name]), extra):
                text = f"{request.name} {pins[request.name]} has no extra [{extra}], or needs nothing for it"
                out.append(Warning_("unknown-extra", text))
    if "torch" not in pins and any(rank_of(enc, name)[0] == FRAMEWORK for name in pins):
        out.append(Warning_("no-torch", "nothing here requires torch, so the answer has none: ask for torch as well"))
    for request in enc.outside:
        if request.text in left_out:
            continue
        out.append(
            Warning_("outside-matrix", f"{request.name} is not in the matrix: its own needs join only when locked")
        )
    out += stale(matrix, wish, found, load)
    return tuple(dict.fromkeys(out))


def _address_text(request: Request, version: str) -> str:
    text = f"{request.name} comes from an address: until a lock builds it, it is taken for release {version}"
    loose = (request.url or "").startswith("git+") and not re.search(r"@[0-9a-f]{40}(#|$)", request.url or "")
    return text + ("; a lock needs the full commit" if loose else "")


def _has_extra(release: Release, extra: str) -> bool:
    names = (name for line in release.requires for name in re.findall(r"extra\s*==\s*[\"']([^\"']+)", line))
    return any(normalise(name) == extra for name in names)


def _violates(enc: Encoding, rule: Rule, term: tuple[tuple[str, int], ...], values: dict[str, int]) -> bool:
    for name, specifier in rule.needs.items():
        for bad in violated_terms(enc, name, specifier, sm_of(term)):
            if bad is None or bad[1] >> values.get(bad[0], 0) & 1:
                return True
    return False


def _minor_text(enc: Encoding, variant: str) -> str:
    cuda = variant_cuda(variant)
    own = shipped_driver(enc.matrix, cuda) if cuda else None
    return (
        f"driver {enc.driver} is older than the one CUDA {cuda} shipped with ({own}): the build's own machine code "
        "runs, but PTX is not compiled by the driver (no JIT), and features that need the newer driver fail at run time"
    )


def _build_text(enc: Encoding, name: str, version: str, variant: str) -> str:
    """What it takes to install a release that has no wheel."""
    cuda = variant_cuda(variant)
    needs = "a C++ compiler"
    if cuda:
        major = cuda.split(".")[0]
        needs += f", ninja, and nvcc of CUDA {cuda} or another {major}.x (its major must be that of torch's CUDA)"
    native = [row for row in enc.matrix.native if row.package == name and row.source_only]
    kernels = any(
        row.sm and enc.domains[name].mask(row.versions, True) >> enc.domains[name].bit(version) & 1 for row in native
    )
    if kernels:
        return (
            f"{name} {version} has no wheel and is compiled: that needs {needs}, several GiB of memory for each "
            "compile job (limit them with MAX_JOBS), and it takes long; --no-compile forbids it"
        )
    if native:
        return (
            f"{name} {version} has no wheel and is built from its source archive; its operators are compiled on first "
            f"use, and that needs {needs} where it runs; --no-compile forbids it"
        )
    return f"{name} {version} has no wheel and is built from its source archive; --no-compile forbids it"


def _code_note(enc: Encoding, values: dict[str, int], pins: dict[str, str], sm: str) -> str | None:
    """Says which code of torch serves a GPU that has no code of its own capability."""
    if "torch" not in pins:
        return None
    variant = _value(enc, values, VARIANT)
    build = next(
        (
            b
            for b in enc.matrix.torch_builds
            if b.torch == minor_of(pins["torch"]) and b.variant == variant and b.arch == enc.arch
        ),
        None,
    )
    if build is None or sm in build.sm:
        return None
    how = covers(build.sm, build.ptx, sm, jit=True)
    major = key(sm)[0]
    code = next((s for s in reversed(build.sm) if key(s)[0] == major and key(s) <= key(sm)), None)
    through = f"its sm_{code.replace('.', '')} code" if how == "cubin" and code else "PTX that the driver compiles"
    return f"torch {pins['torch']}+{variant} serves {gpu_words(enc, sm)} through {through}"


def stale(matrix: Matrix, wish: Wish, found: Found, load: Loader) -> list[Warning_]:
    """Requested packages that landed far behind what their hosts would allow, and who held them back."""
    enc, values = found.enc, found.values
    out: list[Warning_] = []
    limit = matrix.policy.stale_days
    kept = dict(enc.options.keep)
    free_wish = replace(wish, as_of="today", options=replace(wish.options, keep=()))
    for request in enc.requests:
        if request.name not in enc.releases or request.specifier or request.name in enc.options.pythons:
            continue
        if not values.get(request.name, 0):
            continue
        chosen = enc.release(request.name, values[request.name])
        if kept.get(request.name) == chosen.version:
            continue  # an earlier plan pins it, and that is why it is there
        # Where no pin and nobody set the date, it follows from what was chosen and excuses nothing.
        date_set = asked_date(enc, wish)
        newest = _newest_before(enc, request.name, date_set)
        if _days(chosen.uploaded, newest) <= limit:
            continue
        alone = search(matrix, replace(free_wish, requests=(replace(request, extras=()),)), load)
        if not isinstance(alone, Found):
            continue
        free = alone.enc.release(request.name, alone.values[request.name])
        reference = min(free.uploaded[:10], date_set or free.uploaded[:10])
        if _days(chosen.uploaded, reference) <= limit:
            latest = enc.releases[request.name][-1]
            if free.version == chosen.version and _days(chosen.uploaded, latest.uploaded) > limit:
                text = (
                    f"{request.name} {chosen.version} of {chosen.uploaded[:10]} is the newest that these hosts allow; "
                    f"{latest.version} of {latest.uploaded[:10]} is not for them"
                )
                out.append(Warning_("old-for-host", text + _held_by(matrix, wish, request, latest.version, load)))
            continue
        who = _held_by(matrix, wish, request, free.version, load)
        if kept and not who:
            who = "; it goes with what the earlier plan pins (--upgrade NAME lets a pin move)"
        out.append(
            Warning_(
                "stale",
                f"{request.name} {chosen.version} of {chosen.uploaded[:10]} is far behind "
                f"{free.version} of {free.uploaded[:10]}, which these hosts would allow" + who,
            )
        )
    return out


def _held_by(matrix: Matrix, wish: Wish, request: Request, version: str, load: Loader) -> str:
    line = f"{request.name}=={version}"
    others = tuple(r for r in wish.requests if r.name != request.name)
    found = search(matrix, replace(wish, requests=(*others, with_line(request, line))), load)
    if isinstance(found, Found):
        return ""
    enc, rows = found
    core = core_of(enc, rows)
    said = [s.text for s in statements(enc, core) if s.text != f"you ask for {line}"]
    return f"; held back because {'; '.join(said)}" if said else ""


def _newest_before(enc: Encoding, name: str, as_of: str | None) -> str:
    dates = [r.uploaded[:10] for r in enc.releases[name] if not as_of or r.uploaded[:10] <= as_of]
    return max(dates) if dates else enc.releases[name][-1].uploaded[:10]


def _days(early: str, late: str) -> int:
    return (date.fromisoformat(late[:10]) - date.fromisoformat(early[:10])).days
