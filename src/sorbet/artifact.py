"""The `.sorbet` file: a whole model as packed bits, integers and shifts.

A `.sorbet` file is a safetensors file. Its tensors are the integer arrays of the classes below, named by their path
(`layers.0.query.bits`); its metadata has one entry, "sorbet", a JSON object with the format version, the shape, the
shifts, the labels, the provenance and a SHA-256 over all of it. The tokenizer is a tensor too: zlib over its JSON.

What the numbers mean is in docs/semantics.md; `reference.py` is the same in code. A file is never trusted: every
shape, range and shift is checked before anything is computed with it.
"""

import dataclasses
import hashlib
import json
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from .encoding import Encoding, count_range
from .errors import ArtifactError

FORMAT_VERSION = 1
MAX_FILE_BYTES = 256 * 2**20
MAX_HEADER_BYTES = 2 * 2**20  # JSON grows twenty-fold when it is read
MAX_TOKENIZER_BYTES = 8 * 2**20
MAX_SHIFT = 30
Array = NDArray[Any]

Rounding = Literal["log", "value"]
ShiftRounding = Literal["floor", "nearest"]


# ---------------------------------------------------------------------------------------------------------------------
# What a model consists of
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """Everything that fixes the sizes of arrays and the kind of operations."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    max_positions: int
    type_vocab_size: int
    num_labels: int
    num_steps: int  # T
    encoding: Encoding  # of hidden states, queries and contexts
    pooler_encoding: Encoding
    norm: Literal["bspn", "bspn-pow2"]
    norm_groups: int
    norm_fraction_bits: int  # F
    softmax_fraction_bits: int
    softmax_rounding: Rounding
    shift_rounding: ShiftRounding

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    def counts(self, encoding: str | None = None) -> tuple[int, int]:
        return count_range(self.num_steps, encoding or self.encoding)

    def check(self) -> None:
        limits = {
            "vocab_size": 2**22, "hidden_size": 2**13, "num_layers": 2**8, "num_heads": 2**10,
            "intermediate_size": 2**15, "max_positions": 2**13, "type_vocab_size": 2**8, "num_labels": 2**14,
            "norm_groups": 2**13,
        }  # fmt: skip
        for name, limit in limits.items():
            if not 1 <= getattr(self, name) <= limit:
                raise ArtifactError(f"shape.{name} is {getattr(self, name)}: it must lie in 1 … {limit}")
        if self.num_steps not in (2, 4, 8, 16):
            raise ArtifactError(f"shape.num_steps is {self.num_steps}: it must be 2, 4, 8 or 16")
        for name, limit in {"norm_fraction_bits": 12, "softmax_fraction_bits": 20}.items():
            if not 0 <= getattr(self, name) <= limit:
                raise ArtifactError(f"shape.{name} is {getattr(self, name)}: it must lie in 0 … {limit}")
        for name in ("num_heads", "norm_groups"):
            if self.hidden_size % getattr(self, name):
                raise ArtifactError(f"shape.hidden_size {self.hidden_size} is no multiple of {name}")


def tensor(dtype: str, *dims: str, low: int | None = None, high: int | None = None) -> Any:
    """A field that holds an array: its type, its dimensions by name, the range of its elements."""
    return field(metadata={"dtype": dtype, "dims": dims, "low": low, "high": high})


def integer(low: int, high: int) -> Any:
    """A field that holds one number kept in the metadata."""
    return field(metadata={"low": low, "high": high})


OFFSET = 2**23


@dataclass(frozen=True, eq=False)
class BinaryTable:
    """Row r is (2·bits[r] − 1) << shift[r]."""

    bits: Array = tensor("uint8", "rows", "packed")
    shift: Array = tensor("uint8", "rows", high=MAX_SHIFT)


@dataclass(frozen=True, eq=False)
class ByteTable:
    """Row r is values[r] << shift[r]."""

    values: Array = tensor("int8", "rows", "out", low=-127)
    shift: Array = tensor("uint8", "rows", high=MAX_SHIFT)


@dataclass(frozen=True, eq=False)
class Neuron:
    """count = clip((x + offset + half) >> shift, lo, hi)"""

    offset: Array = tensor("int32", "out", low=-OFFSET, high=OFFSET)
    shift: int = integer(-MAX_SHIFT, MAX_SHIFT)


@dataclass(frozen=True, eq=False)
class Projection:
    """A binary linear layer and the neuron behind it: x = B c, then as `Neuron`."""

    bits: Array = tensor("uint8", "out", "packed")
    offset: Array = tensor("int32", "out", low=-OFFSET, high=OFFSET)
    shift: int = integer(-MAX_SHIFT, MAX_SHIFT)


@dataclass(frozen=True, eq=False)
class Norm:
    """BSPN merged with its neuron: count = clip(⌊(±X̂ + offset + ⌊|θ|/2⌋) / |θ|⌋, lo, hi), θ's sign being that of X̂."""

    threshold: Array = tensor("int32", "out", low=-(2**16), high=2**16)
    offset: Array = tensor("int32", "out", low=-(2**20), high=2**20)


