"""Texts and the files that they come in."""

import gzip

import pytest

from sorbet import madeup
from sorbet.errors import DataError, SorbetError, TruncationWarning
from sorbet.text import TextEncoder, pad, read_table

GLUE_FILES = {
    "SST-2.tsv": ("sentence\tlabel\na \"fine\" film\t1\nbad\t0\n", ['a "fine" film', "bad"]),
    "MRPC.tsv": ("sentence1\tsentence2\tlabel\na b\tc\t1\n", [("a b", "c")]),
    "QNLI.tsv": ("question\tsentence\tlabel\nwho ?\tme\tentailment\n", [("who ?", "me")]),
    "QQP.tsv": ("id\tquestion1\tquestion2\tis_duplicate\n7\ta\tb\t1\n", [("a", "b")]),
    "MNLI.tsv": ("index\tsentence1\tsentence2\tgold_label\n0\ta\tb\tneutral\n", [("a", "b")]),
    "tickets.csv": ('id,text,label\n1,"broken,\nagain",bug\n2,thanks,praise\n', ["broken,\nagain", "thanks"]),
    "pairs.csv": ("text1,text2\na,b\n", [("a", "b")]),
    "rows.jsonl": ('{"text": "a", "label": 1}\n\n{"label": 2, "text": "b\\n"}\n', ["a", "b\n"]),
    "lines.txt": ("first line\n\n  second, with a\ttab\n", ["first line", "  second, with a\ttab"]),
    "noname": ("just\none text\na line\n", ["just", "one text", "a line"]),
}  # fmt: skip


@pytest.mark.parametrize("name", GLUE_FILES)
@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("windows", [False, True])
def test_formats(tmp_path, name, zipped, windows):
    content, expected = GLUE_FILES[name]
    if windows and name != "tickets.csv":
        content = "\ufeff" + content.replace("\n", "\r\n")
    data = content.encode()
    path = tmp_path / (name + ".gz" * zipped)
    path.write_bytes(gzip.compress(data) if zipped else data)
    assert read_table(path).texts() == expected


def test_lines_are_known(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text('text,label\n"two\nlines",a\nnext,b\n')
    assert read_table(path).lines == [2, 4]
    assert read_table(path).column("label") == ["a", "b"]
    with pytest.raises(DataError, match=r"x.csv: no column 'score'; it has text, label"):
        read_table(path).column("score")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", b"", "a.tsv: the file is empty"),
        ("a.tsv", b" \n\n", "the file is empty"),
        ("a.tsv", b"sentence\tlabel\n", "a header and no rows"),
        ("a.tsv", b"sentence\tlabel\nx\t1\ny\n", "line 3: 1 fields where the header has 2"),
        ("a.csv", b"text,label\nx,1\ny,2,3\n", "line 3: 3 fields where the header has 2"),
        ("a.csv", b'text,label\n"x,1\n', "line 2: .*check its quotes"),
        ("a.tsv", b"utterance\tlabel\nx\t1\n", "line 1: no text column among utterance, label"),
        ("a.txt", b"fine\nna\xefve\n", "line 2: not UTF-8 \\(byte 0xef\\)"),
        ("a.tsv.gz", b"\x1f\x8b\x08\x00garbage", "cannot be read"),
        ("b.tsv.gz", gzip.compress(b"sentence\n" + b"abc " * 99)[:20] + b"\xff" * 30, "cannot be read"),
        ("a.jsonl", b'{"text": "x"}\n[1]\n', "line 2: list where an object must stand"),
        ("a.jsonl", b'{"text": "x"}\n{"text": 1', "line 2: not JSON"),
        ("a.jsonl", b'{"text": "x"}\n{"label": 1}\n', "line 2: 'text' is missing"),
        ("a.csv", b"text,text,label\na,b,c\n", "column 'text' stands there twice"),
    ],
)
def test_bad_files(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_table(path).texts()


def test_missing_file(tmp_path):
    with pytest.raises(DataError, match=r"nowhere.tsv: cannot be read \(No such file"):
        read_table(tmp_path / "nowhere.tsv")


def test_long_texts_are_cut_with_a_warning():
    encoder = TextEncoder(madeup.tokenizer().to_str(), 16)
    with pytest.warns(TruncationWarning, match="more than 16 tokens was cut to the model's 16 positions"):
        ids, _ = encoder.ids("film " * 50)
    assert len(ids) == 16
    assert ids[-1] == encoder.ids("film")[0][-1], "the closing token stays"
    with pytest.warns(TruncationWarning):
        ids, types = encoder.ids(("film " * 50, "plot " * 50))
    assert len(ids) == len(types) == 16
    assert set(types) == {0, 1}


def test_empty_text_and_wrong_types():
    encoder = TextEncoder(madeup.tokenizer().to_str(), 16)
    assert len(encoder.ids("")[0]) == 2
    for wrong in (5, None, ("a", "b", "c"), ("a", 1), b"a"):
        with pytest.raises(SorbetError, match="it must be a string, or a pair of strings"):
            encoder.ids(wrong)  # type: ignore[arg-type]
    with pytest.raises(SorbetError, match="carries no tokenizer"):
        TextEncoder(None, 16)


def test_padding():
    batch = pad([([1, 2, 3], [0, 0, 1]), ([4], [0])], length=5)
    assert batch.input_ids.tolist() == [[1, 2, 3, 0, 0], [4, 0, 0, 0, 0]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]]
    assert batch.token_type_ids.tolist() == [[0, 0, 1, 0, 0], [0, 0, 0, 0, 0]]
