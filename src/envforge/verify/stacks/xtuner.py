"""XTuner."""

from __future__ import annotations

from envforge.verify.stacks.hf import HfStack


class XtunerStack(HfStack):
    """Its own training entry."""

    name = "xtuner"
    package = "xtuner"