@dataclass(frozen=True, eq=False)
class Residual:
    """((B c + bias) << shift) + (residual count << residual_shift), then the norm."""

    norm: Norm
    bits: Array = tensor("uint8", "out", "packed")
    bias: Array = tensor("int32", "out", low=-OFFSET, high=OFFSET)
    shift: int = integer(0, MAX_SHIFT)
    residual_shift: int = integer(0, MAX_SHIFT)


@dataclass(frozen=True, eq=False)
class Embeddings:
    word: BinaryTable
    position: ByteTable
    token_type: ByteTable
    norm: Norm


@dataclass(frozen=True, eq=False)
class Layer:
    query: Projection
    key: Projection
    value: Projection
    context: Neuron
    attention_output: Residual
    intermediate: Projection
    output: Residual
    score_exponent: int = integer(-60, MAX_SHIFT)  # z = (q · k) 2^score_exponent
    probs_exponent: int = integer(-40, MAX_SHIFT)  # α = 2^probs_exponent of the neuron behind PTsoftmax


@dataclass(frozen=True, eq=False)
class Pooler(Projection):
    """The first token's projection; a pooled count c stands for c · 2^exponent."""

    exponent: int = integer(-120, 120)


@dataclass(frozen=True, eq=False)
class Classifier:
    """logit = (Σ weight · count + bias) · 2^exponent"""

    weight: Array = tensor("int8", "labels", "in", low=-127)
    bias: Array = tensor("int32", "labels", low=-OFFSET, high=OFFSET)
    exponent: int = integer(-120, 120)


