"""Transformers and PEFT: the plain stack, and the base of the other adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from envforge.verify import share
from envforge.verify.policy import Precision, TrainingPolicy
from envforge.verify.record import Recorder, Skip
from envforge.verify.settings import Settings

CPU_BLOCKS = 4  # quantised in a 4-bit model on the CPU


def version_of(package: str) -> tuple[int, ...]:
    """Leading numbers of an installed version, () when it is not installed."""
    from importlib import metadata

    try:
        text = metadata.version(package)
    except metadata.PackageNotFoundError:
        return ()
    numbers = []
    for part in text.split("+")[0].split("."):
        digits = "".join(char for char in part if char.isdigit())
        if not digits or not part[0].isdigit():
            break
        numbers.append(int(digits))
    return tuple(numbers)


def dtype_argument(dtype: Any) -> dict[str, Any]:
    """`torch_dtype` became `dtype` in transformers 4.56."""
    return {"dtype" if version_of("transformers") >= (4, 56) else "torch_dtype": dtype}


class HfStack:
    """Loads with the auto classes, trains with PEFT's LoRA, merges with `merge_and_unload`."""

    name = "transformers"
    package = "transformers"
    in_place = True  # `with_adapter` puts the adapter on the base it is given

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def start(self) -> None:
        """Import what must come before everything else; each layer calls it inside its first check."""

    def self_check(self, recorder: Recorder) -> None:
        """The framework's own check, where it has one."""

    def policy(self) -> TrainingPolicy:
        """The training policy with what the run was asked for."""
        settings = self.settings
        return TrainingPolicy(
            max_length=settings.max_length,
            batch_size=settings.batch_size,
            accumulation=settings.micro_batches,
            learning_rate=settings.learning_rate,
            max_grad_norm=settings.max_grad_norm,
            precision=settings.precision,
            seed=settings.seed,
        )

    def precision(self) -> Precision:
        """Precision on the device of the run."""
        return self.policy().precision_for(self.settings.device)

    def remote(self) -> dict[str, Any]:
        """The argument that lets a model's own code run, only where that was allowed."""
        return {"trust_remote_code": True} if self.settings.trust_remote_code else {}

    def tokenizer(self, folder: str | None = None) -> Any:
        """The real tokenizer, with a padding token."""
        kept = share.take("tokenizer") if folder is None else None
        if kept is None:
            from transformers import AutoTokenizer

            kept = AutoTokenizer.from_pretrained(folder or self.settings.model, **self.remote())
            if kept.pad_token is None:
                kept.pad_token = kept.eos_token
        if folder is None:
            share.keep("tokenizer", kept)  # no layer changes it
        return kept

    def config(self, folder: str | None = None) -> Any:
        """The model's configuration."""
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(folder or self.settings.model, **self.remote())

    def model(self, folder: str | None = None, dtype: Any = None) -> Any:
        """The model on the device of the run, in the precision of the run unless `dtype` is given."""
        kept = share.take("base") if folder is None and dtype is None else None
        if kept is not None:
            return kept
        return self.as_it_is_on_disk(folder or self.settings.model, dtype or self.precision().dtype)

    def as_it_is_on_disk(self, folder: str, dtype: Any) -> Any:
        """Load a model folder."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, **dtype_argument(dtype), **self.remote())
        return model.to(self.settings.device).eval()

    def chat_model(self) -> Any:
        """The base model as one would chat with it."""
        return self.model()

    def leave_base(self, model: Any) -> None:
        """Leave the base of a model that a layer is done with to the next layer, as it was when it was loaded."""
        share.keep("base", as_loaded(model))

    def four_bit_model(self) -> Any:
        """The base model quantised to 4 bits while loading.

        Raises:
            Skip: bitsandbytes is absent or cannot do it on this device; the reason.
        """
        import torch

        why_not = four_bit_obstacle(self.settings.device)
        if why_not:
            raise Skip(why_not)
        from transformers import AutoModelForCausalLM, BitsAndBytesConfig

        quantised = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=self.precision().dtype,
            llm_int8_skip_modules=self.left_whole(),
        )
        device = torch.device(self.settings.device, 0) if self.settings.device == "cuda" else "cpu"
        return AutoModelForCausalLM.from_pretrained(
            self.settings.model,
            quantization_config=quantised,
            device_map={"": device},
            **dtype_argument(self.precision().dtype),
            **self.remote(),
        ).eval()

    def left_whole(self) -> list[str] | None:
        """Blocks that stay as they are: on the CPU, where quantising is slow, all but the first; None on a GPU."""
        layers = getattr(self.config(), "num_hidden_layers", 0)
        if self.settings.device == "cuda" or layers <= CPU_BLOCKS:
            return None
        return ["lm_head", *(f"model.layers.{number}" for number in range(CPU_BLOCKS, layers))]

    def training_model(self, policy: TrainingPolicy) -> Any:
        """The base model with fresh LoRA adapters, in training mode, checkpointing on where it can be."""
        import torch
        from peft import LoraConfig, get_peft_model

        model = self.model()
        model.config.use_cache = False
        if policy.gradient_checkpointing:
            enable_checkpointing(model)
        config = LoraConfig(
            r=policy.lora_r,
            lora_alpha=policy.lora_alpha,
            lora_dropout=policy.lora_dropout,
            target_modules=linear_names(model),
            task_type="CAUSAL_LM",
        )
        torch.manual_seed(policy.seed)  # the same adapters whether the model was loaded now or earlier
        model = get_peft_model(model, config)
        for _, parameter in model.named_parameters():
            if parameter.requires_grad:
                # PEFT of old leaves adapters in the base's half precision, which a GradScaler refuses.
                parameter.data = parameter.data.float()
        return model.train()

    def save_adapter(self, model: Any, tokenizer: Any, folder: Path) -> None:
        """Write the adapter alone."""
        model.save_pretrained(str(folder))

    def with_adapter(self, folder: Path, base: Any) -> Any:
        """The base model with a saved adapter on it; `base` is changed by that."""
        from peft import PeftModel

        return PeftModel.from_pretrained(base, str(folder)).to(self.settings.device).eval()

    def merge(self, model: Any) -> Any:
        """Fold the adapter into the weights."""
        return model.merge_and_unload()

    def save_merged(self, merged: Any, tokenizer: Any, folder: Path) -> None:
        """Write a folder that stands alone."""
        merged.save_pretrained(str(folder), safe_serialization=True)
        tokenizer.save_pretrained(str(folder))

    def own_export(self, model: Any, tokenizer: Any, folder: Path) -> str:
        """Write a merged model the framework's own way; -> the name of that way, "" when there is none."""
        return ""

    def extra_training(self, recorder: Recorder, model: Any, tokenizer: Any) -> None:
        """The framework's own way to train, beyond the step-by-step loop of the proof."""
        from envforge.verify.layers.trainer import trainer_roundtrip

        trainer_roundtrip(self, recorder, model, tokenizer)


def as_loaded(model: Any) -> Any:
    """The base model alone, without adapters and checkpointing, ready to generate."""
    if hasattr(model, "unload"):  # a PEFT model
        model = model.unload()
        if getattr(model, "is_gradient_checkpointing", False):
            model.gradient_checkpointing_disable()
        model.disable_input_require_grads()
        model.config.use_cache = True
    return model.eval()


def enable_checkpointing(model: Any) -> None:
    """Gradient checkpointing, non-reentrant where the release can."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        return
    try:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    except TypeError:  # transformers before 4.35
        model.gradient_checkpointing_enable()
    # Frozen embeddings give activations without gradients, and then nothing would reach the adapters.
    model.enable_input_require_grads()


def linear_names(model: Any) -> list[str]:
    """Names (last part) of the linear layers inside the blocks; the output head stays as it is."""
    import torch

    head = model.get_output_embeddings()
    names = {
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    }
    return sorted(names)


def four_bit_obstacle(device: str) -> str:
    """Why 4-bit cannot be done on this device; "" when it can."""
    version = version_of("bitsandbytes")
    if not version:
        return "bitsandbytes is not installed"
    if device != "cuda" and version < (0, 46):
        return "bitsandbytes before 0.46 quantises on CUDA only"
    return ""
