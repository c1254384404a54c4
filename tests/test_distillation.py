"""The distillation: data, losses, recipes, and the chain as a person runs it."""

import csv
import dataclasses
import gzip
import itertools
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from conftest import config, random_model
from safetensors.torch import load_file
from test_cli import NO_TORCH, sorbet
from test_model import hf_tokenizer
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    TrainingArguments,
)

from sorbet import Artifact, SorbetError, madeup
from sorbet.configuration_sorbet import STAGES
from sorbet.distillation import metrics as M
from sorbet.distillation.command import changed
from sorbet.distillation.losses import attention_loss, logits_loss, representation_loss
from sorbet.distillation.recipe import Recipe, Step, load_recipe, parse_recipe
from sorbet.distillation.tasks import GLUE, Examples, load_files, load_glue, split
from sorbet.distillation.trainer import (
    Checkpoint,
    Collator,
    DistillationTrainer,
    EncodedExamples,
    last_checkpoint,
    parameter_groups,
    schedule,
)
from sorbet.errors import DataError
from sorbet.hub import push

# -- data -------------------------------------------------------------------------------------------------------------

OFFICIAL = {
    "cola": ("CoLA", "s1\t1\t\tgood .\ns2\t0\t*\tbad bad .\n", ["good .", "bad bad ."], [1, 0]),
    "sst2": ("SST-2", "sentence\tlabel\nfine \t1\nno\t0\n", ["fine ", "no"], [1, 0]),
    "mrpc": ("MRPC", "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\ta \"b\tc\n0\t7\t8\td\te\n",
             [('a "b', "c"), ("d", "e")], [1, 0]),
    "stsb": ("STS-B", "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
             "0\tg\tf\ty\to\ts\tt\ta\tb\t4.250\n", [("a", "b")], [4.25]),
    "qqp": ("QQP", "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n1\t2\t3\ta ?\tb ?\t1\n1\t2\tmalformed\n",
            [("a ?", "b ?")], [1]),
    "mnli": ("MNLI", "index\tsentence1\tsentence2\tgold_label\n0\ta\tb\tcontradiction\n1\tc\td\tentailment\n",
             [("a", "b"), ("c", "d")], [2, 0]),
    "qnli": ("QNLI", "index\tquestion\tsentence\tlabel\n0\tq\ts\tnot_entailment\n", [("q", "s")], [1]),
    "rte": ("RTE", "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tentailment\n", [("a", "b")], [0]),
}  # fmt: skip


@pytest.mark.parametrize("name", OFFICIAL)
@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.filterwarnings("ignore:.*malformed")
def test_official_glue_layout(tmp_path, name, zipped):
    folder, content, texts, labels = OFFICIAL[name]
    (tmp_path / folder).mkdir()
    for part in ("train", *GLUE[name].dev):
        path = tmp_path / folder / f"{part}.tsv{'.gz' * zipped}"
        path.write_bytes(gzip.compress(content.encode()) if zipped else content.encode())
    for place in (tmp_path, tmp_path / folder):
        data = load_glue(name, place)
        assert data.train.texts == texts
        assert data.train.labels == labels
        assert list(data.dev) == list(GLUE[name].dev)


def test_all_shared_glue_files(glue):
    """Real files, where they are at hand: sizes as documented by GLUE."""
    sizes = {"sst2": (67349, 872), "cola": (8551, 1043), "mrpc": (3668, 408), "rte": (2490, 277), "stsb": (5749, 1500)}
    for name, (train, dev) in sizes.items():
        data = load_glue(name, glue)
        assert (len(data.train), len(data.dev["dev"])) == (train, dev)


def test_glue_errors(tmp_path):
    with pytest.raises(DataError, match="task is 'sst': it must be one of cola, sst2"):
        load_glue("sst", tmp_path)
    with pytest.raises(DataError, match="no such folder"):
        load_glue("sst2", tmp_path / "nowhere")
    with pytest.raises(DataError, match="no train.tsv"):
        load_glue("sst2", tmp_path)
    (tmp_path / "train.tsv").write_text("sentence\tlabel\n" + "x\t1\ny\t0\n" * 20)
    with pytest.raises(DataError, match="no dev.tsv .* --holdout 0.1 sets aside"):
        load_glue("sst2", tmp_path)
    data = load_glue("sst2", tmp_path, holdout=0.25)
    assert (len(data.train), len(data.dev["holdout"])) == (30, 10)
    assert "0.25 of train held out" in data.source
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\nx\t1\ny\tmaybe\n")
    with pytest.raises(DataError, match=r"dev.tsv, line 3: label 'maybe'; it must be one of negative, positive"):
        load_glue("sst2", tmp_path)
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\nx\t2\n")
    for label in ("2", "-1", "01x", "²"):
        (tmp_path / "dev.tsv").write_text(f"sentence\tlabel\nx\t{label}\n")
        with pytest.raises(DataError, match=rf"line 2: label '{label}'"):
            load_glue("sst2", tmp_path)


