"""The entry of a stage process: `python -m envforge.verify.stage SETTINGS LAYER[,LAYER...] EVENTS`."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from envforge.verify import share
from envforge.verify.record import Recorder, emit
from envforge.verify.settings import Settings

TARGETS = {
    "environment": "envforge.verify.layers.environment:run",
    "data": "envforge.verify.layers.data:run",
    "chat": "envforge.verify.layers.chat:run",
    "training": "envforge.verify.layers.training:run",
    "distributed": "envforge.verify.layers.distributed:run",
    "effect": "envforge.verify.layers.effect:run",
}


def find(layer: str, settings: Settings) -> Callable[[Settings, Recorder], None]:
    """The function behind a layer; `settings.targets` may name another."""
    module, _, name = settings.targets.get(layer, TARGETS.get(layer, "")).partition(":")
    found: Callable[[Settings, Recorder], None] = getattr(importlib.import_module(module), name)
    return found


def main(argv: list[str]) -> int:
    """Runs layers until one fails. 0 whatever the checks say: anything else means that the process itself broke.

    What follows a failure never runs here: a process that saw an error of CUDA cannot be trusted any more.
    """
    settings = Settings.load(Path(argv[0]))
    layers, events = argv[1].split(","), Path(argv[2])
    end_with_parent()
    quiet()
    share.start(settings.device == "cpu" and len(layers) > 1)
    for layer in layers:
        sys.stdout.flush()
        emit(events, {"event": "layer", "layer": layer, "at": time.monotonic(), "log_start": os.fstat(1).st_size})
        recorder = Recorder(layer, events)
        find(layer, settings)(settings, recorder)
        free_device()
        sys.stdout.flush()
        emit(events, {"event": "layer-end", "layer": layer, "at": time.monotonic()})
        if recorder.failed:
            break
    return 0


def free_device() -> None:
    """Give the GPU back what a layer has let go, so that the next one finds the memory that a fresh process would."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return
    import gc

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


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
