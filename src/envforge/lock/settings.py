"""What pip is told on this machine, in a form that uv can be told: uv does not read pip's configuration.

pip's files and `PIP_*` variables are read here with pip's own places and order. pip itself is not asked: that costs
half a second, and `pip config list` prints the files by name, so that which of two values counts cannot be told from it
(the tests compare with pip's option parser). Where the user told uv the same thing (`UV_DEFAULT_INDEX`, `UV_INDEX`,
`UV_FIND_LINKS`), that wins. Everything else of uv's own (`UV_*`, uv.toml) is left to uv.

User names and passwords in index addresses travel in environment variables only, never in arguments, files or messages.
"""

from __future__ import annotations

import configparser
import contextlib
import functools
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from envforge.errors import DataError

TORCH = "torch"  # the name under which uv is told of the PyTorch index, and of its credentials
TORCH_INDEX = "https://download.pytorch.org/whl"
SHARED = (Path("/etc"),)  # pip reads /etc/pip.conf besides the XDG folders
_TRUE = {"1", "true", "t", "yes", "y", "on"}
# Everything up to the last "@" before the path: a password may hold an unquoted "@".
_USERINFO = re.compile(r"(?<=://)[^/\s\"'<>]*@")
# What the user may have set for uv that would change the meaning of a lock or of an install.
MEANING = (
    "UV_TORCH_BACKEND",
    "UV_NO_SOURCES",
    "UV_NO_SOURCES_PACKAGE",
    "UV_RESOLUTION",
    "UV_PRERELEASE",
    "UV_FORK_STRATEGY",
    "UV_EXCLUDE_NEWER",
    "UV_EXCLUDE_NEWER_PACKAGE",
    "UV_PYTHON",
    "UV_SYSTEM_PYTHON",
    "UV_BREAK_SYSTEM_PACKAGES",
    "UV_PROJECT",
    "UV_WORKING_DIR",
    "UV_WORKING_DIRECTORY",
    "UV_NO_BUILD",
    "UV_NO_BUILD_PACKAGE",
    "UV_NO_BINARY",
    "UV_NO_BINARY_PACKAGE",
    "UV_REQUIRE_HASHES",
    "UV_NO_VERIFY_HASHES",
    "UV_OUTPUT_FORMAT",
    "UV_CUSTOM_COMPILE_COMMAND",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
)


@dataclass(frozen=True, slots=True)
class PipSettings:
    """Where packages come from. Addresses may hold credentials: print them through `redact` only.

    find_links: folders and pages; local folders are absolute. constraints: files that pip applies to every install.
    torch_index: the root under which the PyTorch project keeps one index per variant, or a mirror of it.
    timeout: seconds per connection, None = the tool's own. trusted_hosts: "host" or "host:port", certificate unchecked.
    """

    index_url: str | None = None
    extra_index_urls: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    no_index: bool = False
    cert: str | None = None
    client_cert: str | None = None
    trusted_hosts: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()
    proxy: str | None = None
    timeout: float | None = None
    keyring: str | None = None
    torch_index: str = TORCH_INDEX

    def __repr__(self) -> str:
        # A traceback or a debug print must not carry a password.
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__slots__ if getattr(self, name))
        return redact(f"PipSettings({shown})")

    def local_folders(self) -> tuple[Path, ...]:
        """Those of `find_links` that are folders on this machine."""
        return tuple(Path(link) for link in self.find_links if link.startswith("/") and Path(link).is_dir())


def redact(text: str) -> str:
    """The text with user names and passwords taken out of every address."""
    return _USERINFO.sub("", text)


def read_pip_settings(env: Mapping[str, str] | None = None) -> PipSettings:
    """pip's settings on this machine, as `pip install` would use them.

    Args:
        env: environment variables; the process's own unless given.

    Raises:
        DataError: a configuration file of pip's cannot be read (names the file).
    """
    env = os.environ if env is None else env
    merged: dict[str, str] = {}
    for section in ("global", "install"):
        for path in config_files(env):
            merged.update(_section(path, section))
    merged.update(_variables(env))

    def many(key: str) -> tuple[str, ...]:
        return tuple(merged.get(key, "").split())

    index = env.get("UV_DEFAULT_INDEX") or env.get("UV_INDEX_URL") or merged.get("index-url") or merged.get("pypi-url")
    extra = (env.get("UV_INDEX") or env.get("UV_EXTRA_INDEX_URL") or "").split() or many("extra-index-url")
    links = [link for link in env.get("UV_FIND_LINKS", "").split(",") if link] or many("find-links")
    timeout = merged.get("timeout") or merged.get("default-timeout") or ""
    return PipSettings(
        index_url=_unnamed(index) if index else None,
        extra_index_urls=tuple(_unnamed(url) for url in extra),
        find_links=tuple(_absolute(link) for link in links),
        no_index=merged.get("no-index", "").lower() in _TRUE,
        cert=env.get("SSL_CERT_FILE") or merged.get("cert") or env.get("REQUESTS_CA_BUNDLE") or None,
        client_cert=env.get("SSL_CLIENT_CERT") or merged.get("client-cert") or None,
        trusted_hosts=many("trusted-host"),
        constraints=tuple(_absolute(path) for path in many("constraint")),
        proxy=merged.get("proxy") or None,
        timeout=float(timeout) if re.fullmatch(r"\d+(\.\d+)?", timeout) else None,
        keyring=merged.get("keyring-provider") or None,
    )