def test_split_is_a_partition_and_reproducible():
    examples = Examples([f"t{i}" for i in range(50)], list(range(50)))
    train, held = split(examples, 0.2, seed=3)
    assert sorted(train.texts + held.texts) == sorted(examples.texts)
    assert split(examples, 0.2, seed=3)[1].texts == held.texts != split(examples, 0.2, seed=4)[1].texts
    assert all(train.texts[i] == f"t{train.labels[i]}" for i in range(len(train)))
    with pytest.raises(DataError, match="holdout is 1.5"):
        split(examples, 1.5, 0)


def write(path: Path, content: str) -> Path:
    path.write_text(content, encoding="utf-8")
    return path


def test_own_files(tmp_path):
    rows = "text,category\n" + "printer on fire,hardware\nforgot it,password\n" * 10
    data = load_files(write(tmp_path / "t.csv", rows), write(tmp_path / "d.csv", rows))
    assert data.task.labels == ("hardware", "password")
    assert data.task.label_column == "category"
    assert data.train.labels[:2] == [0, 1]
    assert len(data.dev["dev"]) == 20
    jsonl = "".join(json.dumps({"question": f"q{i}", "answer": "a", "stars": i % 10}) + "\n" for i in range(40))
    data = load_files(write(tmp_path / "t.jsonl", jsonl), text=("question", "answer"), label="stars")
    assert data.task.labels == tuple(str(i) for i in range(10)), "numbers sort as numbers"
    assert data.train.texts[0] == ("q0", "a")
    assert len(data.dev["holdout"]) == 4
    scores = "sentence1\tsentence2\tscore\na\tb\t2.5\nc\td\t-1\n"
    data = load_files(write(tmp_path / "t.tsv", scores), write(tmp_path / "d.tsv", scores), regression=True)
    assert data.train.labels == [2.5, -1.0]
    assert data.task.metrics == ("spearman", "pearson")


@pytest.mark.parametrize(
    ("train", "dev", "options", "message"),
    [
        ("text,label\na,x\nb,y\n", "text,label\na,z\n", {}, r"d.csv, line 2: label 'z'; it must be one of x, y"),
        ("text,label\na,1\nb,2\n", "text,label\na,0\n", {}, r"d.csv, line 2: label '0'; it must be one of 1, 2"),
        ("text,label\na,x\nb,y\n", "text,label\na,-1\n", {}, r"d.csv, line 2: label '-1'"),
        ("text,label\na,x\nb,\n", None, {}, r"t.csv, line 3: label ''; leave rows without a label out"),
        ("text,label\na,x\nb,NaN\n", None, {}, r"t.csv, line 3: label 'NaN'"),
        ("text,label\na,x\nb,y\n", None, {"text": ("label",)}, r"column 'label' is both text and label"),
        ("text,label\na,x\nb,y\n", None, {"holdout": 0.0}, r"holdout is 0: it must be a share"),
        ("text,label\na,x\nb,y\n", "text,label\na,x\n", {"holdout": 0.5}, r"both --dev and --holdout"),
        ("text,label\na,x\nb,x\n", None, {}, r"every row is labelled 'x'; a classifier needs at least two"),
        ("text,kind\na,x\nb,y\n", None, {}, r"no label column among text, kind; name it with --label"),
        ("body,label\na,x\nb,y\n", None, {}, r"line 1: no text column among body, label"),
        ("text,label\na,x\nb,y\n", "text,mark\na,x\n", {}, r"d.csv: no column 'label'; it has text, mark"),
        ("text,label\na,x\nb,y\n", None, {"text": ("body",)}, r"no column 'body'; it has text, label"),
        ("text,label\na,x\nb,y\n", None, {"text": ("a", "b", "c")}, r"3 text columns"),
        ("text,label\na,1\nb,many\n", None, {"regression": True}, r"line 3: label 'many'; it must be a number"),
        ("text,label\na,1\nb,nan\n", None, {"regression": True}, r"line 3: label 'nan'; it must be a number"),
        ("text,label\n" + "".join(f"a,{i / 7}\n" for i in range(300)), None, {}, "300 different .* --regression"),
        ("", None, {}, r"t.csv: the file is empty"),
        ("text,label\n", None, {}, r"a header and no rows"),
    ],
)  # fmt: skip
def test_own_files_that_cannot_be_used(tmp_path, train, dev, options, message):
    files = [write(tmp_path / "t.csv", train), None if dev is None else write(tmp_path / "d.csv", dev)]
    with pytest.raises(DataError, match=message):
        load_files(*files, **options)


