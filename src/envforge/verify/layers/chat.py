"""Chat: the base model loads and answers, as it is and in 4 bits, before anything is trained."""

from __future__ import annotations

import time
from typing import Any

from envforge.verify import share
from envforge.verify.layers.talk import ask, encode_text, judge_answer, logits_of
from envforge.verify.record import Fail, Recorder, Skip
from envforge.verify.settings import Settings
from envforge.verify.stacks import open_stack
from envforge.verify.stacks.hf import HfStack
from envforge.verify.texts import SAMPLES, first_sentence


def run(settings: Settings, recorder: Recorder) -> None:
    """Load, look at the weights, answer, answer in 4 bits."""
    stack = open_stack(settings)
    model = tokenizer = None
    with recorder.check("load") as check:
        stack.start()
        import torch

        torch.manual_seed(settings.seed)
        start = time.monotonic()
        tokenizer, model = stack.tokenizer(), stack.chat_model()
        parameters = sum(parameter.numel() for parameter in model.parameters())
        precision = stack.precision()
        check.figure(
            load_seconds=round(time.monotonic() - start, 2),
            parameters=parameters,
            model_class=type(model).__name__,
            precision=precision.name,
            precision_reason=precision.reason,
            **memory_figures(settings.device),
        )
        check.say(f"{type(model).__name__}, {parameters / 1e6:.0f} M parameters, {precision.name} on {settings.device}")
    if model is None:
        return
    one_device(recorder, model, settings.device)
    with recorder.check("logits") as check:
        import torch

        logits = logits_of(model, encode_text(tokenizer, first_sentence(SAMPLES[0]), settings.device))
        share.keep("base-logits", logits)
        finite = bool(torch.isfinite(logits).all())
        check.figure(shape=list(logits.shape), largest=round(float(logits.abs().max()), 3))
        if not finite:
            raise Fail("the logits of the base model hold values that are not finite: the weights are damaged")
        check.say("finite")
    with recorder.check("answer") as check:
        start = time.monotonic()
        answer = ask(model, tokenizer, settings.prompt, settings.max_new_tokens, settings.device)
        seconds = time.monotonic() - start
        recorder.note("chat", {"prompt": settings.prompt, "answer": answer.text})
        check.figure(
            prompt_tokens=answer.prompt_tokens,
            new_tokens=answer.new_tokens,
            tokens_per_second=round(answer.new_tokens / max(seconds, 1e-6), 1),
        )
        judge_answer(answer, settings.expect, "the base model")
        check.say(f'"{answer.text}"')
    if recorder.checks[-1].ok:
        with recorder.check("deterministic") as check:
            again = ask(model, tokenizer, settings.prompt, min(4, settings.max_new_tokens), settings.device).text
            if not answer.text.startswith(again):
                raise Fail(f'the same greedy prompt gave "{answer.text[:80]}" and then "{again}"')
            check.say("the same greedy prompt gives the same answer")
    stack.leave_base(model)
    del model
    four_bit(settings, recorder, stack, tokenizer)


def one_device(recorder: Recorder, model: Any, device: str) -> None:
    """Every parameter and buffer lies on the device of the run."""
    with recorder.check("devices") as check:
        odd: list[str] = []
        total = 0
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            total += 1
            if tensor.device.type != device:
                odd.append(f"{name} ({tensor.device})")
        check.figure(tensors=total, odd=odd[:5])
        if odd:
            raise Fail(f"{len(odd)} of {total} tensors are not on {device}: {', '.join(odd[:3])}")
        check.say(f"all {total} tensors on {device}")


def four_bit(settings: Settings, recorder: Recorder, stack: HfStack, tokenizer: Any) -> None:
    """The same chat with the weights quantised to 4 bits."""
    with recorder.check("four-bit") as check:
        if not settings.four_bit:
            raise Skip("switched off")
        model = stack.four_bit_model()
        # Quantised weights are slow on the CPU; a few tokens tell whether they still speak.
        answer = ask(model, tokenizer, settings.prompt, min(8, settings.max_new_tokens), settings.device)
        recorder.note("chat_four_bit", {"prompt": settings.prompt, "answer": answer.text})
        import torch

        linear = [type(module).__name__ for module in model.modules() if isinstance(module, torch.nn.Linear)]
        packed = [name for name in linear if "4bit" in name.lower()]
        kinds = sorted(set(packed))
        check.figure(
            layers=kinds,
            quantised=len(packed),
            linear=len(linear),
            new_tokens=answer.new_tokens,
            **memory_figures(settings.device),
        )
        if not kinds:
            raise Fail("no layer of the model is a 4-bit layer: the quantisation was not applied")
        judge_answer(answer, settings.expect, "the 4-bit model")
        part = f" ({len(packed)} of {len(linear)} layers in 4 bits)" if settings.device == "cpu" else ""
        check.say(f'"{answer.text}"{part}')


def memory_figures(device: str) -> dict[str, float]:
    """Allocated and reserved MiB on a GPU; resident MiB of this process on the CPU."""
    if device == "cuda":
        import torch

        return {
            "allocated_mib": round(torch.cuda.memory_allocated() / 2**20, 1),
            "reserved_mib": round(torch.cuda.memory_reserved() / 2**20, 1),
        }
    try:
        import resource

        return {"peak_resident_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)}
    except ImportError:
        return {}
