"""Settings in layers, and the matrix rows that lie beside them.

Built-in < site (/etc/envforge) < user (the user's configuration folder) < project (the project's folder) < ENVFORGE_*
variables < options of the command. Each place may hold `config.toml` (a project: `envforge.toml`) and `matrix.d/` with
rows of its own. Where a value came from is kept, for `envforge config show`.

    mirrors = {index = "https://...", torch = "https://..."}  ENVFORGE_MIRRORS="index=https://... torch=https://..."
    ca = "/etc/ssl/site.pem"                                  ENVFORGE_CA
    registry = "registry.example/team"                        ENVFORGE_REGISTRY
    fleet = "/etc/envforge/fleet.yaml"                        ENVFORGE_FLEET
    mounts = ["/scratch", "/data:/data:ro"]                   ENVFORGE_MOUNTS="/scratch /data:/data:ro"
    banned = ["transformers==4.57.0", "numpy>=2.5"]           ENVFORGE_BANNED="transformers==4.57.0 numpy>=2.5"

A higher layer replaces a value; `mirrors` merge by kind, and `banned` adds up: nobody lifts a ban from below.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from envforge.errors import DataError

if TYPE_CHECKING:
    from envforge.matrix.model import Matrix

SITE = Path("/etc/envforge")
MIRRORS = ("index", "torch", "apt", "registry", "hub")
_ALIASES = {"pypi": "index", "docker": "registry", "hf": "hub"}
KEYS = ("mirrors", "ca", "registry", "fleet", "mounts", "banned")
PREFIX = "ENVFORGE_"


class Setting(NamedTuple):
    """A value and where it came from: "built-in", a file, a variable, an option; several where layers add up."""

    value: Any
    origins: tuple[str, ...] = ("built-in",)


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings. Paths are absolute or as an option gave them."""

    mirrors: Mapping[str, str] = field(default_factory=dict)
    ca: Path | None = None
    registry: str | None = None
    fleet: Path | None = None
    mounts: tuple[str, ...] = ()
    banned: tuple[tuple[str, str], ...] = ()  # (package, specifier)
    layers: tuple[Path, ...] = ()  # matrix.d folders, lowest first
    origins: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


class Place(NamedTuple):
    """One layer: its name, its configuration file, its folder of matrix rows."""

    name: str
    config: Path
    rows: Path


def user_folder(env: Mapping[str, str] | None = None) -> Path:
    """The user's configuration folder."""
    env = os.environ if env is None else env
    if env.get("XDG_CONFIG_HOME"):
        return Path(env["XDG_CONFIG_HOME"]) / "envforge"
    from platformdirs import user_config_path

    return user_config_path("envforge")


def places(project: Path | None, env: Mapping[str, str] | None = None) -> tuple[Place, ...]:
    """The layers that may exist, lowest first."""
    user = user_folder(env)
    found = [
        Place("site", SITE / "config.toml", SITE / "matrix.d"),
        Place("user", user / "config.toml", user / "matrix.d"),
    ]
    if project is not None:
        found.append(Place("project", project / "envforge.toml", project / "matrix.d"))
    return tuple(found)


def find_project(folder: Path) -> Path | None:
    """The folder itself where it is a project (it holds an image.yaml or an envforge.toml), else None."""
    return folder if any((folder / name).is_file() for name in ("image.yaml", "envforge.toml")) else None


def load_settings(
    project: Path | None = None,
    options: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
) -> Settings:
    """Read all layers.

    Args:
        project: the project's folder; the current folder where that is a project.
        options: values of the command's options by key; None values are not given.
        env: environment variables; the process's own unless given.

    Raises:
        DataError: every fault of every file and variable, with file, line and key.
    """
    env = os.environ if env is None else env
    project = project or find_project(Path.cwd())
    values: dict[str, Setting] = {}
    faults: list[str] = []
    layers = []
    for place in places(project, env):
        for key, value in _read(place.config, faults).items():
            _lay(values, key, value, f"{place.name} ({place.config})")
        if place.rows.is_dir():
            layers.append(place.rows)
    for key in KEYS:
        text = env.get(PREFIX + key.upper())
        if text:
            value = _checked(key, _from_text(key, text), Path.cwd(), _teller(f"{PREFIX}{key.upper()}", faults))
            if value is not None:
                _lay(values, key, value, f"variable {PREFIX}{key.upper()}")
    for key, raw in (options or {}).items():
        if raw not in (None, (), [], {}):
            value = _checked(key, raw, Path.cwd(), _teller(f"option --{key}", faults))
            if value is not None:
                _lay(values, key, value, f"option --{key}")
    if faults:
        raise DataError("\n".join(faults), f"known keys: {', '.join(KEYS)}; see envforge config show")
    return Settings(
        **{key: setting.value for key, setting in values.items()},
        layers=tuple(layers),
        origins={key: values[key].origins if key in values else ("built-in",) for key in KEYS},
    )


