"""The file: same bytes, same logits; and nothing that is wrong with one gets past the reader or kills the process."""

import ast
import contextlib
import json
import random
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from conftest import arrays, random_inputs, random_model

from sorbet import artifact as A
from sorbet import madeup
from sorbet.artifact import Artifact
from sorbet.conversion import convert
from sorbet.errors import ArtifactError
from sorbet.info import describe
from sorbet.reference import Reference
from sorbet.spiking import SpikingSorbet
from sorbet.text import TextEncoder


def unpacked(data: bytes) -> tuple[dict, dict[str, np.ndarray]]:
    length = int.from_bytes(data[:8], "little")
    header = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["sorbet"])
    return header, dict(safetensors.numpy.load(data))


def repacked(header: dict, tensors: dict[str, np.ndarray]) -> bytes:
    """A file with these contents and a digest that matches them: what a forger would write."""
    with contextlib.suppress(UnicodeEncodeError):  # a lone surrogate has no digest
        header["sha256"] = A.digest(header, tensors)
    return safetensors.numpy.save(tensors, {"sorbet": json.dumps(header)})


@pytest.fixture(scope="module")
def data(tiny_artifact) -> bytes:
    return tiny_artifact.to_bytes()


# -- round trips ------------------------------------------------------------------------------------------------------


def test_save_load_reload(tmp_path, tiny_artifact):
    first, second = tmp_path / "a.sorbet", tmp_path / "b.sorbet"
    tiny_artifact.save(first)
    loaded = Artifact.load(first)
    loaded.save(second)
    assert first.read_bytes() == second.read_bytes() == tiny_artifact.to_bytes()
    ids = np.arange(30).reshape(2, 15)
    assert np.array_equal(Reference(loaded)(ids), Reference(tiny_artifact)(ids))
    assert loaded.labels == tiny_artifact.labels
    assert loaded.shape == tiny_artifact.shape
    assert loaded.provenance == tiny_artifact.provenance
    assert json.loads(loaded.tokenizer) == json.loads(tiny_artifact.tokenizer)


def test_tokenizer_survives(tiny_artifact):
    ours, theirs = TextEncoder(tiny_artifact.tokenizer, 40), madeup.tokenizer()
    for remark in madeup.remarks(50):
        assert ours.ids(remark.text)[0] == theirs.encode(remark.text).ids
    for text in ("", "zebra", "Ünïcödé 漢字 🙂", "\x00\ufffd"):
        assert ours.ids(text)[0] == theirs.encode(text).ids
    ids, types = ours.ids(("a film", "the plot"))
    assert types == theirs.encode("a film", "the plot").type_ids
    assert set(types) == {0, 1}
    assert len(ids) == 7


def test_no_pickle():
    """Nothing in the package reads pickles, by whatever name."""
    for path in Path(A.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = {alias.name for alias in node.names} if isinstance(node, ast.Import | ast.ImportFrom) else set()
            assert not names & {"pickle", "joblib", "dill", "marshal", "shelve"}, path
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in ("torch.load", "np.load", "eval", "exec"), path
                assert not any(keyword.arg == "allow_pickle" for keyword in node.keywords), path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "limit"),
    [
        ({"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536}, 3.6e6),
        ({"hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 3072}, 14.5e6),
    ],
    ids=["MiniLM-L6", "BERT-base"],
)
def test_size(shape, limit, minilm):
    from transformers import AutoTokenizer

    model = random_model(**shape, vocab_size=30522, num_attention_heads=12, max_position_embeddings=512, num_labels=2)
    assert len(convert(model, AutoTokenizer.from_pretrained(minilm)).to_bytes()) <= limit


# -- what is wrong with a file ----------------------------------------------------------------------------------------


def test_no_file(tmp_path):
    with pytest.raises(ArtifactError, match=r"gone.sorbet: cannot be read \(No such file"):
        Artifact.load(tmp_path / "gone.sorbet")
    for other in (tmp_path, "/dev/zero"):
        with pytest.raises(ArtifactError, match="not a file"):
            Artifact.load(other)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"hello, world", "header is longer than the file"),
        (b"\x1f\x8b\x08\x00" + bytes(20), "compressed archive"),
        (b"\x02\x00\x00\x00\x00\x00\x00\x00{}", "no Sorbet header"),
        (b"\xff" * 8 + b"{}", "header is longer than the file"),
        (safetensors.numpy.save({"x": np.zeros(3)}), "no Sorbet header"),
        (safetensors.numpy.save({"x": np.zeros(3)}, {"sorbet": "[[" * 50000}), "no Sorbet header"),
    ],
)
def test_other_files(tmp_path, content, message):
    path = tmp_path / "x.sorbet"
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=message):
        Artifact.load(path)


