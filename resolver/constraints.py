"""Matrix rows, host facts and requests -> incompatibilities, each keeping the fact it came from.

One game for everything: packages, `python`, `torch-variant` and the host's own facts (`host:driver`, `host:glibc`,
`host:sm_86`) are variables with finite domains; each row forbids one combination of values. Rows are made for what
the request can reach and for nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from envforge.errors import UsageError
from envforge.matrix.releases import Release, load_releases
from envforge.resolver.facts import Fact
from envforge.resolver.hosts import Host, covers, family_floor, key, shipped_driver
from envforge.resolver.metadata import Dependency, marker_pythons, parse_line, wheel_fits
from envforge.resolver.request import Request
from envforge.resolver.solve import Row
from envforge.resolver.versions import ABSENT, Domain

if TYPE_CHECKING:
    from envforge.matrix.model import Matrix, NativeLib, Rule, TorchBuild

PYTHON = "python"
VARIANT = "torch-variant"
DRIVER = "host:driver"
GLIBC = "host:glibc"
TORCH_FAMILY = ("torch", "torchvision", "torchaudio")
PRESENT = 2  # the mask of the one value that host:sm_XY has beside ABSENT


def sm_name(sm: str) -> str:
    """ "8.6" -> "host:sm_86"."""
    return f"host:sm_{sm.replace('.', '')}"


@dataclass(frozen=True)
class Builds:
    """The torch wheels that can be had from here, as recorded facts.

    wheels: (package, version, variant, pythons; empty = one wheel for all). A variant of "" is a wheel that does not
    say: it belongs to the `defaults` variant of the torch minor beside it.
    """

    wheels: tuple[tuple[str, str, str, tuple[str, ...]], ...]
    defaults: tuple[tuple[str, str], ...] = ()
    text: str = "only some builds of torch can be had from here"


@dataclass(frozen=True)
class Learned:
    """Pins whose closure has no solution on this Python and variant, and the words of who tried."""

    pins: tuple[tuple[str, str], ...]
    python: str
    variant: str
    text: str


@dataclass(frozen=True)
class Options:
    """How a request may be met. `variant`: auto, cpu or cuXYZ. `pythons`: allowed minors, in order of preference;
    empty = the matrix's own. `forward`: the cuda-compat tier is in the game. `builds`: what can be had of torch and its
    companions, None = everything. `learned`: pin sets that a closure refused."""

    variant: str = "auto"
    pythons: tuple[str, ...] = ()
    forward: bool = False
    allow_uncapped: bool = False
    no_compile: bool = False
    builds: Builds | None = None
    learned: tuple[Learned, ...] = ()
    banned: tuple[tuple[str, str], ...] = ()  # (package, specifier) that a site forbids
    keep: tuple[tuple[str, str], ...] = ()  # (name, value) of an earlier plan that is tried first: change least
    limits: tuple[Request, ...] = ()  # constraint lines: they hold where the package is there, and pull nothing in


@dataclass
class Encoding:
    """The problem in the making: domains, rows and what else the answer needs to be told."""

    matrix: Matrix
    requests: tuple[Request, ...]
    hosts: tuple[Host, ...]
    options: Options
    arch: str
    pythons: tuple[str, ...]
    domains: dict[str, Domain] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    releases: dict[str, tuple[Release, ...]] = field(default_factory=dict)
    outside: list[Request] = field(default_factory=list)  # requested, not in the matrix: they join the closure
    extras: dict[str, str] = field(default_factory=dict)  # "name[extra]" variable -> package
    sms: tuple[str, ...] = ()
    driver: str | None = None  # the lowest of the fleet
    glibc: str | None = None

    @property
    def cpu(self) -> bool:
        """No GPU is wanted."""
        return self.options.variant == "cpu" or not any(host.has_gpu for host in self.hosts)

    def add(self, fact: Fact, *terms: tuple[str, int], activates: str | None = None) -> None:
        """Forbid a combination; a term with an empty mask can never hold, so the row says nothing."""
        if all(mask for _, mask in terms):
            self.rows.append(Row(tuple(terms), fact, activates))

    def release(self, name: str, position: int) -> Release:
        """The release behind a position of the package's domain."""
        return self.releases[name][position - 1]


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
    _packages(enc, load)
    _torch_rows(enc)
    _native_rows(enc)
    _rule_rows(enc)
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

    names = sorted({b.variant for b in matrix.torch_builds}, key=_variant_key)
    variants = enc.domains[VARIANT] = Domain(VARIANT, names)
    if options.variant not in ("auto", *names):
        import difflib

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


