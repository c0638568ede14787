"""Data: does every id have a row, every position a place, and does nothing reach the model that it chokes on?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from envforge.verify.policy import IGNORE, WARN_LENGTH, SafeCollator, length_report
from envforge.verify.record import Fail, Recorder, Skip
from envforge.verify.settings import Settings
from envforge.verify.stacks import open_stack
from envforge.verify.stacks.hf import HfStack
from envforge.verify.texts import SAMPLES, SHORT, long_text
from envforge.verify.weights import embedding_rows


def run(settings: Settings, recorder: Recorder) -> None:
    """All checks of the layer; without a tokenizer and a configuration the rest is left out."""
    stack = open_stack(settings)
    tokenizer = config = None
    with recorder.check("tokenizer") as check:
        tokenizer, config = stack.tokenizer(), stack.config()
        check.figure(kind=type(tokenizer).__name__, tokens=len(tokenizer), chat_template=bool(template(tokenizer)))
        check.say(f"{type(tokenizer).__name__} with {len(tokenizer)} tokens")
        if not template(tokenizer):
            check.warn("it has no chat template: the chat layer prompts with plain text")
    if tokenizer is None or config is None:
        return
    limit = max_positions(config)
    rows = embedding_rows(settings.model) or int(text_config(config).vocab_size)
    vocabulary(recorder, tokenizer, config, rows)
    collator = SafeCollator(tokenizer, stack.policy())
    cap(settings, recorder, limit)
    truncation(recorder, tokenizer, collator, settings.max_length)
    batch(recorder, collator, rows, limit)
    refuses(recorder, collator)
    if settings.data:
        own_data(settings, recorder, stack, tokenizer, limit)


def template(tokenizer: Any) -> str:
    """The chat template, "" when there is none."""
    return str(getattr(tokenizer, "chat_template", None) or "")


def text_config(config: Any) -> Any:
    """The part of a configuration that describes the language model."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def max_positions(config: Any) -> int | None:
    """Largest number of positions, None when the model declares none."""
    inner = text_config(config)
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        value = getattr(inner, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def vocabulary(recorder: Recorder, tokenizer: Any, config: Any, rows: int) -> None:
    """Every id that the tokenizer can give has a row in the embedding table."""
    with recorder.check("vocabulary") as check:
        declared = int(text_config(config).vocab_size)
        highest = max(tokenizer.get_vocab().values())
        specials = {
            name: value
            for name in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")
            if isinstance(value := getattr(tokenizer, name, None), int)
        }
        check.figure(rows=rows, declared=declared, highest_id=highest, **specials)
        if highest >= rows:
            raise Fail(
                f"the tokenizer gives ids up to {highest}, the embedding table has {rows} rows: training would end in "
                "a device-side assert; use the tokenizer of this model or resize the embeddings"
            )
        if declared != rows:
            raise Fail(
                f"config.json says vocab_size {declared}, the weights hold {rows} rows: they do not belong together"
            )
        check.say(f"highest id {highest} of {rows} rows")


def cap(settings: Settings, recorder: Recorder, limit: int | None) -> None:
    """The cap lies within the model's positions and within reason."""
    with recorder.check("cap") as check:
        check.figure(max_length=settings.max_length, max_positions=limit)
        if limit is not None and settings.max_length > limit:
            raise Fail(
                f"max_length {settings.max_length} is above the model's {limit} positions: indexing of the rotary "
                f"table would go out of bounds; set it to {limit} or less"
            )
        check.say(f"max_length {settings.max_length} of {limit or 'unknown'} positions")
        if settings.max_length > WARN_LENGTH:
            check.warn(
                f"above {WARN_LENGTH}: activations grow with the length, look at the 95th percentile of your data"
            )


def truncation(recorder: Recorder, tokenizer: Any, collator: SafeCollator, max_length: int) -> None:
    """A text of at least 5,000 tokens comes out cut at the cap."""
    with recorder.check("truncation") as check:
        text = long_text(max(5000, 2 * max_length))
        whole = len(tokenizer(text, truncation=False)["input_ids"])
        made = collator([text])
        width = int(made["input_ids"].shape[1])
        kept = int(made["attention_mask"].sum())
        check.figure(tokens=whole, after=kept, width=width, cap=max_length)
        if whole < 5000:
            raise Fail(f"the test text has {whole} tokens, fewer than the 5,000 that this check needs")
        multiple = collator.policy.pad_to_multiple_of
        if kept > max_length or width > (max_length + multiple - 1) // multiple * multiple:
            raise Fail(f"a text of {whole} tokens came out with {kept} tokens (width {width}), the cap is {max_length}")
        if kept < max_length:
            raise Fail(f"a text of {whole} tokens came out with {kept} tokens only, the cap is {max_length}")
        check.say(f"{whole} tokens came out as {kept}")


def batch(recorder: Recorder, collator: SafeCollator, rows: int, limit: int | None) -> None:
    """One padded batch: ids, positions, labels, types, device."""
    with recorder.check("batch") as check:
        made = collator([*SAMPLES[:3], SHORT])
        inspect_batch(made, rows, limit, collator.policy.pad_to_multiple_of)
        ids, mask = made["input_ids"], made["attention_mask"]
        check.figure(shape=list(ids.shape), padding=int((mask == 0).sum()), highest_id=int(ids.max()))
        check.say(f"{ids.shape[0]} samples x {ids.shape[1]}, {int((mask == 0).sum())} of it padding and masked")


def inspect_batch(made: dict[str, Any], rows: int, limit: int | None, multiple: int) -> None:
    """The rules for a batch.

    Raises:
        Fail: the first rule that does not hold.
    """
    import torch

    ids, mask, labels = made["input_ids"], made["attention_mask"], made["labels"]
    for name, tensor in made.items():
        if tensor.dtype != torch.int64:
            raise Fail(f"{name} is {tensor.dtype}, an embedding needs int64")
        if tensor.shape != ids.shape:
            raise Fail(f"{name} has shape {tuple(tensor.shape)}, input_ids {tuple(ids.shape)}")
    devices = {name: str(tensor.device) for name, tensor in made.items()}
    if len(set(devices.values())) > 1:
        raise Fail(f"the batch lies on several devices: {devices}")
    if int(ids.min()) < 0 or int(ids.max()) >= rows:
        raise Fail(f"token ids run from {int(ids.min())} to {int(ids.max())}, the embedding has rows 0 to {rows - 1}")
    width = int(ids.shape[1])
    if width % multiple:
        raise Fail(f"the batch is {width} wide, not a multiple of {multiple}")
    if limit is not None and width > limit:
        raise Fail(f"positions run to {width - 1}, the model has {limit}")
    padding = mask == 0
    if bool((labels[padding] != IGNORE).any()):
        raise Fail(
            f"{int((labels[padding] != IGNORE).sum())} labels on padding are not {IGNORE}: padding would be learned"
        )
    if bool((labels[~padding] != ids[~padding]).any()):
        raise Fail("labels of the text are not the (cut) ids themselves")


def refuses(recorder: Recorder, collator: SafeCollator) -> None:
    """What is no tokenized input is refused with a sentence, before the model sees it."""
    with recorder.check("refuses") as check:
        wrong: dict[str, Any] = {
            "text in input_ids": {"input_ids": "text"},
            "nested list": {"input_ids": [[1, 2], [3]]},
            "floating ids": {"input_ids": [1.0, 2.0]},
            "empty sample": {"input_ids": []},
        }
        for name, sample in wrong.items():
            try:
                collator([sample])
            except (TypeError, ValueError):
                continue
            raise Fail(f"the collator let through: {name}")
        check.figure(refused=sorted(wrong))
        check.say(f"{len(wrong)} kinds of wrong input refused")


def own_data(settings: Settings, recorder: Recorder, stack: HfStack, tokenizer: Any, limit: int | None) -> None:
    """The length report of the user's own data set."""
    with recorder.check("own-data") as check:
        path = Path(str(settings.data))
        lengths = []
        for text in read_texts(path, tokenizer):
            lengths.append(len(tokenizer(text, truncation=False)["input_ids"]))
        if not lengths:
            raise Fail(f"{path.name} holds no sample")
        report = length_report(lengths, cap=settings.max_length, limit=limit)
        recorder.note("lengths", report.to_json())
        check.figure(**report.to_json())
        check.say(
            f"{report.count} samples: median {report.median}, 95th percentile {report.p95}, longest {report.longest} "
            f"tokens; suggested max_length {report.suggested}"
        )
        if report.over_cap:
            check.warn(f"{report.over_cap} are longer than {settings.max_length} and would be cut")
        if report.short:
            check.warn(f"{report.short} have fewer than 10 tokens: such samples make the loss jump, leave them out")
        if report.suggested > WARN_LENGTH:
            check.warn(f"the suggested cap is above {WARN_LENGTH}")


def read_texts(path: Path, tokenizer: Any) -> Iterator[str]:
    """Texts of a .jsonl file (a field `text`, `messages`, or the strings of each row joined) or of a plain file
    (paragraphs between empty lines).

    Raises:
        Skip: the file is not there.
        Fail: a line is not JSON; its number.
    """
    if not path.is_file():
        raise Skip(f"{path} is not there")
    with path.open(encoding="utf-8", errors="replace") as file:
        if path.suffix in (".jsonl", ".json"):
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _row_text(line, number, path, tokenizer)
            return
        paragraph: list[str] = []
        for line in file:
            if line.strip():
                paragraph.append(line)
            elif paragraph:
                yield "".join(paragraph)
                paragraph = []
        if paragraph:
            yield "".join(paragraph)


def _row_text(line: str, number: int, path: Path, tokenizer: Any) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise Fail(f"{path.name}, line {number}: not JSON ({error})") from error
    if isinstance(row, str):
        return row
    if not isinstance(row, dict):
        raise Fail(f"{path.name}, line {number}: expected an object or a string, found {type(row).__name__}")
    if isinstance(row.get("text"), str):
        return str(row["text"])
    messages = row.get("messages") or row.get("conversations")
    if (
        isinstance(messages, list)
        and template(tokenizer)
        and all(isinstance(m, dict) and "role" in m for m in messages)
    ):
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    return "\n".join(str(value) for value in row.values() if isinstance(value, (str, list)))
