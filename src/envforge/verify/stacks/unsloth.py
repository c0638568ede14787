"""Unsloth: `FastLanguageModel` on the GPU, and on its own CPU backend where there is none.

The CPU backend (seen in 2026.10.9) is chosen by unsloth itself when torch sees no accelerator and no GPU driver is
loaded; UNSLOTH_FORCE_CPU=1 chooses it on a machine with a driver too. It covers text models, LoRA, 4-bit loading
through bitsandbytes and TRL's SFTTrainer; vision models, vLLM and packing are left out. UNSLOTH_ALLOW_CPU=1 is another
thing: it makes unsloth believe in a CUDA device that is not there, and nothing trains with it.
"""

from __future__ import annotations

import importlib
import inspect
import math
import os
from pathlib import Path
from typing import Any

from envforge.verify.policy import TrainingPolicy
from envforge.verify.record import Fail, Recorder, Skip
from envforge.verify.stacks.hf import HfStack, four_bit_obstacle
from envforge.verify.texts import SAMPLES


class UnslothStack(HfStack):
    """Loads, trains and exports through `FastLanguageModel`."""

    name = "unsloth"
    package = "unsloth"
    in_place = False

    def start(self) -> None:
        """Import unsloth before transformers, TRL and PEFT: it changes them as they are loaded."""
        os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", str(Path(self.settings.workdir) / "unsloth_compiled_cache"))
        os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")
        if self.settings.device == "cpu":
            os.environ.setdefault("UNSLOTH_FORCE_CPU", "1")
        importlib.import_module("unsloth")

    def _fast(self) -> Any:
        return importlib.import_module("unsloth").FastLanguageModel

    def self_check(self, recorder: Recorder) -> None:
        """Unsloth has no check of its own to run; what it says about the device it chose is recorded."""
        with recorder.check("unsloth-device") as check:
            chosen = getattr(importlib.import_module("unsloth"), "DEVICE_TYPE", None)
            chosen = chosen or importlib.import_module("unsloth.device_type").DEVICE_TYPE
            check.figure(device_type=str(chosen))
            if self.settings.grade == "static":
                raise Skip(f"unsloth chose {chosen}; the GPU is not here")
            if self.settings.device == "cuda" and chosen not in ("cuda", "hip"):
                raise Fail(
                    f"unsloth chose the device {chosen} though the proof runs on a GPU: training would be on the CPU"
                )
            check.say(f"unsloth chose {chosen}" + (" (its CPU backend)" if chosen == "cpu" else ""))

    def _load(self, folder: str, dtype: Any, four_bit: bool) -> tuple[Any, Any]:
        model, tokenizer = self._fast().from_pretrained(
            model_name=folder,
            max_seq_length=self.settings.max_length,
            dtype=dtype,
            load_in_4bit=four_bit,
            **self.remote(),
        )
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        return model, tokenizer

    def model(self, folder: str | None = None, dtype: Any = None) -> Any:
        """The model in inference mode."""
        model, _ = self._load(folder or self.settings.model, dtype or self.precision().dtype, four_bit=False)
        self._fast().for_inference(model)
        return model

    def four_bit_model(self) -> Any:
        """The model with 4-bit weights, in inference mode.

        Raises:
            Skip: not possible on this device.
        """
        why_not = four_bit_obstacle(self.settings.device)
        if why_not:
            raise Skip(why_not)
        model, _ = self._load(self.settings.model, self.precision().dtype, four_bit=True)
        self._fast().for_inference(model)
        return model

    def training_model(self, policy: TrainingPolicy) -> Any:
        """Unsloth's LoRA with its own checkpointing."""
        model, _ = self._load(self.settings.model, self.precision().dtype, four_bit=False)
        return self._adapters(model, policy)

    def _adapters(self, model: Any, policy: TrainingPolicy) -> Any:
        fast = self._fast()
        usual = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        there = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
        model = fast.get_peft_model(
            model,
            r=policy.lora_r,
            lora_alpha=policy.lora_alpha,
            lora_dropout=policy.lora_dropout,
            target_modules=[name for name in usual if name in there] or None,
            bias="none",
            use_gradient_checkpointing="unsloth" if policy.gradient_checkpointing else False,
            random_state=policy.seed,
        )
        fast.for_training(model)
        return model

    def leave_base(self, model: Any) -> None:
        """Nothing is left: what unsloth makes of a model for training cannot be undone."""

    def with_adapter(self, folder: Path, base: Any) -> Any:
        """Unsloth loads a saved adapter by its own folder and finds the base through it."""
        model, _ = self._load(str(folder), self.precision().dtype, four_bit=False)
        self._fast().for_inference(model)
        return model

    def extra_training(self, recorder: Recorder, model: Any, tokenizer: Any) -> None:
        """One step of TRL's SFTTrainer as unsloth changed it, the way its users train."""
        with recorder.check("sft-trainer") as check:
            trl = importlib.import_module("trl")
            datasets = importlib.import_module("datasets")
            policy = self.policy()
            known = inspect.signature(trl.SFTConfig.__init__).parameters
            wanted = policy.training_arguments(
                str(Path(self.settings.workdir) / "sft"), self.settings.device, gradient_accumulation_steps=1
            )
            wanted.update(max_steps=1, save_strategy="no", logging_steps=1, dataset_text_field="text")
            wanted.update(disable_tqdm=True, packing=False, dataset_num_proc=1)
            wanted["max_length" if "max_length" in known else "max_seq_length"] = policy.max_length
            wanted.pop("remove_unused_columns", None)
            config = trl.SFTConfig(**{key: value for key, value in wanted.items() if key in known})
            takes = inspect.signature(trl.SFTTrainer.__init__).parameters
            own = "tokenizer" if "tokenizer" in takes and "processing_class" not in takes else "processing_class"
            trainer = trl.SFTTrainer(
                model=model,
                args=config,
                train_dataset=datasets.Dataset.from_dict({"text": list(SAMPLES[:2])}),
                **{own: tokenizer},
            )
            outcome = trainer.train()
            check.figure(
                loss=round(float(outcome.training_loss), 5), trl=trl.__version__, steps=trainer.state.global_step
            )
            if not math.isfinite(float(outcome.training_loss)):
                raise Fail(f"the loss of the SFTTrainer is {outcome.training_loss}")
            check.say(f"the SFTTrainer took a step, loss {float(outcome.training_loss):.4f}")

    def own_export(self, model: Any, tokenizer: Any, folder: Path) -> str:
        """`save_pretrained_merged`, the way unsloth's users write a merged model."""
        model.save_pretrained_merged(str(folder), tokenizer, save_method="merged_16bit")
        return "save_pretrained_merged"
