"""The proof: does this environment load a model, chat, train, and keep what it trained?

Runs inside an image (or any environment) with the standard library and the installed stack only, so it imports
nothing else of envforge, and keeps to Python 3.8 at run time because old stacks run on old Pythons.

    python -m envforge.verify --model DIR --plan plan.json --json receipt.json

Users' own training scripts may import the parts that the proof itself trains with:

    from envforge.verify import SafeCollator, TrainingPolicy, gpu_precheck, length_report
"""

from __future__ import annotations

from envforge.verify.policy import (
    LengthReport,
    MemoryWatch,
    NotReadyError,
    Precheck,
    Precision,
    SafeCollator,
    TrainingPolicy,
    gpu_precheck,
    length_report,
)

__all__ = [
    "LengthReport",
    "MemoryWatch",
    "NotReadyError",
    "Precheck",
    "Precision",
    "SafeCollator",
    "TrainingPolicy",
    "gpu_precheck",
    "length_report",
]
