"""GLUE's metrics, from scipy and scikit-learn."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating] | NDArray[np.integer]


def accuracy(predicted: Array, labels: Array) -> float:
    return float((predicted == labels).mean())


def f1(predicted: Array, labels: Array) -> float:
    """Of the positive class where there are two, else the macro average."""
    from sklearn.metrics import f1_score

    two = len(np.unique(labels)) <= 2 and set(np.unique(predicted)) | set(np.unique(labels)) <= {0, 1}
    return float(f1_score(labels, predicted, average="binary" if two else "macro", zero_division=0.0))


def matthews(predicted: Array, labels: Array) -> float:
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(labels, predicted))


def spearman(predicted: Array, labels: Array) -> float:
    from scipy.stats import spearmanr

    return 0.0 if _constant(predicted) or _constant(labels) else float(spearmanr(predicted, labels).statistic)


def pearson(predicted: Array, labels: Array) -> float:
    from scipy.stats import pearsonr

    return 0.0 if _constant(predicted) or _constant(labels) else float(pearsonr(predicted, labels).statistic)


def _constant(x: Array) -> bool:
    """A constant prediction carries no correlation: 0, not nan."""
    return bool((x == x[0]).all())


METRICS: dict[str, Callable[[Array, Array], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "matthews": matthews,
    "spearman": spearman,
    "pearson": pearson,
}


def evaluate(metrics: tuple[str, ...], logits: NDArray[np.floating], labels: Array) -> dict[str, float]:
    """The named metrics of logits [N, labels] (classification) or [N, 1] (regression)."""
    regression = metrics[0] in ("spearman", "pearson")
    predicted = logits.reshape(-1) if regression else logits.argmax(axis=-1)
    return {name: METRICS[name](predicted, labels) for name in metrics}