def test_mixed_encodings_are_found_by_line(tmp_path):
    (tmp_path / "t.csv").write_bytes("text,label\ncafé,x\n".encode() + "café,y\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"t.csv, line 3: not UTF-8 \(byte 0xe9\)"):
        load_files(tmp_path / "t.csv")


# -- metrics and losses -----------------------------------------------------------------------------------------------


def test_metrics():
    logits = np.array([[2.0, 1], [0, 1], [0, 1], [3, 1]])
    labels = np.array([0, 1, 0, 0])
    assert M.evaluate(("accuracy", "f1"), logits, labels) == {"accuracy": 0.75, "f1": pytest.approx(2 / 3)}
    assert M.evaluate(("matthews",), logits, labels)["matthews"] == pytest.approx(0.57735, abs=1e-5)
    line = np.array([[1.0], [2], [3], [10]])
    assert M.evaluate(("spearman", "pearson"), line, np.array([1.0, 2, 3, 4]))["spearman"] == pytest.approx(1.0)
    for name in ("spearman", "pearson"):
        assert M.METRICS[name](np.ones(4), np.arange(4.0)) == 0.0, "a constant says nothing; it is not nan"


def test_losses_split_over_examples():
    """Every loss is a mean over examples: two halves of a batch average to the whole, whatever their padding."""
    torch.manual_seed(0)
    mask = torch.ones(4, 6, dtype=torch.long)
    mask[0, 3:], mask[3, 1:] = 0, 0
    ours, theirs = ([torch.randn(4, 6, 8) for _ in range(3)] for _ in range(2))
    probs, goals = ([torch.rand(4, 2, 6, 6) for _ in range(3)] for _ in range(2))
    logits, said = torch.randn(4, 3), torch.randn(4, 3)
    cases = [
        lambda s: representation_loss([x[s] for x in ours], [x[s] for x in theirs], mask[s]),
        lambda s: attention_loss([x[s] for x in probs], [x[s] for x in goals], mask[s]),
        lambda s: logits_loss(logits[s], said[s], 4.0),
        lambda s: logits_loss(logits[s, :1], said[s, :1], regression=True),
    ]
    for loss in cases:
        halves = (loss(slice(0, 2)) + loss(slice(2, 4))) / 2
        torch.testing.assert_close(loss(slice(0, 4)), halves)  # sums in another order
        assert loss(slice(0, 4)) > 0
    ours[0][0, 3:] = 1e6
    padded = cases[0](slice(0, 1))
    ours[0][0, 3:] = -5.0
    assert torch.equal(cases[0](slice(0, 1)), padded), "padding counts"


def test_kl_of_equal_logits_is_zero_and_regression_is_not_blind():
    logits = torch.randn(5, 4)
    assert logits_loss(logits, logits).abs() < 1e-6  # rounding of the logarithms
    assert logits_loss(torch.zeros(5, 1), torch.ones(5, 1), regression=True) == 1


# -- recipes ----------------------------------------------------------------------------------------------------------

RECIPES = sorted(Path(M.__file__).parents[1].joinpath("recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes(path):
    recipe = load_recipe(path)
    assert recipe == load_recipe(path.stem)
    assert set(recipe.stages) == {"M1", "M2", "M3"}
    assert recipe.task in ("", path.stem)
    assert parse_recipe(dataclasses.asdict(recipe)) == recipe
    for name, stage in recipe.stages.items():
        config(**(STAGES[name] | recipe.student | stage.config))  # options that the configuration knows


def test_every_task_has_a_recipe():
    assert {path.stem for path in RECIPES} == {*GLUE, "default"}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"epoch": 3}, "'epoch' is unknown; known are"),
        ({"all": {"epochs": "many"}}, "all: epochs is 'many'; it must be float"),
        ({"all": {"batch_size": 1.5}}, "batch_size is 1.5; it must be int"),
        ({"stages": {"M4": {}}}, "stage 'M4' is unknown"),
        ({"stages": {"M1": [1]}}, "a mapping of names to values"),
        ({"seed": True}, "seed is True"),
        ({"all": {"batch_size": 0}}, "batch_size is 0; it must lie in 1"),
        ({"all": {"learning_rate": -1}}, "learning_rate is -1"),
        ({"stages": {"M3": {"teacher": "frist"}}}, "teacher is 'frist'; it must be 'previous' or 'first'"),
        ({"stages": 1}, "stages is 1"),
        ([1], "a mapping of names to values must stand here"),
    ],
)
def test_recipe_errors(raw, message):
    with pytest.raises(SorbetError, match=message):
        parse_recipe(raw)


