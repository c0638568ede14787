"""Adding receipts to the evidence beside the matrix."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from envforge.errors import UsageError
from envforge.files import write_atomic
from envforge.matrix.evidence import RECEIPTS, Receipt, load_receipts

if TYPE_CHECKING:
    from envforge.matrix.check import Finding


def receipt_folders(layers: tuple[Path, ...] = ()) -> tuple[Path, ...]:
    """Where receipts lie: the shipped ones, then those of the matrix.d layers."""
    return (RECEIPTS, *(layer / "receipts" for layer in layers))


def default_folder(user_rows: Path) -> Path:
    """The shipped folder where it can be written (a checkout), else the user's own."""
    place = RECEIPTS
    while not place.exists():
        place = place.parent
    return RECEIPTS if os.access(place, os.W_OK) else user_rows / "receipts"


def add_receipt(receipt: Receipt, folder: Path) -> tuple[Path, bool]:
    """Keep a receipt -> its file, and whether it is new there (the same receipt twice is one file).

    Raises:
        UsageError, DiskFullError: the folder cannot be written.
    """
    path = folder / f"{receipt.id}.json"
    if path.exists():
        return path, False
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make {folder}: {error.strerror}", "name another folder with --folder") from error
    write_atomic(path, receipt.dumps())
    load_receipts.cache_clear()
    return path, True


def check_receipts(folders: tuple[Path, ...] = (RECEIPTS,)) -> list[Finding]:
    """A finding for each damaged evidence file."""
    from envforge.matrix.check import Finding

    do = "remove it, or add the receipt again: envforge matrix add-evidence"
    return [
        Finding("evidence", f"matrix/evidence/receipts/{fault.partition(':')[0]}", 1, "", fault, do)
        for fault in load_receipts(folders)[1]
    ]
