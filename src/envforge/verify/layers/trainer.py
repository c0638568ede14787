"""The framework's Trainer: one step, a checkpoint, and one more step from that checkpoint.

The loop of the training layer shows that the model trains. This shows that the Trainer of this set of releases does
(it leans on accelerate's internals), and that its checkpoint can be read back (releases refuse torch.load under an
older torch).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envforge.verify.policy import SafeCollator
from envforge.verify.record import Fail, Recorder, Skip
from envforge.verify.texts import SAMPLES, first_words

if TYPE_CHECKING:
    from envforge.verify.stacks.hf import HfStack


def trainer_roundtrip(stack: HfStack, recorder: Recorder, model: Any, tokenizer: Any) -> None:
    """Two checks: `trainer` takes a step, `resume` continues from its checkpoint."""
    from envforge.verify.stacks.hf import version_of

    folder = Path(stack.settings.workdir) / "trainer"
    trainer: Any = None
    with recorder.check("trainer") as check:
        if not version_of("accelerate"):
            raise Skip("accelerate is not installed: the Trainer needs it")
        trainer = make_trainer(stack, model, tokenizer, folder, steps=1)
        outcome = trainer.train()
        check.figure(loss=round(float(outcome.training_loss), 5), steps=int(trainer.state.global_step))
        if not math.isfinite(float(outcome.training_loss)):
            raise Fail(f"the Trainer's loss is {outcome.training_loss}")
        check.say(f"the Trainer took a step, loss {float(outcome.training_loss):.4f}")
    if trainer is None or recorder.checks[-1].status != "pass":
        return
    with recorder.check("resume") as check:
        checkpoint = folder / "checkpoint-1"
        if not checkpoint.is_dir():
            raise Fail(f"the Trainer wrote no checkpoint-1, only {sorted(path.name for path in folder.iterdir())}")
        again = make_trainer(stack, model, tokenizer, folder, steps=2)
        again.train(resume_from_checkpoint=str(checkpoint))
        check.figure(steps=int(again.state.global_step), files=sorted(path.name for path in checkpoint.iterdir()))
        if int(again.state.global_step) != 2:
            raise Fail(f"resumed from step 1, but ended at step {again.state.global_step} instead of 2")
        check.say("resumed from its checkpoint and took another step")


def make_trainer(stack: HfStack, model: Any, tokenizer: Any, folder: Path, steps: int) -> Any:
    """A Trainer over two short samples with the proof's policy."""
    import transformers

    policy = stack.policy()
    collator = SafeCollator(tokenizer, policy)
    texts = [first_words(text) for text in SAMPLES[:2]]
    rows = [{"input_ids": collator.encode(text)} for text in texts]
    arguments = policy.training_arguments(
        str(folder),
        stack.settings.device,
        max_steps=steps,
        save_steps=1,
        save_strategy="steps",
        gradient_accumulation_steps=1,
        logging_steps=1,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    return transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(**arguments),
        train_dataset=rows,
        data_collator=collator,
    )