def test_oversized(tmp_path, data):
    with pytest.raises(ArtifactError):
        Artifact.from_bytes(data + bytes(100))
    path = tmp_path / "huge.sorbet"
    with path.open("wb") as file:
        file.truncate(A.MAX_FILE_BYTES + 1)  # sparse: takes no space, and must not be read
    with pytest.raises(ArtifactError, match="more than any Sorbet has"):
        Artifact.load(path)


def test_a_header_of_gigabytes_is_not_parsed():
    long = b'{"__metadata__":{"sorbet":"' + b" " * A.MAX_HEADER_BYTES
    with pytest.raises(ArtifactError, match="more than any Sorbet's"):
        Artifact.from_bytes(len(long).to_bytes(8, "little") + long)


def test_wrong_version(data):
    for version in (0, 2, "1", None, [1], True, 1.0):
        header, tensors = unpacked(data)
        header["format_version"] = version
        with pytest.raises(ArtifactError, match="this Sorbet reads version 1"):
            Artifact.from_bytes(repacked(header, tensors))


def test_a_flipped_bit_is_noticed(data):
    rng = random.Random(0)
    for _ in range(300):
        position = rng.randrange(len(data))
        damaged = bytearray(data)
        damaged[position] ^= 1 << rng.randrange(8)
        with pytest.raises(ArtifactError):
            Artifact.from_bytes(bytes(damaged))


def test_truncated(data):
    for length in [*range(0, 200, 7), *range(200, len(data), 997), len(data) - 1]:
        with pytest.raises(ArtifactError):
            Artifact.from_bytes(data[:length])


def packed(tokenizer) -> np.ndarray:
    return np.frombuffer(zlib.compress(json.dumps(tokenizer).encode()), np.uint8)