@dataclass(frozen=True, eq=False)
class Artifact:
    shape: Shape
    embeddings: Embeddings
    layers: tuple[Layer, ...]
    pooler: Pooler
    classifier: Classifier
    labels: tuple[str, ...]
    problem_type: Literal["classification", "regression"] = "classification"
    tokenizer: str | None = None  # the tokenizers library's JSON
    provenance: dict[str, Any] = field(default_factory=dict)

    def save(self, path: "str | os.PathLike[str]") -> None:
        Path(path).write_bytes(self.to_bytes())

    @classmethod
    def load(cls, path: "str | os.PathLike[str]") -> "Artifact":
        path = Path(path)
        try:
            size = path.stat().st_size
            if not path.is_file():
                raise ArtifactError(f"{path}: not a file")
            if size > MAX_FILE_BYTES:
                raise ArtifactError(f"{path}: {size:,} bytes, more than any Sorbet has ({MAX_FILE_BYTES:,})")
            data = path.read_bytes()
        except OSError as error:
            raise ArtifactError(f"{path}: cannot be read ({error.strerror})") from None
        try:
            return cls.from_bytes(data)
        except ArtifactError as error:
            raise ArtifactError(f"{path}: {error}") from None

    def to_bytes(self) -> bytes:
        """The file: the same artefact always gives the same bytes."""
        arrays, integers = _flatten(self)
        if self.tokenizer is not None:
            arrays["tokenizer"] = np.frombuffer(zlib.compress(_pack_tokenizer(self.tokenizer), 9), np.uint8)
        header = {
            "format_version": FORMAT_VERSION,
            "shape": dataclasses.asdict(self.shape),
            "integers": integers,
            "labels": list(self.labels),
            "problem_type": self.problem_type,
            "provenance": self.provenance,
        }
        header["sha256"] = digest(header, arrays)
        if len(_json(header).encode()) > MAX_HEADER_BYTES // 2:
            raise ArtifactError(f"labels and provenance take more than {MAX_HEADER_BYTES // 2:,} bytes: shorten them")
        return safetensors.numpy.save(arrays, {"sorbet": _json(header)})

    @classmethod
    def from_bytes(cls, data: bytes) -> "Artifact":
        header, arrays = _parse(data)
        if header.get("sha256") != digest(header, arrays):
            raise ArtifactError(
                "the contents do not match their SHA-256: the file is damaged; fetch or convert it again"
            )
        shape = _shape(header.get("shape"))
        labels = header.get("labels")
        if not isinstance(labels, list) or not all(isinstance(x, str) for x in labels):
            raise ArtifactError("labels must be a list of strings")
        if len(labels) != shape.num_labels:
            raise ArtifactError(f"{len(labels)} labels for {shape.num_labels} outputs")
        problem_type, provenance = header.get("problem_type"), header.get("provenance")
        if problem_type not in ("classification", "regression"):
            raise ArtifactError(f"problem_type is {problem_type!r}: it must be 'classification' or 'regression'")
        if not isinstance(provenance, dict):
            raise ArtifactError("provenance must be a JSON object")
        packed_tokenizer = arrays.pop("tokenizer", None)
        integers = header.get("integers")
        if not isinstance(integers, dict):
            raise ArtifactError("integers must be a JSON object")
        reader = _Reader(shape, arrays, dict(integers))
        parts = {
            "embeddings": reader.part(Embeddings, "embeddings"),
            "layers": tuple(reader.part(Layer, f"layers.{i}") for i in range(shape.num_layers)),
            "pooler": reader.part(Pooler, "pooler"),
            "classifier": reader.part(Classifier, "classifier"),
        }
        reader.finish()
        tokenizer = None if packed_tokenizer is None else _unpack_tokenizer(packed_tokenizer)
        artifact = cls(
            shape=shape, labels=tuple(labels), problem_type=problem_type, tokenizer=tokenizer, provenance=provenance,
            **parts,
        )  # fmt: skip
        from .widths import require_exact  # here, because widths.py works on artefacts

        require_exact(artifact, ArtifactError)
        return artifact

    def nbytes(self) -> dict[str, int]:
        """Bytes by part of the model, uncompressed."""
        sizes: dict[str, int] = {}
        for name, array in _flatten(self)[0].items():
            part = "encoder" if name.startswith("layers.") else name.split(".")[0]
            sizes[part] = sizes.get(part, 0) + array.nbytes
        if self.tokenizer is not None:
            sizes["tokenizer"] = len(zlib.compress(_pack_tokenizer(self.tokenizer), 9))
        return sizes


def map_arrays(part: Any, change: Callable[[str, Array], Array], prefix: str = "") -> Any:
    """The same artefact (or part of one) with every array replaced by change(its path, the array)."""
    new: dict[str, Any] = {}
    for item in dataclasses.fields(part):
        value, name = getattr(part, item.name), f"{prefix}{item.name}"
        if "dims" in item.metadata:
            new[item.name] = change(name, value)
        elif item.name == "layers":
            new[item.name] = tuple(map_arrays(layer, change, f"layers.{i}.") for i, layer in enumerate(value))
        elif dataclasses.is_dataclass(value) and not isinstance(value, Shape):
            new[item.name] = map_arrays(value, change, f"{name}.")
    return dataclasses.replace(part, **new)


