"""What packages say of themselves -> incompatibilities: dependencies, pythons, wheels, and caps that trainers inherit.

These rows depend on no host but for its architecture, so they are made once per package and kept: a conflict's fixes
and the plans of a fleet solve the same packages many times.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from envforge.matrix.releases import Release
from envforge.resolver.encoding import GLIBC, PYTHON, VARIANT, Encoding, below, python_mask
from envforge.resolver.facts import Fact
from envforge.resolver.metadata import Dependency, parse_line, wheel_fits
from envforge.resolver.pieces import Key, Piece, Store, read_piece
from envforge.resolver.versions import Domain

if TYPE_CHECKING:
    from envforge.matrix.model import Matrix

_T = TypeVar("_T", bound=Hashable)

Loader: TypeAlias = Callable[[str], tuple[Release, ...]]
MAX_PIECES = 4_000


class Shelf:
    """What was made of one matrix and one way to load releases, kept between solves; with a store also between runs."""

    def __init__(self, matrix: Matrix, load: Loader) -> None:
        self.matrix, self.load = matrix, load
        self.store: Store | None = None
        self.pieces: dict[Key, Piece] = {}
        self.kept: dict[Key, tuple[tuple[Release, ...], Domain | None]] = {}
        self.variables: dict[Key, Domain] = {}


_SHELVES: list[Shelf] = []


def shelf(matrix: Matrix, load: Loader) -> Shelf:
    """The shelf of this matrix and way to load; one that grew too large is left for a new one."""
    old = next((one for one in _SHELVES if one.matrix is matrix and one.load == load), None)
    if old is not None and len(old.pieces) < MAX_PIECES:
        return old
    new = Shelf(matrix, load)
    new.store = old.store if old else None
    _SHELVES.insert(0, new)
    del _SHELVES[2:]
    return new


def packages(enc: Encoding, load: Loader) -> None:
    """Everything that the request can reach, breadth first, with its dependency, python and wheel rows."""
    work = _Work(enc, shelf(enc.matrix, load))
    queue: list[tuple[str, str | None]] = []
    for request in enc.requests:
        if work.domain(request.name) is None:
            enc.outside.append(request)
            continue
        queue.append((request.name, None))
        queue += [(request.name, extra) for extra in request.extras]
    for rule in enc.matrix.rules:
        # A package that some rule needs to be there is part of the game as soon as the rule's own packages are.
        if rule.requires and any(name in enc.domains for name in rule.when):
            queue += [(name, None) for name in rule.requires if work.domain(name) is not None]
    seen: set[tuple[str, str | None]] = set()
    while queue:
        name, extra = queue.pop(0)
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        for target, extras in work.take(name, extra):
            queue.append((target, None))
            queue += [(target, e) for e in extras]
        if extra is None:
            for rule in enc.matrix.rules:
                if rule.requires and name in rule.when:
                    queue += [(n, None) for n in rule.requires if work.domain(n) is not None]


class _Work:
    """One encoding on its way."""

    def __init__(self, enc: Encoding, shelf: Shelf) -> None:
        self.enc, self.shelf = enc, shelf
        self.asked: dict[str, tuple[frozenset[str], bool]] = {}
        for request in enc.requests:
            pins, pre = self.asked.get(request.name, (frozenset(), False))
            pins |= {request.pinned} if request.pinned else frozenset()
            self.asked[request.name] = (pins, pre or _asks_pre(request.specifier))
        plain = {name: self.keep(name, frozenset(), False)[1] for name in self.asked}
        # Only a pin of a yanked or early release changes what a package's domain holds, so only that parts the shelf.
        special = tuple(
            sorted(
                (name, tuple(sorted(pins)), pre)
                for name, (pins, pre) in self.asked.items()
                if pre or not pins <= (set(d.values) if (d := plain[name]) else set())
            )
        )
        options = enc.options
        self.key: Key = (special, enc.pythons, enc.arch, enc.left_out, options.allow_uncapped, options.no_compile)

    def keep(self, name: str, pins: frozenset[str], pre: bool) -> tuple[tuple[Release, ...], Domain | None]:
        """Final, not yanked releases, and whatever the request pins by name."""
        at = (name, pins, pre)
        known = self.shelf.kept.get(at)
        if known is not None:
            return known
        rows = self.shelf.load(name)
        kept = tuple(
            row for row in rows if row.version in pins or (not row.yanked and (pre or not _is_pre(row.version)))
        )
        plain = self.shelf.kept.get((name, frozenset(), False))
        if plain is not None and plain[0] == kept:
            found = plain
        else:
            found = (kept, Domain(name, [row.version for row in kept]) if kept else None)
        self.shelf.kept[at] = found
        return found

    def domain(self, name: str) -> Domain | None:
        """The package's domain; None where the matrix has no release of it."""
        known = self.enc.domains.get(name)
        if known is not None:
            return known
        pins, pre = self.asked.get(name, (frozenset(), False))
        releases, domain = self.keep(name, pins, pre)
        if domain is not None:
            self.enc.releases[name] = releases
            self.enc.domains[name] = domain
        return domain

    def variable(self, name: str, base: str) -> Domain:
        """The domain of "name[extra]"."""
        values = self.enc.domains[base].values
        at = (name, len(values), values[0], values[-1])
        known = self.shelf.variables.get(at)
        if known is None or known.values != values:
            known = self.shelf.variables[at] = Domain(name, values)
        self.enc.domains[name] = known
        self.enc.extras[name] = base
        return known

    def take(self, name: str, extra: str | None) -> list[tuple[str, tuple[str, ...]]]:
        """Put the rows of a package (or an extra) into the encoding; -> what it reaches."""
        enc = self.enc
        pinned = tuple(sorted(r.pinned for r in enc.requests if r.name == name and r.pinned))
        at = (name, extra, *self.key, pinned if _is_trainer(enc, name) else ())
        piece = self.shelf.pieces.get(at) or self.stored(at)
        if piece is None:
            piece = self.shelf.pieces[at] = self.make(name, extra, pinned)
            if self.shelf.store is not None:
                self.shelf.store.write(at, piece.dumps())
        else:
            for target in piece.touched:
                self.domain(target)
            for variable, base in piece.extras.items():
                if variable not in enc.domains:
                    self.variable(variable, base)
        enc.rows += piece.rows
        if enc.glibc:
            for (floor, pythons), versions in piece.floors.items():
                _glibc_row(enc, name, floor, pythons, versions)
        return piece.reached

    def stored(self, at: Key) -> Piece | None:
        """A piece that an earlier run made; what cannot be read is made again."""
        text = self.shelf.store.read(at) if self.shelf.store is not None else None
        if text is None:
            return None
        try:
            piece = self.shelf.pieces[at] = read_piece(text)
        except (ValueError, KeyError, TypeError, IndexError):
            return None
        return piece

    def make(self, name: str, extra: str | None, pinned: tuple[str, ...]) -> Piece:
        """The rows of one package (or of one of its extras)."""
        enc, piece = self.enc, Piece()
        releases, domain = enc.releases[name], enc.domains[name]
        variable = name
        if extra is not None:
            variable = f"{name}[{extra}]"
            self.variable(variable, name)
            piece.extras[variable] = name
            for bit in range(1, len(domain.values) + 1):
                one = 1 << bit
                fact = Fact("dependency", ("dep", variable, name), variable, name)
                piece.add(fact, (variable, one), (name, domain.full & ~one), activates=name)
        lines: dict[str, int] = {}
        for requires, versions in _alike(release.requires for release in releases):
            for line in requires:
                lines[line] = lines.get(line, 0) | versions
        merged: dict[tuple[str, int, int], int] = {}  # (dependency, allowed, pythons) -> versions of this package
        reached: dict[str, set[str]] = {}
        offered: list[tuple[str, int, int]] = []  # (dependency, allowed, versions) of any extra
        for line, versions in lines.items():
            dependency = parse_line(line)
            if dependency is None or dependency.url:
                continue
            if dependency.extra != extra:
                if extra is None and pinned and (target := self.domain(dependency.name)) is not None:
                    piece.touched[dependency.name] = None
                    offered.append((dependency.name, target.mask(dependency.specifier), versions))
                continue
            pythons = python_mask(enc, dependency.marker, extra)
            if not pythons:
                continue
            for target_name, allowed, target_extras in self.edges(piece, dependency):
                edge = (target_name, allowed, pythons)
                merged[edge] = merged.get(edge, 0) | versions
                reached.setdefault(enc.extras.get(target_name, target_name).split("[")[0], set()).update(target_extras)
        for (target_name, allowed, pythons), versions in merged.items():
            fact = Fact("dependency", ("dep", variable, target_name), variable, target_name)
            _dependency_row(enc, piece, _sourced(fact, name), versions, allowed, pythons)
        if extra is None and _is_trainer(enc, name):
            if pinned:
                _implied(enc, piece, name, pinned, merged, offered)
            elif not enc.options.allow_uncapped:
                _inherited(enc, piece, name, merged)
        if extra is None:
            _python_rows(enc, piece, name)
            _wheel_rows(enc, piece, name)
        piece.reached = [(target_name, tuple(sorted(extras))) for target_name, extras in sorted(reached.items())]
        return piece

    def edges(self, piece: Piece, dependency: Dependency) -> Iterable[tuple[str, int, tuple[str, ...]]]:
        """A dependency line -> (variable, allowed mask, extras): the package itself, and a variable for each extra."""
        domain = self.domain(dependency.name)
        if domain is None:
            return  # not a matrix package: left to the closure
        piece.touched[dependency.name] = None
        allowed = domain.mask(dependency.specifier)
        yield dependency.name, allowed, dependency.extras
        for extra in dependency.extras:
            variable = f"{dependency.name}[{extra}]"
            if variable not in self.enc.domains:
                self.variable(variable, dependency.name)
            piece.extras[variable] = dependency.name
            yield variable, allowed, dependency.extras