def test_what_a_recipe_does_not_say():
    recipe = parse_recipe({"all": {"epochs": 9}, "stages": {"M3": {"epochs": 2}}})
    assert [recipe.stages[name].epochs for name in ("M1", "M2", "M3")] == [9, 9, 2]
    assert parse_recipe({"all": {"epochs": 9}}).stages["M1"].epochs == 9


def test_changes_on_the_command_line(tmp_path):
    recipe = changed(Recipe(), ("M3.epochs=4", "all.batch_size=16", "student.encoding=offset", "seed=7"))
    assert recipe.stages["M3"].epochs == 4
    assert {step.batch_size for step in recipe.stages.values()} == {16}
    assert recipe.student == {"encoding": "offset"}
    assert recipe.seed == 7
    assert changed(Recipe(), ("M1.learning_rate=5e-4",)).stages["M1"].learning_rate == 5e-4
    assert changed(Recipe(), ("M3.config.norm_type=bspn-pow2",)).stages["M3"].config == {"norm_type": "bspn-pow2"}
    for change, message in (
        ("M3", "NAME=VALUE"),
        ("M4.epochs=1", "M4 is none of"),
        ("M3.epoch=1", "'epoch' is unknown"),
        ("M3.epochs=[", "no YAML value"),
    ):
        with pytest.raises(SorbetError, match=message):
            changed(Recipe(), (change,))
    (tmp_path / "bad.yaml").write_text("a: [1\n")
    with pytest.raises(SorbetError, match="recipe .*bad.yaml"):
        load_recipe(tmp_path / "bad.yaml")
    with pytest.raises(SorbetError, match="no recipe 'sst': name a YAML file or one of cola"):
        load_recipe("sst")


def test_schedule():
    factor = schedule(100, 0.1, 0.0)
    assert factor(0) == 0.1
    assert factor(9) == factor(10) == 1.0
    assert factor(55) == 0.5
    assert factor(100) == 0.0
    assert schedule(100, 0.1, 0.3)(70) == 0.0 < schedule(100, 0.1, 0.3)(69)


def test_parameter_groups_cover_every_parameter_once():
    model = random_model()
    groups = parameter_groups(model, Step(scale_learning_rate=1e-5))
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    scales = groups[-1]
    assert scales["lr"] == 1e-5
    assert scales["weight_decay"] == 0
    assert all(parameter.dim() == 0 for parameter in scales["params"])
    assert groups[1]["weight_decay"] == 0 < groups[0]["weight_decay"]


