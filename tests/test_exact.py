"""The contract: PyTorch in evaluation, the integer reference and the spike simulation give the same numbers."""

import itertools

import numpy as np
import pytest
import torch
from conftest import arrays, random_inputs, random_model, train_steps

from sorbet import madeup
from sorbet.artifact import Artifact
from sorbet.conversion import convert
from sorbet.modeling_sorbet import SorbetForSequenceClassification
from sorbet.reference import Reference
from sorbet.spiking import SpikingSorbet
from sorbet.text import Batch, read_table
from sorbet.tracing import trace_model
from sorbet.verify import first_difference, integer_backends, verify


def assert_exact(model: SorbetForSequenceClassification, inputs: dict[str, torch.Tensor]) -> Artifact:
    """Every neuron of every layer and the logits, in all three."""
    artifact = convert(model)
    batch = Batch(**arrays(inputs))
    traces = {name: backend(batch) for name, backend in integer_backends(artifact).items()}
    traces["pytorch"] = trace_model(model, batch, artifact.classifier.exponent)
    for row, mask in enumerate(batch.attention_mask):
        difference = first_difference(traces, row, int(mask.sum()), row)
        assert difference is None, str(difference)
    with torch.no_grad():
        logits = model(**inputs).logits.numpy()
    assert np.array_equal(Reference(artifact)(**arrays(inputs)), logits)
    assert np.array_equal(SpikingSorbet(artifact)(**arrays(inputs)), logits)
    for value in traces["reference"].values():
        if value.size > 8:
            alive.append(float(len(np.unique(value)) > 1))
    return artifact


alive: list[float] = []  # of every site that was compared: did it say more than one thing?


@pytest.fixture(scope="module", autouse=True)
def sites_are_alive():
    """Dead neurons agree too easily."""
    yield
    assert not alive or np.mean(alive) > 0.9


SWITCHES = list(
    itertools.product((1, 2, 3, 4), ("signed", "unsigned", "offset"), ("bspn", "bspn-pow2"), ("relu", "identity"))
)


@pytest.mark.parametrize(("bits", "encoding", "norm", "pooler"), SWITCHES)
def test_every_switch(bits, encoding, norm, pooler):
    changes = {"activation_bits": bits, "encoding": encoding, "norm_type": norm, "pooler_act": pooler}
    model = random_model(seed=SWITCHES.index((bits, encoding, norm, pooler)), **changes)
    assert_exact(model, random_inputs(model))


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 8, "num_attention_heads": 1, "intermediate_size": 5, "num_hidden_layers": 1},
        {"hidden_size": 130, "num_attention_heads": 2, "intermediate_size": 67, "norm_groups": 13},
        {"hidden_size": 64, "num_attention_heads": 8, "intermediate_size": 256, "norm_groups": 1},
        {"num_hidden_layers": 5, "num_labels": 1},
        {"num_attention_heads": 12, "norm_groups": 3, "num_labels": 17},
        {"softmax_rounding": "value"},
        {"shift_rounding": "nearest"},
        {"scale_rounding": "value"},
        {"bspn_fraction_bits": 0},
        {"bspn_fraction_bits": 12},
        {"softmax_fraction_bits": 3},
    ],
    ids=lambda changes: "-".join(f"{k}={v}" for k, v in changes.items()),
)
def test_shapes_and_open_choices(changes):
    for seed in range(3):
        model = random_model(seed=seed, **changes)
        assert_exact(model, random_inputs(model, length=13))


@pytest.mark.parametrize("encoding", ["signed", "unsigned", "offset"])
@pytest.mark.parametrize("norm", ["bspn", "bspn-pow2"])
def test_after_training(encoding, norm):
    model = random_model(seed=7, encoding=encoding, norm_type=norm)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    losses = train_steps(model, steps=12)
    assert np.isfinite(losses).all()
    assert not torch.equal(before["sorbet.embeddings.norm.running_square"], model.sorbet.embeddings.norm.running_square)
    assert_exact(model, random_inputs(model))


