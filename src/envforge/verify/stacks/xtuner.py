"""XTuner: its own way to build the model for training, its training entry, and its converters.

What runs where without a GPU (seen with 0.2.0, torch 2.13, transformers 4.48.0):
- chat: done, through transformers.
- 4-bit: not possible, the bitsandbytes that 0.2.0 pins (0.45.0) quantises on CUDA only.
- `SupervisedFinetune`: asks `torch.cpu.is_bf16_supported()`, which torch does not have. The proof answers "no" in its
  own process, and then the model that XTuner builds trains in float32.
- `xtuner train`: not possible, for the same question; and `xtuner.dataset` imports torchvision at once, so it also
  wants a torchvision that was built for this torch.
- `xtuner convert merge`: done; it writes float16.
"""

from __future__ import annotations

import importlib
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from envforge.verify.layers.paths import ADAPTER
from envforge.verify.policy import TrainingPolicy
from envforge.verify.record import Fail, Recorder, Skip
from envforge.verify.stacks.hf import HfStack, dtype_argument, linear_names
from envforge.verify.texts import SAMPLES

LIMIT = 1800.0  # seconds for one of XTuner's own commands


class XtunerStack(HfStack):
    """Transformers for chat, XTuner for training and merging."""

    name = "xtuner"
    package = "xtuner"

    def start(self) -> None:
        """Import xtuner first: it sets up mmengine's registries."""
        importlib.import_module("xtuner")

    def self_check(self, recorder: Recorder) -> None:
        """Whether XTuner's own commands can run on this device."""
        with recorder.check("xtuner-commands") as check:
            obstacle = self.obstacle()
            check.figure(obstacle=obstacle)
            check.say("xtuner train can run here")
            if obstacle:
                check.text = ""
                check.warn(f"xtuner train is not possible here: {obstacle}")

    def obstacle(self) -> str:
        """Why `xtuner train` cannot run here; "" when it can."""
        import torch

        asked = getattr(torch.cpu, "is_bf16_supported", None)
        if self.settings.device == "cpu" and asked in (None, _no):
            return "XTuner asks torch.cpu.is_bf16_supported(), which this torch does not have"
        return dataset_obstacle()

    def training_model(self, policy: TrainingPolicy) -> Any:
        """The language model as XTuner's `SupervisedFinetune` prepares it, adapters included."""
        import torch
        from mmengine.config import ConfigDict
        from peft import LoraConfig
        from transformers import AutoModelForCausalLM
        from xtuner.model import SupervisedFinetune

        # Only the configuration form works: given a model, 0.2.0 looks for a variable that it did not set.
        llm = ConfigDict(
            type=AutoModelForCausalLM.from_pretrained,
            pretrained_model_name_or_path=self.settings.model,
            **dtype_argument(self.precision().dtype),
            **self.remote(),
        )
        lora = {
            "type": LoraConfig,
            "r": policy.lora_r,
            "lora_alpha": policy.lora_alpha,
            "lora_dropout": policy.lora_dropout,
            "target_modules": linear_names_of(self),
            "bias": "none",
            "task_type": "CAUSAL_LM",
        }
        if self.settings.device == "cpu" and not hasattr(torch.cpu, "is_bf16_supported"):
            torch.cpu.is_bf16_supported = _no  # see above; in this process only
        built = SupervisedFinetune(llm=llm, lora=lora, use_activation_checkpointing=policy.gradient_checkpointing)
        return built.llm.to(self.settings.device).train()

    def leave_base(self, model: Any) -> None:
        """Nothing is left: XTuner builds its own model for training, and two copies would lie in memory."""

    def extra_training(self, recorder: Recorder, model: Any, tokenizer: Any) -> None:
        """`xtuner train` on a small configuration, then `pth_to_hf`: each recorded as done, not possible, or failed."""
        work = Path(self.settings.workdir) / "xtuner"
        work.mkdir(exist_ok=True)
        config = work / "proof_config.py"
        with recorder.check("xtuner-train") as check:
            obstacle = self.obstacle()
            if obstacle:
                raise Skip(f"not possible here: {obstacle}")
            config.write_text(self.configuration(work), encoding="utf-8")
            log = run_tool(["xtuner.tools.train", str(config), "--work-dir", str(work / "run")])
            losses = losses_in(log)
            check.figure(losses=losses)
            if not losses:
                raise Fail(f"xtuner train ended without a loss in its log: {log.strip()[-300:]}")
            if not all(math.isfinite(loss) for loss in losses):
                raise Fail(f"xtuner train reported a loss that is not finite: {losses}")
            check.say(f"done: {len(losses)} iterations, loss {losses[0]:.4f} to {losses[-1]:.4f}")
        if recorder.checks[-1].status != "pass":
            return
        with recorder.check("xtuner-convert") as check:
            written = sorted((work / "run").glob("iter_*.pth"))
            if not written:
                raise Fail("xtuner train wrote no iter_*.pth")
            run_tool(["xtuner.tools.model_converters.pth_to_hf", str(config), str(written[-1]), str(work / "hf")])
            files = sorted(path.name for path in (work / "hf").iterdir())
            check.figure(files=files)
            if not any(name.startswith("adapter_model") for name in files):
                raise Fail(f"pth_to_hf wrote no adapter, only {files}")
            check.say("done: the checkpoint became an adapter folder")

    def configuration(self, work: Path) -> str:
        """A configuration in XTuner's format: one pass over a few samples, no quantisation."""
        rows = work / "samples.json"
        pairs = [{"conversation": [{"input": "Go on.", "output": text.partition(". ")[0] + "."}]} for text in SAMPLES]
        rows.write_text(json.dumps(pairs), encoding="utf-8")
        policy, precision = self.policy(), self.precision()
        half = precision.name != "fp32"
        wrapper = (
            f'AmpOptimWrapper, dtype="{"bfloat16" if precision.name == "bf16" else "float16"}", loss_scale="dynamic"'
        )
        return _CONFIGURATION.format(
            model=repr(self.settings.model),
            remote=self.settings.trust_remote_code,
            rows=repr(str(rows)),
            length=min(256, policy.max_length),
            dtype=str(precision.dtype),
            r=policy.lora_r,
            alpha=policy.lora_alpha,
            names=repr(linear_names_of(self)),
            rate=policy.learning_rate,
            norm=policy.max_grad_norm,
            wrapper=wrapper if half else "OptimWrapper",
        )

    def own_export(self, model: Any, tokenizer: Any, folder: Path) -> str:
        """`xtuner convert merge`, the step after which InternLM2 broke; it writes float16."""
        adapter = Path(self.settings.workdir) / ADAPTER
        device = "cuda" if self.settings.device == "cuda" else "cpu"
        tool = "xtuner.tools.model_converters.merge"
        run_tool([tool, self.settings.model, str(adapter), str(folder), "--device", device, "--safe-serialization"])
        return "xtuner convert merge"