def test_collator():
    rows = [
        {"input_ids": [2, 5, 3], "token_type_ids": [0, 0, 1], "labels": 1},
        {"input_ids": [2], "token_type_ids": [0], "labels": 0},
    ]
    batch = Collator(9)(rows)
    assert batch["input_ids"].tolist() == [[2, 5, 3], [2, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert Collator(9, fixed_length=8)(rows)["token_type_ids"].shape == (2, 8)


OLD = '{"global_step": 10, "best_global_step": 5, "best_model_checkpoint": "/elsewhere/checkpoint-5"}'


def test_a_half_written_checkpoint_is_passed_over(tmp_path):
    for step, state in ((5, "{}"), (10, OLD), (15, '{"half'), (20, None)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if state is not None:
            (folder / "trainer_state.json").write_text(state)
    found = last_checkpoint(tmp_path, max_steps=20)
    assert found == Checkpoint(tmp_path / "checkpoint-10", tmp_path / "checkpoint-5", finished=False)
    assert not (tmp_path / "checkpoint-20").exists()
    moved = json.loads((tmp_path / "checkpoint-10" / "trainer_state.json").read_text())
    assert moved["best_model_checkpoint"] == str(tmp_path / "checkpoint-5"), "the run may have moved"
    assert last_checkpoint(tmp_path, max_steps=10).finished
    stopped = moved | {"stateful_callbacks": {"TrainerControl": {"args": {"should_training_stop": True}}}}
    (tmp_path / "checkpoint-10" / "trainer_state.json").write_text(json.dumps(stopped))
    assert last_checkpoint(tmp_path, max_steps=20).finished, "stopped early is finished"
    assert last_checkpoint(tmp_path / "nothing", 1) is None


def small_trainer(folder, batch=8, accumulation=1, compiled=False, examples=20) -> DistillationTrainer:
    """A teacher in the making: a small BERT on the labels of made-up remarks."""
    tokenizer = hf_tokenizer()
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))  # fmt: skip
    made = madeup.remarks(examples)
    data = EncodedExamples(Examples([r.text for r in made], [r.label for r in made]), tokenizer, 32)
    arguments = TrainingArguments(
        output_dir=folder, max_steps=1, per_device_train_batch_size=batch // accumulation,
        gradient_accumulation_steps=accumulation, use_cpu=True, report_to=[], logging_steps=1, torch_compile=compiled,
        save_strategy="no", disable_tqdm=True, label_names=["labels"], remove_unused_columns=False,
    )  # fmt: skip
    return DistillationTrainer(
        model=model, args=arguments, train_dataset=data, eval_dataset=data, data_collator=Collator(0), teacher=None,
        step=Step(),
    )  # fmt: skip


def test_accumulation_does_not_scale_the_gradient(tmp_path):
    norms = []
    for accumulation in (1, 2, 4):
        trainer = small_trainer(tmp_path, accumulation=accumulation)
        trainer.train()
        norms.append(next(entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry))
    assert norms[1:] == pytest.approx([norms[0]] * 2, rel=1e-4)  # sums in another order


def test_compiled_runs_drop_no_example_that_matters(tmp_path):
    """Batches of one size in training, where there are enough examples for one; every example in evaluation."""
    trainer = small_trainer(tmp_path, compiled=True)
    assert [len(batch["labels"]) for batch in trainer.get_train_dataloader()] == [8, 8]
    assert sum(len(batch["labels"]) for batch in trainer.get_eval_dataloader()) == 20
    few = small_trainer(tmp_path, compiled=True, examples=5)
    assert sum(len(batch["labels"]) for batch in few.get_train_dataloader()) == 5
    assert small_trainer(tmp_path, compiled=False).predict(trainer.eval_dataset).predictions.shape == (20, 2)


# -- the chain --------------------------------------------------------------------------------------------------------

SHORT = [f"--set={name}.epochs=0.3" for name in ("teacher", "M1", "M2", "M3")]


def weights(folder: Path) -> dict[str, bytes]:
    """Every checkpoint and the artefact of a run, less the note that names its teacher's folder."""
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("model.safetensors")}
    artifact = dataclasses.replace(Artifact.load(folder / "model.sorbet"), provenance={})
    return found | {"model.sorbet": artifact.to_bytes()}


@pytest.fixture(scope="module")
def short_run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    sorbet("distill", "--smoke", "--cpu", "--quiet", "--out", folder, *SHORT)
    return folder


def test_smoke(tmp_path):
    """The whole chain learns the made-up task, and says what it did."""
    out = tmp_path / "run"
    done = sorbet("distill", "--smoke", "--cpu", "--quiet", "--out", out)
    for part in ("teacher", "M1", "M2", "M3", "sorbet", "spike rate", "0 differences in 16 examples"):
        assert part in done.stdout
    results = {result["step"]: result for result in json.loads((out / "results.json").read_text())}
    assert all(result["scores"]["dev"]["accuracy"] > 0.9 for result in results.values())
    assert results["sorbet"]["scores"] == results["M3"]["scores"], "zero conversion loss"
    assert 0 < results["sorbet"]["spike_rate"] < 1
    assert 0 < results["sorbet"]["millijoules"] < results["sorbet"]["bert_millijoules"]
    rows = "text,label\n" + "".join(f'"{r.text}",{madeup.LABELS[r.label]}\n' for r in madeup.remarks(320, 2))
    (tmp_path / "dev.csv").write_text(rows)
    found = json.loads(
        sorbet("evaluate", out / "model.sorbet", "--data", tmp_path / "dev.csv", "--json", code=NO_TORCH).stdout
    )
    assert found["scores"]["accuracy"] == results["sorbet"]["scores"]["dev"]["accuracy"]
    assert found["spike_rate"] == results["sorbet"]["spike_rate"]
    again = sorbet("distill", "--smoke", "--cpu", "--quiet", "--out", out, check=2)
    assert "holds a run already; --resume goes on with it" in again.stderr