@pytest.mark.parametrize("length", [1, 2, 40])
def test_lengths(length):
    model = random_model(seed=11)
    inputs = {name: value[:1] for name, value in random_inputs(model, length=length).items()}
    assert_exact(model, inputs)


def test_logits_do_not_depend_on_padding_or_batch_mates():
    model = random_model(seed=5)
    artifact = convert(model)
    inputs = random_inputs(model, batch=5, length=16)
    backends = {
        "pytorch": lambda **x: model(**{k: torch.from_numpy(v) for k, v in x.items()}).logits.detach().numpy(),
        "reference": Reference(artifact),
        "spikes": SpikingSorbet(artifact),
    }
    for name, backend in backends.items():
        together = backend(**arrays(inputs))
        assert len(np.unique(together)) > 3, "logits that are all alike would prove nothing"
        for i in range(5):
            length = int(inputs["attention_mask"][i].sum())
            for padded in (length, length + 1, 40):
                alone = {key: np.zeros((1, padded), np.int64) for key in inputs}
                for key, value in inputs.items():
                    alone[key][0, :length] = value[i, :length].numpy()
                alone["input_ids"][0, length:] = 77  # whatever stands in the padding
                assert np.array_equal(backend(**alone), together[i : i + 1]), (name, i, padded)


def test_the_gpu_contract_needs_no_exact_division():
    """`merged_count` keeps its quotients away from integers, so a division off by one unit changes nothing."""
    from sorbet.functional import merged_count

    threshold = torch.tensor([3.0, 7, 96, 1000, 16384, -5, -96])
    for count in range(-15, 16):
        for edge in (-1, 0, 1):
            x_hat = torch.sign(threshold) * (count * threshold.abs() - torch.floor(threshold.abs() / 2) + edge) / 256
            exact = merged_count(x_hat, threshold, torch.zeros(7), 8, -15, 15)
            current = (x_hat * torch.sign(threshold) * 256).double()
            numerator = current + 0.5 * threshold.abs().double() + 0.25
            for wobble in (1 - 2.0**-22, 1 + 2.0**-22):
                off = torch.floor(numerator / threshold.abs().double() * wobble).clamp(-15, 15)
                assert torch.equal(off.float(), exact)


def test_shipped_model_is_exact_and_right():
    from sorbet.quickstart import shipped_model

    artifact = shipped_model()
    remarks = madeup.remarks(60, seed=99)
    report = verify(artifact, [remark.text for remark in remarks])
    assert str(report) == "0 differences in 60 examples"
    from sorbet.text import TextEncoder

    batch = TextEncoder(artifact.tokenizer, 64)([r.text for r in remarks])
    predicted = Reference(artifact)(batch.input_ids, batch.attention_mask).argmax(axis=1)
    assert (predicted == [r.label for r in remarks]).mean() > 0.95


@pytest.mark.slow
def test_real_weights_on_real_text(minilm, glue):
    """MiniLM made a Sorbet, calibrated on real sentences, over sentences and pairs it has not seen."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(minilm)
    texts = read_table(glue / "SST-2" / "dev.tsv.gz").texts()
    pairs = read_table(glue / "RTE" / "dev.tsv.gz").texts()
    calibration = dict(tokenizer(texts[:32], padding=True, return_tensors="pt"))
    model = SorbetForSequenceClassification.from_bert(minilm, "M3", calibration).eval()
    artifact = convert(model, tokenizer)
    assert len(artifact.to_bytes()) <= 3.6e6
    chosen = [*texts[100:108], *pairs[:2]]
    report = verify(artifact, chosen)
    assert str(report) == "0 differences in 10 examples"
    encoded = tokenizer(texts[100:108], padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(**encoded).logits.numpy()
    assert len(np.unique(logits)) > 8
    assert np.array_equal(Reference(artifact)(**{k: v.numpy() for k, v in encoded.items()}), logits)