def read_constraints(settings: PipSettings) -> tuple[str, ...]:
    """The requirement lines of pip's constraint files, for a solver that wants to know them before uv says no.

    Lines that are no requirement (options, addresses) are left to uv; files that cannot be read, too.
    """
    out = []
    for name in settings.constraints:
        try:
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        for line in text.splitlines():
            line = re.sub(r"(^|\s)#.*$", "", line).strip()
            if re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*\s*([<>=!~]|$)", line):
                out.append(line)
    return tuple(out)


def config_files(env: Mapping[str, str], prefix: str = sys.prefix) -> list[Path]:
    """The files that pip reads, weakest first (pip's documentation, "Configuration": location and precedence)."""
    from platformdirs import user_config_dir

    own = env.get("PIP_CONFIG_FILE")
    if own == os.devnull:
        return []
    home = Path(env.get("HOME") or Path.home())
    if sys.platform == "darwin":
        shared = [Path("/Library/Application Support/pip")]
        user = Path(user_config_dir("pip", appauthor=False, roaming=True))
        user = user if user.is_dir() else home / ".config" / "pip"
    else:
        shared = [Path(part) / "pip" for part in (env.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(os.pathsep) if part]
        shared += SHARED
        user = Path(env.get("XDG_CONFIG_HOME") or home / ".config") / "pip"
    files = [folder / "pip.conf" for folder in shared]
    if not (own and Path(own).exists()):  # pip leaves the user's files out when it is given one
        files += [home / ".pip" / "pip.conf", user / "pip.conf"]
    files.append(Path(prefix) / "pip.conf")
    return files + ([Path(own)] if own else [])


def _section(path: Path, section: str) -> dict[str, str]:
    parser = configparser.RawConfigParser()
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"pip's configuration file {path} cannot be read: {error}", "correct or remove it") from error
    try:
        parser.read_string(text)
    except configparser.Error as error:
        first = redact(str(error)).splitlines()[0]
        raise DataError(f"pip's configuration file {path} is malformed: {first}", "correct or remove it") from error
    if not parser.has_section(section):
        return {}
    return {key.lower().replace("_", "-").lstrip("-"): value for key, value in parser.items(section)}


def _variables(env: Mapping[str, str]) -> dict[str, str]:
    return {key[4:].lower().replace("_", "-"): value for key, value in env.items() if key.startswith("PIP_") and value}


def _unnamed(url: str) -> str:
    """An index address without the `name=` that uv allows before it."""
    return re.sub(r"^[A-Za-z0-9_-]+=(?=\w+:|/)", "", url).rstrip("/")


def _absolute(place: str) -> str:
    """A local folder or file as an absolute path; web addresses as they are."""
    if place.startswith("file://"):
        return unquote(urlsplit(place).path)
    return place if "://" in place else str(Path(place).expanduser().absolute())


def split_credentials(url: str) -> tuple[str, str | None, str | None]:
    """-> address without credentials, user name, password."""
    parts = urlsplit(url)
    userinfo, at, host = parts.netloc.rpartition("@")
    if not at:
        return url, None, None
    user, colon, password = userinfo.partition(":")
    return parts._replace(netloc=host).geturl(), unquote(user), unquote(password) if colon else None


def join_credentials(url: str, user: str, password: str | None) -> str:
    """The inverse of `split_credentials`."""
    parts = urlsplit(url)
    userinfo = quote(user, safe="") + (":" + quote(password, safe="") if password is not None else "")
    return parts._replace(netloc=f"{userinfo}@{parts.netloc}").geturl()


@dataclass(frozen=True, slots=True)
class NamedIndex:
    """An index as uv is told of it: `name` links the address to its credentials in the environment."""

    name: str
    url: str
    default: bool = False
    user: str | None = None
    password: str | None = None

    def environment(self) -> dict[str, str]:
        """uv's variables for this index's credentials; empty without any."""
        if self.user is None:
            return {}
        stem = "UV_INDEX_" + re.sub(r"[^A-Z0-9]", "_", self.name.upper())
        return {f"{stem}_USERNAME": self.user, **({f"{stem}_PASSWORD": self.password} if self.password else {})}


