"""Request lines: PEP 508 requirements as users write them, parsed once and kept with where they came from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from envforge.errors import UsageError

MAX_LINE = 8_192
MAX_LINES = 5_000

_SIMPLE = re.compile(r"^([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)\s*$")


@dataclass(frozen=True, slots=True)
class Request:
    """One requirement: normalised name, extras, PEP 440 specifier text ("" = any), local variant label of an `==` pin
    (`torch==2.10.0+cu130` gives specifier "==2.10.0", local "cu130"), marker text, url of `name @ url`, the line."""

    name: str
    specifier: str
    text: str
    extras: tuple[str, ...] = ()
    local: str | None = None
    marker: str | None = None
    url: str | None = None
    origin: str = "command line"

    @property
    def pinned(self) -> str | None:
        """The version of an exact `==` pin, else None."""
        match = re.fullmatch(r"===?\s*([^*,\s]+)", self.specifier)
        return match[1] if match else None


@lru_cache(maxsize=8192)
def normalise(name: str) -> str:
    """PEP 503 name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def parse_request(line: str, origin: str = "command line") -> Request:
    """One PEP 508 line -> Request.

    Raises:
        UsageError: not a requirement (names the line, shortened), or a form that is not supported.
    """
    if len(line) > MAX_LINE:
        raise UsageError(f"a requirement of {len(line):,} characters ({line[:40]!r}...) is too long", _HINT)
    text = line.strip()
    if not text.isascii():
        raise UsageError(f"{_short(text)} holds a character that no requirement may have", _HINT)
    simple = _SIMPLE.match(text)
    if simple:
        return Request(normalise(simple[1]), "", text, origin=origin)
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        parsed = Requirement(text)
    except InvalidRequirement as error:
        first = str(error).splitlines()[0] if str(error) else "not a requirement"
        raise UsageError(f"{_short(text)} is not a PEP 508 requirement: {first}", _written_right(text)) from error
    if parsed.url and not re.match(r"git\+(https?|ssh|file)://|file:|/|\.\.?/", parsed.url):
        raise UsageError(
            f"{_short(text)}: only git+URL@COMMIT and local paths can be locked",
            "give the release's version, or a git URL with a full commit",
        )
    specifier, local = str(parsed.specifier), None
    match = re.fullmatch(r"===?\s*([^*,\s+]+)\+([A-Za-z0-9.]+)", specifier)
    if match:
        specifier, local = f"=={match[1]}", match[2].lower()
    return Request(
        normalise(parsed.name),
        specifier,
        text,
        tuple(sorted(normalise(extra) for extra in parsed.extras)),
        local,
        str(parsed.marker) if parsed.marker else None,
        parsed.url,
        origin,
    )


_HINT = "write requirements such as torch, 'transformers>=4.46,<5' or 'peft==0.13.2'"


def _written_right(text: str) -> str:
    """What was meant, where it is plain."""
    pin = re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*[= ]\s*([0-9][A-Za-z0-9.+]*)", text)
    if pin:
        return f"did you mean {pin[1]}=={pin[2]}?"
    if re.match(r"git\+|https?:|file:|\.{0,2}/", text):
        return f"an address needs a name before it: 'NAME @ {text[:60]}'"
    return _HINT


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
