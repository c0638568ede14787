"""What the output of a failed build step means: one error class per cause, so that the exit code is right."""

from __future__ import annotations

import re
from pathlib import Path

from envforge.errors import (
    DiskFullError,
    EngineError,
    EnvforgeError,
    HashMismatchError,
    IndexUnreachableError,
    OutsideError,
)

# In the order in which they are tried: a full disk also breaks connections, and a dead engine ends everything else.
_FULL = re.compile(r"no space left on device|disk quota exceeded", re.I)
_GONE = re.compile(
    r"cannot connect to the docker daemon|error during connect|error reading from server: EOF|"
    r"rpc error: code = (Unavailable|Canceled)|failed to receive status|connection reset by peer.*docker|"
    r"transport is closing|unexpected EOF|closing transport|graceful(ly)? shutdown|is the docker daemon running",
    re.I,
)
_HASH = re.compile(r"hash mismatch for.*|hashes are required|do not match.*sha256.*", re.I)
_INDEX = re.compile(
    r"error sending request|failed to fetch|dns error|could not connect|connection refused|"
    r"request failed after \d+ retr|network is unreachable|operation timed out|tls handshake|"
    r"failed to download|error reading a body|end of file before message length|"
    r"invalid peer certificate|temporary failure in name resolution|http status (client|server) error",
    re.I,
)
_MISSING = re.compile(r"no solution found.*|because .* was not found in the (package registry|provided package)", re.I)
_APT = re.compile(
    r"(?m)^(?:#\d+ +[\d.]+ +)?(E: (?:Unable to (?:fetch|locate)|Failed to fetch|Version .* was not found).*)$"
)
_BASE = re.compile(
    r"pull access denied|manifest unknown|manifest for .* not found|failed to resolve source metadata|"
    r"failed to do request.*(manifests|registry)|no such image",
    re.I,
)
_SECRET = re.compile(r"the secret uv\.toml.* was not given")


def explain(lines: list[str], log: Path | None = None) -> EnvforgeError:
    """The error for a build that failed, from the last lines of its output."""
    text = "\n".join(lines)
    where = f"; the whole log: {log}" if log else ""
    if _FULL.search(text):
        return DiskFullError(
            "the disk filled up during the build; no image was made", f"free some space and run again{where}"
        )
    if _GONE.search(text) and not re.search(r"did not complete successfully", text):
        return EngineError(
            "the container engine went away during the build; no image was made",
            f"start the engine and run again: finished steps are kept{where}",
            id="engine-died",
        )
    if found := _HASH.search(text):
        return HashMismatchError(
            f"a download is not the file that the lock names: {_clean(found[0])}",
            "try again; if it stays, the index or a mirror serves another file under that name: lock again and compare"
            + where,
        )
    if found := _APT.search(text):
        return OutsideError(
            f"a system package could not be installed: {_clean(found[0])}",
            f"check its name for this base's release, and that the base's package mirror is reachable{where}",
            id="system-package",
        )
    if _BASE.search(text):
        return OutsideError(
            "the base image could not be had from its registry",
            f"check its name and the network, or name one that is here: --base REF{where}",
            id="base",
        )
    if _INDEX.search(text):
        return IndexUnreachableError(
            f"the package index did not deliver during the build: {_said(lines)}",
            f"check the network, proxy and certificate of the machine that builds, and the index{where}",
        )
    if found := _MISSING.search(text):
        return IndexUnreachableError(
            f"the package index does not have what the lock names: {_clean(found[0])}",
            f"lock again, or add a wheelhouse that holds it{where}",
        )
    if _SECRET.search(text):
        return OutsideError("the builder did not pass the secret uv.toml on", f"use BuildKit{where}", id="builder")
    return OutsideError(f"the build failed: {_said(lines)}", f"the whole log: {log}" if log else "", id="build-failed")


def _said(lines: list[str]) -> str:
    """What the failing program said: its error line with the last cause below it, else the last line."""
    clean = [text for text in map(_clean, lines) if text]
    at = max((i for i, text in enumerate(clean) if re.match(r"(error|E)\b[: ]", text, re.I)), default=None)
    if at is None or clean[at].startswith("ERROR: executor failed"):
        at = next((i for i in reversed(range(len(clean))) if clean[i].startswith("error:")), at)
    if at is None:
        return clean[-1] if clean else "no output"
    causes = [text for text in clean[at + 1 : at + 12] if re.match(r"(caused by|cause):", text, re.I)]
    said = re.sub(r"^error:\s*", "", clean[at])
    if not causes:
        return said
    return said + ": " + re.sub(r"^(caused by|cause):\s*", "", causes[-1], flags=re.I)


def _clean(text: str) -> str:
    """One short line without user names and passwords in addresses, and without the builder's step numbers."""
    text = re.sub(r"(?<=://)[^/\s\"'<>]*@", "", text)
    text = re.sub(r"^#\d+\s+[\d.]*\s*", "", text)
    return text.strip()[:300]
