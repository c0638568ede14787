"""Names of the folders that one layer leaves in the scratch folder for another."""

from __future__ import annotations

ADAPTER = "adapter"
MERGED = "merged"
FRAMEWORK_MERGED = "merged-by-framework"
