"""Text to token ids, and the files that texts come in."""

import csv
import gzip
import io
import json
import warnings
from collections.abc import Sequence
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
        try:
            self._tokenizer = Tokenizer.from_str(tokenizer)
            self._tokenizer.no_padding()
            self._tokenizer.enable_truncation(max_positions)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the tokenizers library may panic, which is no Exception
            raise ArtifactError(f"the tokenizer cannot be used ({str(error)[:120]})") from None

    def ids(self, text: Text) -> tuple[list[int], list[int]]:
        """Token ids and token types of one text or pair."""
        parts = (text,) if isinstance(text, str) else text
        if not isinstance(parts, tuple | list) or len(parts) > 2 or not all(isinstance(part, str) for part in parts):
            raise SorbetError(f"a text is {text!r}: it must be a string, or a pair of strings")
        first, second = (*parts, None)[:2]
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
    content = json.loads(backend.to_str())
    content["padding"] = content["truncation"] = None
    return json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


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
        for names in TEXT_COLUMNS:
            if all(name in self.columns for name in names):
                columns = [self.column(name) for name in names]
                return list(columns[0]) if len(names) == 1 else list(zip(*columns, strict=True))
        raise DataError(
            f"{self.path}, line 1: no text column among {', '.join(self.columns)}; "
            "name one 'sentence' or 'text' (pairs: 'sentence1' and 'sentence2')"
        )


def read_text(path: str | Path) -> str:
    """The whole file as UTF-8, unzipped if it is gzip."""
    path = Path(path)
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except (OSError, EOFError, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise DataError(f"{path}, line {line}: not UTF-8 (byte 0x{data[error.start]:02x}); save it as UTF-8") from None
    if not text.strip():
        raise DataError(f"{path}: the file is empty")
    return text


def read_table(path: str | Path) -> Table:
    """A GLUE TSV, a CSV or plain lines (one text each), gzip or not, told apart by the name and the first line."""
    path = Path(path)
    text = read_text(path)
    suffix = (Path(path.stem) if path.suffix == ".gz" else path).suffix.lower()
    lines = text.replace("\r\n", "\n").split("\n")
    if suffix == ".csv":
        return _read_csv(path, text)
    if suffix == ".tsv" or (suffix != ".txt" and _is_header(lines[0].split("\t"))):
        return _read_tsv(path, lines)
    kept = [(i + 1, line) for i, line in enumerate(lines) if line.strip()]
    return Table(path, ("text",), [[line] for _, line in kept], [i for i, _ in kept])


def _is_header(fields: list[str]) -> bool:
    return any(all(name in fields for name in names) for names in TEXT_COLUMNS)


def _read_tsv(path: Path, lines: list[str]) -> Table:
    """GLUE's TSV: tabs, no quoting."""
    columns = tuple(lines[0].split("\t"))
    rows, numbers = [], []
    for i, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        row = line.split("\t")
        if len(row) != len(columns):
            raise DataError(f"{path}, line {i}: {len(row)} fields where the header has {len(columns)}")
        rows.append(row)
        numbers.append(i)
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


def _table(path: Path, columns: tuple[str, ...], rows: list[list[str]], numbers: list[int]) -> Table:
    if not rows:
        raise DataError(f"{path}: it has a header and no rows")
    return Table(path, columns, rows, numbers)
