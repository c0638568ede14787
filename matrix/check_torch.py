"""Checks of torch's builds, of the packages, and of the native libraries, beside the harvested releases."""

from __future__ import annotations

import itertools
import re
from functools import lru_cache

from envforge.matrix.check import Book, number
from envforge.matrix.meaning import Row
from envforge.matrix.releases import Release

ROLES = ("trainer", "framework", "engine", "torch", "companion", "library")
ARCHES = ("x86_64", "aarch64")
# Modules that are not called like their package.
IMPORTS = {"ms-swift": "swift", "protobuf": "google.protobuf"}


def minor(version: str) -> str:
    """ "2.6.0" -> "2.6"."""
    return ".".join(version.split("+")[0].split(".")[:2])


def final(releases: tuple[Release, ...]) -> tuple[Release, ...]:
    """Releases that a plan may hold: no pre-releases, none yanked."""
    return tuple(r for r in releases if not r.yanked and not re.search(r"(a|b|rc)\d", r.version))


def builds(book: Book) -> None:
    """Every torch release has builds, every variant a driver family, a toolkit and GPU code that its CUDA knows."""
    released = {minor(r.version) for r in final(book.releases("torch"))}
    have: dict[str, list[Row]] = {}
    for row in book.rows["torch"]:
        have.setdefault(row.data["torch"], []).append(row)
    families = {row.data["major"] for row in book.rows["families"]}
    for name in sorted(released - set(have), key=number):
        book.tell_file(
            "torch-build",
            "matrix/data/torch.yaml",
            f"torch {name} is released, but no row says what it was built for",
            "add its rows: variants, CUDA, GPU code per architecture, the default",
        )
    for name, rows in have.items():
        if name not in released:
            book.tell("torch-build", rows[0], f"no torch {name} was released", "correct the minor", "torch")
        for arch in ARCHES:
            of_arch = [row for row in rows if row.data["arch"] == arch]
            if not any(row.data["variant"] == "cpu" for row in of_arch):
                what = f"torch {name} has no cpu build for {arch}"
                book.tell("torch-build", rows[0], what, "add the row", "variant")
            if sum(bool(row.data.get("default")) for row in of_arch) != 1:
                what = f"torch {name} has not exactly one default build for {arch}"
                book.tell("torch-build", (of_arch or rows)[0], what, "mark what a plain install gives", "default")
    for row in book.rows["torch"]:
        cuda = row.data.get("cuda")
        if cuda is None:
            continue
        if not any(r.data["driver"] for r in book.toolkits.get(cuda, [])):
            book.tell("torch-build", row, f"CUDA {cuda} has no toolkit row with a driver", "add it", "cuda")
        if number(cuda)[0] not in families:
            book.tell("torch-build", row, f"CUDA {number(cuda)[0]} has no driver floor in families", "add it", "cuda")
        _code(book, row, [cuda])
    _defaults(book)
    _neighbours(book)


def _code(book: Book, row: Row, cudas: list[str]) -> None:
    """Every capability of a list must be one that each of the toolkits can compile for."""
    for key in ("sm", "ptx"):
        listed = row.data.get(key, "").split()
        if listed != sorted(set(listed), key=number):
            book.tell("gpu-code", row, "capabilities are not in order, or one stands twice", "sort them", key)
        for sm in listed:
            arch = book.sms.get(sm)
            if arch is None:
                book.tell("gpu-code", row, f"no architecture has capability {sm}", "correct it, or add it", key)
                continue
            first, last = arch.data["first_cuda"], arch.data.get("last_cuda")
            for cuda in cudas:
                gone = last is not None and number(cuda)[: last.count(".") + 1 - last.endswith(".x")] > number(
                    last.removesuffix(".x")
                )
                if number(cuda) < number(first) or gone:
                    when = f"from {first} on" if number(cuda) < number(first) else f"up to {last}"
                    what = f"CUDA {cuda} has no code for {sm}, which is known {when}"
                    book.tell("gpu-code", row, what, "correct the list, the CUDA version, or the architecture", key)
    ptx, sm = row.data.get("ptx", "").split(), row.data.get("sm", "").split()
    if ptx and (len(ptx) > 1 or not sm or ptx[0] != sm[-1]):
        book.tell("gpu-code", row, "PTX is embedded for the newest capability of a build", "correct ptx", "ptx")


def _defaults(book: Book) -> None:
    """The default of x86_64 has the CUDA runtime that the wheel on the default index asks for, as a note lists it."""
    note = next((r for r in book.rows["notes"] if r.data["id"] == "torch-default-runtime"), None)
    if note is None:
        return
    listed = dict(re.findall(r"(\d+\.\d+)\.\d+ (\d+\.\d+)\.\d+", note.data["text"]))
    for row in book.rows["torch"]:
        name, cuda = row.data["torch"], row.data.get("cuda")
        if row.data["arch"] == "x86_64" and name in listed and (cuda == listed[name]) != bool(row.data.get("default")):
            what = f"the wheel of torch {name} on the default index asks for CUDA {listed[name]}"
            book.tell("torch-build", row, what, "mark that build as the default", "default")


