"""What the user asks for: words on the command line, requirement files, a spec, a project folder."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from envforge.errors import UsageError
from envforge.resolver.request import MAX_LINES, Request, parse_request
from envforge.spec import SPEC_FILE, Spec, find_spec, load_spec

MAX_FILE = 4_000_000
MAX_WITH_HASHES = 200_000  # of one requirement: a release with hundreds of wheels has some 30,000


@dataclass(frozen=True, slots=True)
class Intake:
    """The request: lines, constraint lines (`-c`), and the spec and project folder they came from, if any."""

    lines: tuple[Request, ...]
    constraints: tuple[Request, ...] = ()
    spec: Spec | None = None
    project: Path | None = None

    def requests(self, cpu: bool) -> tuple[Request, ...]:
        """All request lines for a CPU or a GPU target, the spec's first, one per name with the specifiers joined."""
        own = self.spec.requests_for(cpu) if self.spec else ()
        return tuple(dict.fromkeys((*own, *self.lines)))


def read_intake(words: list[str], files: list[Path], spec: str | None) -> Intake:
    """Sort the command line's words: a folder with an image.yaml is the project, the rest are PEP 508.

    Raises:
        UsageError: nothing asked for, too much asked for, or an unreadable line or file (named).
    """
    project: Path | None = None
    lines: list[Request] = []
    for word in words:
        folder = Path(word)
        if _looks_like_folder(word):
            if not (folder / SPEC_FILE).is_file():
                name = _package_name(folder)
                other = f"; its dependencies: -r {folder / 'pyproject.toml'}; itself: '{name} @ {word}'" if name else ""
                raise UsageError(f"{word} is a folder without an {SPEC_FILE}", f"make one: envforge init {word}{other}")
            if project is not None:
                raise UsageError(f"two project folders are given: {project} and {word}", "give one")
            project = folder
        else:
            if re.fullmatch(r"\.{0,2}/\S*|[\w.-]+/", word[:500]) and not _exists(word):
                raise UsageError(f"{word[:80]}: there is no such file or folder", "envforge init DIR makes a project")
            request = parse_request(word)
            if request.url and re.match(r"\.{0,2}/", request.url) and not _exists(request.url):
                raise UsageError(f"{request.text[:80]}: there is no such file or folder")
            lines.append(request)
    constraints: list[Request] = []
    for path in files:
        found, limits = read_requirements(path)
        lines += found
        constraints += limits
    if project is not None and spec is not None:
        raise UsageError("both a project folder and --spec are given", "give one of the two")
    loaded = load_spec(project / SPEC_FILE) if project else load_spec(find_spec(spec)) if spec else None
    if not lines and loaded is None:
        raise UsageError(
            "nothing is asked for", "name packages (envforge resolve unsloth ...), -r FILE, or --spec NAME"
        )
    if len(lines) > MAX_LINES:
        raise UsageError(f"{len(lines):,} requirements are more than the {MAX_LINES:,} that one request may hold")
    return Intake(_once(lines), _once(constraints), loaded, project)


def _once(lines: list[Request]) -> tuple[Request, ...]:
    """Each requirement where it was first asked for: said a hundred times it would be explained a hundred times."""
    first: dict[Request, Request] = {}
    for line in lines:
        first.setdefault(replace(line, text="", origin=""), line)
    return tuple(first.values())


def project_of(words: list[str]) -> Path | None:
    """The project folder among the words, before they are read in full."""
    return next((Path(word) for word in words if _looks_like_folder(word)), None)


def _looks_like_folder(word: str) -> bool:
    """A folder that happens to be called like a package is taken for one only when it holds a spec."""
    try:
        named = "/" in word or word in (".", "..") or (Path(word) / SPEC_FILE).is_file()
        return named and Path(word).is_dir()
    except (OSError, ValueError):  # too long for a path, or with a null byte: then it is no folder
        return False


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError:  # too long for a path
        return False


