"""Text to token ids, and the files that texts come in."""

import csv
import gzip
import io
import json
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from .errors import ArtifactError, ConversionError, DataError, SorbetError, TruncationWarning

Text = str | tuple[str, str]

# ---------------------------------------------------------------------------------------------------------------------
# Tokens
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Padded token ids with their mask and token types, [B, L] each."""

    input_ids: NDArray[np.int64]
    attention_mask: NDArray[np.int64]
    token_type_ids: NDArray[np.int64]


class TextEncoder:
    """The tokenizer of an artefact: texts (or pairs) to ids, cut at the model's positions with a warning."""

    def __init__(self, tokenizer: str | None, max_positions: int):
        if tokenizer is None:
            raise SorbetError("this model carries no tokenizer: give it token ids, or convert it again with one")
        self.max_positions = max_positions
        with _no_panic("the tokenizer cannot be used"):
            self._tokenizer = Tokenizer.from_str(harmless(tokenizer))
            self._tokenizer.no_padding()
            self._tokenizer.enable_truncation(max_positions)

    def ids(self, text: Text) -> tuple[list[int], list[int]]:
        """Token ids and token types of one text or pair."""
        parts = (text,) if isinstance(text, str) else text
        if not isinstance(parts, tuple | list) or len(parts) > 2 or not all(isinstance(part, str) for part in parts):
            raise SorbetError(f"a text is {text!r}: it must be a string, or a pair of strings")
        first, second = (*parts, None)[:2]
        with _no_panic(f"the tokenizer fails on {ascii(text)[:60]}"):
            encoding = self._tokenizer.encode(first, second)
        if encoding.overflowing:
            lost = sum(len(part.ids) for part in encoding.overflowing)
            warnings.warn(
                f"a text of more than {self.max_positions} tokens was cut to the model's {self.max_positions} "
                f"positions (about {lost} tokens lost): {str(text)[:60]!r}…",
                TruncationWarning,
                stacklevel=3,
            )
        return encoding.ids, encoding.type_ids

    def __call__(self, texts: Sequence[Text]) -> Batch:
        return pad([self.ids(text) for text in texts])


@contextmanager
def _no_panic(what: str) -> Iterator[None]:
    """The tokenizers library may panic, which is no Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ArtifactError(f"{what} ({str(error)[:120]})") from None


# Parts of a tokenizer that take time and memory in proportion to their text; regular expressions and replacements
# need not.
HARMLESS = {
    "normalizer": {"BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Strip", "StripAccents"},
    "pre_tokenizer": {"BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "Metaspace", "Punctuation",
                      "UnicodeScripts", "Whitespace", "WhitespaceSplit"},
    "post_processor": {"BertProcessing", "ByteLevel", "RobertaProcessing", "TemplateProcessing"},
    "model": {"BPE", "Unigram", "WordLevel", "WordPiece"},
}  # fmt: skip


def harmless(text: str) -> str:
    """The tokenizer's JSON without padding, truncation and decoder; an error where a part may run away."""
    content = json.loads(text)
    for name, allowed in HARMLESS.items():
        queue = [content.get(name)]
        while queue:
            part = queue.pop()
            if part is None:
                continue
            kind = part.get("type")
            if kind == "Sequence":
                queue += next(value for value in part.values() if isinstance(value, list))
            elif kind not in allowed:
                raise ValueError(f"a {name} of type {kind!r} is none of {', '.join(sorted(allowed))}")
            if len(queue) > 100 or part.get("max_input_chars_per_word", 0) > 1000:
                raise ValueError(f"its {name} is out of all proportion")
    content["padding"] = content["truncation"] = content["decoder"] = None
    return json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def pad(rows: Sequence[tuple[list[int], list[int]]], length: int | None = None) -> Batch:
    length = max([length or 0, *(len(ids) for ids, _ in rows)])
    ids, mask, types = (np.zeros((len(rows), length), np.int64) for _ in range(3))
    for i, (row, row_types) in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)], types[i, : len(row)] = row, 1, row_types
    return Batch(ids, mask, types)