def named(name: str, url: str, *, default: bool = False) -> NamedIndex:
    """An index from an address that may hold credentials."""
    address, user, password = split_credentials(url)
    return NamedIndex(name, address, default, user, password)


def named_indexes(settings: PipSettings) -> tuple[NamedIndex, ...]:
    """The configured indexes, extra ones first (uv asks in this order); none with `no_index`."""
    if settings.no_index:
        return ()
    out = [named(f"pip-extra-{i + 1}", url) for i, url in enumerate(settings.extra_index_urls)]
    return (*out, named("pip", settings.index_url, default=True)) if settings.index_url else tuple(out)


@functools.cache
def default_index() -> str:
    """The index that pip and uv use where none is configured; a library knows its address.

    It is read from the library's source: importing it loads an HTML parser and pydantic, as costly as a whole lock.
    """
    import ast
    from importlib.util import find_spec

    spec = find_spec("pypi_simple")
    source = Path(spec.origin).read_text(encoding="utf-8") if spec and spec.origin else ""
    for node in ast.parse(source).body:
        if isinstance(node, ast.AnnAssign | ast.Assign) and "PYPI_SIMPLE_ENDPOINT" in ast.unparse(node) and node.value:
            with contextlib.suppress(ValueError):
                return str(ast.literal_eval(node.value)).rstrip("/")
    from pypi_simple import PYPI_SIMPLE_ENDPOINT

    return str(PYPI_SIMPLE_ENDPOINT).rstrip("/")


def index_arguments(settings: PipSettings) -> list[str]:
    """uv's options for where packages come from, without any credentials (those: `index_environment`).

    Usable with `uv pip install`, `uv pip sync` and `uv pip compile`. pip treats all its indexes alike and takes the
    best version of all; uv's default (the first index with the name) would see only what an extra index holds.
    """
    out: list[str] = []
    for index in named_indexes(settings):
        out += ["--default-index" if index.default else "--index", f"{index.name}={index.url}"]
    if settings.no_index:
        out.append("--no-index")
    if settings.extra_index_urls and not settings.no_index:
        out += ["--index-strategy", "unsafe-best-match"]
    for link in settings.find_links:
        if split_credentials(link)[1] is None:
            out += ["--find-links", link]
    for host in settings.trusted_hosts:
        out += ["--allow-insecure-host", host]
    if settings.keyring in {"subprocess", "import", "auto"}:
        out += ["--keyring-provider", "subprocess"]
    return out


def index_environment(settings: PipSettings, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that go with `index_arguments`: certificates, proxy, time-out, credentials. Secret: do not print.

    Args:
        env: what is set already; variables of uv's own there are kept.
    """
    env = os.environ if env is None else env
    out: dict[str, str] = {}
    for index in (*named_indexes(settings), named(TORCH, settings.torch_index)):
        out.update(index.environment())
    links = [link for link in settings.find_links if split_credentials(link)[1] is not None]
    if links:
        out["UV_FIND_LINKS"] = ",".join(links)
    if settings.cert:
        out["SSL_CERT_FILE"] = settings.cert
    if settings.client_cert:
        out["SSL_CLIENT_CERT"] = settings.client_cert
    if settings.proxy:
        proxy = settings.proxy if "://" in settings.proxy else f"http://{settings.proxy}"
        out.update({"HTTPS_PROXY": proxy, "HTTP_PROXY": proxy})
    if settings.timeout and "UV_HTTP_TIMEOUT" not in env:
        out["UV_HTTP_TIMEOUT"] = str(max(1, int(settings.timeout)))
    return out


def uv_environment(settings: PipSettings, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """The whole environment for a uv call: the user's, less what would change the answer, plus ours."""
    env = os.environ if env is None else env
    # The index variables are dropped because their values are in the settings and are passed explicitly.
    told = (
        *MEANING,
        "UV_DEFAULT_INDEX",
        "UV_INDEX_URL",
        "UV_INDEX",
        "UV_EXTRA_INDEX_URL",
        "UV_FIND_LINKS",
        "UV_TARGET",
    )
    kept = {key: value for key, value in env.items() if key not in told}
    return {**kept, "UV_PYTHON_DOWNLOADS": "never", **index_environment(settings, env)}


def secrets(settings: PipSettings) -> set[str]:
    """Passwords and user names in the settings, for tests and for scrubbing text that is about to be shown."""
    found: set[str] = set()
    urls: Iterable[str | None] = (settings.index_url, *settings.extra_index_urls, *settings.find_links, settings.proxy)
    urls = (*urls, settings.torch_index)
    for url in urls:
        _, user, password = split_credentials(url or "")
        found |= {word for word in (user, password) if word}
    return found
