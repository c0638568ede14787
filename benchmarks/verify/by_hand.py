"""What someone writes by hand to see whether an environment works: load, chat, a few LoRA steps.

    python by_hand.py MODEL [STEPS]

The same prompt, samples, adapters, precision and steps as the proof takes by default on a CPU, with nothing checked.
Knows nothing of envforge. Prints one line of JSON: seconds since the start of the process, by phase.
"""

from __future__ import annotations

import json
import sys
import time

STARTED = time.monotonic()


def main(model_folder: str, steps: int) -> None:
    """Load, generate, train."""
    seconds: dict[str, float] = {}

    def mark(name: str) -> None:
        seconds[name] = round(time.monotonic() - STARTED, 2)

    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    mark("import")
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    mark("load")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], tokenize=False, add_generation_prompt=True
    )
    batch = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    out = model.generate(**batch, max_new_tokens=32, do_sample=False)
    answer = tokenizer.decode(out[0][batch["input_ids"].shape[1] :], skip_special_tokens=True)
    mark("chat")
    model.config.use_cache = False
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    torch.manual_seed(3407)
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=names, task_type="CAUSAL_LM"))
    model.train()
    texts = [
        "A driver that is older than the toolkit can still run many programs, as long as both belong to the same "
        "family.",
        "When a loss turns into a number that is not a number, the first thing to look at is the batch that came "
        "before.",
    ]
    batches = []
    for sample in texts:
        row = tokenizer(sample, truncation=True, max_length=1024, return_tensors="pt", padding=True,
                        pad_to_multiple_of=8)  # fmt: skip
        labels = row["input_ids"].masked_fill(row["attention_mask"] == 0, -100)
        batches.append({**row, "labels": labels})
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=2e-4, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        total = 0.0
        for row in batches:
            loss = model(**row).loss / len(batches)
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(round(total, 4))
    mark("train")
    print(json.dumps({"seconds": seconds, "answer": answer, "losses": losses}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 8)