def test_the_same_run_twice_is_the_same(short_run, tmp_path):
    sorbet("distill", "--smoke", "--cpu", "--quiet", "--out", tmp_path / "again", *SHORT)
    assert weights(tmp_path / "again") == weights(short_run)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_killed_at_random_and_resumed(short_run, tmp_path, seed):
    """SIGKILL at a random moment, several times over, then --resume: the same weights as a run left alone."""
    rng = random.Random(seed)
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "sorbet", "distill", "--smoke", "--cpu", "--quiet", "--out", str(out), *SHORT]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    interrupted = 0
    for stage in [*rng.sample(("teacher", "M1", "M2", "M3"), 2), "M3"]:
        process = subprocess.Popen(
            [*command, *["--resume"] * (out / "run.json").is_file()], env=env, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        began = time.monotonic()  # wait for a checkpoint of this stage, or for the run to end without needing one
        while process.poll() is None and not any((out / stage).glob("checkpoint-*")):
            assert time.monotonic() - began < 120
            time.sleep(0.02)
        time.sleep(rng.uniform(0.0, 0.6))
        process.send_signal(signal.SIGKILL)
        process.wait()
        interrupted += not (out / stage / "result.json").is_file()
    assert interrupted > 0, "no stage was cut short: the test proves nothing"
    sorbet("distill", "--smoke", "--cpu", "--quiet", "--out", out, *SHORT, *["--resume"] * (out / "run.json").is_file())
    assert weights(out) == weights(short_run)


def test_card_and_what_would_be_uploaded(short_run, tmp_path, monkeypatch):
    done = sorbet("push", short_run, "someone/sorbet-madeup", "--gather", tmp_path / "upload")
    names = done.stdout.split()
    assert {"README.md", "config.json", "model.safetensors", "model.sorbet", "tokenizer.json"} <= set(names)
    assert "result.json" not in names
    card = (tmp_path / "upload" / "README.md").read_text()
    assert card == (short_run / "README.md").read_text()
    results = json.loads((short_run / "results.json").read_text())
    for text in (
        "| teacher (M0) |",
        "| **Sorbet** (spikes) |",
        f"{results[-1]['spike_rate']:.4f}",
        "0 differences in 16",
    ):
        assert text in card
    assert str(short_run.parent) not in card, "no path of this machine"

    calls = []
    from huggingface_hub import HfApi

    monkeypatch.setattr(HfApi, "create_repo", lambda self, name, **options: calls.append((name, options)) or "url")

    def upload(self, repo_id, folder_path, **_):
        calls.append((repo_id, sorted(path.name for path in Path(folder_path).iterdir())))

    monkeypatch.setattr(HfApi, "upload_folder", upload)
    assert push(short_run, name := "someone/sorbet-madeup") == "url"
    assert calls == [(name, {"private": False, "exist_ok": True}), (name, sorted(names))]
    with pytest.raises(SorbetError, match="it must read user/name"):
        push(short_run, "sorbet")
    with pytest.raises(SorbetError, match="no finished run there"):
        push(tmp_path, "someone/sorbet")


def test_resume_with_other_settings_is_refused(short_run):
    done = sorbet(
        "distill", "--smoke", "--cpu", "--quiet", "--out", short_run, "--resume", "--set=M3.epochs=9", check=2
    )
    assert "its run has another recipe" in done.stderr


def test_teachers_that_cannot_teach(tmp_path):
    """Said before the folder of the run is made."""
    shape = {"vocab_size": len(hf_tokenizer()), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
             "intermediate_size": 16, "max_position_embeddings": 64}  # fmt: skip
    other = BertForSequenceClassification(BertConfig(**shape, id2label={0: "positive", 1: "negative"}))
    for name, model in (("order", other), ("kind", DistilBertModel(DistilBertConfig(dim=16, n_layers=1, n_heads=2)))):
        model.save_pretrained(tmp_path / name)
        hf_tokenizer().save_pretrained(tmp_path / name)
    BertForSequenceClassification(BertConfig(**shape)).save_pretrained(tmp_path / "mute")
    (tmp_path / "t.csv").write_text("text,label\n" + "good,positive\nbad,negative\n" * 20)
    for teacher, extra, message in (
        ("order", (), "a classifier of positive, negative, the task's labels are negative, positive"),
        ("kind", (), "'distilbert' checkpoint: the teacher must be a BERT"),
        ("mute", (), "no usable tokenizer there"),
        ("none", (), "no BERT to load there"),
        ("order", ("--set", "max_length=200"), "max_length is 200, the teacher has 64 positions"),
    ):
        arguments = ("--teacher", tmp_path / teacher, "--train", tmp_path / "t.csv", "--out", tmp_path / "run", "--cpu")
        if "max_length=200" not in extra:
            arguments += ("--set", "max_length=64")
        done = sorbet("distill", *arguments, *extra, check=2)
        assert message in done.stderr
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["glue", "ablations"])
def test_shipped_sweeps_are_well_formed(name, tmp_path):
    """Every run parses, builds on a run that comes before it, and makes configurations that exist."""
    sweep = yaml.safe_load((Path(__file__).parents[1] / "sweeps" / f"{name}.yaml").read_text())
    seen: list[str] = []
    for run, arguments in sweep["runs"].items():
        words = shlex.split(f"{sweep['common']} {arguments or ''}".format(teacher="t", data="d", out="o"))
        options = dict(itertools.pairwise(words))
        changes = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
        assert options.get("--from", "o/").removeprefix("o/") in ("", *seen)
        recipe = changed(load_recipe(options["--task"]), tuple(changes))
        for stage in options.get("--stages", "M1,M2,M3").split(","):
            config(**(STAGES[stage] | recipe.student | recipe.stages[stage].config))
        seen.append(run)


