"""Keeping the matrix: what needs the resolver or a package index beside the rows.

`check` holds the ready-made stacks against the rows; `update` harvests new releases and says what they would change;
`newer` looks up one release that the matrix does not know yet. Nothing here prints; the command line does.
"""

from __future__ import annotations

from envforge.keep.images import ImageAnswer, changes, check_images, image_answers
from envforge.keep.newer import Newer, find_newer
from envforge.keep.update import PackageUpdate, Update, update, write_update

__all__ = [
    "ImageAnswer",
    "Newer",
    "PackageUpdate",
    "Update",
    "changes",
    "check_images",
    "find_newer",
    "image_answers",
    "update",
    "write_update",
]
