"""Conversion writes down what is there, proves its widths, and refuses what cannot be exact."""

import numpy as np
import pytest
from conftest import random_inputs, random_model
from transformers import BertConfig, BertForSequenceClassification

from sorbet import madeup
from sorbet.bits import bytes_to_words
from sorbet.conversion import convert
from sorbet.errors import ConversionError
from sorbet.modeling_sorbet import SorbetForSequenceClassification
from sorbet.reference import Reference
from sorbet.widths import FLOAT32, accumulator_widths


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
    for value in (-300.0, 300.0):
        model = random_model()
        model.sorbet.layers[0].attention.query_neuron.log2_scale.data.fill_(value)
        with pytest.raises(ConversionError, match=r"layers.0"):
            convert(model)


def test_a_tokenizer_of_another_model_is_refused():
    with pytest.raises(ConversionError, match="the tokenizer gives ids up to .*, the model knows 20"):
        convert(random_model(vocab_size=20), madeup.tokenizer())
    with pytest.raises(ConversionError, match="the tokenizer is a str"):
        convert(random_model(), "bert-base-uncased")


def test_widths_hold_what_inputs_do():
    """The proof is a bound: no sum on real inputs leaves the range that it states, and the linear ones are tight."""
    model = random_model(seed=3)
    artifact = convert(model)
    widths = {width.name: width for width in accumulator_widths(artifact)}
    assert all(width.fits for width in widths.values())
    seen: dict[str, tuple[int, int]] = {}
    reference = Reference(artifact)
    honest = reference.linear
    names = {id(part.bits): name for name, part in _linear_parts(reference.parts)}

    def watched(words, counts, encoding):
        out = honest(words, counts, encoding)
        seen[names[id(words)]] = (int(out.min()), int(out.max()))
        return out

    reference.linear = watched  # type: ignore[method-assign]
    for seed in range(5):
        inputs = random_inputs(model, seed=seed)
        reference(inputs["input_ids"].numpy(), inputs["attention_mask"].numpy())
        for name, (low, high) in seen.items():
            assert widths[name].low <= low + _offset(reference.parts, name)[0], name
            assert high + _offset(reference.parts, name)[1] <= widths[name].high, name
    assert len(seen) == 13
    row = np.bitwise_count(bytes_to_words(artifact.layers[0].intermediate.bits)).sum(axis=1)
    offset = artifact.layers[0].intermediate.offset
    best = max(int(15 * 48 + max(o, 0)) for o in offset)  # signed counts reach hi · K on every row
    assert widths["layers.0.intermediate"].high == best
    assert len(row) == 72
    assert {width.limit for width in widths.values()} >= {FLOAT32, 31, 22}


def _linear_parts(parts):
    for i, layer in enumerate(parts.layers):
        for name in ("query", "key", "value", "attention_output", "intermediate", "output"):
            yield f"layers.{i}.{name}", getattr(layer, name)
    yield "pooler", parts.pooler


def _offset(parts, wanted):
    for name, part in _linear_parts(parts):
        if name == wanted:
            offset = getattr(part, "offset", getattr(part, "bias", None))
            return min(int(offset.min()), 0), max(int(offset.max()), 0)
    raise KeyError(wanted)


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