FORGERIES = {
    "tensor pooler.bits is missing": lambda h, t: t.pop("pooler.bits"),
    "integer layers.0.query.shift is missing": lambda h, t: h["integers"].pop("layers.0.query.shift"),
    "tensor 'extra' is unknown": lambda h, t: t.update(extra=np.zeros(2)),
    "integer 'extra' is unknown": lambda h, t: h["integers"].update(extra=1),
    r"tensor layers.1.key.bits has shape \(48, 7\)": lambda h, t: t.update(
        {"layers.1.key.bits": np.zeros((48, 7), np.uint8)}
    ),
    "classifier.weight has type float32: it must be int8": lambda h, t: t.update(
        {"classifier.weight": np.zeros((2, 48), np.float32)}
    ),
    "layers.0.query.shift holds 31": lambda h, t: h["integers"].update({"layers.0.query.shift": 31}),
    "layers.0.query.shift is '1'": lambda h, t: h["integers"].update({"layers.0.query.shift": "1"}),
    "layers.0.query.shift is True": lambda h, t: h["integers"].update({"layers.0.query.shift": True}),
    "layers.0.score_exponent holds 1000000": lambda h, t: h["integers"].update({"layers.0.score_exponent": 10**6}),
    "has a threshold of 0": lambda h, t: t["embeddings.norm.threshold"].__setitem__(0, 0),
    "embeddings.norm.threshold holds 65537": lambda h, t: t.update(
        {"embeddings.norm.threshold": np.full(48, 65537, np.int32)}
    ),
    r"layers.0.query.offset holds 16777216": lambda h, t: t.update(
        {"layers.0.query.offset": np.full(48, 2**24, np.int32)}
    ),
    r"layers.0.query.membrane: sums can reach .* more than the 31": lambda h, t: h["integers"].update(
        {"layers.0.query.shift": -29}
    ),
    "embeddings.word.shift holds 200": lambda h, t: t["embeddings.word.shift"].__setitem__(0, 200),
    "shape.vocab_size is -1": lambda h, t: h["shape"].update(vocab_size=-1),
    "shape.num_layers is 100000": lambda h, t: h["shape"].update(num_layers=100000),
    "shape.num_layers is 1.0": lambda h, t: h["shape"].update(num_layers=1.0),
    "shape.num_steps is 5": lambda h, t: h["shape"].update(num_steps=5),
    "shape.encoding is 'x'": lambda h, t: h["shape"].update(encoding="x"),
    "shape.hidden_size 48 is no multiple of num_heads": lambda h, t: h["shape"].update(num_heads=5),
    "the shape does not have the fields": lambda h, t: h["shape"].update(more=1),
    "3 labels for 2 outputs": lambda h, t: h["labels"].append("c"),
    "labels must be a list of strings": lambda h, t: h.update(labels=[1, 2]),
    "problem_type is 'x'": lambda h, t: h.update(problem_type="x"),
    "provenance must be": lambda h, t: h.update(provenance=[]),
    "integers must be": lambda h, t: h.update(integers=[]),
    "no Sorbet header|damaged": lambda h, t: h.update(provenance={"note": "\ud800"}),
    "a vocabulary maps words to numbers": lambda h, t: t.update(tokenizer=packed({"model": {"vocab": {"a": "x"}}})),
    "the tokenizer cannot be read .*surrogates": lambda h, t: t.update(tokenizer=packed({"model": {"\ud800": 1}})),
    "the tokenizer cannot be read": lambda h, t: t.update(tokenizer=np.zeros(9, np.uint8)),
}  # fmt: skip


@pytest.mark.parametrize("message", FORGERIES)
def test_a_forged_file_is_refused_by_name(data, message):
    header, tensors = unpacked(data)
    tensors = {name: array.copy() for name, array in tensors.items()}
    FORGERIES[message](header, tensors)
    with pytest.raises(ArtifactError, match=message):
        Artifact.from_bytes(repacked(header, tensors))


def test_a_tokenizer_bomb_is_refused(data):
    header, tensors = unpacked(data)
    bomb = zlib.compress(b" " * (A.MAX_TOKENIZER_BYTES + 10**6), 9)
    tensors["tokenizer"] = np.frombuffer(bomb, np.uint8)
    with pytest.raises(ArtifactError, match="cut short or too large"):
        Artifact.from_bytes(repacked(header, tensors))


def test_a_hostile_tokenizer_is_an_error_not_a_crash():
    replace = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"}
    honest = json.loads(madeup.tokenizer().to_str())
    for text in (
        "{}", "[]", '{"model": {"type": "WordPiece", "vocab": {"a": -1}}}', "null", "x",
        json.dumps(honest | {"normalizer": replace}),
        json.dumps(honest | {"normalizer": {"type": "Sequence", "normalizers": [replace] * 8}}),
        json.dumps(honest | {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "x"}}}),
    ):  # fmt: skip
        with pytest.raises(ArtifactError, match="the tokenizer cannot be used"):
            TextEncoder(text, 16)
    encoder = TextEncoder(json.dumps(honest), 16)
    with pytest.raises(ArtifactError, match="the tokenizer fails on"):
        encoder.ids("\ud800")
    del honest["model"]["vocab"]["[UNK]"]
    with pytest.raises(ArtifactError, match="the tokenizer (fails|cannot)"):
        TextEncoder(json.dumps(honest), 16).ids("漢")


