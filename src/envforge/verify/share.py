"""What a layer leaves in memory for the next one of the same stage process, so that nothing is loaded twice.

Only on the CPU, and only in a process that runs several layers: on a GPU two copies of a model may not fit, and a layer
that runs alone must find out for itself. What is kept is taken once; a layer that changes it gives it back as it was.
"""

from __future__ import annotations

from typing import Any

_kept: dict[str, Any] = {}
_on = False


def start(on: bool) -> None:
    """Switch keeping on or off; forgets what was kept."""
    global _on
    _on = on
    _kept.clear()


def keep(name: str, value: Any) -> None:
    """Leave something for a later layer; nothing happens where keeping is off."""
    if _on:
        _kept[name] = value


def take(name: str) -> Any:
    """What was kept under this name, None when there is nothing; it is not kept any longer."""
    return _kept.pop(name, None)