def _neighbours(book: Book) -> None:
    """The GPU code of a variant stays from one torch minor to the next, and so do variants, unless a note says so."""
    series: dict[tuple[str, str], list[Row]] = {}
    for row in book.rows["torch"]:
        series.setdefault((row.data["variant"], row.data["arch"]), []).append(row)
    minors = sorted({row.data["torch"] for row in book.rows["torch"]}, key=number)
    for (variant, arch), rows in series.items():
        rows.sort(key=lambda row: number(row.data["torch"]))
        for older, newer in itertools.pairwise(rows):
            between = minors[minors.index(older.data["torch"]) + 1 : minors.index(newer.data["torch"])]
            for gap in between:
                what = f"{variant} for {arch} exists before and after torch {gap}, but not for it"
                if not _noted(book, variant, gap):
                    book.tell("torch-build", newer, what, "add the row, or a note that names both", "torch")
            for key, word in (("sm", ""), ("ptx", "PTX")):
                a, b = set(older.data.get(key, "").split()), set(newer.data.get(key, "").split())
                if a != b and not _noted(book, variant, *sorted(a ^ b), *([word] if word else [])):
                    what = (
                        f"GPU code ({key}) of {variant} for {arch} changes from torch {older.data['torch']} to "
                        f"{newer.data['torch']}: {', '.join(sorted(a ^ b, key=number))}"
                    )
                    book.tell("gpu-code", newer, what, "correct it, or add a note that names variant and change", key)


def _noted(book: Book, *words: str) -> bool:
    return any(
        all(re.search(rf"(?<![\d.]){re.escape(word)}(?![\d])", note, re.IGNORECASE) for word in words)
        for note in book.notes
    )


def packages(book: Book) -> None:
    """A package has releases and releases have a package; roles follow the ranks; modules are called as usual."""
    released = set(book.released)
    for name in sorted(released - set(book.packages)):
        book.tell_file(
            "package",
            f"matrix/releases/{name}.json",
            f"{name} has releases but no row in packages",
            "add its row: role, rank, summary",
        )
    last = 0
    for row in sorted(book.packages.values(), key=lambda row: int(row.data["rank"])):
        data = row.data
        if data["name"] not in released or not final(book.releases(data["name"])):
            what = f"{data['name']} has no releases"
            do = f"harvest them: envforge matrix update {data['name']} --write"
            book.tell("package", row, what, do, "name")
        place = ROLES.index(data["role"])
        if place < last:
            what = f"a {data['role']} decides after a {ROLES[last]}"
            book.tell("package", row, what, "ranks follow the roles: correct rank or role", "rank")
        last = max(last, place)
        usual = IMPORTS.get(data["name"], data["name"].replace("-", "_"))
        if data.get("import") is not None and data["import"] != usual and data["import"] != usual.replace("_lite", ""):
            what = f"the module of {data['name']} is {usual}"
            book.tell("package", row, what, "correct it, or add it to the exceptions of the check", "import")
        rows = [r for r in book.rows["native"] if r.data["package"] == data["name"]]
        if bool(data.get("sources_ok")) != any(r.data.get("source_only") for r in rows):
            what = "a source archive may be built where, and only where, native rows say source_only"
            book.tell("package", row, what, "correct one of the two", "sources_ok")


@lru_cache(maxsize=100_000)
def parsed(version: str) -> object:
    """A version, parsed once."""
    from packaging.version import Version

    return Version(version)


@lru_cache(maxsize=20_000)
def specifier(text: str) -> object:
    """A specifier, parsed once."""
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(text, prereleases=True)


_MATCHING: dict[tuple[int, str], tuple[tuple[Release, ...], frozenset[str]]] = {}


def matching(releases: tuple[Release, ...], text: str) -> frozenset[str]:
    """Versions of the releases that a specifier allows, pre-releases too."""
    key = (id(releases), text)  # hashing hundreds of releases costs more than the answer; the entry keeps them alive
    found = _MATCHING.get(key)
    if found is None:
        spec = specifier(text)
        versions = frozenset(r.version for r in releases if spec.contains(parsed(r.version)))  # type: ignore[attr-defined]
        found = _MATCHING[key] = (releases, versions)
    return found[1]


