"""Runs inside a fresh environment: imports what it is told to and, if asked, trains a tiny random Llama for two steps.

    tiny_check.py STEP IMPORT...        STEP: import, lora, trainer or sft

import   the imports alone.
lora     a LoRA over a tiny Llama (peft), forward and backward; some adapter weight gets a gradient.
trainer  the same through transformers' Trainer, two steps; without peft the whole model is trained.
sft      the same through trl's SFTTrainer, on texts and a tokenizer made here.

Nothing is downloaded. With `datasets` among the imports its Dataset is what the Trainer gets. An IMPORT may be a name
inside a module ("trl:SFTTrainer"), called with a text where one is given ("mmengine.utils:is_installed=numpy").
Prints one JSON line {"ok", "error", "versions"} last; only the stack that is there is used, so the file runs on
everything since early 2023.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import json
import math
import re
import sys
import tempfile
from typing import Any

VOCABULARY = 64


def main(argv: list[str]) -> int:
    """Runs the steps; -> 0 when everything worked."""
    step, imports = argv[0], argv[1:]
    error = ""
    try:
        for name in imports:
            module, _, member = name.partition(":")
            loaded = importlib.import_module(module)
            member, called, text = member.partition("=")
            if member:
                found = getattr(loaded, member)
                if called:
                    found(text)
        {"import": lambda: None, "lora": lora, "trainer": trainer, "sft": sft}[step]()
    except BaseException as caught:
        if isinstance(caught, KeyboardInterrupt):
            raise
        import traceback

        traceback.print_exc()
        error = words(caught)
    versions = {
        re.sub(r"[-_.]+", "-", d.metadata["Name"]).lower(): d.version
        for d in importlib.metadata.distributions()
        if d.metadata["Name"]
    }
    print(json.dumps({"ok": not error, "error": error, "versions": dict(sorted(versions.items()))}), flush=True)
    return 1 if error else 0


def words(error: BaseException) -> str:
    """The error in one line without paths; of a lazy import's error the part behind its frame."""
    text = str(error).strip()
    for frame in ("(look up to see its traceback):", "because of the following error:"):
        text = text.rpartition(frame)[2].strip()
    text = re.sub(r"\(?/[^\s'\"]*/([^/\s'\")]+)\)?", r"\1", text)
    line = " ".join(text.split())
    return f"{type(error).__name__}: {line[:240]}" if line else type(error).__name__


def model() -> Any:
    """A Llama of some thousand weights, from the same seed each time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


def lora_config() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def has(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def lora() -> None:
    """One forward and backward through adapters."""
    import torch
    from peft import get_peft_model

    adapted = get_peft_model(model(), lora_config())
    tokens = torch.randint(3, VOCABULARY, (2, 16))
    loss = adapted(input_ids=tokens, labels=tokens).loss
    loss.backward()
    if not math.isfinite(float(loss)):
        raise ValueError(f"the loss is {float(loss)}")
    if not any(p.grad is not None and p.grad.abs().sum() > 0 for n, p in adapted.named_parameters() if "lora_" in n):
        raise ValueError("no adapter weight has a gradient")


def moved(before: dict[str, Any], trained: Any, what: str) -> None:
    """Some trainable weight is another one than before."""
    import torch

    now = {n: p.detach() for n, p in trained.named_parameters() if p.requires_grad}
    same = [n for n in now if n in before and torch.equal(before[n], now[n])]
    if not now or len(same) == len(now):
        raise ValueError(f"no {what} moved in training")
    if not all(bool(torch.isfinite(p).all()) for p in now.values()):
        raise ValueError(f"a {what} is not finite after training")


def weights(trained: Any) -> dict[str, Any]:
    return {n: p.detach().clone() for n, p in trained.named_parameters() if p.requires_grad}


def settings(cls: Any, folder: str, **more: Any) -> Any:
    """Training arguments of this release: only what it knows."""
    wanted = {
        "output_dir": folder,
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "bf16": False,
        **more,
    }
    known = inspect.signature(cls.__init__).parameters
    return cls(**{key: value for key, value in wanted.items() if key in known})


def trainer() -> None:
    """Two steps through transformers' Trainer."""
    import torch
    from transformers import Trainer, TrainingArguments

    trained, what = model(), "weight"
    if has("peft"):
        from peft import get_peft_model

        trained, what = get_peft_model(trained, lora_config()), "adapter weight"
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, VOCABULARY, (8, 16), generator=generator).tolist()
    rows: Any = [{"input_ids": row, "attention_mask": [1] * 16, "labels": row} for row in tokens]
    if "datasets" in sys.modules:
        from datasets import Dataset

        rows = Dataset.from_list(rows).with_format("torch")
    else:
        rows = [{key: torch.tensor(value) for key, value in row.items()} for row in rows]
    before = weights(trained)
    with tempfile.TemporaryDirectory() as folder:
        run = Trainer(model=trained, args=settings(TrainingArguments, folder), train_dataset=rows)
        loss = run.train().training_loss
    if not math.isfinite(loss):
        raise ValueError(f"the loss is {loss}")
    moved(before, trained, what)


def tokenizer() -> Any:
    """Words and their numbers, made here."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(VOCABULARY - 4))]
    inner = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def sft() -> None:
    """Two steps through trl's SFTTrainer, with LoRA where peft is there."""
    import trl
    from datasets import Dataset
    from transformers import TrainingArguments

    text = [" ".join(f"w{(i * 7 + k) % 50}" for k in range(12)) for i in range(8)]
    rows = Dataset.from_dict({"text": text})
    more = {"dataset_text_field": "text", "max_seq_length": 32, "max_length": 32, "packing": False}
    config = getattr(trl, "SFTConfig", TrainingArguments)
    known = inspect.signature(trl.SFTTrainer.__init__).parameters
    taken = inspect.signature(config.__init__).parameters
    words_ = tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        arguments: dict[str, Any] = {"model": model(), "args": settings(config, folder, **more), "train_dataset": rows}
        arguments |= {key: more[key] for key in more if key in known and key not in taken and key != "max_length"}
        arguments["processing_class" if "processing_class" in known else "tokenizer"] = words_
        if has("peft"):
            arguments["peft_config"] = lora_config()
        run = trl.SFTTrainer(**arguments)
        before = weights(run.model)
        loss = run.train().training_loss
    if not math.isfinite(loss):
        raise ValueError(f"the loss is {loss}")
    moved(before, run.model, "adapter weight" if has("peft") else "weight")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