def packed_width(count: int) -> int:
    return -(-count // 8)


# ---------------------------------------------------------------------------------------------------------------------
# Parts to arrays and back
# ---------------------------------------------------------------------------------------------------------------------


def _flatten(part: Any, prefix: str = "") -> tuple[dict[str, Array], dict[str, int]]:
    arrays: dict[str, Array] = {}
    integers: dict[str, int] = {}
    for item in dataclasses.fields(part):
        value, name = getattr(part, item.name), f"{prefix}{item.name}"
        if "dims" in item.metadata:
            arrays[name] = np.ascontiguousarray(_narrow(value) if item.metadata["dtype"] == "int32" else value)
        elif "low" in item.metadata:
            integers[name] = int(value)
        elif dataclasses.is_dataclass(value) and not isinstance(value, Shape):
            _merge(arrays, integers, _flatten(value, f"{name}."))
        elif item.name == "layers":
            for i, layer in enumerate(value):
                _merge(arrays, integers, _flatten(layer, f"layers.{i}."))
    return arrays, integers


def _merge(arrays: dict[str, Array], integers: dict[str, int], new: tuple[dict[str, Array], dict[str, int]]) -> None:
    arrays.update(new[0])
    integers.update(new[1])


def _narrow(array: Array) -> Array:
    """The smallest signed integer type that holds every element: thresholds rarely need 32 bits."""
    for dtype in (np.int8, np.int16):
        if array.size and np.iinfo(dtype).min <= array.min() and array.max() <= np.iinfo(dtype).max:
            return array.astype(dtype)
    return array.astype(np.int32)


class _Reader:
    """Builds parts from named arrays and integers, each checked, none left over."""

    def __init__(self, shape: Shape, arrays: dict[str, Array], integers: dict[str, Any]):
        self.shape, self.arrays, self.integers = shape, arrays, integers

    def part(self, kind: Any, path: str) -> Any:
        hints = get_type_hints(kind)
        values: dict[str, Any] = {}
        for item in dataclasses.fields(kind):
            name = f"{path}.{item.name}"
            if "dims" in item.metadata:
                values[item.name] = self.array(name, item.metadata, self.dimensions(path))
            elif "low" in item.metadata:
                values[item.name] = self.integer(name, item.metadata)
            else:
                values[item.name] = self.part(hints[item.name], name)
        return kind(**values)

    def dimensions(self, path: str) -> dict[str, int]:
        s, last = self.shape, path.split(".")[-1]
        inputs = s.intermediate_size if last == "output" else s.hidden_size
        rows = {"word": s.vocab_size, "position": s.max_positions, "token_type": s.type_vocab_size}
        return {
            "rows": rows.get(last, 0),
            "in": inputs,
            "packed": packed_width(inputs),
            "out": s.intermediate_size if last == "intermediate" else s.hidden_size,
            "labels": s.num_labels,
        }

    def array(self, name: str, meta: Any, dimensions: dict[str, int]) -> Array:
        array = self.arrays.pop(name, None)
        if array is None:
            raise ArtifactError(f"tensor {name} is missing")
        wanted = tuple(dimensions[d] for d in meta["dims"])
        if array.shape != wanted:
            raise ArtifactError(f"tensor {name} has shape {array.shape}: the model's shape asks for {wanted}")
        allowed = ("int8", "int16", "int32") if meta["dtype"] == "int32" else (meta["dtype"],)
        if array.dtype.name not in allowed:
            raise ArtifactError(f"tensor {name} has type {array.dtype.name}: it must be {' or '.join(allowed)}")
        array = array.astype(meta["dtype"], copy=False)
        if array.size:
            self.check_range(name, int(array.min()), int(array.max()), meta)
        if meta["dims"][-1] == "packed" and dimensions["in"] % 8 and (array[:, -1] >> (dimensions["in"] % 8)).any():
            raise ArtifactError(f"tensor {name} has bits set beyond its {dimensions['in']} columns")
        if name.endswith(".threshold") and not array.all():
            raise ArtifactError(f"tensor {name} has a threshold of 0: thresholds must be at least 1 in size")
        return array

    def integer(self, name: str, meta: Any) -> int:
        value = self.integers.pop(name, None)
        if type(value) is not int:
            raise ArtifactError(f"integer {name} is {'missing' if value is None else repr(value)[:40]}")
        self.check_range(name, value, value, meta)
        return value

    @staticmethod
    def check_range(name: str, least: int, largest: int, meta: Any) -> None:
        low, high = meta["low"], meta["high"]
        if (low is not None and least < low) or (high is not None and largest > high):
            bad = least if low is not None and least < low else largest
            raise ArtifactError(f"{name} holds {bad}: it must lie in {low if low is not None else 0} … {high}")

    def finish(self) -> None:
        for kind, rest in (("tensor", self.arrays), ("integer", self.integers)):
            if rest:
                raise ArtifactError(f"{kind} {min(rest)[:80]!r} is unknown to this format version")


def _shape(raw: Any) -> Shape:
    fields = get_type_hints(Shape)
    if not isinstance(raw, dict) or raw.keys() != fields.keys():
        raise ArtifactError("the shape does not have the fields of this format version")
    for name, kind in fields.items():
        if kind is int:
            if type(raw[name]) is not int:
                raise ArtifactError(f"shape.{name} is {repr(raw[name])[:40]}: it must be an integer")
        elif raw[name] not in get_args(kind):
            raise ArtifactError(
                f"shape.{name} is {repr(raw[name])[:40]}: it must be one of {', '.join(get_args(kind))}"
            )
    shape = Shape(**raw)
    shape.check()
    return shape


# ---------------------------------------------------------------------------------------------------------------------
# Bytes
# ---------------------------------------------------------------------------------------------------------------------


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def digest(header: dict[str, Any], arrays: dict[str, Array]) -> str:
    """SHA-256 over the header (without the digest itself) and every tensor's name, type, shape and bytes."""
    sha = hashlib.sha256(_json({k: v for k, v in header.items() if k != "sha256"}).encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        sha.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        sha.update(array.data if array.size else b"")
    return sha.hexdigest()


def _parse(data: bytes) -> tuple[dict[str, Any], dict[str, Array]]:
    """The raw tensors and the metadata, as far as safetensors vouches for them."""
    if not data:
        raise ArtifactError("the file is empty")
    if data[:2] == b"\x1f\x8b" or data[:2] == b"PK":
        raise ArtifactError("this is a compressed archive, not a .sorbet file: unpack it first")
    try:
        length = int.from_bytes(data[:8], "little")
        if length > len(data) - 8:
            raise ArtifactError("no .sorbet file, or the end is missing: its header is longer than the file")
        if length > MAX_HEADER_BYTES:
            raise ArtifactError(f"its header takes {length:,} bytes, more than any Sorbet's ({MAX_HEADER_BYTES:,})")
        entries = json.loads(data[8 : 8 + length])
        raw = entries["__metadata__"]["sorbet"]
        header = json.loads(raw)
        version = header["format_version"]
    except ArtifactError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ArtifactError("no .sorbet file: it has no Sorbet header (make one with `sorbet convert`)") from None
    if type(version) is not int or version != FORMAT_VERSION:
        raise ArtifactError(
            f"format version {repr(version)[:20]}: this Sorbet reads version {FORMAT_VERSION}; "
            "install a matching release or convert the checkpoint again"
        )
    try:
        _json(header).encode()  # what cannot be written back (NaN, lone surrogates) has no digest either
        arrays = safetensors.numpy.load(data)
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RecursionError, MemoryError) as error:
        reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise ArtifactError(f"the file is damaged or cut short ({reason})") from None
    return header, arrays


def _pack_tokenizer(text: str) -> bytes:
    """A WordPiece vocabulary as a list by id takes half the space of one with an id for each word."""
    tokenizer = json.loads(text)
    vocab = tokenizer.get("model", {}).get("vocab")
    if isinstance(vocab, dict) and sorted(vocab.values()) == [*range(len(vocab))]:
        tokenizer["model"]["vocab"] = sorted(vocab, key=vocab.__getitem__)
    return _json(tokenizer).encode()


def _unpack_tokenizer(packed: Array) -> str:
    try:
        decompressor = zlib.decompressobj()
        text = decompressor.decompress(packed.tobytes(), MAX_TOKENIZER_BYTES)
        if not decompressor.eof:
            raise ValueError("cut short or too large")
        tokenizer = json.loads(text)
        model = tokenizer.get("model", {})
        vocab = model.get("vocab")
        if isinstance(vocab, dict) and not all(type(number) is int for number in vocab.values()):
            raise ValueError("a vocabulary maps words to numbers")
        if isinstance(vocab, list) and all(isinstance(token, str) for token in vocab):
            model["vocab"] = {token: i for i, token in enumerate(vocab)}
        plain = _json(tokenizer)
        plain.encode()  # lone surrogates are no text
        return plain
    except (zlib.error, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise ArtifactError(f"the tokenizer cannot be read ({str(error)[:80]})") from None
