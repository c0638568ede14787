"""One short chat, the same way in every layer: through the chat template, greedy, with finite logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from envforge.verify.layers.data import max_positions, template
from envforge.verify.record import Fail


@dataclass(frozen=True)
class Answer:
    """The text that came back, and how many tokens went in and out."""

    text: str
    prompt_tokens: int
    new_tokens: int


def encode_prompt(tokenizer: Any, prompt: str, device: str) -> dict[str, Any]:
    """The prompt as a batch of one, through the chat template where there is one."""
    if template(tokenizer):
        # As text first: what apply_chat_template returns when it tokenizes differs between releases.
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        encoded = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    else:
        encoded = tokenizer(prompt, return_tensors="pt")
    return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}


def encode_text(tokenizer: Any, text: str, device: str) -> dict[str, Any]:
    """A text as it is, as a batch of one."""
    encoded = tokenizer(text, return_tensors="pt")
    return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}


def ask(model: Any, tokenizer: Any, prompt: str, max_new_tokens: int, device: str) -> Answer:
    """A greedy answer.

    Raises:
        Fail: the model cannot generate, or positions would leave the model's range.
    """
    import torch

    if not hasattr(model, "generate"):
        raise Fail(
            f"{type(model).__name__} has no generate(): remote code of a model written for transformers before 4.50 "
            "relies on PreTrainedModel bringing it; pin transformers below 4.50"
        )
    batch = encode_prompt(tokenizer, prompt, device)
    length = int(batch["input_ids"].shape[1])
    limit = max_positions(model.config)
    if limit is not None and length + max_new_tokens > limit:
        raise Fail(f"prompt ({length}) and answer ({max_new_tokens}) need more than the model's {limit} positions")
    with torch.no_grad():
        out = model.generate(
            **batch,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            use_cache=True,
            pad_token_id=tokenizer.pad_token_id,
        )
    new = out[0][length:]
    text = tokenizer.decode(new, skip_special_tokens=True).strip()
    return Answer(text=text, prompt_tokens=length, new_tokens=int(new.shape[0]))


def logits_of(model: Any, batch: dict[str, Any]) -> Any:
    """Logits of a batch in float32 on the CPU, shape (batch, length, vocabulary)."""
    import torch

    with torch.no_grad():
        return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.float().cpu()


def judge_answer(answer: Answer, expect: str, who: str) -> None:
    """Raises:
    Fail: the answer is empty, or lacks the word that this model is known to say.
    """
    if not answer.text:
        raise Fail(f"{who} answered nothing ({answer.new_tokens} tokens, all of them special)")
    if expect and expect.lower() not in answer.text.lower():
        raise Fail(f'{who} answered "{answer.text[:200]}", without the expected "{expect}"')