def tokenizer_json(tokenizer: Any, vocab_size: int) -> str:
    """The JSON of a fast tokenizer, without the padding and truncation of its training."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not isinstance(backend, Tokenizer):
        raise ConversionError(
            f"the tokenizer is a {type(tokenizer).__name__}: it must be a fast one "
            "(AutoTokenizer.from_pretrained) or a tokenizers.Tokenizer"
        )
    largest = max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= vocab_size:
        raise ConversionError(
            f"the tokenizer gives ids up to {largest}, the model knows {vocab_size}: they do not match"
        )
    try:
        return harmless(backend.to_str())
    except ValueError as error:
        raise ConversionError(f"the tokenizer cannot go into an artefact: {error}") from None


# ---------------------------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------------------------

TEXT_COLUMNS = (
    ("sentence1", "sentence2"), ("question1", "question2"), ("question", "sentence"), ("premise", "hypothesis"),
    ("text1", "text2"), ("text_a", "text_b"), ("#1 String", "#2 String"),
    ("sentence",), ("text",), ("review",), ("content",),
)  # fmt: skip
MAX_FIELD = 2**24


@dataclass(frozen=True)
class Table:
    """Rows of a file with the line that each begins at; columns by name (or 'text' where there is no header)."""

    path: Path
    columns: tuple[str, ...]
    rows: list[list[str]]
    lines: list[int]

    def column(self, name: str) -> list[str]:
        if name not in self.columns:
            raise DataError(f"{self.path}: no column {name!r}; it has {', '.join(self.columns)}")
        return [row[self.columns.index(name)] for row in self.rows]

    def texts(self) -> list[Text]:
        """One text, or a pair, for each row: by the column names that GLUE and its relatives use."""
        columns = [self.column(name) for name in text_columns(self)]
        return list(columns[0]) if len(columns) == 1 else list(zip(*columns, strict=True))


def text_columns(table: Table) -> tuple[str, ...]:
    for names in TEXT_COLUMNS:
        if all(name in table.columns for name in names):
            return names
    raise DataError(
        f"{table.path}, line 1: no text column among {', '.join(table.columns)}; "
        "name one 'sentence' or 'text' (pairs: 'sentence1' and 'sentence2')"
    )


def read_text(path: str | Path) -> str:
    """The whole file as UTF-8, unzipped if it is gzip."""
    path = Path(path)
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise DataError(f"{path}, line {line}: not UTF-8 (byte 0x{data[error.start]:02x}); save it as UTF-8") from None
    if not text.strip():
        raise DataError(f"{path}: the file is empty")
    return text


def read_table(
    path: str | Path, columns: tuple[str, ...] | None = None, drop_malformed: bool = False
) -> Table:  # fmt: skip
    """A GLUE TSV, a CSV, JSONL or plain lines (one text each), gzip or not, told apart by name and first line.

    `columns` are those of a TSV whose first line has that many fields and no known name: it is a row, not a header.
    `drop_malformed` leaves out TSV rows with a wrong number of fields, with a warning (the official files have some).
    """
    path = Path(path)
    text = read_text(path)
    suffix = (Path(path.stem) if path.suffix == ".gz" else path).suffix.lower()
    lines = text.replace("\r\n", "\n").split("\n")
    if suffix == ".csv":
        return _read_csv(path, text)
    if suffix in (".jsonl", ".ndjson", ".json"):
        return _read_jsonl(path, lines)
    first = lines[0].split("\t")
    if suffix == ".tsv" or (suffix != ".txt" and _is_header(first)):
        headless = columns is not None and not _is_header(first) and len(first) == len(columns)
        return _read_tsv(path, lines, columns if headless else None, drop_malformed)
    kept = [(i + 1, line) for i, line in enumerate(lines) if line.strip()]
    return Table(path, ("text",), [[line] for _, line in kept], [i for i, _ in kept])


def _is_header(fields: list[str]) -> bool:
    return any(all(name in fields for name in names) for names in TEXT_COLUMNS)


def _read_tsv(path: Path, lines: list[str], columns: tuple[str, ...] | None, drop_malformed: bool) -> Table:
    """GLUE's TSV: tabs, no quoting."""
    start = 0 if columns else 1
    columns = columns or tuple(lines[0].split("\t"))
    rows, numbers, malformed = [], [], []
    for i, line in enumerate(lines[start:], start=start + 1):
        if not line.strip():
            continue
        row = line.split("\t")
        if len(row) == len(columns):
            rows.append(row)
            numbers.append(i)
        elif drop_malformed:
            malformed.append(i)
        else:
            raise DataError(f"{path}, line {i}: {len(row)} fields where the header has {len(columns)}")
    if malformed:
        where = ", ".join(map(str, malformed[:5])) + (", …" if len(malformed) > 5 else "")
        warnings.warn(f"{path}: {len(malformed)} malformed rows left out (line {where})", stacklevel=3)
    return _table(path, columns, rows, numbers)


def _read_csv(path: Path, text: str) -> Table:
    csv.field_size_limit(MAX_FIELD)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows, numbers, start = [], [], 1
    try:
        columns = tuple(next(reader))
        start = reader.line_num + 1
        for row in reader:
            if row:
                if len(row) != len(columns):
                    raise DataError(f"{path}, line {start}: {len(row)} fields where the header has {len(columns)}")
                rows.append(row)
                numbers.append(start)
            start = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{path}, line {start}: {error}; check its quotes") from None
    return _table(path, columns, rows, numbers)


def _read_jsonl(path: Path, lines: list[str]) -> Table:
    """One JSON object a line, all with the same keys."""
    columns: tuple[str, ...] = ()
    rows, numbers = [], []
    for i, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise DataError(f"{path}, line {i}: not JSON; each line must be one object") from None
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {i}: {type(row).__name__} where an object must stand")
        columns = columns or tuple(row)
        if set(columns) - row.keys():
            missing = next(name for name in columns if name not in row)
            raise DataError(f"{path}, line {i}: {missing!r} is missing; the first row has it")
        rows.append([_json_field(row[name]) for name in columns])
        numbers.append(i)
    return _table(path, columns, rows, numbers)


def _json_field(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)


def _table(path: Path, columns: tuple[str, ...], rows: list[list[str]], numbers: list[int]) -> Table:
    if not rows:
        raise DataError(f"{path}: it has a header and no rows")
    for name in columns:
        if columns.count(name) > 1:
            raise DataError(f"{path}, line 1: column {name!r} stands there twice")
    return Table(path, columns, rows, numbers)