def test_building_on_another_run(tmp_path):
    """--from takes over the steps that are the same, and does the rest; the ‡ variant, and rows without spikes."""
    tokenizer = hf_tokenizer()
    BertForSequenceClassification(BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64)).save_pretrained(tmp_path / "bert")  # fmt: skip
    tokenizer.save_pretrained(tmp_path / "bert")
    rows = "".join(f'"{r.text}",{madeup.LABELS[r.label]}\n' for r in madeup.remarks(120))
    (tmp_path / "t.csv").write_text("text,label\n" + rows)
    common = ("--teacher", tmp_path / "bert", "--train", tmp_path / "t.csv", "--cpu", "--quiet")
    common += ("--set", "max_length=32", "--set", "all.epochs=1")
    base = tmp_path / "base"
    sorbet("distill", *common, "--out", base)
    for name in ("M1", "M2", "M3"):
        result = json.loads((base / name / "result.json").read_text())
        (base / name / "result.json").write_text(json.dumps(result | {"marked": True}))

    out = tmp_path / "double-dagger"
    sorbet("distill", *common, "--out", out, "--from", base, "--set", "M3.config.norm_type=bspn-pow2")
    results = {result["step"]: result for result in json.loads((out / "results.json").read_text())}
    assert [name for name, result in results.items() if "marked" in result] == ["M1", "M2"]
    assert Artifact.load(out / "model.sorbet").shape.norm == "bspn-pow2"

    out = tmp_path / "full-precision"
    bits = ("--set", "M3.config.weight_bits=32", "--set", "M3.config.activation_bits=32")
    done = sorbet("distill", *common, "--out", out, "--from", base, "--stages", "M3", *bits)
    assert "M3" in done.stdout
    assert [result["step"] for result in json.loads((out / "results.json").read_text())] == ["teacher", "M3"]
    assert not (out / "model.sorbet").exists()