def _alike(values: Iterable[_T]) -> Iterable[tuple[_T, int]]:
    """Each value with the mask of the releases that have it, in the order in which they first do.

    Neighbours mostly need the same and come in the same wheels: looked at once instead of once a release.
    """
    found: dict[_T, int] = {}
    for i, value in enumerate(values):
        found[value] = found.get(value, 0) | (2 << i)
    return found.items()


def _is_trainer(enc: Encoding, name: str) -> bool:
    row = enc.matrix.packages.get(name)
    return row is not None and row.role == "trainer"


def _sourced(fact: Fact, name: str) -> Fact:
    return Fact(fact.kind, fact.key, fact.a, fact.b, source=f"{name} Requires-Dist")


def _is_pre(version: str) -> bool:
    return any(c.isalpha() for c in version.split("+")[0].replace("post", "").replace(".post", ""))


def _asks_pre(specifier: str) -> bool:
    return any(_is_pre(part.strip(" <>=!~")) for part in specifier.split(",") if part.strip())


def _dependency_row(enc: Encoding, piece: Piece, fact: Fact, versions: int, allowed: int, pythons: int) -> None:
    variable, target = fact.a, fact.b
    if target in enc.left_out:
        return
    terms = [(variable, versions), (target, enc.domains[target].full & ~allowed)]
    if pythons != enc.domains[PYTHON].all_mask:
        terms.append((PYTHON, pythons))
    if variable == "torch" and target == "triton":
        # The index's metadata belongs to the CUDA build; the CPU build of the same release does not ask for Triton.
        variants = enc.domains[VARIANT]
        terms.append((VARIANT, variants.all_mask & ~variants.mask_of(["cpu"])))
    piece.add(fact, *terms, activates=target)


