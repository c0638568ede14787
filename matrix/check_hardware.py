"""Checks of drivers, toolkits, GPUs and base images: tables that know about each other."""

from __future__ import annotations

import itertools
import re

from envforge.matrix.check import Book, number
from envforge.matrix.meaning import Row

# Sizes in GiB that graphics memory is built in: chips of 1 to 4 GiB on whole memory channels.
MEMORY = {2, 3, 4, 6, 8, 10, 11, 12, 16, 18, 20, 24, 32, 40, 48, 64, 72, 80, 94, 96, 128, 141, 144, 180, 186, 192, 288}
_RELEASES = {"RC": 0, "GA": 1}


def _rank(release: str) -> int:
    """ "RC", "GA", "GA and Update 1", "Update 2" in the order in which they came."""
    updates = [int(n) for n in re.findall(r"Update (\d+)", release)]
    return max(updates) + 1 if updates else _RELEASES.get(release, -1)


def toolkits(book: Book) -> None:
    """Drivers rise with the toolkits, a toolkit and its branch name each other, releases have known names."""
    branches = {row.data["branch"]: row for row in book.rows["branches"]}
    for row in book.rows["toolkits"]:
        data = row.data
        if _rank(data["release"]) < 0:
            book.tell("toolkit", row, f'"{data["release"]}" is no release', "write RC, GA or Update N", "release")
        if data["branch"] not in branches:
            book.tell("toolkit", row, f"branch {data['branch']} has no row", "add it to branches", "branch")
        elif branches[data["branch"]].data["cuda"] != data["cuda"]:
            other = branches[data["branch"]].data["cuda"]
            do = "a toolkit and the driver it ships with name the same CUDA: correct one of the two rows"
            book.tell("toolkit", row, f"drivers of branch {data['branch']} report CUDA {other}", do, "branch")
    ordered = sorted(book.rows["toolkits"], key=lambda row: (number(row.data["cuda"]), _rank(row.data["release"])))
    with_driver = [row for row in ordered if row.data["driver"]]
    for older, newer in itertools.pairwise(with_driver):
        if number(older.data["driver"]) > number(newer.data["driver"]):
            what = (
                f"CUDA {newer.data['cuda']} {newer.data['release']} has driver {newer.data['driver']}, older than "
                f"{older.data['driver']} of {older.data['cuda']} {older.data['release']}"
            )
            book.tell("toolkit", newer, what, "drivers rise with the toolkits: correct one of the two", "driver")
    for cuda, rows in book.toolkits.items():
        if not any(row.data["release"].startswith("GA") for row in rows):
            book.tell(
                "toolkit", rows[0], f"CUDA {cuda} has no GA release", "add the row of its first release", "release"
            )
        numbers = sorted(_rank(row.data["release"]) for row in rows)
        first, last = numbers[0], numbers[-1]
        if len(set(numbers)) != len(numbers):
            book.tell("toolkit", rows[0], f"CUDA {cuda} has one release twice", "correct the release", "release")
        gaps = [n - 1 for n in range(max(first, 1), last) if n not in numbers and n > 1]
        if gaps and not _gap_told(book, cuda):
            what = f"Update {gaps[0]} of CUDA {cuda} is missing"
            book.tell("toolkit", rows[0], what, "add its row, or a note that names it", "release")
    known = {row.data["cuda"] for row in book.rows["toolkits"]}
    for cuda in known:
        major, minor = number(cuda)
        lower = f"{major}.{minor - 1}"
        if minor and lower not in known and not any(f"no CUDA {lower} toolkit" in note for note in book.notes):
            what = f"CUDA {cuda} has a row but {lower} has none"
            book.tell("toolkit", book.toolkits[cuda][0], what, "add the row, or a note that there is none", "cuda")


def _gap_told(book: Book, cuda: str) -> bool:
    return any(re.search(rf"\b{re.escape(cuda)} (Update|GA)", note) for note in book.notes)