def native(book: Book) -> None:
    """Native rows name releases, CUDA and GPU code that exist, without holes, and sources only where no wheel is."""
    groups: dict[str, list[tuple[Row, frozenset[str]]]] = {}
    oldest = min(map(number, book.toolkits))
    for row in book.rows["native"]:
        data = row.data
        releases = book.releases(data["package"])
        covered = matching(releases, data["versions"])
        groups.setdefault(data["package"], []).append((row, covered))
        cudas = data.get("cuda", "").split()
        if cudas != sorted(set(cudas), key=number):
            book.tell("native", row, "CUDA versions are not in order, or one stands twice", "sort them", "cuda")
        for cuda in cudas:
            if number(cuda) >= oldest and cuda not in book.toolkits:
                book.tell("native", row, f"there is no CUDA toolkit {cuda}", "correct it", "cuda")
        _code(book, row, cudas)
        wheels = {r.version for r in releases if r.wheels}
        if data.get("source_only") and covered & wheels:
            what = f"{data['package']} {min(covered & wheels, key=parsed)} has wheels"  # type: ignore[arg-type]
            book.tell("native", row, what, "limit the versions, or drop source_only", "source_only")
        if not data.get("source_only") and covered and not covered & wheels:
            what = f"no {data['package']} release in {data['versions']} has a wheel"
            book.tell("native", row, what, "say source_only: true", "versions")
        if data["match"] == "any" and cudas:
            book.tell("native", row, "match any means no CUDA library of its own", "drop cuda, or correct it", "match")
    for name, rows in groups.items():
        for i, (row, covered) in enumerate(rows):
            for other, theirs in rows[:i]:
                same = set(row.data.get("cuda", "").split()) & set(other.data.get("cuda", "").split())
                both = covered & theirs
                if both and (same or not row.data.get("cuda") or not other.data.get("cuda")):
                    what = f"rows {other.path[1] + 1} and {row.path[1] + 1} both speak of {name} {sorted(both)[0]}"  # type: ignore[operator]
                    book.tell("native", row, what, "rows on one release have different CUDA versions", "versions")
                if both and row.data["match"] != other.data["match"]:
                    book.tell("native", row, f"rows on one {name} release match differently", "correct it", "match")
        whole = frozenset().union(*(covered for _, covered in rows))
        ordered = [r.version for r in final(book.releases(name))]
        inside = [v in whole for v in ordered]
        exact = any(row.data["match"] != "any" for row, _ in rows)
        if True in inside and exact and not (name in OPEN_END or all(inside[inside.index(True) :])):
            hole = next(v for v, ok in zip(ordered, inside, strict=True) if not ok and v > ordered[inside.index(True)])
            what = f"{name} {hole} has no row, though releases around it have"
            book.tell("native", rows[-1][0], what, "extend a row or add one", "versions")


# Packages whose newer releases bring no CUDA library of their own (a note in their file says so).
OPEN_END = ("lmdeploy",)


def companions(book: Book) -> None:
    """torchvision, torchaudio and triton ask for a torch (or are asked for) that is released and has builds."""
    from packaging.requirements import Requirement

    torch = final(book.releases("torch"))
    built = {row.data["torch"] for row in book.rows["torch"]}
    for name in ("torchvision", "torchaudio", "xformers"):
        for release in final(book.releases(name)):
            for line in release.requires:
                if not re.match(r"torch(?![\w-])", line):
                    continue
                wanted = Requirement(line)
                if wanted.marker is not None and "extra" in str(wanted.marker):
                    continue
                found = matching(torch, str(wanted.specifier))
                if found or _noted(book, release.version, name):
                    continue
                exact = re.search(r"==(\d+\.\d+)", str(wanted.specifier))
                if exact and exact[1] not in built and number(exact[1]) < (1, 13):
                    continue  # before the table begins
                what = f"{name} {release.version} asks for torch{wanted.specifier}, which is not in the matrix"
                do = "harvest torch, or add a note that names the release and why"
                book.tell_file("companion", f"matrix/releases/{name}.json", what, do)
    for release in torch:
        for line in release.requires:
            if re.match(r"triton(?![\w-])", line):
                wanted = Requirement(line)
                if not matching(book.releases("triton"), str(wanted.specifier)):
                    what = f"torch {release.version} asks for triton{wanted.specifier}, which is not in the matrix"
                    book.tell_file("companion", "matrix/releases/torch.json", what, "harvest triton")


def policy(book: Book) -> None:
    """The matrix is not older than its releases, and prefers pythons that the newest torch has wheels for."""
    row = book.placed.policy_row["as_of"]
    uploads = [(r.uploaded[:10], name) for name in book.released for r in book.releases(name)[-400:]]
    newest, name = max(uploads, default=("", ""))
    if newest > row.data["as_of"]:
        book.tell("policy", row, f"{name} has a release of {newest}", "as_of is the newest day that is in", "as_of")
    row = book.placed.policy_row["pythons"]
    torch = final(book.releases("torch"))
    pythons = row.data["pythons"].split()
    if len(set(pythons)) != len(pythons):
        book.tell("policy", row, "a python stands twice", "correct it", "pythons")
    for python in pythons:
        tag = f"cp{python.replace('.', '')}-"
        if torch and not any(t.startswith(tag) for release in torch for t in release.wheels):
            book.tell("policy", row, f"no torch has wheels for python {python}", "correct it", "pythons")
    if torch and f"cp{pythons[0].replace('.', '')}-" not in " ".join(torch[-1].wheels):
        book.tell("policy", row, f"the newest torch has no wheel for python {pythons[0]}", "prefer another", "pythons")


CHECKS = (builds, packages, native, companions, policy)
