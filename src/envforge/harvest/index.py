"""Reads a Python package index as the user's pip would: address, certificates and proxy come from pip's settings.

Only three things are asked of an index: one project page (the JSON simple API, PEP 691 and 700), small files beside a
distribution (PEP 658), and byte ranges of a wheel (its file list and single members, without downloading it). Every
answer has a size limit and the whole client a deadline, so an index that trickles or talks nonsense ends in an error.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from envforge.errors import IndexUnreachableError

if TYPE_CHECKING:
    from zipfile import ZipFile

    from requests import Response

SIMPLE_JSON = "application/vnd.pypi.simple.v1+json"
MIB = 1024 * 1024


class IndexSettings(Protocol):
    """What is needed of pip's settings; `envforge.lock.settings.PipSettings` has it."""

    @property
    def index_url(self) -> str | None:
        """None = pip's default index."""

    @property
    def no_index(self) -> bool: ...

    @property
    def cert(self) -> str | None:
        """A bundle of certificate authorities."""

    @property
    def client_cert(self) -> str | None: ...

    @property
    def proxy(self) -> str | None: ...

    @property
    def trusted_hosts(self) -> tuple[str, ...]:
        """Hosts ("host" or "host:port") whose certificate is not checked."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: `url` after redirects, `content_range` as the server sent it ("" for a whole file)."""

    body: bytes
    url: str
    content_range: str = ""


class _TransientError(Exception):
    """Worth another try: no connection, a cut answer, 429 or 5xx."""