def _no() -> bool:
    return False


def linear_names_of(stack: HfStack) -> list[str]:
    """Names of the linear layers, from the configuration alone (weights on no device)."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return linear_names(AutoModelForCausalLM.from_config(stack.config(), **stack.remote()))


def dataset_obstacle() -> str:
    """Why XTuner's data sets cannot be imported; "" when they can."""
    try:
        importlib.import_module("xtuner.dataset")
    except Exception as error:
        return f"xtuner.dataset does not import ({type(error).__name__}: {str(error)[:200]})"
    return ""


def run_tool(arguments: list[str]) -> str:
    """One of XTuner's commands in a process of its own; -> its output.

    Raises:
        Fail: it ended with an error (its last words) or not in time.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise Fail(f"{arguments[0]} did not end within {LIMIT:g} s") from error
    if done.returncode:
        words = [line for line in done.stdout.splitlines() if line.strip()]
        raise Fail(f"{arguments[0]} ended with code {done.returncode}: {words[-1].strip()[:400] if words else ''}")
    return done.stdout


def losses_in(log: str) -> list[float]:
    """The losses that mmengine's logger prints, in order."""
    found = re.findall(r"Iter\(train\).*?\bloss: (\S+)", log)
    return [float(value) for value in found]


_CONFIGURATION = """\
import torch
from datasets import load_dataset
from mmengine.dataset import DefaultSampler
from mmengine.hooks import CheckpointHook, IterTimerHook, LoggerHook, ParamSchedulerHook
from mmengine.optim import AmpOptimWrapper, ConstantLR, OptimWrapper
from peft import LoraConfig
from torch.optim import AdamW
from transformers import AutoModelForCausalLM, AutoTokenizer
from xtuner.dataset import process_hf_dataset
from xtuner.dataset.collate_fns import default_collate_fn
from xtuner.engine.runner import TrainLoop
from xtuner.model import SupervisedFinetune

tokenizer = dict(
    type=AutoTokenizer.from_pretrained, pretrained_model_name_or_path={model}, trust_remote_code={remote},
    padding_side="right")
model = dict(
    type=SupervisedFinetune,
    llm=dict(
        type=AutoModelForCausalLM.from_pretrained, pretrained_model_name_or_path={model}, trust_remote_code={remote},
        torch_dtype={dtype}),
    lora=dict(
        type=LoraConfig, r={r}, lora_alpha={alpha}, lora_dropout=0.0, target_modules={names}, bias="none",
        task_type="CAUSAL_LM"))
train_dataset = dict(
    type=process_hf_dataset, dataset=dict(type=load_dataset, path="json", data_files={rows}), tokenizer=tokenizer,
    max_length={length}, remove_unused_columns=True, shuffle_before_pack=False, pack_to_max_length=False)
train_dataloader = dict(
    batch_size=1, num_workers=0, dataset=train_dataset, sampler=dict(type=DefaultSampler, shuffle=False),
    collate_fn=dict(type=default_collate_fn))
optim_wrapper = dict(
    type={wrapper}, optimizer=dict(type=AdamW, lr={rate}, weight_decay=0.0),
    clip_grad=dict(max_norm={norm}, error_if_nonfinite=False), accumulative_counts=1)
param_scheduler = [dict(type=ConstantLR, factor=1.0, by_epoch=False)]
train_cfg = dict(type=TrainLoop, max_epochs=1)
custom_hooks = []
default_hooks = dict(
    timer=dict(type=IterTimerHook), logger=dict(type=LoggerHook, log_metric_by_epoch=False, interval=1),
    param_scheduler=dict(type=ParamSchedulerHook),
    checkpoint=dict(type=CheckpointHook, by_epoch=False, interval=8, max_keep_ckpts=1))
env_cfg = dict(cudnn_benchmark=False, mp_cfg=dict(mp_start_method="fork", opencv_num_threads=0),
    dist_cfg=dict(backend="gloo"))
visualizer = None
log_level = "INFO"
load_from = None
resume = False
randomness = dict(seed=1, deterministic=False)
log_processor = dict(by_epoch=False)
"""
