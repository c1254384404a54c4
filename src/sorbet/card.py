"""The model card of a run: what it was made of, what it scores, what it costs, where it ends."""

import json
from pathlib import Path
from typing import Any

from .artifact import Artifact
from .errors import SorbetError


def read_run(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The plan and the results of a finished run."""
    found = []
    for name in ("run.json", "results.json"):
        try:
            found.append(json.loads((folder / name).read_text(encoding="utf-8")))
        except (OSError, ValueError):
            raise SorbetError(
                f"{folder}: no finished run there ({name} is missing or damaged); "
                "finish it with `sorbet distill … --resume`"
            ) from None
    return found[0], found[1]


def model_card(folder: Path) -> str:
    """Markdown with the hub's front matter, from the files of a run."""
    plan, results = read_run(folder)
    artifact = Artifact.load(folder / "model.sorbet")
    made, shape = artifact.provenance, artifact.shape
    spiking = results[-1]
    parts = list(spiking["scores"])
    metrics = list(spiking["scores"][parts[0]])
    head = [f"{part} {metric}" for part in parts for metric in metrics]
    rows = [
        f"| {name_of(result['step'])} | "
        + " | ".join(f"{100 * result['scores'][part][metric]:.2f}" for part in parts for metric in metrics)
        + " |"
        for result in results
    ]
    sets = ", ".join(f"{part} {made['data'][part]:,}" for part in ("train", *parts))
    labels = ", ".join(f"`{label}`" for label in artifact.labels)
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    recipe = json.dumps(made["recipe"], indent=2)
    base = f"\nbase_model: {made['teacher']}" if "/" in made["teacher"] else ""  # a name on the hub, not a folder
    return f"""---
library_name: sorbet
pipeline_tag: text-classification
tags: [spiking-neural-network, binary-weights, neuromorphic, bert]{base}
---

# Sorbet for {plan["task"]}

A spiking BERT: {shape.num_layers} layers, hidden size {shape.hidden_size}, 1-bit weights, activations as up to
{shape.num_steps} spikes ({shape.encoding}), PTsoftmax and {shape.norm} in place of softmax and LayerNorm. Nothing on
the way from tokens to logits is multiplied. `model.sorbet` ({spiking["bytes"]:,} bytes) computes what the checkpoint
beside it computes, bit for bit: {spiking["verified"]} (integer reference, spike simulation, PyTorch).

Outputs: {labels}.

## Scores

| step | {" | ".join(head)} |
| --- |{" --- |" * len(head)}
{chr(10).join(rows)}

Best checkpoint on the dev set, as is the custom of the field: a dev score is a little better than that of new text.

## Cost

Spike rate {spiking["spike_rate"]:.4f}: spikes per neuron and step over all spiking sites (attention probabilities among
them; keys and values are levels, not spikes), {parts[0]} set. Matrix products by the
paper's formula, without memory traffic: {spiking["millijoules"]:.3g} mJ a text, the same BERT in float32
{spiking["bert_millijoules"]:.3g} mJ.

## Data and training

{made["data"]["source"]}: {sets} examples. Teacher: {made["teacher"]}. {versions}.

<details><summary>recipe</summary>

```json
{recipe}
```

</details>

## Limits

Texts beyond {shape.max_positions} tokens are cut. It knows the language and the domain of its training data and shares
the biases of its teacher; a probability near 1 is no proof.
"""


def name_of(step: str) -> str:
    return {"teacher": "teacher (M0)", "sorbet": "**Sorbet** (spikes)"}.get(step, step)