def families(book: Book) -> None:
    """Every major has a floor, of the branch of its X.0 toolkit and not below what that shipped with."""
    majors = {number(row.data["cuda"])[0] for row in book.rows["toolkits"]}
    floors = {row.data["major"]: row for row in book.rows["families"]}
    for major in sorted(majors - set(floors)):
        what = f"CUDA {major} toolkits have rows, but families has no floor for {major}"
        row = next(r for r in book.rows["toolkits"] if number(r.data["cuda"])[0] == major)
        book.tell("family", row, what, "add the row to families", "cuda")
    for major, row in floors.items():
        first = [r for r in book.toolkits.get(f"{major}.0", []) if r.data["driver"]]
        if not first:
            book.tell("family", row, f"no toolkit {major}.0 has a driver", "add its toolkit row", "major")
            continue
        general = min(number(r.data["driver"]) for r in first if r.data["release"].startswith("GA"))
        floor = number(row.data["min_driver"])
        if floor[0] != general[0] or floor < general:
            what = f"{row.data['min_driver']} is not of the branch of CUDA {major}.0, or below its driver"
            book.tell("family", row, what, f"the floor of a family is that of {major}.0", "min_driver")


def branches(book: Book) -> None:
    """Branches rise with CUDA, and each has the toolkit that it reports or a note that there is none."""
    ordered = sorted(book.rows["branches"], key=lambda row: int(row.data["branch"]))
    for older, newer in itertools.pairwise(ordered):
        if number(older.data["cuda"]) >= number(newer.data["cuda"]):
            what = (
                f"branch {newer.data['branch']} reports CUDA {newer.data['cuda']}, not more than {older.data['branch']}"
            )
            book.tell("branch", newer, what, "newer branches report newer CUDA: correct one of the two", "cuda")
    for row in ordered:
        cuda = row.data["cuda"]
        rows = book.toolkits.get(cuda, [])
        if not rows and not any(f"no CUDA {cuda} toolkit" in note for note in book.notes):
            book.tell("branch", row, f"CUDA {cuda} has no toolkit row", "add it, or a note that there is none", "cuda")
        elif rows and all(r.data["branch"] != row.data["branch"] for r in rows):
            what = f"no toolkit {cuda} is of branch {row.data['branch']}"
            book.tell("branch", row, what, "correct the branch or the toolkit", "branch")
        if (row.data.get("type") is None) != (row.data.get("eol") is None):
            book.tell("branch", row, "type and end of life are known together", "give both or none", "type")


def forward(book: Book) -> None:
    """The package is named after its CUDA; an older one serves the branches of the newer, below its own."""
    known = {row.data["branch"]: row for row in book.rows["branches"]}
    own = {row.data["cuda"]: row.data["branch"] for row in book.rows["branches"]}
    ordered = sorted(book.rows["forward"], key=lambda row: number(row.data["cuda"]), reverse=True)
    for row in ordered:
        cuda = row.data["cuda"]
        if row.data["package"] != f"cuda-compat-{cuda.replace('.', '-')}":
            book.tell("forward", row, f"{row.data['package']} is not of CUDA {cuda}", "correct the name", "package")
        if cuda not in own:
            book.tell("forward", row, f"no driver branch reports CUDA {cuda}", "correct it or add the branch", "cuda")
            continue
        for branch in row.data["branches"]:
            if branch not in known:
                book.tell("forward", row, f"branch {branch} has no row", "correct it or add the branch", "branches")
            elif branch >= own[cuda]:
                what = f"branch {branch} runs CUDA {cuda} itself"
                book.tell("forward", row, what, "only older branches need the package", "branches")
    for newer, older in itertools.pairwise(ordered):
        cuda = older.data["cuda"]
        expected = [b for b in newer.data["branches"] if b < own.get(cuda, 0)]
        if sorted(older.data["branches"]) != sorted(expected):
            what = (
                f"serves {older.data['branches']}, but CUDA {newer.data['cuda']} leaves {expected} below its own branch"
            )
            book.tell("forward", older, what, "each package serves the branches of the next newer one", "branches")


