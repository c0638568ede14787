"""What the files of a model folder say without loading them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any


def embedding_rows(folder: str) -> int | None:
    """Rows of the input embedding, read from the safetensors headers without loading; None when there is none."""
    for file in sorted(Path(folder).glob("*.safetensors")):
        for name, entry in safetensors_header(file).items():
            if name.endswith(("embed_tokens.weight", "tok_embeddings.weight", "wte.weight", "embed_in.weight")):
                return int(entry["shape"][0])
    return None


def safetensors_header(file: Path) -> dict[str, Any]:
    """name -> {dtype, shape, data_offsets} of one file (format: 8 bytes of little-endian length, then JSON)."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header: dict[str, Any] = json.loads(stream.read(size))
    header.pop("__metadata__", None)
    return header


def stored_dtype(folder: str) -> str | None:
    """The number format of most weights on disk ("BF16"), None where there are no safetensors."""
    sizes: Counter[str] = Counter()
    for file in sorted(Path(folder).glob("*.safetensors")):
        for entry in safetensors_header(file).values():
            start, end = entry["data_offsets"]
            sizes[entry["dtype"]] += end - start
    return sizes.most_common(1)[0][0] if sizes else None
