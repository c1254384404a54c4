"""The whole chain of Algorithm 4: teacher, M1, M2, M3, then convert, verify, evaluate.

A run is a folder. Each step has a folder of its own (`teacher`, `M1`, `M2`, `M3`) with its best checkpoint and a
`result.json` that is written last: where it is, the step is done, and `resume` goes on behind it.
"""

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import torch
import transformers
from accelerate import PartialState
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    EarlyStoppingCallback,
    PreTrainedModel,
    PrinterCallback,
    TrainingArguments,
    set_seed,
)
from transformers.integrations import is_tensorboard_available

from .. import __version__
from ..card import model_card
from ..conversion import convert, obstacles
from ..errors import SorbetError
from ..evaluation import evaluate
from ..modeling_sorbet import SorbetForSequenceClassification, load_tokenizer, stage_config
from ..verify import verify
from .metrics import evaluate as score
from .recipe import STEPS, Recipe, Step
from .tasks import Examples, Task, TaskData
from .trainer import (
    Collator,
    DistillationTrainer,
    EncodedExamples,
    columns,
    distillation_loss,
    last_checkpoint,
    logits_of,
    write_json,
)

STAGES = ("M1", "M2", "M3")


@dataclass(frozen=True)
class Machine:
    """How to compute, as opposed to what."""

    bf16: bool = False
    compile: bool = False
    cpu: bool = False
    accumulation: int = 1  # batches of batch_size / accumulation, added up
    quiet: bool = False
    tensorboard: bool = False


