"""How each stack loads, trains and merges. The layers ask; an adapter answers in its framework's own way."""

from __future__ import annotations

from envforge.verify.settings import Settings
from envforge.verify.stacks.hf import HfStack

NAMES = ("transformers", "unsloth", "xtuner")


def open_stack(settings: Settings) -> HfStack:
    """The adapter of `settings.stack`.

    Raises:
        ValueError: an unknown stack; the message names the known ones.
    """
    if settings.stack == "transformers":
        return HfStack(settings)
    if settings.stack == "unsloth":
        from envforge.verify.stacks.unsloth import UnslothStack

        return UnslothStack(settings)
    if settings.stack == "xtuner":
        from envforge.verify.stacks.xtuner import XtunerStack

        return XtunerStack(settings)
    raise ValueError(f"unknown stack {settings.stack!r}; known: {', '.join(NAMES)}")