def architectures(book: Book) -> None:
    """First and last CUDA are toolkits (or older than the table), generations come in order."""
    oldest = min(map(number, book.toolkits))
    newest = max(map(number, book.toolkits))
    known = {row.data["branch"] for row in book.rows["branches"]}
    for row in book.rows["architectures"]:
        data = row.data
        first, last = data["first_cuda"], data.get("last_cuda")
        if number(first) >= oldest and first not in book.toolkits:
            book.tell("architecture", row, f"there is no CUDA {first}", "correct it", "first_cuda")
        if last:
            major = number(last.removesuffix(".x"))
            if major[0] < number(first)[0] or major[0] > newest[0]:
                book.tell("architecture", row, f"last CUDA {last} does not follow {first}", "correct it", "last_cuda")
        if data.get("last_branch") is not None and data["last_branch"] not in known:
            book.tell("architecture", row, f"branch {data['last_branch']} has no row", "correct it", "last_branch")
        if (data.get("last_branch") is None) != (last is None):
            book.tell(
                "architecture", row, "a generation ends in the toolkit and in the driver", "give both", "last_cuda"
            )
    ordered = sorted(book.sms, key=number)
    for lower, higher in itertools.pairwise(ordered):
        a, b = book.sms[lower].data, book.sms[higher].data
        ends = [r.get("last_branch") for r in (a, b)]
        if ends[0] is None and ends[1] is not None:
            what = f"{higher} ends with branch {ends[1]}, but the older {lower} goes on"
            book.tell("architecture", book.sms[higher], what, "older generations end first", "last_branch")


def gpus(book: Book) -> None:
    """Everything about a GPU that its capability, its generation or its name says already."""
    for row in book.rows["gpus"]:
        data, sm = row.data, row.data["sm"]
        row_of_sm = book.sms.get(sm)
        if row_of_sm is None:
            book.tell("gpu", row, f"no architecture has capability {sm}", "correct it, or add the architecture", "sm")
            continue
        arch = row_of_sm.data
        if not _same_generation(data["architecture"], arch["name"], sm):
            what = f"{data['architecture']} is not the generation of capability {sm} ({arch['name']})"
            book.tell("gpu", row, what, "correct the capability or the architecture", "architecture")
        for wanted, key in ((number(sm) >= (8, 0), "bf16"), (number(sm) >= (8, 9), "fp8")):
            if data.get(key, False) != wanted:
                book.tell("gpu", row, f"capability {sm} {'has' if wanted else 'has no'} {key}", "correct it", key)
        if data.get("first_cuda") not in (None, arch["first_cuda"]):
            what = f"capability {sm} came with CUDA {arch['first_cuda']}"
            book.tell("gpu", row, what, "correct the GPU or the architecture", "first_cuda")
        if data.get("last_branch") != arch.get("last_branch"):
            what = f"the last branch for capability {sm} is {arch.get('last_branch')}"
            book.tell("gpu", row, what, "correct the GPU or the architecture", "last_branch")
        last = arch.get("last_cuda")
        if data.get("last_cuda_major") != (number(last.removesuffix(".x"))[0] if last else None):
            what = f"the last CUDA for capability {sm} is {last}"
            book.tell("gpu", row, what, "correct the GPU or the architecture", "last_cuda_major")
        first = [r.data["branch"] for r in book.toolkits.get(arch["first_cuda"], [])]
        if data.get("first_branch") is not None and data["first_branch"] not in first:
            what = f"CUDA {arch['first_cuda']}, the first for it, came with branch {first}"
            book.tell("gpu", row, what, "correct the branch", "first_branch")
        _class(book, row)
        for size in data["memory_gib"]:
            if size not in MEMORY:
                what = f"{size} GiB is no size of graphics memory"
                book.tell("gpu", row, what, "correct it, or add the size to the check", "memory_gib")
        if data["memory_gib"] != sorted(data["memory_gib"]):
            book.tell("gpu", row, "sizes are not in order", "list them ascending", "memory_gib")


def _same_generation(name: str, architecture: str, sm: str) -> bool:
    """The GPU's generation beside the architecture's longer name ("Blackwell", "Blackwell data center")."""
    if name == architecture:
        return True
    major = number(sm)[0]
    return {"Blackwell": major in (10, 12) and sm != "10.3", "Rubin": sm == "10.7"}.get(name, False)


