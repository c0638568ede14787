"""How much a build will download and write, from the lock: before anything is built.

A wheel's own table of contents says what it unpacks to, to the byte, and an index serves the end of a file by itself:
so the large wheels are asked, and the same rules as in the build say what of them stays. What is small is estimated.
"""

from __future__ import annotations

import importlib.util
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envforge.image.render import TEMPLATES
from envforge.image.values import Prediction
from envforge.keep.download import credentials
from envforge.lock import Lock, LockedPackage, PipSettings

if TYPE_CHECKING:
    from requests import Session

SHARE = 0.97  # of the bytes to download: what is beyond is estimated
# Where a wheel cannot be asked: what the 56 wheels of a CPU stack unpack to, and what of that stays in an image; and
# the same of CUDA's libraries, which hardly compress.
RATIO, STAYS = 3.55, 0.8
CUDA_RATIO = 1.7
TIMEOUT = 10.0
Content = list[tuple[str, int]]  # path in the wheel, bytes unpacked


@dataclass(frozen=True, slots=True)
class _Told:
    """One wheel: bytes to download, unpacked, and of these in the image; asked: the wheel itself said so."""

    size: int
    unpacked: int
    kept: int
    asked: bool = False


def measure(lock: Lock, settings: PipSettings, wheelhouses: Iterable[Path], *, keep_headers: bool) -> Prediction:
    """What a build of this lock downloads and writes. An index that does not tell costs precision, never an error.

    Args:
        wheelhouses: folders of wheels that need no download.
        keep_headers: as the build will be told (see `may_compile`).
    """
    from concurrent.futures import ThreadPoolExecutor

    from envforge.lock.availability import http_session

    here = {path.name: path for folder in wheelhouses if folder.is_dir() for path in folder.glob("*.whl")}
    packages = [package for package in lock.packages if package.file.endswith(".whl")]
    with http_session(settings) as session, ThreadPoolExecutor(max_workers=6) as pool:

        def one(package: LockedPackage) -> _Told | None:
            path = Path(package.path) if package.path else here.get(package.file)
            return _look(package, path, session, settings, keep_headers)

        asked = _large(packages)
        told = dict(zip((package.name for package in asked), pool.map(one, asked), strict=True))
    download = unpacked = kept = carried = 0
    exact = True
    for package in lock.packages:
        row = told.get(package.name) or _guess(package, package.size or 0)
        exact = exact and (row.asked or package not in asked)
        local = package.path is not None or package.file in here
        carried += row.size if local else 0
        download += 0 if local else row.size
        unpacked += row.unpacked
        kept += row.kept
    return Prediction(download, unpacked, kept, carried, exact)


def _large(packages: list[LockedPackage]) -> list[LockedPackage]:
    """Those that nearly all bytes are in, and those whose size no index gave."""
    rows = sorted(packages, key=lambda package: -(package.size or 0))
    total = sum(package.size or 0 for package in rows)
    found: list[LockedPackage] = []
    have = 0
    for package in rows:
        if package.size is None or have < SHARE * total:
            found.append(package)
            have += package.size or 0
    return found


def _look(
    package: LockedPackage, path: Path | None, session: Session, settings: PipSettings, keep_headers: bool
) -> _Told | None:
    try:
        if path is not None:
            with zipfile.ZipFile(path) as archive:
                content = [(info.filename, info.file_size) for info in archive.infolist()]
            size = path.stat().st_size
        elif package.url:
            size, content = _remote(package.url, session, settings)
        else:
            return None
    except Exception:  # noqa: BLE001 - whatever a server or a file does: this is only a forecast
        return _head(package, session, settings)
    drops = slim_rule()
    kept = sum(bytes_ for name, bytes_ in content if not drops(name, keep_headers, set()))
    return _Told(package.size or size, sum(bytes_ for _, bytes_ in content), kept, True)


def _remote(url: str, session: Session, settings: PipSettings) -> tuple[int, Content]:
    """The table of contents of a wheel on an index: the last bytes of the file only."""
    from remotezip import RemoteZip

    from envforge.lock.availability import verification

    options = {"timeout": TIMEOUT, "verify": verification(settings, url), "auth": credentials(settings, url)}
    with RemoteZip(url, session=session, initial_buffer_size=1 << 18, **options) as archive:
        size = int(getattr(archive.fp, "_file_size", 0) or 0)  # it read it from the server's answer
        return size, [(info.filename, info.file_size) for info in archive.infolist()]


def _head(package: LockedPackage, session: Session, settings: PipSettings) -> _Told | None:
    """The size alone, where the table of contents cannot be had."""
    import requests

    from envforge.lock.availability import verification

    size = package.size
    if size is None and package.url:
        try:
            answer = session.head(
                package.url,
                timeout=TIMEOUT,
                allow_redirects=True,
                verify=verification(settings, package.url),
                auth=credentials(settings, package.url),
            )
            size = int(answer.headers.get("Content-Length") or 0) if answer.ok else None
        except (requests.RequestException, ValueError):
            size = None
    return None if size is None else _guess(package, size)


def _guess(package: LockedPackage, size: int) -> _Told:
    if package.name.startswith("nvidia-"):
        return _Told(size, int(size * CUDA_RATIO), int(size * CUDA_RATIO))
    return _Told(size, int(size * RATIO), int(size * RATIO * STAYS))


@lru_cache(maxsize=1)
def slim_rule() -> Callable[[str, bool, set[str]], bool]:
    """The rule of the build's own script: which file of a wheel does not stay in an image."""
    spec = importlib.util.spec_from_file_location("envforge_slim", TEMPLATES / "image" / "slim.py")
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rule: Callable[[str, bool, set[str]], bool] = module.drops
    return rule
