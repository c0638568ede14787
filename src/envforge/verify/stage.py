"""The entry of a stage process: `python -m envforge.verify.stage SETTINGS LAYER EVENTS`."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from envforge.verify.record import Recorder
from envforge.verify.settings import Settings

TARGETS = {
    "environment": "envforge.verify.layers.environment:run",
    "data": "envforge.verify.layers.data:run",
    "chat": "envforge.verify.layers.chat:run",
    "training": "envforge.verify.layers.training:run",
    "effect": "envforge.verify.layers.effect:run",
}


def find(layer: str, settings: Settings) -> Callable[[Settings, Recorder], None]:
    """The function behind a layer; `settings.targets` may name another."""
    module, _, name = settings.targets.get(layer, TARGETS.get(layer, "")).partition(":")
    found: Callable[[Settings, Recorder], None] = getattr(importlib.import_module(module), name)
    return found


def main(argv: list[str]) -> int:
    """Runs one layer. 0 whatever the checks say: anything else means that the process itself broke."""
    settings = Settings.load(Path(argv[0]))
    layer, events = argv[1], Path(argv[2])
    end_with_parent()
    quiet()
    recorder = Recorder(layer, events)
    find(layer, settings)(settings, recorder)
    sys.stdout.flush()
    return 0


def end_with_parent() -> None:
    """Ask Linux to end this process when the supervisor is killed and cannot do it any more."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    except (OSError, AttributeError):
        pass


def quiet() -> None:
    """Nothing leaves the machine and nothing draws bars while the proof runs; what the user set stays."""
    for key, value in (
        ("TOKENIZERS_PARALLELISM", "false"),
        ("HF_HUB_DISABLE_PROGRESS_BARS", "1"),
        ("HF_HUB_DISABLE_TELEMETRY", "1"),
        ("HF_HUB_OFFLINE", "1"),  # the model is a folder by now: a look-up could only hang
        ("TQDM_DISABLE", "1"),
        ("WANDB_DISABLED", "true"),
    ):
        os.environ.setdefault(key, value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