@dataclass
class Run:
    teacher: str
    data: TaskData
    recipe: Recipe
    out: Path
    machine: Machine = Machine()
    stages: tuple[str, ...] = STAGES
    base: Path | None = None  # another run, whose finished steps are taken over as far as they are the same

    # -- the chain -------------------------------------------------------------------------------------------------

    def run(self, resume: bool = False, verify_examples: int | None = 64) -> list[dict[str, Any]]:
        """Every step that is not done yet; returns the results of all, the spiking model's last."""
        state = PartialState(cpu=self.machine.cpu)
        self.check()
        with state.main_process_first():
            self.prepare(resume)
        results = [self.step("teacher")]
        for before, stage in zip(("teacher", *self.stages), self.stages, strict=False):
            results.append(self.step(stage, before))
        if state.is_main_process:  # the others are done: what follows would outlast their patience at a barrier
            spiking = self.spiking(verify_examples)
            results += [spiking] if spiking else []
            write_json(self.out / "results.json", results)
            if spiking:
                (self.out / "README.md").write_text(model_card(self.out), encoding="utf-8")
        return results

    def check(self) -> None:
        """What can be wrong with teacher and recipe, found before a folder is made or a step is run."""
        try:
            config = AutoConfig.from_pretrained(self.teacher)
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0][:160]
            raise SorbetError(f"{self.teacher}: no BERT to load there ({reason})") from None
        if config.model_type not in ("bert", "sorbet"):
            raise SorbetError(f"{self.teacher} is a {config.model_type!r} checkpoint: the teacher must be a BERT")
        if self.recipe.max_length > config.max_position_embeddings:
            raise SorbetError(
                f"max_length is {self.recipe.max_length}, the teacher has {config.max_position_embeddings} positions: "
                f"--set max_length={config.max_position_embeddings}"
            )
        self.tokenizer()
        self.is_task_model()
        for name in self.stages:
            options = self.recipe.student | self.recipe.step(name).config
            stage_config(config, name, options)
        if self.machine.tensorboard and not is_tensorboard_available():
            raise SorbetError("--tensorboard needs the package tensorboard: pip install tensorboard")
        for name in ("teacher", *self.stages):
            self.batch_size(name)

    def prepare(self, resume: bool) -> None:
        """A new folder with the plan in it, or, to resume, a folder with the same plan."""
        plan = self.plan()
        file = self.out / "run.json"
        if not PartialState().is_main_process:
            return
        if self.out.is_dir() and any(self.out.iterdir()):
            if not file.is_file():
                raise SorbetError(f"{self.out}: a folder with other things in it; name a new one")
            if not resume:
                raise SorbetError(f"{self.out}: holds a run already; --resume goes on with it, or name a new folder")
            try:
                before = json.loads(file.read_text(encoding="utf-8"))
            except ValueError:
                raise SorbetError(f"{file}: damaged; name a new folder") from None
            for name in ("task", "data", "teacher_sha256", "recipe", "stages"):
                if before.get(name) != json.loads(json.dumps(plan[name])):
                    raise SorbetError(
                        f"{self.out}: its run has another {name.removesuffix('_sha256')}; "
                        "resume it with the same settings and files, or name a new folder"
                    )
            return
        self.out.mkdir(parents=True, exist_ok=True)
        if self.base is not None:
            for name in self.shared_steps(self.base):
                shutil.copytree(self.base / name, self.out / name)
        write_json(file, plan)

    def shared_steps(self, base: Path) -> list[str]:
        """The steps, from the teacher on, that another run has finished with the same settings."""
        try:
            before = json.loads((base / "run.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise SorbetError(f"{base}: no run to build on (run.json is missing or damaged)") from None
        plan = json.loads(json.dumps(self.plan()))
        theirs, ours = before["recipe"], plan["recipe"]
        found: list[str] = []
        for name in ("teacher", *self.stages):
            same = all(before.get(key) == plan[key] for key in ("teacher_sha256", "task", "data"))
            same = same and all(theirs[key] == ours[key] for key in ("max_length", "seed"))
            if name == "teacher":
                same = same and theirs["teacher"] == ours["teacher"]
            else:
                same = same and theirs["stages"].get(name) == ours["stages"][name]
                same = same and all(theirs[key] == ours[key] for key in ("student", "calibration"))
                same = same and before["stages"][: len(found)] == plan["stages"][: len(found)]
            if not same or not (base / name / "result.json").is_file():
                break
            found.append(name)
        return found

    def plan(self) -> dict[str, Any]:
        return {
            "teacher": self.teacher,
            "task": self.data.task.name,
            "data": {
                "source": self.data.source,
                "labels": list(self.data.task.labels),
                "columns": [*self.data.task.text_columns, self.data.task.label_column],
                "train": len(self.data.train),
                **{part: len(examples) for part, examples in self.data.dev.items()},
                "sha256": fingerprint(self.data.train, *self.data.dev.values()),
            },
            "teacher_sha256": teacher_fingerprint(self.teacher),
            "recipe": asdict(self.recipe),
            "stages": list(self.stages),
            "versions": {
                "sorbet": __version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "accelerate": accelerate.__version__,
            },
        }

    # -- one step --------------------------------------------------------------------------------------------------

    def step(self, name: str, before: str | None = None) -> dict[str, Any]:
        folder = self.out / name
        done = folder / "result.json"
        if done.is_file():
            return json.loads(done.read_text(encoding="utf-8"))
        set_seed(self.recipe.seed + STEPS.index(name))
        tokenizer = self.tokenizer()
        teacher: PreTrainedModel | None = None
        if before is None:
            model, ready = self.teacher_model(), self.is_task_model()
        else:
            model, ready = self.student(name, before, tokenizer), False
            teacher = self.teacher_of(name, before)
        trainer = self.trainer(name, model, teacher, tokenizer)
        steps = 0
        if not ready:
            found = last_checkpoint(folder, trainer.args.max_steps)
            if found is not None and found.finished:
                load_weights(model, found.best or found.path)
                steps = found.step
            else:
                trainer.train(resume_from_checkpoint=str(found.path) if found else None)
                steps = trainer.state.global_step
        scores = {part: self.scores(trainer, examples) for part, examples in self.data.dev.items()}
        result = {
            "step": name,
            "scores": scores,
            "steps": steps,
            "processes": trainer.args.world_size,
        }
        trainer.accelerator.wait_for_everyone()
        if trainer.is_world_process_zero():
            trainer.save_model(str(folder))
            tokenizer.save_pretrained(folder)
            (folder / "training_args.bin").unlink(missing_ok=True)  # a pickle that nothing here reads
            write_json(done, result)
            for checkpoint in folder.glob("checkpoint-*"):
                shutil.rmtree(checkpoint)
        trainer.accelerator.wait_for_everyone()
        return result

    def tokenizer(self) -> Any:
        return load_tokenizer(self.teacher)

    def is_task_model(self) -> bool:
        """Does the teacher come with a head for this task? Its labels must then be the task's, in the same order."""
        config = AutoConfig.from_pretrained(self.teacher)
        headed = any("SequenceClassification" in name for name in config.architectures or [])
        if not headed or config.num_labels != self.num_outputs:
            return False
        theirs = [str(config.id2label[i]) for i in range(config.num_labels)]
        ours = [label.casefold() for label in self.data.task.labels]
        named = not all(label.startswith("LABEL_") for label in theirs)
        if ours and named and [label.casefold() for label in theirs] != ours:
            raise SorbetError(
                f"{self.teacher} is a classifier of {', '.join(theirs)}, the task's labels are "
                f"{', '.join(self.data.task.labels)}: name a teacher for this task, or an encoder without a head"
            )
        return True

    @property
    def num_outputs(self) -> int:
        return 1 if self.data.task.regression else len(self.data.task.labels)

    def teacher_model(self) -> PreTrainedModel:
        task = self.data.task
        names = dict(enumerate(task.labels or ("score",)))
        try:
            return AutoModelForSequenceClassification.from_pretrained(
                self.teacher,
                num_labels=self.num_outputs,
                id2label=names,
                label2id={label: i for i, label in names.items()},
                problem_type="regression" if task.regression else "single_label_classification",
                ignore_mismatched_sizes=not self.is_task_model(),  # a head for another task makes way for a new one
                dtype=torch.float32,  # whatever the file holds: half precision is no precision to train in
            )
        except Exception as error:  # weights that are missing, cut short or of another shape
            reason = (str(error).splitlines() or [type(error).__name__])[0][:160]
            raise SorbetError(f"{self.teacher}: its weights cannot be loaded ({reason})") from None

    def student(self, stage: str, before: str, tokenizer: Any) -> SorbetForSequenceClassification:
        """The stage before, with what is new calibrated on training sentences."""
        texts = self.data.train.texts[:: max(len(self.data.train) // self.recipe.calibration, 1)]
        first, second = columns(texts[: self.recipe.calibration])
        batch = tokenizer(
            first, second, padding=True, truncation=True, max_length=self.recipe.max_length, return_tensors="pt",
            return_token_type_ids=True,
        )  # fmt: skip
        calibration = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids") if name in batch}
        options = self.recipe.student | self.recipe.step(stage).config
        return SorbetForSequenceClassification.from_bert(str(self.out / before), stage, calibration, **options)

    def teacher_of(self, stage: str, before: str) -> PreTrainedModel:
        name = before if self.recipe.step(stage).teacher == "previous" else "teacher"
        return AutoModelForSequenceClassification.from_pretrained(self.out / name, dtype=torch.float32)

    def trainer(self, name: str, model: PreTrainedModel, teacher: Any, tokenizer: Any) -> DistillationTrainer:
        step, machine = self.recipe.step(name), self.machine
        length = self.recipe.max_length
        fixed = length if machine.compile else None
        first = next(iter(self.data.dev.values()))
        arguments = self.arguments(name, step)
        made = DistillationTrainer(
            model=model,
            args=arguments,
            train_dataset=EncodedExamples(self.data.train, tokenizer, length),
            eval_dataset=EncodedExamples(first, tokenizer, length),
            data_collator=Collator(tokenizer.pad_token_id or 0, fixed),
            compute_metrics=metrics_of(self.data.task),
            teacher=teacher,
            step=step,
        )
        if machine.quiet:
            made.remove_callback(PrinterCallback)
        if step.patience:
            made.add_callback(EarlyStoppingCallback(step.patience))
        return made

    def arguments(self, name: str, step: Step) -> TrainingArguments:
        machine, per_device = self.machine, self.batch_size(name)
        total = self.num_steps(step)
        every = max(math.ceil(total / step.evaluations), 1)
        arguments = TrainingArguments(
            output_dir=str(self.out / name),
            max_steps=total,
            per_device_train_batch_size=per_device,
            per_device_eval_batch_size=max(per_device, 64),
            gradient_accumulation_steps=machine.accumulation,
            learning_rate=step.learning_rate,
            max_grad_norm=step.max_grad_norm,
            bf16=machine.bf16,
            torch_compile=machine.compile,
            use_cpu=machine.cpu,
            eval_strategy="steps",
            eval_steps=every,
            save_strategy="steps",
            save_steps=every,
            save_total_limit=2,
            load_best_model_at_end=True,
            metric_for_best_model=self.data.task.metric,
            greater_is_better=True,
            logging_steps=max(min(every, 50), 1),
            report_to=["tensorboard"] if machine.tensorboard else [],
            seed=self.recipe.seed + STEPS.index(name),
            remove_unused_columns=False,
            label_names=["labels"],
            disable_tqdm=machine.quiet,
            log_level="error" if machine.quiet else "passive",
            restore_callback_states_from_checkpoint=True,
            ddp_find_unused_parameters=False,
        )
        arguments._n_gpu = min(arguments.n_gpu, 1)  # several GPUs: `accelerate launch`; DataParallel loses statistics
        return arguments

    def batch_size(self, name: str) -> int:
        """Examples that one process takes at a time."""
        size, accumulated = self.recipe.step(name).batch_size, self.machine.accumulation
        processes = PartialState().num_processes
        if size % (processes * accumulated):
            raise SorbetError(
                f"{name}: batch_size {size} does not divide into {processes} processes × {accumulated} batches each"
            )
        return size // (processes * accumulated)

    def num_steps(self, step: Step) -> int:
        per_epoch = math.ceil(len(self.data.train) / step.batch_size)
        return max(math.ceil(per_epoch * step.epochs), 1)

    def scores(self, trainer: DistillationTrainer, examples: Examples) -> dict[str, float]:
        dataset = EncodedExamples(examples, self.tokenizer(), self.recipe.max_length)
        logits = logits_of(trainer, dataset)
        return score(self.data.task.metrics, logits, np.asarray(examples.labels))

    def device(self) -> str:
        return "cpu" if self.machine.cpu or not torch.cuda.is_available() else torch.cuda.get_device_name()

    def seconds_per_example(self) -> float:
        """Seconds per example of a training step of M3, teacher included: the second of two steps, not compiled."""
        config = AutoConfig.from_pretrained(self.teacher)
        teacher = AutoModelForSequenceClassification.from_config(config).eval()
        options = self.recipe.student | self.recipe.step("M3").config
        student = SorbetForSequenceClassification.from_bert(teacher, "M3", **options).train()
        device = torch.device("cpu" if self.machine.cpu or not torch.cuda.is_available() else "cuda")
        for model in (teacher, student):
            torch.nn.Module.to(model, device)
        tokens = [len(ids) for ids in self.tokenizer()(*columns(self.data.train.texts[:256]))["input_ids"]]
        length = min(self.recipe.max_length, config.max_position_embeddings)
        length = length if self.machine.compile else max(min(round(float(np.mean(tokens)) * 1.5), length), 2)
        ids = torch.randint(config.vocab_size, (16, length), device=device)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        took = 0.0
        for _ in range(2):
            start = time.monotonic()
            with torch.no_grad():
                said = teacher(**batch, output_hidden_states=True)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.machine.bf16):
                heard = student(**batch, output_hidden_states=True)
            distillation_loss(heard, said, batch["attention_mask"], self.recipe.step("M3")).backward()
            if device.type == "cuda":
                torch.cuda.synchronize()
            took = time.monotonic() - start
        return took / len(ids)

    # -- the spiking model -----------------------------------------------------------------------------------------

    def spiking(self, verify_examples: int | None) -> dict[str, Any] | None:
        """Convert the last stage, verify the artefact against it, evaluate the artefact.

        Nothing where the last stage has no spiking form: M1, M2, an ablation in full precision.
        """
        last = self.out / self.stages[-1]
        model = SorbetForSequenceClassification.from_pretrained(last).eval()
        if obstacles(model):
            return None
        examples = next(iter(self.data.dev.values()))
        path = self.out / "model.sorbet"
        artifact = convert(model, self.tokenizer(), self.provenance(), self.recipe.max_length)
        artifact.save(path)
        chosen = examples.texts[:verify_examples]
        report = verify(artifact, chosen, last) if chosen else None
        if report is not None and report.differing:
            raise SorbetError(f"the converted model differs from the trained one: {report.first}; please report this")
        found = {part: evaluate(artifact, self.data.task, dev).to_json() for part, dev in self.data.dev.items()}
        figures = next(iter(found.values()))  # rate and energy are those of the first dev set
        return {
            "step": "sorbet",
            "scores": {part: one["scores"] for part, one in found.items()},
            **{name: value for name, value in figures.items() if name not in ("scores", "examples")},
            "bytes": path.stat().st_size,
            "verified": str(report),
        }

    def provenance(self) -> dict[str, Any]:
        """What the file says of its making: no path of the machine that made it."""
        plan = self.plan()
        folder = Path(self.teacher)
        plan["teacher"] = folder.name if folder.is_dir() else self.teacher
        return {name: plan[name] for name in ("teacher", "task", "data", "recipe", "stages", "versions")}


def metrics_of(task: Task) -> Callable[[Any], dict[str, float]]:
    def compute(prediction: Any) -> dict[str, float]:
        logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
        return score(task.metrics, np.asarray(logits), np.asarray(prediction.label_ids))

    return compute


def load_weights(model: PreTrainedModel, checkpoint: Path) -> None:
    model.load_state_dict(load_file(checkpoint / "model.safetensors"))


def fingerprint(*parts: Examples) -> str:
    """A hash of texts and labels."""
    sha = hashlib.sha256()
    for examples in parts:
        sha.update(json.dumps([examples.texts, examples.labels]).encode())
    return sha.hexdigest()[:16]


def teacher_fingerprint(teacher: str) -> str:
    """A hash of a local teacher's configuration and weights, or the hub's own name of a version."""
    sha, folder = hashlib.sha256(), Path(teacher)
    files = sorted(p for p in folder.glob("*") if p.name == "config.json" or p.suffix in (".safetensors", ".bin"))
    for path in files:
        sha.update(path.name.encode())
        with path.open("rb") as file:
            sha.update(hashlib.file_digest(file, "sha256").digest())
    return sha.hexdigest()[:16] if files else str(getattr(AutoConfig.from_pretrained(teacher), "_commit_hash", teacher))


def smoke_recipe(recipe: Recipe) -> Recipe:
    """The same chain in a minute: for trying it out, not for its scores."""

    def short(step: Step, epochs: float, learning_rate: float) -> Step:
        return replace(step, epochs=epochs, learning_rate=learning_rate, batch_size=32, evaluations=2)

    return replace(
        recipe,
        max_length=48,
        teacher=short(recipe.teacher, 4.0, 1e-3),
        stages={name: short(step, 2.0, 2e-3) for name, step in recipe.stages.items()},
    )
