"""Small texts for the data and training layers, written for this project."""

from __future__ import annotations

# Short, plain and of one register, so that a few steps lower the loss for any language model.
SAMPLES = (
    "A driver that is older than the toolkit can still run many programs, as long as both belong to the same family. "
    "The machine code for the card must be in the package, because nothing is compiled on the way.",
    "When a loss turns into a number that is not a number, the first thing to look at is the batch that came before. "
    "Often it holds an empty line, or a line of a thousand copies of one sign.",
    "The small model reads a sentence, guesses the next word, and is told how wrong it was. After eight such rounds "
    "over the same page it is a little less surprised by that page than it was before.",
    "An adapter is a pair of thin matrices beside a thick one. The second of them starts at zero, so in the first "
    "step only that one moves; from the next step on, both of them do.",
    "Padding is not text. The model may see it, but it must never be asked to predict it, and that is why the labels "
    "of the padding carry the one value that the loss function leaves out.",
    "A folder with a lock file in it can be built again on another day, on another machine, by another person, and "
    "it will hold the same bytes. A folder without one is a memory of a good afternoon.",
    "Two processes that share a card do not see each other's memory, but they do share what is left of it. The one "
    "that asks last is told that there is none, and its log never names the other.",
    "Nobody reads a table of versions for pleasure. So the table should be read by a program, once, and the person "
    "should be told in one sentence which two lines of it cannot both be true.",
)

SHORT = "Yes."


def first_sentence(text: str) -> str:
    """A sample cut to what a CPU gets through quickly."""
    return text.partition(". ")[0] + "."


def first_words(text: str, count: int = 10) -> str:
    """The start of a sample, where it only matters that a step is taken."""
    return " ".join(text.split()[:count])


_LONG = (
    "On day {n} the keeper of the lighthouse wrote down the wind, the height of the water and the ships that passed; "
    "there were {m} of them, and none came close to the rocks. "
)


def long_text(words: int = 8000) -> str:
    """An article of at least `words` words, far beyond any cap: it must come out of the collator cut."""
    parts = []
    total, day = 0, 1
    while total < words:
        sentence = _LONG.format(n=day, m=(day * 7) % 23)
        parts.append(sentence)
        total += len(sentence.split())
        day += 1
    return "".join(parts)