def gpu_words(enc: Encoding, sm: str) -> str:
    """ "a Tesla V100 (sm_70, compute capability 7.0, Volta)"."""
    names = sorted({g.name for h in enc.hosts for g in h.gpus if g.sm == sm and g.name})
    generation = next((a.name for a in enc.matrix.architectures if sm in a.sm), None)
    code = f"sm_{sm.replace('.', '')}, compute capability {sm}" + (f", {generation}" if generation else "")
    return f"{' and '.join(names)} ({code})" if names else f"a GPU of {code}"


def _variant_key(name: str) -> tuple[int, ...]:
    return (-1,) if name == "cpu" else variant_cuda_key(name)


def variant_cuda_key(name: str) -> tuple[int, int]:
    """ "cu126" -> (12, 6)."""
    return (int(name[2:-1]), int(name[-1]))


def variant_cuda(name: str) -> str | None:
    """ "cu126" -> "12.6"; None for cpu."""
    return None if name == "cpu" else "{}.{}".format(*variant_cuda_key(name))


def below(domain: Domain, version: str) -> int:
    """Mask of the values of a dotted-number domain that are lower than `version`."""
    return domain.mask_of([v for v in domain.values if key(v) < key(version)])


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
        if arch.last_branch is not None:
            newer = driver.mask_of([v for v in driver.values if key(v)[0] > arch.last_branch])
            text = f"the last driver branch for {words} is {arch.last_branch}"
            enc.add(
                Fact("generation", ("generation", sm), sm, text=text, source=arch.source.text),
                (DRIVER, newer),
                (sm_name(sm), PRESENT),
            )
        first = next((t.branch for t in reversed(enc.matrix.toolkits) if t.cuda == arch.first_cuda), None)
        if first is not None:
            older = driver.mask_of([v for v in driver.values if key(v)[0] < first])
            text = f"the first driver branch for {words} is {first}"
            enc.add(
                Fact("generation", ("generation", sm), sm, text=text, source=arch.source.text),
                (DRIVER, older),
                (sm_name(sm), PRESENT),
            )


def forward_eligible(enc: Encoding) -> bool:
    """Every GPU of every host is named and may use cuda-compat."""
    from envforge.matrix.gpus import find_gpu

    gpus = [g for h in enc.hosts for g in h.gpus]
    rows = [find_gpu(enc.matrix, g.name) if g.name else None for g in gpus]
    return bool(rows) and all(row is not None and row.forward for row in rows)


# --- packages and what their metadata says -----------------------------------------------------------------------


def _packages(enc: Encoding, load: Callable[[str], tuple[Release, ...]]) -> None:
    """Everything that the request can reach, breadth first, with its dependency, python and wheel rows."""
    queue: list[tuple[str, str | None]] = []
    for request in enc.requests:
        if _domain(enc, request.name, load) is None:
            enc.outside.append(request)
            continue
        queue.append((request.name, None))
        queue += [(request.name, extra) for extra in request.extras]
    for rule in enc.matrix.rules:
        # A package that some rule needs to be there is part of the game as soon as the rule's own packages are.
        if rule.requires and any(name in enc.domains for name in rule.when):
            queue += [(name, None) for name in rule.requires if _domain(enc, name, load) is not None]
    seen: set[tuple[str, str | None]] = set()
    while queue:
        name, extra = queue.pop(0)
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        for target, extras in _dependency_rows(enc, name, extra, load):
            queue.append((target, None))
            queue += [(target, e) for e in extras]
        if extra is None:
            _python_rows(enc, name)
            _wheel_rows(enc, name)
            for rule in enc.matrix.rules:
                if rule.requires and name in rule.when:
                    queue += [(n, None) for n in rule.requires if _domain(enc, n, load) is not None]


