"""Unsloth."""

from __future__ import annotations

from envforge.verify.stacks.hf import HfStack


class UnslothStack(HfStack):
    """FastLanguageModel."""

    name = "unsloth"