def mutate(rng: random.Random, data: bytes) -> bytes:
    """One of many ways to break a file."""
    kind = rng.randrange(8)
    if kind == 0:  # noise in the bytes
        damaged = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 8, 64))):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        return bytes(damaged)
    if kind == 1:  # noise in the header alone
        damaged, length = bytearray(data), int.from_bytes(data[:8], "little")
        for _ in range(rng.choice((1, 2, 4))):
            damaged[rng.randrange(8 + length)] = rng.choice(b'0123456789-{}[]",:eE.\x00\xff')
        return bytes(damaged)
    if kind == 2:  # pieces cut out, doubled or appended
        a, b = sorted((rng.randrange(len(data)), rng.randrange(len(data))))
        return rng.choice((data[:a], data[a:], data[:a] + data[b:], data[:b] + data[a:], data + data[a:b]))
    # Correctly signed: these reach the checks behind the digest.
    header, tensors = unpacked(data)
    tensors = {name: array.copy() for name, array in tensors.items()}
    if kind == 3:
        for _ in range(rng.choice((1, 2, 5))):
            array = tensors[rng.choice(sorted(tensors))]
            raw = array.reshape(-1).view(np.uint8)
            raw[rng.randrange(len(raw))] = rng.randrange(256)
    elif kind == 6:  # the tokenizer's JSON, under the compression
        text = bytearray(zlib.decompress(tensors["tokenizer"].tobytes()))
        for _ in range(rng.choice((1, 2, 8))):
            text[rng.randrange(len(text))] = rng.choice(b'0123456789-{}[]",:#azN')
        tensors["tokenizer"] = np.frombuffer(zlib.compress(bytes(text)), np.uint8)
    elif kind == 7:  # the words of the header
        name = rng.choice(("labels", "problem_type", "provenance"))
        word = rng.choice(("\ud800", "\x00", "[/b]", "x" * 1000, ""))
        header[name] = rng.choice((word, [word] * 2, {word: word}, [[word]], None, 1e308))
    elif kind == 4:
        name = rng.choice(sorted(header["integers"]))
        header["integers"][name] = rng.choice((rng.randrange(-70, 70), rng.randrange(-(2**40), 2**40), None, 0.5, "3"))
        if rng.random() < 0.5:
            field = rng.choice(sorted(header["shape"]))
            header["shape"][field] = rng.choice((0, 1, 2, 3, 8, 16, 48, 96, 2**30, -4, "signed", "floor", None))
    else:
        name = rng.choice(sorted(tensors))
        array = tensors.pop(name)
        if rng.random() < 0.8:
            dtype = rng.choice((array.dtype, np.int8, np.uint8, np.int32, np.float32, np.int64))
            changed = rng.choice((array, array.reshape(-1), array[:0], array[..., None], array[: len(array) // 2]))
            tensors[name] = np.ascontiguousarray(changed.astype(dtype))
    return repacked(header, tensors)


FUZZ_FILES, FUZZ_PARTS = 6000, 6


@pytest.mark.parametrize("part", range(FUZZ_PARTS))
def test_fuzz(data, part):
    """Mutated files: each is either refused with an ArtifactError or is a model that computes. Never anything else."""
    rng = random.Random(part)
    refused = computed = 0
    for _ in range(FUZZ_FILES // FUZZ_PARTS):
        mutated = mutate(rng, data)
        try:
            artifact = Artifact.from_bytes(mutated)
        except ArtifactError:
            refused += 1
            continue
        computed += 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # an overflow would warn
            ids = (np.array([[2, 3, 3, 1]]) % artifact.shape.vocab_size)[:, : artifact.shape.max_positions]
            logits = Reference(artifact)(ids)
            assert describe(artifact, widths=True)["labels"] == list(artifact.labels)
        assert logits.shape == (1, artifact.shape.num_labels)
        assert np.isfinite(logits).all()
        if computed % 20 == 0:
            assert np.array_equal(SpikingSorbet(artifact)(ids), logits)
        if artifact.tokenizer is not None:
            try:
                TextEncoder(artifact.tokenizer, artifact.shape.max_positions).ids("a film , zebra")
            except ArtifactError:
                continue
    assert refused > 500
    assert computed > 50  # weights may be anything: such a file is a different model, not a broken one


def test_what_is_loaded_computes_what_was_saved():
    model = random_model(seed=9)
    artifact = convert(model)
    again = Artifact.from_bytes(artifact.to_bytes())
    inputs = arrays(random_inputs(model))
    assert np.array_equal(Reference(again)(**inputs), Reference(artifact)(**inputs))
