"""Sorbet: spiking BERTs with 1-bit weights, exact from training to hardware."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# What needs PyTorch is imported on first use only: `import sorbet` stays light.
_LAZY = {
    "SorbetConfig": ".configuration_sorbet",
    "SorbetModel": ".modeling_sorbet",
    "SorbetForSequenceClassification": ".modeling_sorbet",
    "convert": ".conversion",
    "Artifact": ".artifact",
    "SorbetError": ".errors",
}

__all__ = [*_LAZY, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'sorbet' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name], __name__), name)
