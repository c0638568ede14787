"""Reads Python tracebacks as they stand in logs: plain, IPython's, with prefixes in front of each line."""

from __future__ import annotations

import re

_FRAME = re.compile(
    r"""(?:File\s+["']?|^\s*|\s|["'(\[])(?P<path>[\w./~<>+@-]*/[\w.+-]+\.py|[\w-]+\.py)(?=["':,\s)])""", re.MULTILINE
)
_INSTALLED = re.compile(r"(?:site|dist)-packages/(?P<name>[A-Za-z0-9_]+)")
_REMOTE = re.compile(r"transformers_modules[/.]|/modules/transformers_modules|\\transformers_modules\\")
_REMOTE_FILE = re.compile(r"(?:modeling|tokenization|configuration|processing|modelling)_[\w-]+\.py")

# Import name -> name on the index, where they differ.
_DIST = {
    "PIL": "pillow", "yaml": "pyyaml", "cv2": "opencv-python", "sklearn": "scikit-learn", "skimage": "scikit-image",
    "google": "protobuf", "dateutil": "python-dateutil", "bs4": "beautifulsoup4", "pkg_resources": "setuptools",
    "flash_attn_2_cuda": "flash-attn", "flash_attn": "flash-attn", "unsloth_zoo": "unsloth_zoo", "attr": "attrs",
    "huggingface_hub": "huggingface-hub", "mmcv": "mmcv", "OpenSSL": "pyopenssl", "Crypto": "pycryptodome",
    "git": "gitpython", "jwt": "pyjwt", "docx": "python-docx", "dotenv": "python-dotenv",
    "_lzma": "a Python built with lzma", "_ctypes": "a Python built with ctypes", "_bz2": "a Python built with bz2",
}  # fmt: skip
# Packages whose frames are recognised without a site-packages folder in front (shortened or repository paths).
_KNOWN = {
    "peft", "transformers", "trl", "accelerate", "unsloth", "unsloth_zoo", "deepspeed", "bitsandbytes", "xtuner",
    "mmengine", "torchvision", "torchaudio", "datasets", "diffusers", "vllm", "torchao", "xformers", "flash_attn",
    "axolotl", "llamafactory", "swift", "optimum", "auto_gptq", "awq", "sentence_transformers", "timm", "lightning",
    "pytorch_lightning", "torchmetrics", "evaluate", "gradio", "langchain", "triton", "torch", "huggingface_hub",
    "tokenizers", "safetensors", "sglang", "lmdeploy", "liger_kernel", "cut_cross_entropy", "galore_torch", "torchtune",
}  # fmt: skip


def top(module: str) -> str:
    """`transformers.cache_utils` -> `transformers`."""
    return module.split(".")[0]


def dist(module: str) -> str:
    """The name to install for an import name."""
    return _DIST.get(module, module)


def asking_package(lines: str) -> str | None:
    """The package of the innermost frame in a traceback whose last line is the error; None for the user's own file."""
    above = lines.rsplit("\n", 1)[0] if "\n" in lines else ""
    innermost = None
    for frame in _FRAME.finditer(above):
        innermost = frame["path"]
    if innermost is None:
        return None
    installed = _INSTALLED.search(innermost)
    if installed:
        return installed["name"]
    parts = [part for part in innermost.split("/") if part not in ("", ".", "~", "src")]
    return next((part for part in parts[:-1] if part in _KNOWN), None)


def is_remote_code(lines: str) -> bool:
    """A frame of a model's own Python file (trust_remote_code) stands in the traceback."""
    return bool(_REMOTE.search(lines))


def remote_file(lines: str) -> str | None:
    """The model's own file, `modeling_internlm2.py`: the innermost frame's, not one that the error line names."""
    found = _REMOTE_FILE.findall(lines.rsplit("\n", 1)[0] if "\n" in lines else lines)
    return str(found[-1]) if found else None


def is_remote_part(module: str) -> bool:
    """The module is a model's own file that was not downloaded with it."""
    return module.startswith("transformers_modules")