def _domain(enc: Encoding, name: str, load: Callable[[str], tuple[Release, ...]]) -> Domain | None:
    """The package's domain: final, not yanked releases, and whatever the request pins by name."""
    if name in enc.domains:
        return enc.domains[name]
    rows = load(name)
    if not rows:
        return None
    asked = " ".join(r.specifier for r in enc.requests if r.name == name)
    pinned = {r.pinned for r in enc.requests if r.name == name}
    keep = tuple(
        row
        for row in rows
        if row.version in pinned or (not row.yanked and (not _is_pre(row.version) or _asks_pre(asked)))
    )
    if not keep:
        return None
    enc.releases[name] = keep
    enc.domains[name] = Domain(name, [row.version for row in keep])
    return enc.domains[name]


def _is_pre(version: str) -> bool:
    return any(c.isalpha() for c in version.split("+")[0].replace("post", "").replace(".post", ""))


def _asks_pre(specifier: str) -> bool:
    return any(_is_pre(part.strip(" <>=!~")) for part in specifier.split(",") if part.strip())


def _dependency_rows(
    enc: Encoding, name: str, extra: str | None, load: Callable[[str], tuple[Release, ...]]
) -> list[tuple[str, tuple[str, ...]]]:
    """Rows of one package (or of one of its extras); -> what it reaches."""
    releases, domain = enc.releases[name], enc.domains[name]
    variable = name
    if extra is not None:
        variable = f"{name}[{extra}]"
        enc.domains[variable] = Domain(variable, domain.values)
        enc.extras[variable] = name
        for bit in range(1, len(domain.values) + 1):
            one = 1 << bit
            fact = Fact("dependency", ("dep", variable, name), variable, name)
            enc.add(fact, (variable, one), (name, domain.full & ~one), activates=name)
    lines: dict[str, int] = {}
    for i, release in enumerate(releases):
        for line in release.requires:
            lines[line] = lines.get(line, 0) | (2 << i)
    merged: dict[tuple[str, int, int], int] = {}  # (dependency, allowed, pythons) -> versions of this package
    reached: dict[str, set[str]] = {}
    for line, versions in lines.items():
        dependency = parse_line(line)
        if dependency is None or dependency.url or dependency.extra != extra:
            continue
        pythons = _python_mask(enc, dependency.marker, extra)
        if not pythons:
            continue
        for entry in _edges(enc, dependency, load):
            target, allowed, target_extras = entry
            edge = (target, allowed, pythons)
            merged[edge] = merged.get(edge, 0) | versions
            reached.setdefault(enc.extras.get(target, target).split("[")[0], set()).update(target_extras)
    caps = _inherited(enc, name, merged) if extra is None else []
    for (target, allowed, pythons), versions in merged.items():
        _dependency_row(
            enc,
            Fact("dependency", ("dep", variable, target), variable, target, source=f"{name} Requires-Dist"),
            variable,
            versions,
            target,
            allowed,
            pythons,
        )
    for fact, target, allowed, pythons, versions in caps:
        _dependency_row(enc, fact, variable, versions, target, allowed, pythons)
    return [(target, tuple(sorted(extras))) for target, extras in sorted(reached.items())]


def _edges(
    enc: Encoding, dependency: Dependency, load: Callable[[str], tuple[Release, ...]]
) -> Iterable[tuple[str, int, tuple[str, ...]]]:
    """A dependency line -> (variable, allowed mask, extras): the package itself, and a variable for each extra."""
    domain = _domain(enc, dependency.name, load)
    if domain is None:
        return  # not a matrix package: left to the closure
    allowed = domain.mask(dependency.specifier)
    yield dependency.name, allowed, dependency.extras
    for extra in dependency.extras:
        variable = f"{dependency.name}[{extra}]"
        if variable not in enc.domains:
            enc.domains[variable] = Domain(variable, domain.values)
            enc.extras[variable] = dependency.name
        yield variable, allowed, dependency.extras


