"""What every neuron of the PyTorch model hands on, under the names and in the integers of the reference."""

import re
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from .conversion import exponent_of
from .layers import Dyadic, SpikeNeuron
from .modeling_sorbet import SorbetForSequenceClassification
from .text import Batch

# Module names on the left, the reference's on the right.
_SITES = [
    (r"^sorbet\.", ""),
    (r"\.attention\.norm\.neuron$", ".attention_output"),
    (r"\.attention\.softmax\.neuron$", ".probs"),
    (r"\.attention\.(\w+)_neuron$", r".\1"),
    (r"\.intermediate_neuron$", ".intermediate"),
    (r"^embeddings\.norm\.neuron$", "embeddings"),
    (r"^(layers\.\d+)\.norm\.neuron$", r"\1.output"),
    (r"^pooler\.neuron$", "pooler"),
]


def site_name(module_name: str) -> str:
    for pattern, replacement in _SITES:
        module_name = re.sub(pattern, replacement, module_name)
    return module_name


@torch.no_grad()
def trace_model(
    model: SorbetForSequenceClassification, batch: Batch, logits_exponent: int
) -> dict[str, NDArray[np.float64]]:
    """Counts by site, and logits in units of 2^logits_exponent. Not rounded: a count that is no integer would show."""
    trace: dict[str, Any] = {}
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, SpikeNeuron):
            handles.append(module.register_forward_hook(_recorder(trace, site_name(name))))
    try:
        model.eval()
        logits = model(
            input_ids=torch.from_numpy(batch.input_ids),
            attention_mask=torch.from_numpy(batch.attention_mask),
            token_type_ids=torch.from_numpy(batch.token_type_ids),
        ).logits
    finally:
        for handle in handles:
            handle.remove()
    trace["logits"] = np.ldexp(logits.double().numpy(), -logits_exponent)
    return trace


def _recorder(trace: dict[str, Any], name: str) -> Any:
    def record(neuron: nn.Module, args: Any, out: Dyadic) -> None:
        assert isinstance(neuron, SpikeNeuron)
        trace[name] = np.ldexp(out.value.double().numpy(), -exponent_of(neuron))

    return record
