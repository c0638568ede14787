"""What can be had here: which builds of torch and its companions the indexes, folders and the wheelhouse offer.

A recorded fact: it is probed once, printed and kept as JSON, and handed to the resolver as rows. An index that does not
answer is part of the record and a warning, never silence.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import unquote, urljoin, urlsplit

from envforge.errors import DataError
from envforge.lock.settings import PipSettings, default_index, redact, split_credentials

if TYPE_CHECKING:
    from concurrent.futures import Future

    from requests import Session

    from envforge.matrix.model import Matrix

    _Page: TypeAlias = tuple[str, str, Future[tuple[list[str], str]]]  # where, address, file names and problem

SCHEMA = 1
# Built once per CUDA version: these must come from where torch comes from.
FAMILY = ("torch", "torchvision", "torchaudio")
# On the PyTorch index for some variants and releases only; taken from there when it has the pinned version.
GUESTS = ("torchao", "torchcodec", "torchtext", "xformers", "fbgemm-gpu")
# Everything that index serves under names which a closure may hold. It gives no upload times.
TORCH_INDEX_NAMES = (*FAMILY, *GUESTS, "triton", "pytorch-triton", "torchdata")
# CUDA's run-time packages, which torch pins exactly one level down (cuda-toolkit -> nvidia-cublas): torch's own needs,
# never cut off at a date. Names as on the package index: bare since CUDA 13, with -cu11 or -cu12 before, some both.
_RUNTIME = (
    *("cublas", "cuda-cccl", "cuda-crt", "cuda-culibos", "cuda-cupti", "cuda-nvcc", "cuda-nvrtc", "cuda-opencl"),
    *("cuda-profiler-api", "cuda-runtime", "cuda-sanitizer-api", "cudnn", "cudnn-frontend", "cufft", "cufile"),
    *(
        "curand",
        "cusolver",
        "cusparse",
        "cusparselt",
        "nccl",
        "npp",
        "nvfatbin",
        "nvjitlink",
        "nvjpeg",
        "nvptxcompiler",
    ),
    *("nvshmem", "nvtx", "nvvm"),
)
CUDA_NAMES = (
    *("cuda-bindings", "cuda-core", "cuda-pathfinder", "cuda-python", "cuda-toolkit", "triton", "pytorch-triton"),
    *(f"nvidia-{name}{end}" for name in _RUNTIME for end in ("", "-cu11", "-cu12", "-cu13")),
)
AS_TORCH = "as-torch"
_HREF = re.compile(r"""<a\s[^>]*?href\s*=\s*["']([^"']+)["']""", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Build:
    """Wheels of one release that are to be had: `pythons` as "3.11", empty where one wheel serves all.

    version: without the local part. variant: "cpu", "cu126", ...; AS_TORCH where the file name does not say and the
    index's own torch decides; "" for guests, which say nothing of it.
    where: wheelhouse, find-links, default, extra-1 .. (pip's extra indexes in order), torch.
    """

    package: str
    version: str
    variant: str
    pythons: tuple[str, ...]
    where: str
    local: bool = False  # the file name carries the local part (+cu126)


@dataclass(frozen=True, slots=True)
class Place:
    """One index that was asked: its name as in `Build.where`, address without credentials, and whether it answered."""

    where: str
    url: str
    answers: bool
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Availability:
    """The record. `variant` is what was asked for; `defaults` the default index's variant per torch minor."""

    variant: str
    arch: str
    builds: tuple[Build, ...] = ()
    places: tuple[Place, ...] = ()
    defaults: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()

    def place(self, where: str) -> Place | None:
        """What is known about one index."""
        return next((place for place in self.places if place.where == where), None)

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` is the inverse."""
        return {"schema": SCHEMA, **asdict(self)}


def from_json(data: Mapping[str, Any]) -> Availability:
    """The inverse of `Availability.to_json`.

    Raises:
        DataError: another schema, or not such a record.
    """
    try:
        if data["schema"] != SCHEMA:
            raise ValueError("unknown schema")
        return Availability(
            variant=str(data["variant"]),
            arch=str(data["arch"]),
            builds=tuple(Build(**{**row, "pythons": tuple(row["pythons"])}) for row in data["builds"]),
            places=tuple(Place(**row) for row in data["places"]),
            defaults=tuple((str(minor), str(variant)) for minor, variant in data["defaults"]),
            warnings=tuple(str(text) for text in data["warnings"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"not an availability record ({error})", "let envforge probe again") from error


def allowed_torch(availability: Availability) -> tuple[Build, ...]:
    """The builds of torch, torchvision and torchaudio that a lock may use, one per package, version, variant and place.

    A resolver's row: a (package, version, variant, python) that no entry covers cannot be locked here. A companion with
    variant AS_TORCH fits where the plan's variant is `availability.defaults` of its torch.
    """
    return tuple(build for build in availability.builds if build.package in FAMILY)


def find_builds(
    availability: Availability, package: str, version: str, variant: str, python: str, torch: str
) -> list[Build]:
    """The places that have a build, best first: what lies on disk, then the indexes, the PyTorch index last.

    The default index goes before the PyTorch index because it gives upload times. `torch`: the plan's torch version.
    """
    rank = {"wheelhouse": 0, "find-links": 1, "default": 2, "torch": 9}
    minor = ".".join(torch.split(".")[:2])
    fit = {variant, ""} | ({AS_TORCH} if dict(availability.defaults).get(minor) == variant else set())
    found = [
        build
        for build in availability.builds
        if (build.package, build.version) == (package, version)
        and build.variant in fit
        and (not build.pythons or python in build.pythons)
    ]
    return sorted(found, key=lambda build: (rank.get(build.where, 5), build.where))


class Pages:
    """The index pages of torch and its companions, fetched side by side, in the background from the start.

    Most are the same for every variant, so that a solve that decides on one need not wait for them. The threads are
    daemons: a command that ends early is not held up by an index that hangs.

    Args:
        settings: where to ask. timeout: seconds per request.
    """

    def __init__(self, settings: PipSettings, timeout: float = 8.0) -> None:
        self._settings, self._timeout = settings, timeout
        self._session: Session | None = None
        self._lock = threading.Lock()
        places: list[tuple[str, str]] = []
        if not settings.no_index:
            places.append(("default", settings.index_url or default_index()))
            places += [(f"extra-{i + 1}", url) for i, url in enumerate(settings.extra_index_urls)]
        self._pages = [self._fetch(where, url, name) for where, url in places for name in FAMILY]
        self._links = [self._fetch("find-links", link, "") for link in settings.find_links if "://" in link]

    def read(self, variant: str) -> list[tuple[str, str, list[str], str]]:
        """Wait for everything that a plan of this variant can use -> (where, address, file names, problem)."""
        torch: list[_Page] = []
        if not self._settings.no_index:
            index = f"{self._settings.torch_index.rstrip('/')}/{variant}"
            torch = [self._fetch("torch", index, name) for name in FAMILY + GUESTS]
        return [(where, url, *page.result()) for where, url, page in (*self._pages, *torch, *self._links)]

    def _fetch(self, where: str, url: str, name: str) -> _Page:
        from concurrent.futures import Future

        page: Future[tuple[list[str], str]] = Future()

        def work() -> None:
            try:
                with self._lock:
                    self._session = self._session or http_session(self._settings)
                page.set_result(_file_names(self._session, self._settings, url, name, self._timeout))
            except BaseException as error:  # noqa: BLE001 - raised where the page is waited for
                page.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        return where, url, page


def probe_availability(
    variant: str,
    settings: PipSettings,
    *,
    arch: str = "x86_64",
    wheelhouse: Path | None = None,
    defaults: Mapping[str, str] | None = None,
    timeout: float = 8.0,
    pages: Pages | None = None,
) -> Availability:
    """Asks every configured place for torch and its companions; never raises because one is out of reach.

    Args:
        variant: the torch build wanted ("cu126", "cpu"); the PyTorch index keeps one index per variant.
        settings: where to ask. wheelhouse: a further folder of wheels, preferred over everything.
        defaults: torch minor ("2.6") -> the variant that the default index carries; from the matrix unless given.
        timeout: seconds per request; the requests run side by side.
        pages: those that were asked for before.
    """
    if defaults is None:
        defaults = default_variants(arch)
    builds: list[Build] = []
    places: list[Place] = []
    warnings: list[str] = []
    for where, folder in [("wheelhouse", wheelhouse)] if wheelhouse else []:
        builds += _folder(where, Path(folder), arch)
    for folder in settings.local_folders():
        builds += _folder("find-links", folder, arch)
    pages = pages or Pages(settings, timeout)
    states: dict[tuple[str, str], str] = {}
    for where, url, files, problem in pages.read(variant):
        shown = redact(split_credentials(url)[0])
        states[where, shown] = states.get((where, shown)) or problem
        builds += _builds(where, files, arch, dict(defaults) if where != "find-links" else {})
    for (where, shown), problem in states.items():
        places.append(Place(where, shown, not problem, problem))
    for place in places:
        if not place.answers and place.where == "torch":
            warnings.append(
                f"the PyTorch index for {variant} ({place.url}) does not answer ({place.problem}); only builds that "
                "lie on disk or on the default index can be locked"
            )
        elif not place.answers:
            warnings.append(f"{_named(place.where)} ({place.url}) does not answer ({place.problem})")
    return Availability(
        variant=variant,
        arch=arch,
        builds=_merge(builds),
        places=tuple(places),
        defaults=tuple(sorted(defaults.items())),
        warnings=tuple(warnings),
    )


def default_variants(arch: str = "x86_64", matrix: Matrix | None = None) -> dict[str, str]:
    """torch minor -> the variant that a plain install from the default index gives, from the matrix."""
    from envforge.settings import layered_matrix

    builds = (matrix or layered_matrix()).torch_builds
    return {build.torch: build.variant for build in builds if build.default and build.arch == arch}


def _named(where: str) -> str:
    return {"default": "the default index", "find-links": "the find-links page"}.get(where, "an extra index")


def http_session(settings: PipSettings) -> Session:
    """A requests session with the settings' proxy and client certificate."""
    import requests

    session = requests.Session()
    session.headers["Accept"] = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
    session.headers["User-Agent"] = "envforge"
    if settings.proxy:
        session.proxies = {"http": settings.proxy, "https": settings.proxy}
    session.cert = settings.client_cert
    return session


def verification(settings: PipSettings, url: str) -> bool | str:
    """requests' `verify` for an address under these settings."""
    parts = urlsplit(url)
    if {parts.hostname, parts.netloc.rpartition("@")[2]} & set(settings.trusted_hosts):
        return False
    return settings.cert or True


def _file_names(session: Session, settings: PipSettings, base: str, name: str, timeout: float) -> tuple[list[str], str]:
    """-> file names on one project page (or, without a name, on a find-links page), and the problem, "" if none.

    A page that is not there (404; the PyTorch index says 403) is an answer: the index has no such project.
    """
    import requests

    url = f"{base.rstrip('/')}/{name}/" if name else base
    if not urlsplit(url).scheme.startswith("http"):
        return _local_page(url), ""
    try:
        answer = session.get(url, timeout=timeout, verify=verification(settings, url))
        if answer.status_code in {403, 404, 410}:
            return [], ""
        if answer.status_code != 200:
            return [], f"HTTP {answer.status_code}"
        if "json" in answer.headers.get("Content-Type", ""):
            return [str(row["filename"]) for row in answer.json()["files"] if not row.get("yanked")], ""
        return _links(answer.text, answer.url), ""
    except requests.exceptions.SSLError:
        return [], "its certificate is not accepted"
    except requests.exceptions.Timeout:
        return [], f"no answer within {timeout:g} s"
    except requests.exceptions.ConnectionError as error:
        unknown = any(word in str(error) for word in ("resolve", "Name or service", "getaddrinfo"))
        return [], "its name is not known here" if unknown else "no connection"
    except (requests.exceptions.RequestException, ValueError, KeyError, TypeError) as error:
        return [], f"not an index page ({type(error).__name__})"


def _local_page(url: str) -> list[str]:
    """A page of an index that is a folder (file:///...)."""
    path = Path(unquote(urlsplit(url).path)) if url.startswith("file:") else Path(url)
    page = path / "index.html" if path.is_dir() else path
    try:
        return _links(page.read_text(encoding="utf-8", errors="replace"), "")
    except OSError:
        return []


def _links(page: str, base: str) -> list[str]:
    return [unquote(urlsplit(urljoin(base, link)).path).rpartition("/")[2] for link in _HREF.findall(page)]


def _folder(where: str, folder: Path, arch: str) -> list[Build]:
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder of wheels", "name the folder that holds the .whl files")
    return _builds(where, sorted(path.name for path in folder.glob("*.whl")), arch, {})


def _builds(where: str, files: Iterable[str], arch: str, defaults: dict[str, str]) -> list[Build]:
    """File names -> builds for Linux on `arch`.

    Without a local part in its name a wheel has the default index's variant (`defaults`), which is known for indexes
    only: an unlabelled torch wheel in a folder says nothing about its CUDA and is left out.
    """
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename

    found: dict[tuple[str, str, str, bool], set[str]] = {}
    for file in files:
        if not file.endswith(".whl") or (arch not in file and "-any" not in file):
            continue
        try:
            name, version, _, tags = parse_wheel_filename(file)
        except InvalidWheelFilename:
            continue
        if name not in FAMILY + GUESTS or version.is_prerelease:
            continue
        pythons = set().union(*(_python(tag.interpreter, tag.abi) for tag in tags if _runs(tag.platform, arch)))
        if not any(_runs(tag.platform, arch) for tag in tags) or any(tag.abi.endswith("t") for tag in tags):
            continue
        label = version.local or ""
        if label:
            variant = label.partition(".")[0] if re.match(r"cu\d+|cpu|rocm|xpu", label) else ""
        elif name in GUESTS:
            variant = ""
        elif name == "torch":
            variant = defaults.get(".".join(str(number) for number in version.release[:2]), "")
        else:
            variant = AS_TORCH if defaults else ""
        if not variant and name in FAMILY:
            continue
        found.setdefault((str(name), version.public, variant, bool(label)), set()).update(pythons)
    return [
        Build(name, version, variant, () if "" in pythons else tuple(sorted(pythons, key=_numbers)), where, local)
        for (name, version, variant, local), pythons in found.items()
    ]


def _runs(platform: str, arch: str) -> bool:
    if platform == "any":
        return True
    return platform.endswith(f"_{arch}") and platform.startswith(("manylinux", "linux"))


def _python(interpreter: str, abi: str) -> set[str]:
    """{"3.11"} of cp311, {""} (any) of py3 and of the stable ABI."""
    found = re.fullmatch(r"cp3(\d+)", interpreter)
    return {f"3.{found[1]}"} if found and abi != "abi3" else {""}


def _numbers(python: str) -> tuple[int, ...]:
    return tuple(int(part) for part in python.split(".") if part)


def _merge(builds: Iterable[Build]) -> tuple[Build, ...]:
    """Sorted, and without repeats (two find-links folders may hold the same wheel)."""
    merged: dict[tuple[str, str, str, str, bool], set[str] | None] = {}
    for build in builds:
        key = (build.package, build.version, build.variant, build.where, build.local)
        old = merged.get(key, set())
        merged[key] = None if old is None or not build.pythons else old | set(build.pythons)
    return tuple(
        Build(package, version, variant, tuple(sorted(pythons or (), key=_numbers)), where, local)
        for (package, version, variant, where, local), pythons in sorted(merged.items(), key=lambda item: item[0])
    )