def _inherited(enc: Encoding, piece: Piece, name: str, merged: dict[tuple[str, int, int], int]) -> None:
    """Older releases of a trainer inherit the upper bounds, and the dependencies that they do not declare, of the
    newest one: else a request beyond today's caps would silently land on a release that has no cap yet."""
    domain = enc.domains[name]
    newest = 1 << len(domain.values)
    older = domain.all_mask & ~newest
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
        fact = Fact(
            "inherited",
            ("inherited", name, target),
            name,
            target,
            data=(version, allowed),
            source=f"{name}=={version} Requires-Dist",
        )
        if capped != full and declaring & older:
            _dependency_row(enc, piece, fact, declaring & older, capped, pythons)
        if older & ~declaring:
            _dependency_row(enc, piece, fact, older & ~declaring, allowed, pythons)


def _implied(
    enc: Encoding,
    piece: Piece,
    name: str,
    pinned: tuple[str, ...],
    merged: dict[tuple[str, int, int], int],
    offered: list[tuple[str, int, int]],
) -> None:
    """A pinned trainer that leaves its stack to extras still imports it: what the newest release declares and the
    pinned one lists under some extra must be there, in the range of those extras; torch in any case."""
    domain = enc.domains[name]
    newest = 1 << len(domain.values)
    mine = domain.mask_of([v for v in pinned if v in domain.values])
    if not mine or mine == newest:
        return
    for target in sorted({t for (t, _, _), versions in merged.items() if versions & newest and "[" not in t}):
        if any(t == target and versions & mine for (t, _, _), versions in merged.items()):
            continue
        ranges = [allowed for t, allowed, versions in offered if t == target and versions & mine]
        full = enc.domains[target].all_mask
        union = 0
        for allowed in ranges:
            union |= allowed
        row = enc.matrix.packages.get(target)
        role = row.role if row else "library"
        if role == "torch":
            union = union or full
        elif not union or (role != "framework" and union != full):
            continue
        fact = Fact(
            "dependency",
            ("implied", name, target),
            name,
            target,
            source=f"{name} Requires-Dist (extras of that release; every later release declares it)",
        )
        _dependency_row(enc, piece, fact, mine, union, enc.domains[PYTHON].all_mask)