def _dependency_row(
    enc: Encoding, fact: Fact, variable: str, versions: int, target: str, allowed: int, pythons: int
) -> None:
    terms = [(variable, versions), (target, enc.domains[target].full & ~allowed)]
    if pythons != enc.domains[PYTHON].all_mask:
        terms.append((PYTHON, pythons))
    if variable == "torch" and target == "triton":
        # The index's metadata belongs to the CUDA build; the CPU build of the same release does not ask for Triton.
        variants = enc.domains[VARIANT]
        terms.append((VARIANT, variants.all_mask & ~variants.mask_of(["cpu"])))
    enc.add(fact, *terms, activates=target)


def _python_mask(enc: Encoding, marker: str | None, extra: str | None = None) -> int:
    holds = marker_pythons(marker, enc.pythons, enc.arch, extra or "")
    return sum(2 << i for i, ok in enumerate(holds) if ok)


def _inherited(
    enc: Encoding, name: str, merged: dict[tuple[str, int, int], int]
) -> list[tuple[Fact, str, int, int, int]]:
    """Older releases of a trainer inherit the upper bounds, and the dependencies that they do not declare, of the
    newest one: else a request beyond today's caps would silently land on a release that has no cap yet."""
    row = enc.matrix.packages.get(name)
    pinned = any(r.name == name and r.pinned for r in enc.requests)
    if row is None or row.role != "trainer" or enc.options.allow_uncapped or pinned:
        return []
    domain = enc.domains[name]
    newest = 1 << len(domain.values)
    older = domain.all_mask & ~newest
    rows = []
    version = domain.values[-1]
    for (target, allowed, pythons), versions in list(merged.items()):
        if not versions & newest or "[" in target:
            continue
        full = enc.domains[target].all_mask
        declaring = 0
        for (other, _, _), mask in merged.items():
            if other == target:
                declaring |= mask
        top = allowed.bit_length()
        capped = full & ((1 << top) - 1) if allowed else 0  # everything up to the newest allowed release
        if capped != full and declaring & older:
            fact = Fact(
                "inherited",
                ("inherited", name, target),
                name,
                target,
                data=version,
                text=f"{name} {version}, the newest, allows {target} {enc.domains[target].describe(allowed)} "
                f"at most, and older releases of {name} are held to that cap",
                source=f"{name}=={version} Requires-Dist",
            )
            rows.append((fact, target, capped, pythons, declaring & older))
        silent = older & ~declaring
        if silent:
            fact = Fact(
                "inherited",
                ("inherited", name, target),
                name,
                target,
                data=version,
                text=f"{name} releases that do not declare {target} are held to what {version} declares: "
                f"{target} {enc.domains[target].describe(allowed)}",
                source=f"{name}=={version} Requires-Dist",
            )
            rows.append((fact, target, allowed, pythons, silent))
    return rows


def _python_rows(enc: Encoding, name: str) -> None:
    groups: dict[str, int] = {}
    for i, release in enumerate(enc.releases[name]):
        if release.python:
            groups[release.python] = groups.get(release.python, 0) | (2 << i)
    python = enc.domains[PYTHON]
    for specifier, versions in groups.items():
        allowed = python.mask_of(p for p in enc.pythons if _python_allowed(p, specifier))
        fact = Fact("requires-python", ("requires-python", name), name, PYTHON, source=f"{name} Requires-Python")
        enc.add(fact, (name, versions), (PYTHON, python.all_mask & ~allowed))


def _python_allowed(python: str, specifier: str) -> bool:
    """Some patch release of this minor is allowed. The last patch decides `<`/`<=` bounds as installers would."""
    domain = _python_domain()
    return bool(domain.mask(specifier) >> domain.bit(f"{python}.99") & 1)


_PYTHONS: list[Domain] = []


def _python_domain() -> Domain:
    if not _PYTHONS:
        _PYTHONS.append(Domain("python-patch", [f"3.{minor}.99" for minor in range(6, 20)]))
    return _PYTHONS[0]


