"""One class per kind of failure: its exit code, its cause in one message, and what to do about it.

Every error that a user can meet is an `EnvforgeError`. The command line prints `cause`, an empty line, then
`hint: ...`, and exits with `exit_code`. Anything else that escapes is a fault of ours (exit 70).
"""

from __future__ import annotations


class EnvforgeError(Exception):
    """Base of all failures that are told to the user.

    Args:
        cause: what is wrong and where, one sentence or a few lines.
        hint: what to do, without the leading "hint:"; empty when there is nothing useful to say.
        id: stable kebab-case identifier for machines; the class's own unless given.
    """

    exit_code = 70
    id = "internal"

    def __init__(self, cause: str, hint: str = "", *, id: str | None = None) -> None:
        super().__init__(cause)
        self.cause = cause
        self.hint = hint
        if id is not None:
            self.id = id

    def render(self) -> str:
        """The text for a terminal: cause first, then a blank line, then the hint."""
        return f"error: {self.cause}" + (f"\n\nhint: {self.hint}" if self.hint else "")


class NoError(EnvforgeError):
    """An honest 'no': a conflict, a failed proof, a check with findings (exit 1)."""

    exit_code = 1
    id = "no"


class ConflictError(NoError):
    """The request cannot be met on the described hosts."""

    id = "conflict"


class ProofFailedError(NoError):
    """`verify` ran and an environment did not pass."""

    id = "proof-failed"


class UsageError(EnvforgeError):
    """Bad input or usage (exit 2): an unknown name, a malformed file, a missing target."""

    exit_code = 2
    id = "usage"


class NoTargetError(UsageError):
    """No target was described and none was found on this machine."""

    id = "no-target"


class DataError(UsageError):
    """A YAML or JSON input is malformed; `cause` lists every fault with file, line or row, and field."""

    id = "bad-data"


class OutsideError(EnvforgeError):
    """Something outside is missing, unreachable or broke (exit 3): engine, index, model, disk.

    `kept` holds what stood before it broke (an answer without its lock), so that whoever reports it can keep that.
    """

    exit_code = 3
    id = "outside"
    kept: object | None = None


class EngineError(OutsideError):
    """No container engine answers, or it died."""

    id = "engine"


class IndexUnreachableError(OutsideError):
    """A package index could not be reached or answered with nonsense."""

    id = "index"


class HashMismatchError(OutsideError):
    """A download does not have the hash that the lock records."""

    id = "hash-mismatch"


class DiskFullError(OutsideError):
    """The disk filled up; nothing half-written was left behind."""

    id = "disk-full"


class ModelError(OutsideError):
    """A model could not be found or fetched."""

    id = "model"


class PreflightError(EnvforgeError):
    """The node was refused before user code ran (exit 86)."""

    exit_code = 86
    id = "preflight"