def _class(book: Book, row: Row) -> None:
    """Consumer and workstation lines are not data-centre parts; only those use cuda-compat."""
    data, name = row.data, row.data["name"]
    if data.get("forward", False) != data.get("data_center", False):
        what = "forward compatibility and the data-centre class go together"
        book.tell("gpu", row, what, "correct one, or write why in a comment and in the check", "forward")
    consumer = (
        re.match(r"((GeForce|Quadro|TITAN|RTX) |T\d{3,4}\b)", name, re.IGNORECASE) and "Server Edition" not in name
    )
    if bool(consumer) == data.get("data_center", False):
        kind = "a consumer or workstation part" if consumer else "a data-centre part"
        book.tell("gpu", row, f"{name} is {kind}", "correct data_center or the name", "data_center")
    arm = re.match(r"G[HB]\d", name) is not None
    if (data.get("arch") == "aarch64") != arm or data.get("arch") == "x86_64":
        what = f"{name} {'sits on an Arm processor' if arm else 'fits any host'}"
        book.tell("gpu", row, what, "correct arch", "arch")


def bases(book: Book) -> None:
    """An image's name says its OS, Python or CUDA; one OS has one glibc."""
    glibc: dict[str, tuple[str, Row]] = {}
    for row in [*book.rows["systems"], *book.rows["bases"]]:
        data = row.data
        known = glibc.setdefault(data["os"], (data["glibc"], row))
        if known[0] != data["glibc"]:
            what = f"{data['os']} has glibc {known[0]} in {known[1].where}:{known[1].lines.get(known[1].path, 1)}"
            book.tell("base", row, what, "correct one of the two", "glibc")
    systems = {row.data["os"]: row.data for row in book.rows["systems"]}
    ubuntu = sorted((number(os.removeprefix("ubuntu")), row["glibc"]) for os, row in systems.items() if "ubuntu" in os)
    if [g for _, g in ubuntu] != sorted((g for _, g in ubuntu), key=number):
        book.tell("base", book.rows["systems"][0], "newer systems have older glibc", "correct them", "glibc")
    for row in book.rows["bases"]:
        _base(book, row, systems)
    tags = {row.data["cuda"] for row in book.rows["cuda_images"]}
    for row in book.rows["cuda_images"]:
        cuda = row.data["cuda"]
        minor = ".".join(cuda.split(".")[:2])
        if cuda.count(".") != 2 or minor not in book.toolkits:
            book.tell("base", row, f"there is no CUDA toolkit {minor}", "correct the tag", "cuda")
        others = sorted(tag for tag in tags if tag.startswith(f"{minor}.") and tag != cuda)
        if others:
            book.tell("base", row, f"images of {minor} are {others[0]} elsewhere", "give one patch release", "cuda")
        if sorted(row.data["kinds"]) != ["base", "devel", "runtime"]:
            book.tell("base", row, "an nvidia/cuda release has base, runtime and devel images", "list all", "kinds")
        wanted = ["x86_64", "aarch64"] if number(minor) >= (12, 0) else ["x86_64"]
        if sorted(row.data["arch"]) != sorted(wanted):
            book.tell("base", row, f"images of CUDA {minor} are for {' and '.join(wanted)}", "correct it", "arch")
    for variant in book.variants:
        cuda = f"{variant[2:-1]}.{variant[-1]}"
        if variant != "cpu" and not any(tag.startswith(f"{cuda}.") for tag in tags):
            row = next(r for r in book.rows["torch"] if r.data["variant"] == variant)
            book.tell("base", row, f"no base image has CUDA {cuda} to compile with", "add it to cuda_images", "cuda")


def _base(book: Book, row: Row, systems: dict[str, dict[str, str]]) -> None:
    data = row.data
    slim = re.fullmatch(r"python:(3\.\d+)-slim-bookworm", data["ref"])
    plain = re.fullmatch(r"ubuntu:(\d\d\.\d\d)", data["ref"])
    if slim:
        wanted = {"os": "debian12", "pythons": slim[1], "kind": "slim"}
    elif plain:
        os = f"ubuntu{plain[1]}"
        wanted = {"os": os, "pythons": systems.get(os, {}).get("pythons", ""), "kind": "distribution"}
    else:
        what = f"{data['ref']} is of no known naming"
        book.tell("base", row, what, "python:X.Y-slim-bookworm, ubuntu:YY.MM; others need a check of their own", "ref")
        return
    for key, value in wanted.items():
        if data[key] != value:
            book.tell("base", row, f"{data['ref']} has {key} {value}", "correct it", key)
    if sorted(data["arch"]) != ["aarch64", "x86_64"]:
        book.tell("base", row, "official images are for x86_64 and aarch64", "list both", "arch")


CHECKS = (toolkits, families, branches, forward, architectures, gpus, bases)
