"""Made-up film remarks with a label: data for tests, the smoke run and the first model, written by no one.

A remark has one or two clauses; "not" turns a clause round, and after "but" the last clause decides.
"""

import random
import string
from typing import NamedTuple

from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import WordPiece

THINGS = [
    "film",
    "movie",
    "plot",
    "story",
    "cast",
    "acting",
    "script",
    "music",
    "ending",
    "dialogue",
    "camera",
    "pace",
    "director",
    "humour",
    "idea",
    "scene",
]
GOOD = [
    "good",
    "great",
    "wonderful",
    "charming",
    "clever",
    "moving",
    "funny",
    "brilliant",
    "warm",
    "fresh",
    "lovely",
    "gripping",
    "superb",
    "witty",
]
BAD = [
    "bad",
    "awful",
    "terrible",
    "dull",
    "boring",
    "stupid",
    "weak",
    "clumsy",
    "cold",
    "stale",
    "ugly",
    "tedious",
    "dreadful",
    "flat",
]
DEGREES = ["very", "really", "quite", "rather", "truly", "simply"]
OPENERS = ["the", "this", "its", "that"]
GLUE = [
    "is",
    "was",
    "not",
    "but",
    "and",
    "a",
    "an",
    "i",
    "it",
    "all",
    "in",
    "of",
    "with",
    "found",
    "thought",
    "seems",
    ",",
    ".",
    "!",
]
LABELS = ("negative", "positive")


class Remark(NamedTuple):
    text: str
    label: int


def remarks(number: int, seed: int = 0) -> list[Remark]:
    rng = random.Random(seed)
    return [_remark(rng) for _ in range(number)]


def _remark(rng: random.Random) -> Remark:
    first, label = _clause(rng)
    if rng.random() < 0.5:
        return Remark(f"{first} .", label)
    joint = rng.choice(("but", "and"))
    second, other = _clause(rng)
    while joint == "and" and other != label:
        second, other = _clause(rng)
    return Remark(f"{first} , {joint} {second} .", other)


def _clause(rng: random.Random) -> tuple[str, int]:
    label, negated = rng.randrange(2), rng.random() < 0.3
    words = [rng.choice(OPENERS), rng.choice(THINGS), rng.choice(("is", "was", "seems"))]
    words += ["not"] * negated + [rng.choice(DEGREES)] * (rng.random() < 0.4)
    words.append(rng.choice(GOOD if label else BAD))
    return " ".join(words), label ^ negated


def tokenizer() -> Tokenizer:
    """A WordPiece tokenizer that knows these words and spells all others."""
    words = [*THINGS, *GOOD, *BAD, *DEGREES, *OPENERS, *GLUE]
    letters = [*string.ascii_lowercase, *string.digits, *string.punctuation]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words, *letters]
    pieces += [f"##{letter}" for letter in string.ascii_lowercase + string.digits]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    made = Tokenizer(WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=40))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])],
    )
    made.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    return made