# --- pythons and wheels --------------------------------------------------------------------------------------------


def _python_rows(enc: Encoding, piece: Piece, name: str) -> None:
    groups: dict[str, int] = {}
    for i, release in enumerate(enc.releases[name]):
        if release.python:
            groups[release.python] = groups.get(release.python, 0) | (2 << i)
    python = enc.domains[PYTHON]
    for specifier, versions in groups.items():
        allowed = python.mask_of(p for p in enc.pythons if python_allowed(p, specifier))
        fact = Fact("requires-python", ("requires-python", name), name, PYTHON, source=f"{name} Requires-Python")
        piece.add(fact, (name, versions), (PYTHON, python.all_mask & ~allowed))


def python_allowed(python: str, specifier: str) -> bool:
    """Some patch release of this minor is allowed. The last patch decides `<`/`<=` bounds as installers would."""
    domain = _python_domain()
    return bool(domain.mask(specifier) >> domain.bit(f"{python}.99") & 1)


_PYTHONS: list[Domain] = []


def _python_domain() -> Domain:
    if not _PYTHONS:
        _PYTHONS.append(Domain("python-patch", [f"3.{minor}.99" for minor in range(6, 20)]))
    return _PYTHONS[0]


def _wheel_rows(enc: Encoding, piece: Piece, name: str) -> None:
    """Releases whose wheels do not fit a python, the architecture or the host's glibc, and cannot be built instead."""
    row = enc.matrix.packages.get(name)
    buildable = row is not None and row.sources_ok
    none_for: dict[int, int] = {}  # pythons without a wheel -> versions
    archives, barred, foreign = 0, 0, 0  # versions: no wheel at all; the same, but buildable; wheels for others only
    python = enc.domains[PYTHON]
    for (wheels, sdist), versions in _alike((release.wheels, release.sdist) for release in enc.releases[name]):
        if not wheels:
            if not sdist:
                continue
            if not buildable:
                archives |= versions
            elif enc.options.no_compile:
                barred |= versions
            continue
        best: dict[str, tuple[int, int]] = {}
        for tag in wheels:
            glibc, fits = wheel_fits(tag, enc.pythons, enc.arch)
            if glibc is None:
                continue
            for minor, ok in zip(enc.pythons, fits, strict=True):
                if ok and (minor not in best or glibc < best[minor]):
                    best[minor] = glibc
        missing = python.mask_of(p for p in enc.pythons if p not in best)
        if missing == python.all_mask:
            foreign |= versions
            continue
        none_for[missing] = none_for.get(missing, 0) | versions
        by_floor: dict[tuple[int, int], list[str]] = {}
        for minor, floor in best.items():
            by_floor.setdefault(floor, []).append(minor)
        for floor, minors in by_floor.items():
            edge = (f"{floor[0]}.{floor[1]}", python.mask_of(minors))
            piece.floors[edge] = piece.floors.get(edge, 0) | versions
    files = f"{name} file list"
    for missing, versions in none_for.items():
        piece.add(Fact("wheels", ("wheels", name), name, PYTHON, source=files), (name, versions), (PYTHON, missing))
    text = "comes as a source archive only"
    piece.add(Fact("archive", ("archive", name), name, text=text, source=files), (name, archives))
    text += ", and --no-compile forbids building it"
    piece.add(Fact("archive", ("no-compile", name), name, "no-compile", text=text, source=files), (name, barred))
    text = f"has no wheel for {enc.arch} and the pythons of the matrix"
    piece.add(Fact("archive", ("foreign", name), name, text=text, source=files), (name, foreign))


def _glibc_row(enc: Encoding, name: str, floor: str, pythons: int, versions: int) -> None:
    fact = Fact(
        "wheels",
        ("wheels-glibc", name),
        name,
        GLIBC,
        data=floor,
        source=f"{name} file list",
        text=f"the wheels need glibc >={floor} (manylinux_{floor.replace('.', '_')})",
    )
    enc.add(fact, (name, versions), (PYTHON, pythons), (GLIBC, below(enc.domains[GLIBC], floor)))
