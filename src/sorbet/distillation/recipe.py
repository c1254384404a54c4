"""A recipe: every number of a distillation, in one small YAML file per task (`sorbet/recipes/`)."""

from dataclasses import dataclass, field, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, get_type_hints

from ..errors import SorbetError

STEPS = ("teacher", "M1", "M2", "M3")
RANGES: dict[str, tuple[float, float]] = {  # of what a recipe may say
    "epochs": (1e-3, 1e4), "learning_rate": (1e-9, 10), "batch_size": (1, 2**20), "warmup": (0, 1),
    "weight_decay": (0, 10), "scale_learning_rate": (0, 10), "max_grad_norm": (1e-6, 1e9), "evaluations": (1, 10**6),
    "patience": (0, 10**6), "logits": (0, 1e6), "reps": (0, 1e6), "attention": (0, 1e6), "temperature": (1e-3, 1e3),
    "frozen_scales": (0, 1), "max_length": (2, 2**13), "seed": (0, 2**31), "calibration": (1, 2**16),
}  # fmt: skip


@dataclass(frozen=True)
class Step:
    """The training of one stage (or of the teacher)."""

    epochs: float = 3.0
    learning_rate: float = 2e-4
    batch_size: int = 64
    warmup: float = 0.1  # share of the steps
    weight_decay: float = 0.01  # not on biases, norms, shifts and scales
    scale_learning_rate: float | None = None  # of log2 of the scales; none: the same as everything else
    max_grad_norm: float = 1.0
    evaluations: int = 10  # on the dev set; the best one is kept
    patience: int = 0  # stop after that many evaluations without a better one; 0: never
    logits: float = 1.0  # weight of L_logits
    reps: float = 1.0  # weight of L_reps
    attention: float = 0.0  # weight of the attention loss
    temperature: float = 1.0
    teacher: str = "previous"  # who teaches: the stage before (Algorithm 4), or "first", the full-precision model
    frozen_scales: float = 0.0  # the last share of the steps in which no exponent moves
    config: dict[str, Any] = field(default_factory=dict)  # changes to this stage's SorbetConfig: norm_type, …


@dataclass(frozen=True)
class Recipe:
    task: str = ""
    max_length: int = 128
    seed: int = 42
    calibration: int = 64  # sentences that set the first scales
    student: dict[str, Any] = field(default_factory=dict)  # changes to every stage's SorbetConfig: encoding, …
    teacher: Step = field(default_factory=lambda: Step(epochs=3.0, learning_rate=5e-5, batch_size=32))
    stages: dict[str, Step] = field(default_factory=lambda: {name: Step() for name in ("M1", "M2", "M3")})

    def step(self, name: str) -> Step:
        return self.teacher if name == "teacher" else self.stages[name]


def load_recipe(source: str | Path) -> Recipe:
    """A recipe by file, or by the name of a task that has one, or the default."""
    import yaml

    path = Path(source)
    text = path.read_text(encoding="utf-8") if path.is_file() else _packaged(str(source))
    try:
        raw = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise SorbetError(f"recipe {source}: {str(error).splitlines()[0]}") from None
    return parse_recipe(raw, f"recipe {source}")


def _packaged(name: str) -> str:
    found = files("sorbet") / "recipes" / f"{name}.yaml"
    if not found.is_file():
        known = sorted(f.name.removesuffix(".yaml") for f in (files("sorbet") / "recipes").iterdir())
        raise SorbetError(f"no recipe {name!r}: name a YAML file or one of {', '.join(known)}")
    return found.read_text(encoding="utf-8")


def parse_recipe(raw: dict[str, Any], where: str = "recipe") -> Recipe:
    if not isinstance(raw, dict):
        raise SorbetError(f"{where}: a mapping of names to values must stand here, not {raw!r}")
    raw = dict(raw)
    common = _values(Step, raw.pop("all", {}), f"{where}, all")
    teacher = _values(Step, raw.pop("teacher", {}), f"{where}, teacher")
    stages = raw.pop("stages", {})
    if not isinstance(stages, dict):
        raise SorbetError(f"{where}: stages is {stages!r}; it must be a mapping of M1, M2, M3")
    unknown = set(map(str, stages)) - {"M1", "M2", "M3"}
    if unknown:
        raise SorbetError(f"{where}: stage {min(unknown)!r} is unknown; stages are M1, M2, M3")
    made = {}
    for name in ("M1", "M2", "M3"):
        made[name] = Step(**(common | _values(Step, stages.get(name) or {}, f"{where}, stage {name}")))
    recipe = Recipe(**_values(Recipe, raw, where))
    return replace(recipe, teacher=replace(recipe.teacher, **teacher), stages=made)


def _values(kind: type, raw: dict[str, Any], where: str) -> dict[str, Any]:
    hints = get_type_hints(kind)
    known = {f.name for f in fields(kind)}
    if not isinstance(raw, dict):
        raise SorbetError(f"{where}: a mapping of names to values must stand here, not {raw!r}")
    made = {}
    for name, value in raw.items():
        if name not in known:
            raise SorbetError(f"{where}: {name!r} is unknown; known are {', '.join(sorted(known))}")
        hint = hints[name]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if hint in (float, float | None) and isinstance(value, str):  # YAML reads 5e-4 as a string
            try:
                value, number = float(value), True
            except ValueError:
                number = False
        wrong = (
            (hint is int and type(value) is not int)
            or (hint is float and not number)
            or (hint == (float | None) and not (number or value is None))
            or (hint is str and not isinstance(value, str))
            or (hint == dict[str, Any] and not isinstance(value, dict))
        )
        if name == "teacher" and hint is str and value not in ("previous", "first"):
            raise SorbetError(f"{where}: teacher is {value!r}; it must be 'previous' or 'first'")
        if number and not wrong and name in RANGES and not RANGES[name][0] <= value <= RANGES[name][1]:
            low, high = RANGES[name]
            raise SorbetError(f"{where}: {name} is {value:g}; it must lie in {low:g} … {high:g}")
        if wrong:
            raise SorbetError(f"{where}: {name} is {value!r}; it must be {getattr(hint, '__name__', hint)}")
        made[name] = value
    return made
