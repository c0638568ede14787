"""Harvests release metadata from the configured package index for matrix/releases.

One project page per package, then the requirements of those releases whose requirements are not known yet, from the
first of these that answers: the METADATA beside the wheel (PEP 658), the METADATA inside the wheel by ranged read, the
index's own JSON for that release; for releases that are only source archives what the archive declares (PKG-INFO,
requires.txt, requirements.txt), read without running any of its code. What was read is kept in the user's cache folder
at once, so an interrupted harvest goes on where it stopped. Files are replaced whole or not at all.
"""

from __future__ import annotations

from envforge.harvest.choose import PACKAGES
from envforge.harvest.index import Index, IndexSettings
from envforge.harvest.news import news
from envforge.harvest.read import Floors, cuda_libraries, transformers_floors, wheel_files
from envforge.harvest.run import Harvest, HarvestRefusedError, harvest, write

__all__ = [
    "PACKAGES",
    "Floors",
    "Harvest",
    "HarvestRefusedError",
    "Index",
    "IndexSettings",
    "cuda_libraries",
    "harvest",
    "news",
    "transformers_floors",
    "wheel_files",
    "write",
]
