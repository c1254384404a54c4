"""Conversion writes down what is there, proves its widths, and refuses what cannot be exact."""

import numpy as np
import pytest
from conftest import random_inputs, random_model
from test_exact import assert_exact
from transformers import BertConfig, BertForSequenceClassification

from sorbet import madeup, reference
from sorbet.conversion import convert
from sorbet.errors import ConversionError
from sorbet.modeling_sorbet import SorbetForSequenceClassification
from sorbet.reference import Reference
from sorbet.widths import accumulator_widths


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_bits": 32}, "weight_bits is 32"),
        ({"activation_bits": 32}, "activation_bits is 32"),
        ({"softmax_type": "softmax"}, "softmax_type is 'softmax'"),
        ({"norm_type": "layernorm"}, "norm_type is 'layernorm'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"pooler_act": "tanh"}, "pooler_act is 'tanh'"),
    ],
)
def test_stages_without_an_integer_form_are_refused(changes, message):
    with pytest.raises(ConversionError, match=message):
        convert(random_model(**changes))


def test_other_models_are_refused():
    bert = BertForSequenceClassification(BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1,
                                                    num_attention_heads=1, intermediate_size=8))  # fmt: skip
    with pytest.raises(ConversionError, match="a BertForSequenceClassification cannot be converted"):
        convert(bert)
    with pytest.raises(ConversionError, match=r"is torch.float16: evaluate and convert in float32"):
        convert(random_model().half())