def read_requirements(path: Path, _seen: frozenset[Path] = frozenset()) -> tuple[list[Request], list[Request]]:
    """A pip requirements file -> (requirements, constraints). Follows -r and -c; hashes are dropped, since the lock
    makes its own, and index options too: where packages come from is a setting.

    Raises:
        UsageError: unreadable, a cycle of -r, or a line that is not a requirement (file:line).
    """
    real = path.resolve()
    if real in _seen:
        raise UsageError(f"{path} includes itself through -r or -c")
    if path.name == "pyproject.toml":
        return _pyproject(path), []
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_FILE + 1)  # a device or a pipe has no size of its own
        if len(raw) > MAX_FILE:
            raise UsageError(f"{path} has more than {MAX_FILE:,} bytes: no requirements file is that large")
        # Windows tools put a byte order mark before UTF-8, or write UTF-16; pip reads both.
        text = raw.decode("utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text (byte {error.start})") from error
    if path.suffix in (".yml", ".yaml"):
        raise UsageError(f"{path} is no requirements file", "list its packages in a requirements file, one a line")
    if path.suffix == ".toml" or re.search(r"^\[\[packages?\]\]", text, re.MULTILINE):
        raise UsageError(f"{path} is no requirements file", f"a lock is a place to start from: --from {path}")
    requests: list[Request] = []
    constraints: list[Request] = []
    for number, line in _logical_lines(text):
        where = f"{path}:{number}"
        if len(line) > MAX_WITH_HASHES:
            raise UsageError(f"{where}: a line of {len(line):,} characters ({line[:40]!r}...) is too long")
        option = re.match(r"^(-r|--requirement|-c|--constraint)(?:\s+|=)(.+)$", line)
        if option:
            inner = (path.parent / option[2].strip()).resolve()
            found, limits = read_requirements(inner, _seen | {real})
            if option[1] in ("-r", "--requirement"):
                requests += found
            else:
                constraints += found
            constraints += limits
            continue
        line = _named(line, where)
        if line.startswith("-"):
            name = line.split()[0].split("=")[0]
            if name in ("-i", "--index-url", "--extra-index-url", "-f", "--find-links", "--no-index", "--trusted-host"):
                continue  # where packages come from is pip's setting, not part of the question
            if name in (
                "--no-binary",
                "--only-binary",
                "--prefer-binary",
                "--pre",
                "--require-hashes",
                "--use-feature",
            ):
                continue
            raise UsageError(f"{where}: option {name} is not supported", "leave it out, or list the requirement itself")
        line = re.sub(r"\s+--(hash|config-settings|global-option)[= ]\S+", "", line)
        try:
            requests.append(parse_request(line, origin=where))
        except UsageError as error:
            raise UsageError(f"{where}: {error.cause}", error.hint) from error
    return requests, constraints


def _named(line: str, where: str) -> str:
    """`-e PATH`, `-e git+URL#egg=NAME` and a bare local path -> `NAME @ ADDRESS`; other lines as they are."""
    match = re.match(r"(?:(-e|--editable)(?:\s+|=))?(\S+?)(\[[\w,. -]*\])?$", line)
    if not match or not (match[1] or re.match(r"\.{0,2}/", match[2])):
        return line
    address, extras = match[2], match[3] or ""
    address, _, egg = address.partition("#egg=")
    if not re.match(r"git\+|file:|\.{0,2}/", address):
        address = "./" if address == "." else f"./{address}"
    name = egg.split("[")[0] or _package_name(Path(address)) or _wheel_name(address)
    if not name:
        raise UsageError(f"{where}: {address[:80]} does not say what it is called", f"write NAME @ {address[:80]}")
    return f"{name}{extras} @ {address}"


def _wheel_name(address: str) -> str:
    match = re.search(r"(?:^|/)([A-Za-z0-9_.]+)-[^/-]+(?:-[^/-]+){3,4}\.whl$", address)
    return match[1] if match else ""


def _package_name(folder: Path) -> str:
    """What the pyproject.toml of a folder calls itself, "" where there is none."""
    try:
        name = _toml(folder / "pyproject.toml").get("project", {}).get("name")
    except (UsageError, AttributeError):
        return ""
    return name if isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) else ""


def _logical_lines(text: str) -> list[tuple[int, str]]:
    """Lines with continuations joined and comments gone, each with the number of its first line."""
    found: list[tuple[int, str]] = []
    start, held = 0, ""
    for number, raw in enumerate(text.splitlines(), 1):
        line = re.sub(r"(^|\s)#.*$", "", raw)
        start = start or number
        if line.rstrip().endswith("\\"):
            held += line.rstrip()[:-1] + " "
            continue
        whole = (held + line).strip()
        if whole:
            found.append((start, whole))
        start, held = 0, ""
    if held.strip():
        found.append((start, held.strip()))
    return found


def _toml(path: Path) -> dict[str, Any]:
    import sys

    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return dict(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not TOML: {error}") from error


def _pyproject(path: Path) -> list[Request]:
    lines = _toml(path).get("project", {}).get("dependencies")
    if not isinstance(lines, list):
        raise UsageError(f"{path} has no [project] dependencies", "list them there, or give a requirements file")
    return [parse_request(str(line), origin=f"{path} dependencies {i}") for i, line in enumerate(lines, 1)]