def test_sweep(tmp_path):
    """Runs side by side with their results in one tidy table; one that fails is reported and leaves the rest alone."""
    (tmp_path / "sweep.yaml").write_text(
        "common: --smoke --cpu --quiet --set teacher.epochs=0.1 --set all.epochs=0.1\n"
        "runs:\n  a:\n  b: --set seed=7\n  broken: --set M3.epoch=1\n"
    )
    script = Path(__file__).parents[1] / "scripts" / "sweep.py"
    done = subprocess.run([sys.executable, str(script), str(tmp_path / "sweep.yaml"), "--out", str(tmp_path / "out")],
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 1
    assert "broken: FAILED" in done.stdout
    with (tmp_path / "out" / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["run"] for row in rows} == {"a", "b"}
    assert {row["seed"] for row in rows if row["run"] == "b"} == {"7"}
    assert {row["step"] for row in rows} == {"teacher", "M1", "M2", "M3", "sorbet"}
    assert str(tmp_path) not in (tmp_path / "out" / "results.csv").read_text()


def test_dry_run(tmp_path):
    done = sorbet("distill", "--smoke", "--cpu", "--out", tmp_path / "run", "--dry-run")
    for part in ("2 labels (negative, positive)", "train 3,200, dev 320", "M3", "previous", "in all on cpu"):
        assert part in done.stdout
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a BERT with --teacher and a folder with --out"),
        (["--teacher", "x", "--out", "o"], "either a GLUE task with --task, or your own data"),
        (["--teacher", "x", "--out", "o", "--task", "sst2", "--train", "t.csv"], "either a GLUE task"),
        (["--teacher", "x", "--out", "o", "--task", "sst3"], "no recipe 'sst3'"),
        (["--teacher", "x", "--out", "o", "--task", "sst2", "--data", "./none"], "./none: no such folder"),
        (["--teacher", "x", "--out", "o", "--train", "none.csv"], "none.csv: cannot be read"),
        (["--teacher", "x", "--out", "o", "--train", "t.csv", "--stages", "M3,M1"], "stages are M3,M1"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    done = sorbet("distill", *arguments, check=2)
    assert message in done.stderr
    assert not (tmp_path / "o").exists()


@pytest.mark.slow
def test_two_processes_take_one_step_together(tmp_path):
    """Gradients, ψ and ν of a batch split over two processes are those of the whole batch in one."""
    script = Path(__file__).with_name("two_processes.py")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for world in (1, 2):
        places = [[str(rank), str(world), str(tmp_path), str(port)] for rank in range(world)]
        running = [subprocess.Popen([sys.executable, str(script), *place]) for place in places]
        try:
            assert [process.wait(90) for process in running] == [0] * world
        finally:
            for process in running:
                process.kill()
    whole, first, second = (torch.load(tmp_path / f"{name}.pt") for name in ("1-0", "2-0", "2-1"))
    for name, value in whole.items():
        assert torch.equal(first[name], second[name]), f"{name}: the processes disagree"
        # Sums in another order; key biases have no gradient but rounding.
        tolerance = 1e-4 * float(value.abs().max()) + 1e-6
        assert float((first[name] - value).abs().max()) <= tolerance, name


@pytest.mark.slow
def test_two_processes_run_the_chain_of_one(short_run, tmp_path):
    """Two processes, half of each batch to either: the same steps on the same batches, and nearly the same weights."""
    out = tmp_path / "two"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "sorbet"]
    command = [*launch, "distill", "--smoke", "--cpu", "--quiet", "--out", str(out), *SHORT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = (json.loads((folder / "results.json").read_text()) for folder in (short_run, out))
    assert [result.get("processes") for result in two] == [2, 2, 2, 2, None]
    assert [result.get("processes") for result in one] == [1, 1, 1, 1, None]
    assert [result.get("steps") for result in one] == [result.get("steps") for result in two]
    assert two[-1]["verified"] == "0 differences in 16 examples"
    for name, limit in (("teacher", 1e-3), ("M1", 0.02)):
        ours, theirs = (load_file(folder / name / "model.safetensors") for folder in (short_run, out))
        start = load_file(short_run.parent / f"{short_run.name}-bert" / "model.safetensors")
        moved = [k for k in start if f"bert.{k}" in ours and ours[f"bert.{k}"].shape == start[k].shape]
        assert name != "teacher" or any(not torch.equal(ours[f"bert.{k}"], start[k]) for k in moved), "nothing learned"
        for key, value in ours.items():  # sums in another order; in M1 a quantiser may amplify one
            difference = float((value - theirs[key]).float().norm() / (value.float().norm() + 1e-6))
            # What is added to all keys alike has no gradient but rounding, which AdamW makes steps of.
            exempt = value.dim() == 0 or key.endswith(("key.bias", "key_neuron.shift"))
            assert exempt or difference < limit, f"{name} {key}: {difference}"


@pytest.mark.parametrize("task", ["mnli", "stsb"])
def test_two_dev_sets_and_regression(tmp_path, task):
    """Through the whole chain: texts cut at max_length by every step alike, figures per dev set."""
    tokenizer = hf_tokenizer()
    BertModel(BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64)).save_pretrained(tmp_path / "bert")  # fmt: skip
    tokenizer.save_pretrained(tmp_path / "bert")
    folder = tmp_path / GLUE[task].folder
    folder.mkdir()
    made = madeup.remarks(160)
    label = "gold_label" if task == "mnli" else "score"
    for number, part in enumerate(("train", *GLUE[task].dev)):
        rows = []
        for a, b in zip(made[number:120], made[number + 40 :], strict=False):
            both = a.label + b.label
            rows.append(f"{a.text}\t{b.text}\t{GLUE[task].labels[both] if task == 'mnli' else both + 0.5}\n")
        (folder / f"{part}.tsv").write_text(f"sentence1\tsentence2\t{label}\n" + "".join(rows))
    out = tmp_path / "run"
    options = ["--cpu", "--quiet", "--set=max_length=12", "--set=all.epochs=2", "--set=teacher.epochs=2"]
    sorbet("distill", "--teacher", tmp_path / "bert", "--task", task, "--data", tmp_path, "--out", out, *options)
    results = {result["step"]: result for result in json.loads((out / "results.json").read_text())}
    assert list(results["sorbet"]["scores"]) == list(GLUE[task].dev)
    assert results["sorbet"]["scores"] == results["M3"]["scores"], "cut at the same length by both"
    assert Artifact.load(out / "model.sorbet").shape.max_positions == 12
    for part in GLUE[task].dev:
        for backend in ("reference", "spikes"):
            arguments = ("--task", task, "--data", tmp_path, "--part", part, "--backend", backend, "--json")
            found = json.loads(sorbet("evaluate", out / "model.sorbet", *arguments).stdout)
            assert found["scores"] == results["sorbet"]["scores"][part]
        if part == GLUE[task].dev[0]:
            assert found["spike_rate"] == results["sorbet"]["spike_rate"]