def _wheel_rows(enc: Encoding, name: str) -> None:
    """Releases whose wheels do not fit a python, the architecture or the host's glibc, and cannot be built instead."""
    row = enc.matrix.packages.get(name)
    buildable = row is not None and row.sources_ok and not enc.options.no_compile
    none_for: dict[int, int] = {}  # pythons without a wheel -> versions
    floors: dict[tuple[str, int], int] = {}  # (glibc floor, pythons) -> versions
    python = enc.domains[PYTHON]
    for i, release in enumerate(enc.releases[name]):
        if not release.wheels and not release.sdist:
            continue
        if buildable and not release.wheels:
            continue
        best: dict[str, tuple[int, int]] = {}
        for tag in release.wheels:
            glibc, fits = wheel_fits(tag, enc.pythons, enc.arch)
            if glibc is None:
                continue
            for minor, ok in zip(enc.pythons, fits, strict=True):
                if ok and (minor not in best or glibc < best[minor]):
                    best[minor] = glibc
        if not release.wheels and _pure_sdist(name):
            continue
        missing = python.mask_of(p for p in enc.pythons if p not in best)
        none_for[missing] = none_for.get(missing, 0) | (2 << i)
        if enc.glibc and best:
            by_floor: dict[tuple[int, int], list[str]] = {}
            for minor, floor in best.items():
                by_floor.setdefault(floor, []).append(minor)
            for floor, minors in by_floor.items():
                edge = (f"{floor[0]}.{floor[1]}", python.mask_of(minors))
                floors[edge] = floors.get(edge, 0) | (2 << i)
    for missing, versions in none_for.items():
        fact = Fact("wheels", ("wheels", name), name, PYTHON, source=f"{name} file list")
        enc.add(fact, (name, versions), (PYTHON, missing))
    if enc.glibc:
        glibc_domain = enc.domains[GLIBC]
        for (floor_text, pythons), versions in floors.items():
            fact = Fact(
                "wheels",
                ("wheels-glibc", name),
                name,
                GLIBC,
                data=floor_text,
                source=f"{name} file list",
                text=f"the wheels need glibc >={floor_text} (manylinux_{floor_text.replace('.', '_')})",
            )
            enc.add(fact, (name, versions), (PYTHON, pythons), (GLIBC, below(glibc_domain, floor_text)))


def _pure_sdist(name: str) -> bool:
    """Source archives of packages outside the trainers' native set build anywhere; uv is told so by the lock."""
    return False


# --- torch builds, native libraries, rules -----------------------------------------------------------------------


def minor_of(version: str) -> str:
    """ "2.6.0" -> "2.6"."""
    return ".".join(version.split("+")[0].split(".")[:2])


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
    for sm in enc.sms:
        _code_rows(enc, sm, minors, builds)
    if enc.options.builds is not None:
        for name in TORCH_FAMILY:
            if name in enc.domains:
                _availability_rows(enc, name, enc.options.builds, minors)


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
            low = below(enc.domains[DRIVER], native)
            enc.add(fact, ("torch", jit_only), (VARIANT, only), (sm_name(sm), PRESENT), (DRIVER, low))


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
            if cuda is None:
                continue
            only = variants.mask_of([variant])
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


def _rule_rows(enc: Encoding) -> None:
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
            for need in violated_terms(enc, name, specifier):
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


def violated_terms(enc: Encoding, name: str, specifier: str) -> list[tuple[str, int] | None]:
    """The terms under which a `needs` is broken; an empty list when it cannot be."""
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
        return variable, domain.mask_of(v for v in domain.values if _python_allowed(v, specifier))
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


def _request_rows(enc: Encoding) -> None:
    for index, request in enumerate(enc.requests):
        domain = enc.domains.get(request.name)
        if domain is None:
            continue
        mask = domain.mask(request.specifier, prereleases=bool(request.pinned))
        fact = Fact("request", ("request", index), request.name, text=request.text, data=request, source=request.origin)
        pythons = _python_mask(enc, request.marker) if request.marker else enc.domains[PYTHON].all_mask
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
