"""The problem in the making: its variables, what a request may ask of it, and the `Encoding` that rows go into."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from envforge.matrix.releases import Release
from envforge.resolver.facts import Fact
from envforge.resolver.hosts import Host, key
from envforge.resolver.metadata import marker_pythons
from envforge.resolver.request import Request
from envforge.resolver.solve import Row
from envforge.resolver.versions import Domain

if TYPE_CHECKING:
    from envforge.matrix.model import Matrix

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

    @property
    def left_out(self) -> tuple[str, ...]:
        """Companions of torch that a CPU plan goes without: nobody asked for them by name, and no CPU build of them can
        be had. The CUDA build of torchvision fails at import beside a CPU torch; being absent does less harm."""
        builds = self.options.builds
        if not self.cpu or builds is None:
            return ()
        asked = {request.name for request in self.requests}
        have = {package for package, _, variant, _ in builds.wheels if variant == "cpu"}
        return tuple(name for name in TORCH_FAMILY[1:] if name not in asked and name not in have)

    def drivers_of(self, sm: str) -> tuple[str, str] | None:
        """The oldest and newest driver among the hosts that have GPUs of this capability."""
        found = sorted((h.driver for h in self.hosts if h.driver and any(g.sm == sm for g in h.gpus)), key=key)
        return (found[0], found[-1]) if found else None

    def driver_term(self, sm: str, bad: Callable[[str], bool]) -> tuple[tuple[str, int], ...] | None:
        """The term that says "the driver beside this GPU is `bad`": on the fleet's driver where that host has the
        oldest one; else its driver is known, and the answer is no term (it is bad anyway) or None (it is not)."""
        own = self.drivers_of(sm)
        if own is None or DRIVER not in self.domains:
            return None
        if own[0] == self.driver:
            domain = self.domains[DRIVER]
            mask = domain.mask_of([v for v in domain.values if bad(v)])
            return ((DRIVER, mask),) if mask else None
        return () if bad(own[0]) else None

    def add(self, fact: Fact, *terms: tuple[str, int], activates: str | None = None) -> None:
        """Forbid a combination; a term with an empty mask can never hold, so the row says nothing."""
        if all(mask for _, mask in terms):
            self.rows.append(Row(tuple(terms), fact, activates))

    def release(self, name: str, position: int) -> Release:
        """The release behind a position of the package's domain."""
        return self.releases[name][position - 1]


def gpu_words(enc: Encoding, sm: str) -> str:
    """ "a Tesla V100 (sm_70, compute capability 7.0, Volta)"."""
    names = sorted({g.name for h in enc.hosts for g in h.gpus if g.sm == sm and g.name})
    generation = next((a.name for a in enc.matrix.architectures if sm in a.sm), None)
    code = f"sm_{sm.replace('.', '')}, compute capability {sm}" + (f", {generation}" if generation else "")
    return f"{' and '.join(names)} ({code})" if names else f"a GPU of {code}"


def variant_key(name: str) -> tuple[int, ...]:
    """Sorts variants by CUDA version, cpu first."""
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


def minor_of(version: str) -> str:
    """ "2.6.0" -> "2.6"."""
    return ".".join(version.split("+")[0].split(".")[:2])


def python_mask(enc: Encoding, marker: str | None, extra: str | None = None) -> int:
    """The pythons for which a marker holds."""
    holds = marker_pythons(marker, enc.pythons, enc.arch, extra or "")
    return sum(2 << i for i, ok in enumerate(holds) if ok)
