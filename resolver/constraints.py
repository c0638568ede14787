"""Matrix rows, host facts and requests -> incompatibilities, each keeping the fact it came from.

One game for everything: packages, `python`, `torch-variant` and the host's own facts (`host:driver`, `host:glibc`,
`host:sm_86`) are variables with finite domains; each row forbids one combination of values. Rows are made for what
the request can reach and for nothing else.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from envforge.errors import UsageError
from envforge.matrix.releases import Release, load_releases
from envforge.resolver.encoding import (
    DRIVER,
    GLIBC,
    PRESENT,
    PYTHON,
    TORCH_FAMILY,
    VARIANT,
    Builds,
    Encoding,
    Learned,
    Options,
    below,
    gpu_words,
    minor_of,
    python_mask,
    sm_name,
    variant_cuda,
    variant_key,
)
from envforge.resolver.facts import Fact
from envforge.resolver.hosts import Host, covers, family_floor, key, shipped_driver
from envforge.resolver.metadata import parse_line
from envforge.resolver.packages import packages
from envforge.resolver.request import Request
from envforge.resolver.rules import rule_rows, rule_terms, violated_terms
from envforge.resolver.versions import ABSENT, Domain

if TYPE_CHECKING:
    from envforge.matrix.model import Matrix, NativeLib, TorchBuild

__all__ = [
    "DRIVER",
    "GLIBC",
    "PYTHON",
    "TORCH_FAMILY",
    "VARIANT",
    "Builds",
    "Encoding",
    "Learned",
    "Options",
    "encode",
    "forward_eligible",
    "gpu_words",
    "minor_of",
    "rule_terms",
    "sm_name",
    "variant_cuda",
    "violated_terms",
]


def encode(
    matrix: Matrix,
    requests: Sequence[Request],
    hosts: Sequence[Host],
    options: Options,
    load: Callable[[str], tuple[Release, ...]] = load_releases,
) -> Encoding:
    """Build the problem. Hosts must have their capabilities filled in (`hosts.known`).

    Raises:
        UsageError: an unknown variant, or hosts of several architectures in one plan.
    """
    arches = sorted({host.arch for host in hosts})
    if len(arches) > 1:
        raise UsageError(
            f"one plan cannot serve {' and '.join(arches)} hosts", "resolve them apart: --host one at a time"
        )
    pythons = options.pythons or matrix.policy.pythons
    order = tuple(sorted(set(pythons) | set(matrix.policy.pythons), key=key))
    enc = Encoding(matrix, tuple(requests), tuple(hosts), options, arches[0] if arches else "x86_64", order)
    enc.sms = tuple(sorted({g.sm for h in hosts for g in h.gpus if g.sm}, key=key)) if not enc.cpu else ()
    drivers = [h.driver for h in hosts if h.driver]
    enc.driver = min(drivers, key=key) if drivers and not enc.cpu else None
    floors = [h.glibc for h in hosts if h.glibc]
    enc.glibc = min(floors, key=key) if floors else None
    _host_rows(enc)
    packages(enc, load)
    _torch_rows(enc)
    _native_rows(enc)
    rule_rows(enc)
    _request_rows(enc)
    return enc


# --- hosts, python and variant -----------------------------------------------------------------------------------


def _host_rows(enc: Encoding) -> None:
    matrix, options = enc.matrix, enc.options
    enc.domains[PYTHON] = Domain(PYTHON, enc.pythons)
    wanted = enc.domains[PYTHON].mask_of(options.pythons or enc.pythons)
    among = ", ".join(options.pythons or enc.pythons)
    text = f"python {among} is asked for" if options.pythons else f"python is one of {among}"
    enc.add(
        Fact("option", ("option", PYTHON), PYTHON, " or ".join(options.pythons), text),
        (PYTHON, ~wanted & enc.domains[PYTHON].full),
        activates=PYTHON,
    )

    names = sorted({b.variant for b in matrix.torch_builds}, key=variant_key)
    variants = enc.domains[VARIANT] = Domain(VARIANT, names)
    if options.variant not in ("auto", *names):
        near = difflib.get_close_matches(options.variant, names, 4, 0.3) or names
        raise UsageError(f"unknown variant {options.variant[:40]!r}", f"known: {', '.join(near)}; or auto")
    if options.variant != "auto":
        only = variants.mask_of([options.variant])
        fact = Fact("option", ("option", VARIANT), VARIANT, options.variant, f"variant {options.variant} is asked for")
    elif enc.cpu:
        only = variants.mask_of(["cpu"])
        fact = Fact("option", ("option", VARIANT), VARIANT, "cpu", "the target has no GPU, so torch is the CPU build")
    else:
        only = variants.all_mask & ~variants.mask_of(["cpu"])
        fact = Fact(
            "option", ("option", VARIANT), VARIANT, "cuda", "the target has a GPU, so torch must be a CUDA build"
        )
    enc.add(fact, (VARIANT, ~only & variants.full), activates=VARIANT)

    if enc.glibc:
        floors = sorted(
            {"2.5", "2.12", "2.17", "2.24", "2.27", "2.28", "2.31", "2.34", "2.35", "2.39", enc.glibc}, key=key
        )
        glibc = enc.domains[GLIBC] = Domain(GLIBC, floors)
        enc.add(
            Fact("glibc", ("host", GLIBC), enc.glibc, text=f"the host has glibc {enc.glibc}"),
            (GLIBC, ~glibc.mask_of([enc.glibc]) & glibc.full),
            activates=GLIBC,
        )
    if enc.driver:
        points = (
            {t.driver for t in matrix.toolkits if t.driver} | {f.min_driver for f in matrix.families} | {enc.driver}
        )
        driver = enc.domains[DRIVER] = Domain(DRIVER, sorted(points, key=key))
        where = next(h.name for h in enc.hosts if h.driver == enc.driver)
        many = f" (of host {where}, the oldest here)" if len({h.driver for h in enc.hosts if h.driver}) > 1 else ""
        enc.add(
            Fact("driver", ("host", DRIVER), enc.driver, text=f"the host's driver is {enc.driver}{many}"),
            (DRIVER, ~driver.mask_of([enc.driver]) & driver.full),
            activates=DRIVER,
        )
    for sm in enc.sms:
        name = sm_name(sm)
        enc.domains[name] = Domain(name, ["present"])
        enc.add(
            Fact("gpu", ("host", name), sm, text=f"the host has {gpu_words(enc, sm)}"),
            (name, ABSENT),
            activates=name,
        )
    _driver_rows(enc)


def _driver_rows(enc: Encoding) -> None:
    """Family floors of the variants, and the driver branches that know each GPU generation."""
    if not enc.driver:
        return
    driver, variants = enc.domains[DRIVER], enc.domains[VARIANT]
    eligible = enc.options.forward and forward_eligible(enc)
    for name in variants.values:
        cuda = variant_cuda(name)
        if cuda is None:
            continue
        major = key(cuda)[0]
        floor = family_floor(enc.matrix, major)
        if floor is None:
            continue
        low = below(driver, floor)
        if eligible:
            row = next((f for f in enc.matrix.forward if f.cuda == cuda), None)
            if row:
                low &= ~driver.mask_of([v for v in driver.values if key(v)[0] in row.branches])
        source = next(f.source.text for f in enc.matrix.families if f.major == major)
        text = f"CUDA {major} builds (such as {name}, CUDA {cuda}) need driver >={floor}"
        enc.add(
            Fact("floor", ("floor", major), name, text=text, source=source, data=floor),
            (DRIVER, low),
            (VARIANT, variants.mask_of([name])),
        )
    for sm in enc.sms:
        arch = next((a for a in enc.matrix.architectures if sm in a.sm), None)
        if arch is None:
            continue
        words = gpu_words(enc, sm)
        last = arch.last_branch
        if last is not None:
            text = f"the last driver branch for {words} is {last}"
            _generation_row(enc, sm, text, arch.source.text, _outside(above=last), newest=True)
        first = next((t.branch for t in reversed(enc.matrix.toolkits) if t.cuda == arch.first_cuda), None)
        if first is not None:
            text = f"the first driver branch for {words} is {first}"
            _generation_row(enc, sm, text, arch.source.text, _outside(below=first))


def _outside(above: int = 10_000, below: int = 0) -> Callable[[str], bool]:
    return lambda driver: key(driver)[0] > above or key(driver)[0] < below


def _older(than: str) -> Callable[[str], bool]:
    return lambda driver: key(driver) < key(than)


def _generation_row(
    enc: Encoding, sm: str, text: str, source: str, bad: Callable[[str], bool], newest: bool = False
) -> None:
    """A driver branch that does not know a GPU, judged by the driver of the hosts that have it."""
    own = enc.drivers_of(sm)
    terms = enc.driver_term(sm, bad)
    if newest and own and own[1] != enc.driver:
        terms = () if bad(own[1]) else None
    if terms is None:
        return
    if not terms and own:
        text += f", and the driver of a host that has it is {own[1 if newest else 0]}"
    enc.add(Fact("generation", ("generation", sm), sm, text=text, source=source), (sm_name(sm), PRESENT), *terms)


def forward_eligible(enc: Encoding) -> bool:
    """Every GPU of every host is named and may use cuda-compat."""
    from envforge.matrix.gpus import find_gpu

    gpus = [g for h in enc.hosts for g in h.gpus]
    rows = [find_gpu(enc.matrix, g.name) if g.name else None for g in gpus]
    return bool(rows) and all(row is not None and row.forward for row in rows)


# --- torch builds, native libraries, rules -----------------------------------------------------------------------


def _torch_rows(enc: Encoding) -> None:
    """Which variants a torch minor was built for, and which GPUs each build has code for."""
    torch = enc.domains.get("torch")
    if torch is None:
        return
    variants = enc.domains[VARIANT]
    minors: dict[str, int] = {}
    for i, version in enumerate(torch.values):
        minors[minor_of(version)] = minors.get(minor_of(version), 0) | (2 << i)
    builds: dict[tuple[str, str], TorchBuild] = {
        (b.torch, b.variant): b for b in enc.matrix.torch_builds if b.arch == enc.arch
    }
    for minor, versions in minors.items():
        have = variants.mask_of(v for v in variants.values if (minor, v) in builds)
        source = next((b.source.text for (m, _), b in builds.items() if m == minor), "torch builds of the matrix")
        fact = Fact("builds", ("builds", "torch"), "torch", VARIANT, source=source)
        enc.add(fact, ("torch", versions), (VARIANT, variants.all_mask & ~have))
    _companion_rows(enc, builds)
    for sm in enc.sms:
        _code_rows(enc, sm, minors, builds)
    if enc.options.builds is not None:
        for name in TORCH_FAMILY:
            if name in enc.domains:
                _availability_rows(enc, name, enc.options.builds, minors)


def _companion_rows(enc: Encoding, builds: dict[tuple[str, str], TorchBuild]) -> None:
    """torchvision and torchaudio are built beside one torch release, for the variants of that release and no others."""
    variants = enc.domains[VARIANT]
    for name in TORCH_FAMILY[1:]:
        if name not in enc.domains:
            continue
        groups: dict[str, int] = {}
        for i, release in enumerate(enc.releases[name]):
            minor = built_with(release, enc.releases["torch"])
            if minor is not None:
                groups[minor] = groups.get(minor, 0) | (2 << i)
        for minor, versions in groups.items():
            have = variants.mask_of(v for v in variants.values if (minor, v) in builds)
            if not have:
                continue
            source = f"{name} Requires-Dist and upload dates; builds of torch {minor}"
            fact = Fact("builds", ("builds", name), name, VARIANT, source=source, data=minor)
            enc.add(fact, (name, versions), (VARIANT, variants.all_mask & ~have))


def built_with(companion: Release, torch: Sequence[Release]) -> str | None:
    """The minor of the torch release that a companion was built with: its exact pin, or, where it declares a range or
    nothing, the newest torch that was there on its day (they are released together)."""
    for line in companion.requires:
        dependency = parse_line(line)
        if dependency and dependency.name == "torch" and dependency.extra is None:
            specifier = dependency.specifier
            if specifier.startswith("==") and "*" not in specifier and "," not in specifier:
                return minor_of(specifier.removeprefix("===").removeprefix("==").strip())
    there = [release for release in torch if release.uploaded[:10] <= companion.uploaded[:10]]
    return minor_of(max(there, key=lambda release: release.uploaded).version) if there else None


def _code_rows(enc: Encoding, sm: str, minors: dict[str, int], builds: dict[tuple[str, str], TorchBuild]) -> None:
    variants = enc.domains[VARIANT]
    for name in variants.values:
        none, jit_only, source = 0, 0, ""
        cuda = variant_cuda(name)
        for minor, versions in minors.items():
            build = builds.get((minor, name))
            if build is None or cuda is None:
                continue
            how = covers(build.sm, build.ptx, sm, jit=True)
            if how is None:
                none |= versions
                source = build.source.text
            elif how == "ptx":
                jit_only |= versions
                source = source or build.source.text
        only = variants.mask_of([name])
        fact = Fact("code", ("code", "torch", sm), "torch", name, source=source, data=sm)
        enc.add(fact, ("torch", none), (VARIANT, only), (sm_name(sm), PRESENT))
        native = shipped_driver(enc.matrix, cuda) if cuda else None
        if jit_only and native and enc.driver:
            text = f"{name} has only PTX for it, which a driver below {native} cannot compile"
            fact = Fact("code", ("code", "torch", sm), "torch", name, source=source, data=sm, text=text)
            terms = enc.driver_term(sm, _older(native))
            if terms is not None:
                enc.add(fact, ("torch", jit_only), (VARIANT, only), (sm_name(sm), PRESENT), *terms)


def _availability_rows(enc: Encoding, name: str, builds: Builds, minors: dict[str, int]) -> None:
    """Forbid the versions, variants and pythons of one package that cannot be had."""
    domain, variants, python = enc.domains[name], enc.domains[VARIANT], enc.domains[PYTHON]
    fact = Fact("unavailable", ("unavailable", name), name, text=builds.text, source="recorded availability")
    default_of = dict(builds.defaults)
    have: dict[tuple[str, str], int] = {}
    for package, version, variant, pythons in builds.wheels:
        if package == name:
            mask = python.mask_of([p for p in enc.pythons if p in pythons]) if pythons else python.all_mask
            have[version, variant] = have.get((version, variant), 0) | mask
    for i, version in enumerate(domain.values):
        unsaid = have.get((version, ""), 0)
        for variant in variants.values:
            term = (VARIANT, variants.mask_of([variant]))
            exact = have.get((version, variant), 0)
            never = python.all_mask & ~(exact | unsaid)
            enc.add(fact, (name, 2 << i), term, (PYTHON, never))
            other = 0  # torch releases beside which the unsaid wheel would be of another variant
            for minor, versions in minors.items():
                if default_of.get(minor) != variant:
                    other |= versions
            if unsaid & ~exact:
                enc.add(fact, (name, 2 << i), term, (PYTHON, unsaid & ~exact), ("torch", other))


def _native_rows(enc: Encoding) -> None:
    """Packages with CUDA libraries of their own: they restrict the variant, and the GPUs."""
    groups: dict[str, list[NativeLib]] = {}
    for row in enc.matrix.native:
        if row.package in enc.domains:
            groups.setdefault(row.package, []).append(row)
    variants = enc.domains[VARIANT]
    for name, rows in groups.items():
        domain = enc.domains[name]
        masks = [(row, domain.mask(row.versions, prereleases=True)) for row in rows]
        for variant in variants.values:
            cuda = variant_cuda(variant)
            only = variants.mask_of([variant])
            if cuda is None:
                kernels = 0
                for row, versions in masks:
                    kernels |= versions if row.source_only and row.sm else 0
                text = f"{name} is GPU code and cannot be built beside a CPU torch"
                fact = Fact("native", ("gpu-only", name), name, variant, text=text, source=rows[0].source.text)
                enc.add(fact, (name, kernels), (VARIANT, only))
                continue
            known, fits = 0, 0
            code: dict[str, int] = {}
            unlisted = 0
            for row, versions in masks:
                known |= versions
                if not _cuda_fits(row, cuda):
                    continue
                fits |= versions
                if not row.sm:
                    unlisted |= versions
                for sm in enc.sms:
                    if row.sm and covers(row.sm, row.ptx, sm, jit=False):
                        code[sm] = code.get(sm, 0) | versions
            source = rows[0].source.text
            fact = Fact("native", ("native", name), name, variant, source=source)
            enc.add(fact, (name, known & ~fits), (VARIANT, only))
            for sm in enc.sms:
                bad = fits & ~unlisted & ~code.get(sm, 0)
                fact = Fact("code", ("code", name, sm), name, variant, source=source, data=sm)
                enc.add(fact, (name, bad), (VARIANT, only), (sm_name(sm), PRESENT))


def _cuda_fits(row: NativeLib, cuda: str) -> bool:
    if row.match == "any" or not row.cuda:
        return True
    if row.match == "exact":
        return cuda in row.cuda
    return any(key(have)[0] == key(cuda)[0] for have in row.cuda)


def _request_rows(enc: Encoding) -> None:
    for index, request in enumerate(enc.requests):
        domain = enc.domains.get(request.name)
        if domain is None:
            continue
        mask = domain.mask(request.specifier, prereleases=bool(request.pinned))
        fact = Fact("request", ("request", index), request.name, text=request.text, data=request, source=request.origin)
        pythons = python_mask(enc, request.marker) if request.marker else enc.domains[PYTHON].all_mask
        guard = () if pythons == enc.domains[PYTHON].all_mask else ((PYTHON, pythons),)
        enc.add(fact, *guard, (request.name, domain.full & ~mask), activates=request.name)
        for extra in request.extras:
            variable = f"{request.name}[{extra}]"
            if variable in enc.domains:
                enc.add(fact, *guard, (variable, domain.full & ~mask), activates=variable)
        if request.local and request.name in TORCH_FAMILY:
            variants = enc.domains[VARIANT]
            wanted = variants.mask_of(v for v in variants.values if v == request.local)
            enc.add(fact, *guard, (VARIANT, variants.full & ~wanted), activates=VARIANT)