def layered_matrix(project: Path | None = None, settings: Settings | None = None) -> Matrix:
    """The shipped matrix with the rows of site, user and project on top.

    Raises:
        DataError: a layer or a settings file is malformed.
    """
    from envforge.matrix.load import load_matrix

    settings = settings or load_settings(project)
    return load_matrix(layers=settings.layers)


def _teller(where: str, faults: list[str]) -> Callable[[str], None]:
    return lambda what: faults.append(f"{where}: {what}")


def _lay(values: dict[str, Setting], key: str, value: Any, origin: str) -> None:
    """One value over what lies below."""
    below = values.get(key)
    if key == "mirrors" and below:
        values[key] = Setting({**below.value, **value}, (*below.origins, origin))
    elif key == "banned" and below:
        values[key] = Setting(tuple(dict.fromkeys((*below.value, *value))), (*below.origins, origin))
    else:
        values[key] = Setting(value, (origin,))


def _read(path: Path, faults: list[str]) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        faults.append(f"{path}: cannot be read ({error.strerror or error})")
        return {}
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        text = raw.decode("utf-8")
        data = tomllib.loads(text)
    except UnicodeDecodeError as error:
        faults.append(f"{path}:{raw[: error.start].count(10) + 1}: not UTF-8 text")
        return {}
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"line (\d+)", str(error))
        faults.append(f"{path}:{line[1] if line else 1}: not TOML: {error}")
        return {}
    found = {}
    for key, value in data.items():
        fault = _teller(f"{path}:{_line_of(text, key)}: {key}", faults)
        if key not in KEYS:
            import difflib

            near = difflib.get_close_matches(key, KEYS, 1, 0.5)
            fault("unknown setting" + (f"; did you mean {near[0]}?" if near else ""))
            continue
        checked = _checked(key, value, path.parent, fault)
        if checked is not None:
            found[key] = checked
    return found


def _line_of(text: str, key: str) -> int:
    pattern = re.compile(rf"\s*\[?\s*[\"']?{re.escape(key)}[\"']?\s*[\]=.]")
    return next((number for number, line in enumerate(text.splitlines(), 1) if pattern.match(line)), 1)


def _from_text(key: str, text: str) -> Any:
    """The value of a variable in the form that a file has."""
    if key in ("mounts", "banned"):
        return text.split()
    if key == "mirrors":
        pairs = [part.partition("=") for part in text.split()]
        return {kind: url for kind, _, url in pairs}
    return text


def _checked(key: str, value: Any, base: Path, fault: Callable[[str], None]) -> Any:
    """The value in its final form; None after `fault` was told."""
    if key == "mirrors":
        return _mirrors(value, fault)
    if key in ("ca", "fleet"):
        if not isinstance(value, (str, Path)) or not str(value):
            return fault("must be the path of a file")
        return (base / Path(value).expanduser()).absolute()
    if key == "registry":
        if not isinstance(value, str) or "://" in value or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:/-]*", value):
            return fault("must be a registry such as registry.example/team, without https://")
        return value.rstrip("/")
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        return fault("must be a list of texts")
    if key == "mounts":
        for item in value:
            if not item.startswith("/"):
                return fault(f"{item[:60]!r} is not an absolute path")
        return tuple(value)
    return _banned(value, fault)


def _mirrors(value: Any, fault: Callable[[str], None]) -> Any:
    if not isinstance(value, Mapping):
        return fault('must be a table such as {index = "https://..."}')
    value = {_ALIASES.get(kind, kind): url for kind, url in value.items()}
    for kind, url in value.items():
        if kind not in MIRRORS:
            return fault(f"unknown kind of mirror {str(kind)[:40]!r}; known: {', '.join(MIRRORS)}")
        if not isinstance(url, str) or not re.match(r"(https?|file)://|/|[a-z0-9.-]+(:\d+)?(/|$)", url):
            return fault(f"{kind}: not an address")
    return {str(kind): str(url).rstrip("/") for kind, url in value.items()}


def _banned(value: list[str] | tuple[str, ...], fault: Callable[[str], None]) -> Any:
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    found = []
    for item in value:
        try:
            requirement = Requirement(item)
        except InvalidRequirement:
            return fault(f"{item[:60]!r} is not of the form transformers==4.57.0")
        if requirement.url or requirement.marker or requirement.extras:
            return fault(f"{item[:60]!r}: give a name and versions only")
        # A name alone bans every release.
        found.append((canonicalize_name(requirement.name), str(requirement.specifier) or ">=0.dev0"))
    return tuple(found)
