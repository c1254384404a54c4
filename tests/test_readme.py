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
    rows = "".join(f'"{r.text}",LABEL_{r.label}\n' for r in madeup.remarks(5))
    Path("labelled.csv").write_text("text,label\n" + rows)
    for name, lines in (("tickets", 40), ("held-out", 20)):
        rows = "".join(f'"{r.text}",{madeup.LABELS[r.label]}\n' for r in madeup.remarks(lines, seed=lines))
        Path(f"{name}.csv").write_text("text,label\n" + rows)
    commands = re.findall(r"^    sorbet (.*?)(?:#.*)?$", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(commands) == 8
    for command in commands:
        command = command.replace("path/to/checkpoint", "checkpoint").replace("bert-base-uncased", "bert")
        arguments = shlex.split(command)
        if arguments[0] == "push":
            arguments += ["--gather", "upload"]
        elif "--smoke" in arguments or "sst2" in arguments:
            continue  # tested in test_distillation; needs the hub
        elif arguments[0] == "distill":
            arguments += [
                "--cpu",
                "--quiet",
                *(f"--set={x}" for x in ("all.epochs=1", "teacher.epochs=1", "max_length=40")),
            ]
            arguments[arguments.index("--out") + 1] = "runs/sst2"
        assert sorbet(*arguments).returncode == 0


def test_its_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)\)", README.read_text(encoding="utf-8")):
        assert (README.parent / target).exists(), target
