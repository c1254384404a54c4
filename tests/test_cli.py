"""The command line as a person meets it: a new process for each call."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from conftest import random_model
from test_model import hf_tokenizer
from transformers import BertConfig, BertForSequenceClassification

from sorbet import madeup
from sorbet.artifact import Artifact
from sorbet.conversion import convert

NO_TORCH = """
import sys
from importlib.abc import MetaPathFinder

class NotInstalled(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "accelerate"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NotInstalled())
from sorbet.cli import main
main()
"""


def sorbet(*arguments, code: str = "from sorbet.cli import main; main()", check: int | None = 0):
    env = {**os.environ, "COLUMNS": "200", "TRANSFORMERS_VERBOSITY": "error", "NO_COLOR": "1"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, check=False)
    assert check is None or done.returncode == check, done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint folder with its tokenizer, and the artefact of it."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = hf_tokenizer()
    model = random_model(seed=12, vocab_size=len(tokenizer), num_labels=2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    sorbet("convert", folder, folder / "model.sorbet")
    return folder


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "dev.tsv"
    path.write_text("sentence\tlabel\n" + "".join(f"{r.text}\t{r.label}\n" for r in madeup.remarks(60)))
    return path


def test_convert_writes_what_the_api_gives(checkpoint):
    tokenizer = hf_tokenizer()
    model = random_model(seed=12, vocab_size=len(tokenizer), num_labels=2)
    assert Artifact.load(checkpoint / "model.sorbet").to_bytes() == convert(model, tokenizer).to_bytes()


def test_verify(checkpoint, data):
    done = sorbet("verify", checkpoint / "model.sorbet", "--data", data)
    assert done.stdout.strip() == "0 differences in 60 examples  (reference, spikes)"
    done = sorbet("verify", checkpoint / "model.sorbet", "--data", data, "--checkpoint", checkpoint)
    assert done.stdout.strip() == "0 differences in 60 examples  (reference, spikes, pytorch)"
    report = json.loads(sorbet("verify", checkpoint / "model.sorbet", "--data", data, "--limit", 5, "--json").stdout)
    assert report == {"examples": 5, "backends": ["reference", "spikes"], "differences": 0, "first": None}


def test_verify_finds_a_difference(checkpoint, data, tmp_path):
    """One bias moved by a step in the artefact: the first layer, token and channel where it shows are named."""
    artifact = Artifact.load(checkpoint / "model.sorbet")
    artifact.layers[1].intermediate.offset[5] += 400
    artifact.save(tmp_path / "other.sorbet")
    done = sorbet("verify", tmp_path / "other.sorbet", "--data", data, "--checkpoint", checkpoint, check=1)
    assert "differences in 60 examples" in done.stdout
    assert "example 0, layers.1.intermediate, token 0, channel 5: reference has" in done.stdout
    done = sorbet("verify", tmp_path / "other.sorbet", "--data", data, "--checkpoint", checkpoint, "--json", check=1)
    report = json.loads(done.stdout)
    assert report["differences"] > 0
    assert report["first"]["layer"] == "layers.1.intermediate"
    assert report["first"]["channel"] == 5
    assert report["first"]["values"]["reference"] != report["first"]["values"]["pytorch"]


def test_info(checkpoint):
    done = sorbet("info", checkpoint / "model.sorbet", "--widths")
    for part in ("2 layers, hidden 48", "T = 16, signed", "layers.1.output.residual", "kernels", "LABEL_0"):
        assert part in done.stdout
    facts = json.loads(sorbet("info", checkpoint / "model.sorbet", "--widths", "--json").stdout)
    assert facts["shape"]["num_steps"] == 16
    assert facts["bytes"]["file"] == (checkpoint / "model.sorbet").stat().st_size
    assert all(width["bits"] > 0 and width["low"] <= width["high"] for width in facts["widths"])
    assert "widths" not in json.loads(sorbet("info", checkpoint / "model.sorbet", "--json").stdout)


def test_a_file_cannot_steer_the_terminal(tmp_path, tiny_artifact):
    import dataclasses

    path = tmp_path / "x.sorbet"
    note = {"note": "[red]\x1b[2J[/nope]"}
    dataclasses.replace(tiny_artifact, provenance=note, labels=("[/b]", "\x07")).save(path)
    done = sorbet("info", path)
    assert "[red]" in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("command", ["quickstart", "info", "verify", "--help", "--version"])
def test_inference_commands_import_no_torch(command, checkpoint, data):
    """They run where torch cannot be imported at all."""
    model = checkpoint / "model.sorbet"
    arguments = {"info": (model,), "verify": (model, "--data", data)}.get(command, ())
    done = sorbet(command, *arguments, code=NO_TORCH)
    assert done.stdout


def test_import_is_light():
    code = (
        "import sorbet, sys; sorbet.Artifact, sorbet.SorbetError; "
        "print(*sorted({'torch', 'transformers', 'typer', 'rich'} & set(sys.modules)))"
    )
    assert sorbet(code=code).stdout.strip() == ""


def test_commands_that_need_torch_say_so(checkpoint, data, tmp_path):
    done = sorbet("convert", checkpoint, tmp_path / "x.sorbet", code=NO_TORCH, check=2)
    assert "pip install 'sorbet-snn[train]'" in done.stderr
    model = checkpoint / "model.sorbet"
    done = sorbet("verify", model, "--data", data, "--checkpoint", checkpoint, code=NO_TORCH, check=2)
    assert "pip install 'sorbet-snn[train]'" in done.stderr


def test_quickstart():
    done = sorbet("quickstart")
    assert "positive" in done.stdout
    assert "negative" in done.stdout
    assert "bit for bit" in done.stdout
    assert "NO" not in done.stdout.split()


def test_errors_are_one_line(checkpoint, data, tmp_path):
    model = checkpoint / "model.sorbet"
    broken = tmp_path / "broken.sorbet"
    broken.write_bytes(model.read_bytes()[:-10])
    bert = tmp_path / "bert"
    BertForSequenceClassification(BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
                                             intermediate_size=8)).save_pretrained(bert)  # fmt: skip
    other = tmp_path / "other"
    random_model(num_hidden_layers=1, vocab_size=99, num_labels=2).save_pretrained(other)
    nan = tmp_path / "nan"
    diverged = random_model()
    diverged.classifier.bias.data[0] = float("nan")
    diverged.save_pretrained(nan)
    hf_tokenizer().save_pretrained(nan)
    for arguments, message in (
        (("info", tmp_path / "none.sorbet"), "none.sorbet: cannot be read (No such file"),
        (("info", broken), "broken.sorbet: the file is damaged or cut short"),
        (("verify", model, "--data", tmp_path / "none.tsv"), "none.tsv: cannot be read"),
        (("verify", model, "--data", data, "--checkpoint", bert), "'bert' checkpoint, not a Sorbet"),
        (("verify", model, "--data", data, "--checkpoint", other), "its vocab_size is 99, the artefact's"),
        (("verify", model, "--data", data, "--checkpoint", tmp_path / "no"), "no model to load here"),
        (("convert", other, tmp_path / "x.sorbet"), "no usable tokenizer there"),
        (("convert", nan, tmp_path / "x.sorbet"), "classifier.bias: 1 of 3 values are NaN"),
    ):
        done = sorbet(*arguments, check=2)
        assert message in done.stderr, done.stderr
        assert done.stderr.strip().count("\n") == 0, done.stderr


def test_broken_checkpoints_are_errors(checkpoint, data, tmp_path):
    """A half-precision copy is compared; weights cut short, another stage, another head count, bad numbers are not."""
    model = checkpoint / "model.sorbet"
    half = random_model(seed=12, vocab_size=len(hf_tokenizer()), num_labels=2).half()
    half.save_pretrained(tmp_path / "half")
    done = sorbet("verify", model, "--data", data, "--checkpoint", tmp_path / "half", "--limit", 4, check=None)
    assert done.returncode in (0, 1)  # half precision moves some weights
    assert "in 4 examples" in done.stdout
    cut = tmp_path / "cut"
    shutil.copytree(checkpoint, cut)
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    stage = tmp_path / "stage"
    random_model(vocab_size=len(hf_tokenizer()), num_labels=2, activation_bits=32).save_pretrained(stage)
    heads = tmp_path / "heads"
    random_model(vocab_size=len(hf_tokenizer()), num_labels=2, num_attention_heads=2).save_pretrained(heads)
    for folder, message in (
        (cut, "no model to load here"),
        (stage, "activation_bits is 32"),
        (heads, "its num_heads is 2"),
    ):
        done = sorbet("verify", model, "--data", data, "--checkpoint", folder, check=2)
        assert message in done.stderr
    for key, value in (("hidden_size", "x"), ("num_attention_heads", 0), ("weight_bits", 2)):
        bad = tmp_path / f"bad-{key}"
        shutil.copytree(checkpoint, bad)
        settings = json.loads((bad / "config.json").read_text())
        (bad / "config.json").write_text(json.dumps(settings | {key: value}))
        done = sorbet("convert", bad, tmp_path / "x.sorbet", check=2)
        assert "no model to load here" in done.stderr
    done = sorbet("convert", checkpoint, tmp_path / "no" / "x.sorbet", check=2)
    assert "cannot be written (No such file" in done.stderr


def test_long_text_is_cut_with_a_warning(checkpoint, tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("[/b] film " * 100 + "\n\nplot\n")
    done = sorbet("verify", checkpoint / "model.sorbet", "--data", path)
    assert "0 differences in 2 examples" in done.stdout
    assert "warning: a text of more than 40 tokens was cut" in done.stderr
