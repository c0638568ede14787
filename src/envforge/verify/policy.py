"""The training policy that the proof uses, for use in one's own scripts too.

Everything here works on any transformers model and needs torch only when it is called, not when it is imported.

    policy = TrainingPolicy()
    gpu_precheck(min_free_mib=8000)                       # raises NotReadyError before anything is spent
    collate = SafeCollator(tokenizer, policy)             # truncates, pads to a multiple of 8, masks padding in labels
    args = transformers.TrainingArguments(**policy.training_arguments("out"))
"""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

IGNORE = -100  # torch's cross entropy leaves targets of this value out (its documented default)
MAX_LENGTH = 1024
WARN_LENGTH = 2048
SHORT = 10  # samples below this many tokens are degenerate: they make losses jump


class NotReadyError(RuntimeError):
    """The device is not fit to start training on; the message says why and what to do."""


@dataclass(frozen=True)
class Precision:
    """The number format to train in: `name` bf16, fp16 or fp32, and one sentence why."""

    name: str
    reason: str

    @property
    def dtype(self) -> Any:
        """The torch dtype of the frozen weights."""
        import torch

        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[self.name]


@dataclass(frozen=True)
class TrainingPolicy:
    """Safe defaults for LoRA fine-tuning of a language model on one device.

    Lengths are in tokens. `batch_size` x `accumulation` samples make one optimizer step. `precision` "auto" takes
    bfloat16 where the device computes it natively, float16 on older GPUs, float32 on the CPU.
    """

    max_length: int = MAX_LENGTH
    batch_size: int = 1
    accumulation: int = 8
    learning_rate: float = 2e-4
    max_grad_norm: float = 1.0
    warmup_steps: int = 0
    scheduler: str = "constant"
    precision: str = "auto"
    gradient_checkpointing: bool = True
    pad_to_multiple_of: int = 8
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.0
    seed: int = 3407

    def __post_init__(self) -> None:
        for name in ("max_length", "batch_size", "accumulation", "pad_to_multiple_of", "lora_r", "lora_alpha"):
            if int(getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 < self.learning_rate < 1:
            raise ValueError(f"learning_rate must lie between 0 and 1, not {self.learning_rate}")
        if self.precision not in ("auto", "bf16", "fp16", "fp32"):
            raise ValueError(f"precision must be auto, bf16, fp16 or fp32, not {self.precision}")

    def cautious(self) -> TrainingPolicy:
        """What to try after a NaN loss: gradients clipped at 0.3, a quarter of the rate, warm-up, cosine decay."""
        return replace(
            self, max_grad_norm=0.3, learning_rate=self.learning_rate / 4, warmup_steps=10, scheduler="cosine"
        )

    def precision_for(self, device: str) -> Precision:
        """The precision on `device` ("cpu", "cuda", "cuda:1"), with the reason."""
        if self.precision != "auto":
            return Precision(self.precision, "asked for")
        if not device.startswith("cuda"):
            return Precision("fp32", "the CPU path trains in float32: half precision is emulated there")
        import torch

        major, minor = torch.cuda.get_device_capability(device)
        if major >= 8:
            return Precision("bf16", f"sm_{major}{minor} computes bfloat16 natively")
        return Precision("fp16", f"sm_{major}{minor} has no native bfloat16 (needs sm_80 or newer)")

    def training_arguments(self, output_dir: str, device: str = "cpu", **more: Any) -> dict[str, Any]:
        """Keyword arguments for `transformers.TrainingArguments`; `more` overrides.

        The keys that changed their name between releases (`use_cpu`, `no_cuda`) are chosen by what the installed
        class accepts.
        """
        import inspect

        import transformers

        known = inspect.signature(transformers.TrainingArguments.__init__).parameters
        precision = self.precision_for(device).name
        wanted: dict[str, Any] = {
            "output_dir": output_dir,
            "per_device_train_batch_size": self.batch_size,
            "gradient_accumulation_steps": self.accumulation,
            "learning_rate": self.learning_rate,
            "max_grad_norm": self.max_grad_norm,
            "warmup_steps": self.warmup_steps,
            "lr_scheduler_type": self.scheduler,
            "gradient_checkpointing": self.gradient_checkpointing,
            "gradient_checkpointing_kwargs": {"use_reentrant": False},
            "bf16": precision == "bf16",
            "fp16": precision == "fp16",
            "seed": self.seed,
            "report_to": [],
            "remove_unused_columns": False,
        }
        if device == "cpu":
            wanted["use_cpu" if "use_cpu" in known else "no_cuda"] = True
        wanted.update(more)
        return {key: value for key, value in wanted.items() if key in known}

    def to_json(self) -> dict[str, Any]:
        """Plain data, for a receipt."""
        return asdict(self)


class SafeCollator:
    """Turns samples into one batch of int64 tensors that a model cannot choke on.

    A sample is a text, or a mapping with `text` or `input_ids` (a flat list of integers). Ids are cut at
    `policy.max_length`, rows padded to the longest, rounded up to `policy.pad_to_multiple_of`; labels are the cut ids
    with -100 on the padding. Returns `input_ids`, `attention_mask`, `labels`, each of shape (batch, length).

    Raises:
        TypeError: a sample holds text in `input_ids`, ragged lists or non-integers.
        ValueError: an empty sample, or an id outside the vocabulary when `vocabulary` is given.
    """

    def __init__(self, tokenizer: Any, policy: TrainingPolicy | None = None, vocabulary: int | None = None):
        self.tokenizer = tokenizer
        self.policy = policy or TrainingPolicy()
        self.vocabulary = vocabulary
        pad = getattr(tokenizer, "pad_token_id", None)
        if pad is None:
            pad = getattr(tokenizer, "eos_token_id", None)
        self.pad = 0 if pad is None else int(pad)

    def encode(self, sample: Any) -> list[int]:
        """Token ids of one sample, cut at the cap."""
        if isinstance(sample, str):
            sample = {"text": sample}
        if not isinstance(sample, Mapping):
            raise TypeError(f"a sample must be a text or a mapping, not {type(sample).__name__}")
        ids = sample.get("input_ids")
        if ids is None:
            if not isinstance(sample.get("text"), str):
                raise TypeError(f"a sample needs `input_ids` or `text`; it has {sorted(sample)}")
            ids = self.tokenizer(sample["text"], truncation=True, max_length=self.policy.max_length)["input_ids"]
        if hasattr(ids, "tolist"):
            ids = ids.tolist()
        if isinstance(ids, str) or not isinstance(ids, (list, tuple)):
            raise TypeError(f"input_ids must be a list of integers, not {type(ids).__name__}")
        for value in ids:
            if isinstance(value, bool) or not isinstance(value, int):
                kind = "a nested list" if isinstance(value, (list, tuple)) else type(value).__name__
                raise TypeError(f"input_ids must be a flat list of integers, it holds {kind}")
        if not ids:
            raise ValueError("a sample is empty after tokenizing: leave it out of the data set")
        ids = list(ids[: self.policy.max_length])
        if self.vocabulary is not None and not 0 <= min(ids) <= max(ids) < self.vocabulary:
            raise ValueError(
                f"token ids run from {min(ids)} to {max(ids)}, the model has rows 0 to {self.vocabulary - 1}"
            )
        return ids

    def __call__(self, samples: Sequence[Any]) -> dict[str, Any]:
        import torch

        rows = [self.encode(sample) for sample in samples]
        multiple = self.policy.pad_to_multiple_of
        width = max(len(row) for row in rows)
        width = (width + multiple - 1) // multiple * multiple
        ids = torch.full((len(rows), width), self.pad, dtype=torch.long)
        mask = torch.zeros((len(rows), width), dtype=torch.long)
        labels = torch.full((len(rows), width), IGNORE, dtype=torch.long)
        for index, row in enumerate(rows):
            values = torch.tensor(row, dtype=torch.long)
            ids[index, : len(row)] = values
            labels[index, : len(row)] = values
            mask[index, : len(row)] = 1
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@dataclass(frozen=True)
class LengthReport:
    """Lengths of a data set in tokens. `suggested` is the cap that keeps 95 of 100 samples whole, within bounds."""

    count: int
    median: int
    p95: int
    longest: int
    short: int  # samples with fewer than SHORT tokens
    over_cap: int  # samples that the cap would cut
    suggested: int

    def to_json(self) -> dict[str, Any]:
        """Plain data, for a receipt."""
        return asdict(self)


def length_report(lengths: Sequence[int], cap: int = MAX_LENGTH, limit: int | None = None) -> LengthReport:
    """Summary of `lengths` (tokens of each sample); `limit` is the model's position limit.

    Raises:
        ValueError: no lengths.
    """
    if not lengths:
        raise ValueError("the data set holds no sample")
    ordered = sorted(lengths)
    p95 = ordered[min(len(ordered) - 1, -(-95 * len(ordered) // 100) - 1)]
    bound = min(WARN_LENGTH, limit) if limit else WARN_LENGTH
    return LengthReport(
        count=len(ordered),
        median=ordered[len(ordered) // 2],
        p95=p95,
        longest=ordered[-1],
        short=sum(1 for length in ordered if length < SHORT),
        over_cap=sum(1 for length in ordered if length > cap),
        suggested=max(8, min(bound, (p95 + 7) // 8 * 8)),
    )


@dataclass(frozen=True)
class Precheck:
    """What `gpu_precheck` found: device name, capability, free and total memory in MiB."""

    name: str
    sm: str
    free_mib: int
    total_mib: int


def gpu_precheck(min_free_mib: int = 4096, device: int = 0) -> Precheck:
    """Look before the first step: a CUDA build, a device, and at least `min_free_mib` MiB free on it.

    Raises:
        NotReadyError: with the reason; nothing was started.
    """
    import torch

    if torch.version.cuda is None:
        raise NotReadyError(
            f"torch {torch.__version__} is a build without CUDA: training would fall to the CPU; "
            "install the build for this driver"
        )
    if not torch.cuda.is_available():
        raise NotReadyError(
            "torch {} is built for CUDA {}, but no GPU can be used here (CUDA_VISIBLE_DEVICES={}): check "
            "nvidia-smi, the driver, and that the container was started with GPUs".format(
                torch.__version__, torch.version.cuda, os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
            )
        )
    if device >= torch.cuda.device_count():
        raise NotReadyError(f"there is no GPU {device}: {torch.cuda.device_count()} in sight")
    free, total = torch.cuda.mem_get_info(device)
    major, minor = torch.cuda.get_device_capability(device)
    found = Precheck(torch.cuda.get_device_name(device), f"{major}.{minor}", free >> 20, total >> 20)
    if found.free_mib < min_free_mib:
        raise NotReadyError(
            f"{found.name} has {found.free_mib} MiB free of {found.total_mib}, {min_free_mib} are wanted: look with "
            "nvidia-smi who holds the rest, and end your own left-over processes"
        )
    return found


class MemoryWatch:
    """Memory after each interval, to see creep. Call `mark()` at the end of every step or epoch.

    On a GPU the figure is what torch has allocated after collection; on the CPU it is the bytes of all tensors that
    Python still holds (each storage once). Both in MiB.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.marks: list[float] = []

    def mark(self) -> float:
        """Collect garbage, record and return the figure in MiB."""
        import torch

        gc.collect()
        if self.device.startswith("cuda"):
            torch.cuda.synchronize(self.device)
            value = float(torch.cuda.memory_allocated(self.device)) / 2**20
        else:
            value = sum(size for size, _ in _live_tensors()) / 2**20
        self.marks.append(round(value, 3))
        return value

    def creep(self, skip: int = 2) -> float:
        """MiB gained between the mark after `skip` marks (optimizer state is made in the first step) and the last."""
        return 0.0 if len(self.marks) <= skip else round(self.marks[-1] - self.marks[skip - 1], 3)

    def holders(self, top: int = 3) -> list[str]:
        """The largest groups of live tensors, as "count x dtype shape: MiB", to name what holds the memory."""
        groups: dict[tuple[str, str], tuple[int, int]] = {}
        for size, tensor in _live_tensors():
            key = (str(tensor.dtype), str(tuple(tensor.shape)))
            count, total = groups.get(key, (0, 0))
            groups[key] = (count + 1, total + size)
        ranked = sorted(groups.items(), key=lambda item: -item[1][1])[:top]
        return [f"{count} x {dtype} {shape}: {total / 2**20:.1f} MiB" for (dtype, shape), (count, total) in ranked]


def _live_tensors() -> list[tuple[int, Any]]:
    """(bytes, tensor) of every storage that a Python object holds, each storage once."""
    import torch

    found: dict[int, tuple[int, Any]] = {}
    for thing in gc.get_objects():
        # type() and not isinstance(): lazy modules of other packages import themselves when asked for __class__.
        if issubclass(type(thing), torch.Tensor):
            try:
                found[thing.data_ptr()] = (thing.numel() * thing.element_size(), thing)
            except (RuntimeError, NotImplementedError):
                continue  # meta and fake tensors have no storage
    return list(found.values())