@dataclass
class Index:
    """A polite client. Use one per run and from at most a few threads; `close` it, or use it as a context manager.

    Args:
        settings: pip's own; only its one index is asked, never an extra one.
        deadline_s: seconds from now after which every call fails.
        attempts: tries per request; `wait_s` is the first pause between two, doubled each time up to 20 s.
        read_s: seconds without a single byte before an answer counts as cut.
    """

    settings: IndexSettings
    deadline_s: float = 1800.0
    attempts: int = 4
    wait_s: float = 0.5
    read_s: float = 60.0
    requests_made: int = field(default=0, init=False)
    _pages: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    stopped: threading.Event = field(default_factory=threading.Event, init=False, repr=False)

    def __post_init__(self) -> None:
        import requests
        from pypi_simple import PYPI_SIMPLE_ENDPOINT
        from requests.adapters import HTTPAdapter

        from envforge import __version__

        if self.settings.no_index:
            raise IndexUnreachableError(
                "pip is told to use no index (no-index)", "unset it for this command: PIP_NO_INDEX=0 ..."
            )
        self.base = (self.settings.index_url or PYPI_SIMPLE_ENDPOINT).rstrip("/")
        parts = urlsplit(self.base)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise IndexUnreachableError(
                f"index-url is not a web address that can be asked for release data: {self.shown(self.base)}",
                "point pip's index-url at an index with the JSON simple API",
            )
        self._end = time.monotonic() + self.deadline_s
        self._session = requests.Session()
        self._session.headers["User-Agent"] = f"envforge/{__version__}"
        if self.settings.proxy:
            proxy = self.settings.proxy if "://" in self.settings.proxy else f"http://{self.settings.proxy}"
            self._session.proxies = {"http": proxy, "https": proxy}
        self._session.cert = self.settings.client_cert
        trusted = {parts.hostname, parts.netloc.rpartition("@")[2]} & set(self.settings.trusted_hosts)
        self._verify: bool | str = False if trusted else (self.settings.cert or True)
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, HTTPAdapter(pool_maxsize=8))

    def __enter__(self) -> Index:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends calls that are under way at their next piece of data, and the connections."""
        self.stopped.set()
        self._session.close()

    @staticmethod
    def shown(url: str) -> str:
        """An address for messages: without user name, password or query."""
        parts = urlsplit(url)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()

    def get(
        self, url: str, *, accept: str | None = None, span: str | None = None, limit: int = 64 * MIB
    ) -> Answer | None:
        """One file, or None where the index says that there is none (404, 410, 403, or a refused range).

        Args:
            span: a Range header value, e.g. "bytes=-65536"; a server that ignores it gives None, unread.
            limit: bytes; a longer answer is an error.

        Raises:
            IndexUnreachableError: no answer after all attempts, the deadline passed, or the answer is too long.
        """
        from tenacity import RetryError, Retrying, retry_if_exception_type, stop_after_attempt
        from tenacity.wait import wait_exponential, wait_random

        headers = {"Accept-Encoding": "identity"} if span else {}
        if span:
            headers["Range"] = span
        if accept:
            headers["Accept"] = accept
        tries = Retrying(
            stop=stop_after_attempt(self.attempts),
            wait=wait_exponential(multiplier=self.wait_s, max=20.0) + wait_random(0, self.wait_s),
            retry=retry_if_exception_type(_TransientError),
            sleep=lambda pause: self._sleep(pause, url),
        )
        try:
            return tries(self._once, url, headers, limit)
        except RetryError as error:
            last = error.last_attempt.exception()
            raise IndexUnreachableError(
                f"the package index did not answer after {self.attempts} tries: {self.shown(url)} ({last})",
                "check the network and pip's index-url, then run the command again: it goes on where it stopped",
            ) from last

    def _sleep(self, pause: float, url: str) -> None:
        self._check_time(url)
        self.stopped.wait(min(pause, max(0.0, self._end - time.monotonic())))
        self._check_time(url)

    def _check_time(self, url: str) -> None:
        if self.stopped.is_set() or time.monotonic() > self._end:
            raise IndexUnreachableError(
                f"stopped, or out of time after {self.deadline_s:.0f} s, while reading {self.shown(url)}",
                "run the command again: it goes on where it stopped",
            )

    def _once(self, url: str, headers: dict[str, str], limit: int) -> Answer | None:
        import requests
        import urllib3

        self._check_time(url)
        self.requests_made += 1
        wait = max(0.1, min(self.read_s, self._end - time.monotonic()))
        try:
            with self._session.get(
                url, headers=headers, stream=True, timeout=(20, wait), verify=self._verify
            ) as answer:
                return self._read(answer, url, "Range" in headers, limit)
        except requests.exceptions.SSLError as error:
            raise IndexUnreachableError(
                f"the certificate of {self.shown(url)} is not accepted: {error}",
                "set pip's `cert` (or PIP_CERT) to the bundle of your certificate authority",
            ) from error
        except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
            raise _TransientError(f"{type(error).__name__}") from error

    def _read(self, answer: Response, url: str, ranged: bool, limit: int) -> Answer | None:
        status = answer.status_code
        if status in {403, 404, 410, 416}:
            return None
        if status == 429 or status >= 500:
            raise _TransientError(f"HTTP {status}")
        if status not in {200, 206}:
            raise IndexUnreachableError(f"{self.shown(url)} answered HTTP {status}", "check pip's index-url and login")
        length = answer.headers.get("Content-Length", "")
        if ranged and status != 206 and not (length.isdigit() and int(length) <= MIB):
            return None  # a whole wheel may be gigabytes: not read
        # read1 hands over what has arrived, so that a server that trickles meets the deadline; old urllib3 has none
        take = getattr(answer.raw, "read1", answer.raw.read)
        pieces, size = [], 0
        while piece := take(256 * 1024, decode_content=True):
            self._check_time(url)
            pieces.append(piece)
            size += len(piece)
            if size > limit:
                raise IndexUnreachableError(f"{self.shown(url)} is longer than {limit} bytes", "check pip's index-url")
        if length.isdigit() and not answer.headers.get("Content-Encoding") and size < int(length):
            raise _TransientError("the answer was cut")
        return Answer(b"".join(pieces), answer.url, answer.headers.get("Content-Range", ""))

    def page(self, name: str) -> Any:
        """The project page (`pypi_simple.ProjectPage`) of one normalised package name, asked for once a run.

        Raises:
            IndexUnreachableError: no page, or not a page of this project in the JSON simple format.
        """
        from pypi_simple import ProjectPage

        if name in self._pages:
            return self._pages[name]
        answer = self.get(f"{self.base}/{name}/", accept=SIMPLE_JSON)
        if answer is None:
            raise IndexUnreachableError(
                f"the package index shows no project {name}", "check the name and pip's index-url"
            )
        try:
            page = ProjectPage.from_json_data(json.loads(answer.body), answer.url)
        except Exception as error:
            raise IndexUnreachableError(
                f"the answer of the package index for {name} is not a JSON simple page ({type(error).__name__})",
                "the index must serve the JSON simple API (PEP 691); check pip's index-url",
            ) from error
        if page.project.lower().replace("_", "-").replace(".", "-") != name:
            raise IndexUnreachableError(f"asked for {name}, the package index answered with {page.project}")
        self._pages[name] = page
        return page

    def wheel(self, url: str) -> ZipFile | None:
        """A wheel opened over ranged reads, or None where the server gives no ranges or the file is gone.

        Costs one request for the file list (two for very long lists) and at most one per member read.

        Raises:
            IndexUnreachableError: as `get`, or what came back is not a zip file.
        """
        from zipfile import BadZipFile

        from remotezip import RemoteZip

        try:
            wheel: ZipFile = RemoteZip(url, fetcher=self._fetcher)
            return wheel
        except _NoRangesError:
            return None
        except (BadZipFile, ValueError) as error:
            raise IndexUnreachableError(f"{self.shown(url)} is not a readable wheel ({error})") from error

    def _fetcher(self, url: str, _session: object, **_: object) -> Any:
        import io

        from remotezip import PartialBuffer

        index = self

        class Fetcher:
            """Gives remotezip its pieces through this client, so that retries and the deadline hold for them too."""

            def fetch(self, span: tuple[int, int | None], stream: bool = False) -> Any:
                first, last = span
                header = f"bytes={first}" if first < 0 else f"bytes={first}-{'' if last is None else last}"
                answer = index.get(url, span=header)
                if answer is None:
                    raise _NoRangesError
                body, start = answer.body, answer.content_range.removeprefix("bytes ").partition("-")[0]
                if not answer.content_range:  # a small file, sent whole
                    offset = max(0, len(body) + first) if first < 0 else first
                    body, start = body[offset : None if last is None else last + 1], str(offset)
                if not start.isdigit():
                    raise _NoRangesError
                return PartialBuffer(io.BytesIO(body), int(start), len(body), False)

        return Fetcher()


class _NoRangesError(Exception):
    """The server ignored or refused a ranged read."""