@pytest.mark.parametrize("name", ["sorbet.layers.1.output.weight", "sorbet.layers.0.norm.running_square"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_is_refused_by_name(name, value):
    model = random_model()
    model.state_dict()[name].view(-1)[3] = value
    with pytest.raises(ConversionError, match=f"{name}: 1 of .* NaN or infinite"):
        convert(model)


@pytest.mark.parametrize(
    ("parameter", "change", "layer"),
    [
        ("sorbet.layers.1.attention.context_neuron.log2_scale", -22.0, "layers.1.context"),
        ("sorbet.layers.0.intermediate_neuron.log2_scale", -20.0, "layers.0.output"),
        ("sorbet.layers.0.norm.neuron.log2_scale", 18.0, "layers.1.output|layers.1.attention_output"),
    ],
)
def test_scales_too_far_apart_are_refused_by_layer(parameter, change, layer):
    """A residual and a product that need more than 24 bits between them would round in float32."""
    model = random_model()
    model.state_dict()[parameter] += change
    with pytest.raises(ConversionError, match=f"({layer}).* bits, more than the"):
        convert(model)


def test_absurd_exponents_are_refused():
    for value in (-300.0, -31.0, 31.0, 300.0):
        model = random_model()
        model.sorbet.layers[0].attention.query_neuron.log2_scale.data.fill_(value)
        with pytest.raises(ConversionError, match=r"layers.0.attention.query_neuron: a scale of 2\^"):
            convert(model)
    model = random_model()
    model.sorbet.embeddings.word_embeddings.weight.data[7] *= 2.0**40
    with pytest.raises(ConversionError, match=r"embeddings.word_embeddings: a scale of 2\^"):
        convert(model)


def test_large_scores_do_not_unmask():
    """Scores beyond 2^30 are still above what is masked, in PyTorch as in integers."""
    model = random_model(seed=1)
    attention = model.sorbet.layers[0].attention
    for neuron in (attention.query_neuron, attention.key_neuron):
        neuron.log2_scale.data += 10.0
    assert_exact(model, random_inputs(model))


def test_what_a_file_cannot_say_is_refused():
    for provenance in ({"x": float("nan")}, {"x": np.float32(1)}, {"x": {1, 2}}):
        with pytest.raises(ConversionError, match="the provenance must be plain JSON"):
            convert(random_model(), provenance=provenance)
    with pytest.raises(ConversionError, match="labels and provenance take more than"):
        convert(random_model(), provenance={"x": "y" * 2**20})
    model = random_model()
    model.config.problem_type = "multi_label_classification"
    with pytest.raises(ConversionError, match="multi_label"):
        convert(model)
    model = random_model(num_labels=2)
    model.config.id2label = {1: "a", 2: "b"}
    with pytest.raises(ConversionError, match=r"id2label has the keys \[1, 2\]"):
        convert(model)


def test_a_tokenizer_of_another_model_is_refused():
    with pytest.raises(ConversionError, match="the tokenizer gives ids up to .*, the model knows 20"):
        convert(random_model(vocab_size=20), madeup.tokenizer())
    with pytest.raises(ConversionError, match="the tokenizer is a str"):
        convert(random_model(), "bert-base-uncased")


@pytest.mark.parametrize("encoding", ["signed", "unsigned", "offset"])
def test_widths_hold_what_inputs_do(encoding, monkeypatch):
    """The proof is a bound: whatever the reference shifts, sums or compares on real inputs stays inside it."""
    model = random_model(seed=3, encoding=encoding)
    artifact = convert(model)
    widths = {width.name: width for width in accumulator_widths(artifact)}
    assert all(width.fits for width in widths.values())
    seen: dict[str, list[int]] = {}

    def note(name, value):
        seen.setdefault(name, []).extend((int(value.min()), int(value.max())))

    queue: list[str] = []  # names of the calls to come, in the order of the forward pass

    def plan():
        queue[:] = ["embeddings.norm"]
        for i in range(2):
            names = ("query", "key", "value", "scores", "context", "attention_output", "intermediate", "output")
            queue.extend(f"layers.{i}.{name}" for name in names)
        queue.append("pooler")

    honest = {name: getattr(reference, name) for name in ("bspn", "half_up", "ptsoftmax")}

    def bspn(norm, x, shape):
        name = queue.pop(0)
        note(f"{name}.residual" if "layers" in name else "embeddings.sum", x)
        current, size = honest["bspn"](norm, x, shape)
        note((f"{name}.norm" if "layers" in name else name) + ".membrane", current + (size >> 1))
        return current, size

    def half_up(x, shift):
        note(name := queue.pop(0), x)
        if f"{name}.membrane" in widths:
            note(f"{name}.membrane", x + (1 << (shift - 1)) if shift > 0 else x << -shift)
        return honest["half_up"](x, shift)

    def ptsoftmax(scores, *rest):
        note(queue.pop(0), scores)
        return honest["ptsoftmax"](scores, *rest)

    for function in (bspn, half_up, ptsoftmax):
        monkeypatch.setattr(reference, function.__name__, function)
    for seed in range(5):
        plan()
        trace: dict = {}
        Reference(artifact)(random_inputs(model, seed=seed)["input_ids"].numpy(), trace=trace)
        note("classifier", trace["logits"])
        assert not queue
    for name, values in seen.items():
        assert widths[name].low <= min(values), name
        assert max(values) <= widths[name].high, name
    assert len(seen) > 30
    lo, hi = artifact.shape.counts()  # where counts are signed every row of ±1 reaches hi · K
    part = artifact.layers[0].intermediate
    plus = np.unpackbits(part.bits, axis=1, count=48).sum(axis=1).astype(int)
    assert widths["layers.0.intermediate"].high == max(hi * plus - lo * (48 - plus) + np.maximum(part.offset, 0))


def test_conversion_of_a_reloaded_checkpoint_is_the_same(tmp_path):
    model = random_model(seed=6)
    model.save_pretrained(tmp_path)
    again = SorbetForSequenceClassification.from_pretrained(tmp_path)
    assert convert(again).to_bytes() == convert(model).to_bytes()


def test_labels_and_regression():
    model = random_model(num_labels=2)
    model.config.id2label = {0: "spam", 1: "ham"}
    artifact = convert(model)
    assert artifact.labels == ("spam", "ham")
    assert artifact.problem_type == "classification"
    assert convert(random_model(num_labels=1)).problem_type == "regression"
