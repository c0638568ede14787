"""Requires-Python of the closure, upper bounds included: uv honours the lower bounds only.

The releases that the plan pins were checked by the resolver. For the others the wheel's own metadata is read: from the
file beside it on the index (PEP 658) or the index's page, and from the wheel where it lies on this machine. A wheel's
metadata never changes, so answers are kept by the hash.
"""

from __future__ import annotations

import json
import re
import zipfile
from email.parser import HeaderParser
from pathlib import Path
from typing import TYPE_CHECKING

from envforge.cached import Cache, cache_folder
from envforge.lock.availability import http_session, verification
from envforge.lock.formats import LockedPackage
from envforge.lock.settings import PipSettings, default_index, split_credentials
from envforge.resolver.plan import Plan

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet
    from requests import Session

STORE = "requires-python.json"


def forbidden(packages: list[LockedPackage], plan: Plan, settings: PipSettings) -> dict[str, str]:
    """Packages outside the pins whose Requires-Python does not allow the plan's Python: name -> the reason.

    What no place tells is let pass: pip would install it too.
    """
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    bounds = requires_python([p for p in packages if p.name not in plan.pins and p.kind != "source"], settings)
    bad = {}
    for package in packages:
        bound = bounds.get(package.name)
        if not bound:
            continue
        try:
            allowed = _allows(SpecifierSet(bound), plan.python)
        except InvalidSpecifier:
            continue
        if not allowed:
            bad[package.name] = f"{package.name} {package.version} says Requires-Python {bound}"
    return bad


def _allows(bound: SpecifierSet, python: str) -> bool:
    """Whether some patch release of this Python is inside the bound."""
    return any(bound.contains(f"{python}.{patch}", prereleases=True) for patch in range(40))


def requires_python(packages: list[LockedPackage], settings: PipSettings) -> dict[str, str]:
    """name -> Requires-Python ("" = no bound); packages for which no place tells are left out."""
    from concurrent.futures import ThreadPoolExecutor

    cache = Cache(cache_folder("lock"))
    kept = cache.read_json(STORE)
    known: dict[str, str] = kept if isinstance(kept, dict) else {}
    keys = {package.name: package.hashes[0] for package in packages}
    missing = [package for package in packages if keys[package.name] not in known]
    if missing:
        with http_session(settings) as session, ThreadPoolExecutor(max_workers=12) as pool:
            asked = list(pool.map(_Client(session, settings).look_up, missing))
        news = {keys[p.name]: bound for p, bound in zip(missing, asked, strict=True) if bound is not None}
        known.update(news)
        if news:
            cache.write_json(STORE, known)
    return {name: known[key] for name, key in keys.items() if key in known}


class _Client:
    """Reads bounds over HTTP. A host that has no metadata files is not asked for another one."""

    def __init__(self, session: Session, settings: PipSettings) -> None:
        self.session = session
        self.settings = settings
        self.without_metadata: set[str] = set()

    def look_up(self, package: LockedPackage) -> str | None:
        """Requires-Python of one locked wheel, None where no place tells."""
        if package.path:
            return _from_wheel(Path(package.path))
        if not package.url:
            return None
        host = "/".join(package.url.split("/")[:3])
        if host not in self.without_metadata:
            text = self.get(f"{package.url}.metadata")
            if text is not None:
                return HeaderParser().parsestr(text).get("Requires-Python", "")
            self.without_metadata.add(host)
        return self.from_page(package)

    def from_page(self, package: LockedPackage) -> str | None:
        for base in (self.settings.index_url or default_index(), *self.settings.extra_index_urls):
            if not base.startswith("http"):
                continue
            text = self.get(f"{base}/{package.name}/")
            try:
                rows = json.loads(text or "{}").get("files", [])
                row = next((row for row in rows if row["filename"] == package.file), None)
            except (ValueError, KeyError, TypeError, AttributeError):
                row = _html_row(text or "", package.file)
            if row is not None:
                return str(row.get("requires-python") or "")
        return None

    def get(self, url: str) -> str | None:
        import requests

        plain = split_credentials(url)[0]
        try:
            answer = self.session.get(
                plain,
                timeout=self.settings.timeout or 15,
                verify=verification(self.settings, plain),
                auth=_login(self.settings, plain),
            )
        except requests.exceptions.RequestException:
            return None
        return answer.text if answer.status_code == 200 else None


def _html_row(page: str, file: str) -> dict[str, str] | None:
    """The link of one file on a plain HTML page (PEP 503)."""
    from html import unescape

    for link, label in re.findall(r"<a\s([^>]*)>([^<]*)</a>", page):
        if unescape(label).strip() == file:
            bound = re.search(r"""data-requires-python\s*=\s*["']([^"']*)["']""", link)
            return {"requires-python": unescape(bound[1]) if bound else ""}
    return None


def _from_wheel(path: Path) -> str | None:
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            return HeaderParser().parsestr(archive.read(name).decode("utf-8", "replace")).get("Requires-Python", "")
    except (OSError, zipfile.BadZipFile, StopIteration):
        return None


def _login(settings: PipSettings, url: str) -> tuple[str, str] | None:
    """Credentials of the configured index on the same host."""
    for configured in (settings.index_url, *settings.extra_index_urls):
        plain, user, password = split_credentials(configured or "")
        if user and url.split("/")[:3] == plain.split("/")[:3]:
            return user, password or ""
    return None
