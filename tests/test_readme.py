"""What the README shows runs as it stands there."""

import re
import shlex
from pathlib import Path

from conftest import SHAPE
from test_cli import sorbet
from test_model import hf_tokenizer
from transformers import BertConfig, BertForSequenceClassification

from sorbet import madeup

README = Path(__file__).parents[1] / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_readme(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = hf_tokenizer()
    shape = {name: value for name, value in SHAPE.items() if name != "initializer_range"}
    bert = BertForSequenceClassification(BertConfig(**(shape | {"vocab_size": len(tokenizer), "num_labels": 2})))
    bert.save_pretrained("bert")
    tokenizer.save_pretrained("bert")
    make, look = (block.replace("path/to/bert", "bert") for block in blocks("python"))
    scope: dict = {}
    exec(make, scope)
    exec(look, scope)
    assert scope["record"]["layers.0.query"].shape[:2] == (16, 1)

    scope["model"].save_pretrained("checkpoint")
    tokenizer.save_pretrained("checkpoint")
    Path("dev.tsv").write_text("sentence\n" + "\n".join(r.text for r in madeup.remarks(5)) + "\n")
    commands = re.findall(r"^    sorbet (.*?)(?:#.*)?$", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        arguments = shlex.split(command.replace("path/to/checkpoint", "checkpoint"))
        assert sorbet(*arguments).returncode == 0


def test_its_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)\)", README.read_text(encoding="utf-8")):
        assert (README.parent / target).exists(), target
