"""GGUF -> a normal model folder, with this environment's transformers: `python -m envforge.verify.convert FILE DIR`.

The folder is written beside its place and moved there when it is whole.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any


def main(argv: list[str]) -> int:
    """FILE DIR [MARKER-JSON]: the marker is kept beside the model as envforge-model.json."""
    file, folder = Path(argv[0]).resolve(), Path(argv[1])
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=str(folder.parent), prefix=f".{folder.name}."))
    try:
        convert(file, scratch)
        if len(argv) > 2:
            (scratch / "envforge-model.json").write_text(argv[2] + "\n", encoding="utf-8")
        scratch.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        scratch.replace(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return 0


def convert(file: Path, folder: Path) -> None:
    """Load with `gguf_file`, drop what marks it as quantised, save as bfloat16 safetensors."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    model: Any = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name)
    # transformers 5 refuses to save what it dequantised itself, though nothing quantised is left in it.
    if getattr(model, "hf_quantizer", None) is not None:
        model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.to(torch.bfloat16).save_pretrained(str(folder), safe_serialization=True)
    tokenizer.save_pretrained(str(folder))
    for path in folder.iterdir():
        path.chmod(0o644)
    both_spellings(folder / "config.json")
    known_class(folder / "tokenizer_config.json")


def both_spellings(config: Path) -> None:
    """Releases of transformers before and after 5 name some keys differently; write both, so that either reads it."""
    data = json.loads(config.read_text(encoding="utf-8"))
    data.pop("_name_or_path", None)  # a folder of this machine
    dtype = data.get("dtype") or data.get("torch_dtype")
    if dtype:
        data["dtype"] = data["torch_dtype"] = dtype
    rope = data.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope and rope.get("rope_type", "default") == "default":
        data.setdefault("rope_theta", rope["rope_theta"])
    config.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def known_class(config: Path) -> None:
    """transformers 5 saves a tokenizer class by a name that no older release knows; all of them know this one."""
    data = json.loads(config.read_text(encoding="utf-8"))
    if data.get("tokenizer_class") == "TokenizersBackend":
        data["tokenizer_class"] = "PreTrainedTokenizerFast"
        config.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
