"""The Hugging Face model: BERT when everything is off, a Sorbet that trains when everything is on."""

import math
import shutil

import numpy as np
import pytest
import torch
from conftest import SHAPE, config, random_inputs, random_model, train_steps
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    pipeline,
)

from sorbet import SorbetError, madeup
from sorbet.configuration_sorbet import STAGES
from sorbet.modeling_sorbet import SorbetForSequenceClassification, SorbetModel, load_sorbet

BERT_SHAPE = {name: value for name, value in SHAPE.items() if name != "initializer_range"}


def bert(**changes) -> BertForSequenceClassification:
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(**(BERT_SHAPE | changes))).eval()


# -- M0 is BERT -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", ["gelu", "relu"])
def test_m0_equals_bert_on_random_weights(act):
    teacher = bert(hidden_act=act)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model = SorbetForSequenceClassification.from_bert(teacher, "M0").eval()
    inputs = random_inputs(model)
    ours = model(**inputs, output_hidden_states=True, output_attentions=True)
    theirs = teacher(**inputs, output_hidden_states=True)
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-5, atol=1e-5)  # sums in another order
    mask = inputs["attention_mask"].bool()
    assert len(ours.hidden_states) == len(theirs.hidden_states)
    for a, b in zip(ours.hidden_states, theirs.hidden_states, strict=True):
        torch.testing.assert_close(a[mask], b[mask], rtol=1e-4, atol=1e-5)
    assert ours.attentions[0].shape == (4, 4, 17, 17)


@pytest.mark.slow
def test_m0_equals_bert_on_real_weights(minilm):
    teacher = BertModel.from_pretrained(minilm).eval()
    model = SorbetForSequenceClassification.from_bert(minilm, "M0").eval()
    inputs = AutoTokenizer.from_pretrained(minilm)(["a real sentence", "and one more, longer"], padding=True,
                                                    return_tensors="pt")  # fmt: skip
    ours, theirs = model.sorbet(**inputs), teacher(**inputs)
    mask = inputs["attention_mask"].bool()
    # sums in another order
    torch.testing.assert_close(ours.last_hidden_state[mask], theirs.last_hidden_state[mask], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.pooler_output, theirs.pooler_output, rtol=1e-4, atol=1e-5)


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["M1", "M2", "M3"])
@pytest.mark.parametrize("encoding", ["signed", "offset", "unsigned"])
def test_every_parameter_gets_a_gradient(stage, encoding):
    model = SorbetForSequenceClassification.from_bert(bert(), stage, encoding=encoding)
    model.train()
    inputs = random_inputs(model, batch=6)
    model(**inputs, labels=torch.tensor([0, 1, 2, 0, 1, 2])).loss.backward()
    sizes = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"no gradient for {name}"
        assert torch.isfinite(parameter.grad).all(), f"gradient of {name} is not finite"
        sizes[name] = float(parameter.grad.norm() / parameter.numel() ** 0.5)
        assert sizes[name] > 0, f"zero gradient for {name}"
    typical = np.median(list(sizes.values()))
    for name, size in sizes.items():
        # A softmax does not feel what is added to all keys alike: only keys out of range tell their bias anything.
        if not name.endswith(("key.bias", "key_neuron.shift")):
            assert size > 1e-5 * typical, f"the gradient of {name} is rounding noise: {size:g}"


@pytest.mark.parametrize(
    "changes",
    [
        {"softmax_type": "softmax"},
        {"norm_type": "layernorm"},
        {"norm_type": "bspn-pow2"},
        {"weight_bits": 32},
        {"activation_bits": 32},
        {"activation_bits": 1},
        {"activation_bits": 2},
        {"hidden_act": "gelu"},
        {"pooler_act": "tanh"},
        {"weight_bits": 32, "activation_bits": 32},
        {"weight_bits": 32, "activation_bits": 32, "norm_type": "layernorm"},
        {"weight_bits": 32, "activation_bits": 32, "softmax_type": "softmax"},
        {"activation_bits": 1, "norm_type": "layernorm"},
        {"activation_bits": 1, "softmax_type": "softmax"},
    ],
    ids=lambda changes: "-".join(f"{k}={v}" for k, v in changes.items()),
)
def test_switches_are_independent(changes):
    """Every row of the paper's ablation tables is a configuration that trains."""
    model = SorbetForSequenceClassification.from_bert(bert(), "M3", **changes)
    losses = train_steps(model, steps=3)
    assert np.isfinite(losses).all()
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter).all(), name


def test_scales_are_powers_of_two_after_every_step():
    model = random_model(seed=1)
    seen: dict[str, set[float]] = {}

    def check(model):
        for name, module in model.named_modules():
            if hasattr(module, "log2_scale"):
                scale = float(module.scale())
                assert math.frexp(scale)[0] == 0.5, name
                seen.setdefault(name, set()).add(scale)

    train_steps(model, steps=6, lr=0.3, after=check)
    assert any(len(values) > 1 for values in seen.values()), "no scale ever moved"


def test_training_learns():
    """A BERT learns the made-up remarks; the M3 made of it has to find its way back."""
    tokenizer = madeup.tokenizer()
    remarks = madeup.remarks(512, seed=1)
    ids = [tokenizer.encode(r.text).ids for r in remarks]
    length = max(map(len, ids))
    input_ids = torch.tensor([row + [0] * (length - len(row)) for row in ids])
    mask, labels = (input_ids != 0).long(), torch.tensor([r.label for r in remarks])

    def fit(model, steps):
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        model.train()
        losses = []
        for step in range(steps):
            rows = torch.arange(step * 32, step * 32 + 32) % 512
            loss = model(input_ids[rows], attention_mask=mask[rows], labels=labels[rows]).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    teacher = bert(num_labels=2)
    assert np.mean(fit(teacher, 150)[-10:]) < 0.4
    student = SorbetForSequenceClassification.from_bert(teacher, "M3", {"input_ids": input_ids, "attention_mask": mask})
    losses = fit(student, 100)
    assert np.mean(losses[-10:]) < 0.5 * np.mean(losses[:3])


def test_running_statistics_ignore_padding():
    """Gradients, ψ and ν after a step are the same whatever stands in the padding, and however much of it there is."""
    states = []
    for extra in (0, 9):
        model = random_model(seed=2)
        for name, buffer in model.named_buffers():
            if name.endswith("running_nu"):
                buffer.copy_(torch.linspace(-0.05, 0.05, len(buffer)))
        model.train()
        inputs = random_inputs(model, batch=4, length=14)
        padded = {k: torch.nn.functional.pad(v, (0, extra)) for k, v in inputs.items()}
        padded["input_ids"][padded["attention_mask"] == 0] = 5 + extra
        model(**padded, labels=torch.tensor([0, 1, 2, 0])).loss.backward()
        states.append({n: b.clone() for n, b in model.named_buffers() if "running" in n})
        states[-1] |= {n: p.grad for n, p in model.named_parameters() if "word_embeddings" not in n}
    for name, first in states[0].items():
        # sums in another order
        torch.testing.assert_close(first, states[1][name], rtol=1e-4, atol=1e-6)


def test_evaluation_leaves_no_trace():
    model = random_model(seed=3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model(**random_inputs(model))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_regression():
    model = random_model(seed=4, num_labels=1)
    inputs = random_inputs(model)
    out = model(**inputs, labels=torch.tensor([0.5, 1.0, 2.5, 5.0]))
    expected = (out.logits.view(-1) - torch.tensor([0.5, 1.0, 2.5, 5.0])).square().mean()
    assert torch.equal(out.loss, expected)


@pytest.mark.parametrize("stage", ["M1", "M3"])
def test_compiles_without_graph_breaks(stage):
    model = SorbetForSequenceClassification.from_bert(bert(), stage)
    model.train()
    inputs, labels = random_inputs(model), torch.tensor([0, 1, 2, 0])
    twin = SorbetForSequenceClassification(model.config)
    twin.load_state_dict(model.state_dict())
    twin.train()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")  # fullgraph: a break is an error
    for network in (compiled, twin):
        network(**inputs, labels=labels).loss.backward()
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        # the traced backward may sum in another order
        torch.testing.assert_close(
            ours.grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
        )
    for (name, ours), theirs in zip(model.named_buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_computes_the_same_evaluation():
    model = random_model(seed=6, num_hidden_layers=1)
    inputs = random_inputs(model)
    with torch.no_grad():
        assert torch.equal(torch.compile(model, fullgraph=True)(**inputs).logits, model(**inputs).logits)


def test_bf16_autocast_trains():
    model = SorbetForSequenceClassification.from_bert(bert(), "M3")
    model.train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(**random_inputs(model), labels=torch.tensor([0, 1, 2, 0])).loss
    loss.backward()
    assert all(torch.isfinite(p.grad).all() and p.grad.abs().sum() > 0 for p in model.parameters())


def test_evaluation_is_exact_under_autocast_too():
    model = random_model(seed=6, hidden_size=384, num_attention_heads=12, intermediate_size=1536)
    inputs = random_inputs(model)
    with torch.no_grad():
        exact = model(**inputs).logits
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(model(**inputs).logits, exact)
            model.exact_evaluation = False
            rounded = model(**inputs, output_hidden_states=True).hidden_states
        assert not all(map(torch.equal, rounded, model(**inputs, output_hidden_states=True).hidden_states))


# -- Hugging Face -----------------------------------------------------------------------------------------------------


def test_save_load_and_auto_classes(tmp_path):
    model = random_model(seed=8)
    model.save_pretrained(tmp_path)
    inputs = random_inputs(model)
    saved = AutoConfig.from_pretrained(tmp_path).to_dict()
    assert saved | {"_name_or_path": ""} == model.config.to_dict()
    for loaded in (
        SorbetForSequenceClassification.from_pretrained(tmp_path),
        AutoModelForSequenceClassification.from_pretrained(tmp_path),
        load_sorbet(tmp_path),
    ):
        assert isinstance(loaded, SorbetForSequenceClassification)
        assert torch.equal(loaded.eval()(**inputs).logits, model(**inputs).logits)
    encoder = AutoModel.from_pretrained(tmp_path).eval()
    assert isinstance(encoder, SorbetModel)
    assert torch.equal(encoder(**inputs).pooler_output, model.sorbet(**inputs).pooler_output)


def test_stages_follow_each_other():
    """M1's weights carry over to M2 and M3; only what is new is calibrated."""
    m1 = SorbetForSequenceClassification.from_bert(bert(), "M1")
    m2 = SorbetForSequenceClassification.from_bert(m1, "M2")
    m3 = SorbetForSequenceClassification.from_bert(m2, "M3")
    for name, value in m1.state_dict().items():
        assert torch.equal(m2.state_dict()[name], value), name
        if "norm.weight" not in name and "norm.bias" not in name:
            assert torch.equal(m3.state_dict()[name], value), name
    for stage, model in (("M1", m1), ("M2", m2), ("M3", m3)):
        assert all(getattr(model.config, name) == value for name, value in STAGES[stage].items())


def hf_tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=madeup.tokenizer(), pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]", mask_token="[MASK]", model_max_length=40,
    )  # fmt: skip


def test_pipeline():
    tokenizer = hf_tokenizer()
    model = random_model(vocab_size=len(tokenizer), num_labels=2)
    classify = pipeline("text-classification", model=model, tokenizer=tokenizer, device="cpu")
    one = classify("a lovely film .")
    several = classify(["a lovely film .", "the plot was not very good , but the cast is charming ."], batch_size=2)
    assert one[0]["score"] == several[0]["score"]
    assert one[0]["label"] in model.config.label2id


def test_trainer(tmp_path):
    tokenizer = hf_tokenizer()
    model = SorbetForSequenceClassification.from_bert(bert(vocab_size=len(tokenizer), num_labels=2), "M3")
    rows = [{**tokenizer(r.text), "labels": r.label} for r in madeup.remarks(32)]
    arguments = TrainingArguments(
        output_dir=tmp_path, max_steps=3, per_device_train_batch_size=8, report_to=[], use_cpu=True, save_steps=3
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, processing_class=tokenizer)
    assert np.isfinite(trainer.train().training_loss)
    restored = SorbetForSequenceClassification.from_pretrained(tmp_path / "checkpoint-3")
    for name, value in model.state_dict().items():
        assert torch.equal(restored.state_dict()[name], value), name


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_bits": 2}, "weight_bits is 2"),
        ({"activation_bits": 5}, "activation_bits is 5"),
        ({"hidden_size": 50}, "does not divide into 4 attention heads"),
        ({"norm_groups": 7}, "does not divide into 7 norm groups"),
        ({"norm_groups": 0}, "does not divide into 0 norm groups"),
        ({"norm_groups": -4}, "does not divide into -4 norm groups"),
        ({"bspn_fraction_bits": 13}, "bspn_fraction_bits"),
        ({"encoding": "ternary"}, "encoding"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ],
)
def test_configuration_errors(changes, message):
    with pytest.raises(Exception, match=message):
        config(**changes)


def test_from_bert_errors(tmp_path):
    with pytest.raises(SorbetError, match="stage is 'M4': it must be one of M0, M1, M2, M3"):
        SorbetForSequenceClassification.from_bert(bert(), "M4")
    with pytest.raises(SorbetError, match="no model to load here"):
        SorbetForSequenceClassification.from_bert(tmp_path / "nowhere")
    DistilBertModel(DistilBertConfig(dim=16, n_layers=1, n_heads=2, hidden_dim=16, vocab_size=50)).save_pretrained(
        tmp_path
    )
    with pytest.raises(SorbetError, match="'distilbert' checkpoint: Sorbet is made from a BERT"):
        SorbetForSequenceClassification.from_bert(tmp_path)
    bert().save_pretrained(tmp_path / "bert")
    with pytest.raises(SorbetError, match="'bert' checkpoint, not a Sorbet"):
        load_sorbet(tmp_path / "bert")


def test_broken_folders(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SorbetError, match="no model to load here"):
        SorbetForSequenceClassification.from_bert(tmp_path)
    bert().save_pretrained(tmp_path / "bert")
    (tmp_path / "bert" / "model.safetensors").write_bytes(b"garbage")
    with pytest.raises(SorbetError, match="no model to load here"):
        SorbetForSequenceClassification.from_bert(tmp_path / "bert")


def test_missing_weights_are_told():
    encoder = BertModel(bert().config, add_pooling_layer=False)
    with pytest.warns(UserWarning, match=r"1 weights are not in the checkpoint .* sorbet.pooler.dense.weight"):
        SorbetForSequenceClassification.from_bert(encoder, "M1")


def test_options_of_from_bert():
    teacher = bert(num_labels=2)
    teacher.config.problem_type = "single_label_classification"
    with pytest.raises(SorbetError, match="'activation_bit' is no option of SorbetConfig"):
        SorbetForSequenceClassification.from_bert(teacher, activation_bit=2)
    model = SorbetForSequenceClassification.from_bert(teacher, num_labels=1)
    assert model.config.problem_type is None
    assert model(**random_inputs(model), labels=torch.ones(4)).loss >= 0
    for activation_bits in (4, 1):
        fresh = SorbetForSequenceClassification.from_bert(teacher, "M1", activation_bits=activation_bits)
        again = SorbetForSequenceClassification.from_bert(
            SorbetForSequenceClassification.from_bert(teacher, "M1"), "M1", activation_bits=activation_bits
        )
        for name, value in fresh.state_dict().items():
            assert torch.equal(again.state_dict()[name], value), f"{name} kept the scale of another T"


def test_gradient_accumulation(tmp_path):
    """4 × 2 is 1 × 8 (at M1: BSPN's statistics see each small batch by itself)."""
    tokenizer = hf_tokenizer()
    rows = [{**tokenizer(r.text), "labels": r.label} for r in madeup.remarks(8)]
    weights = []
    for size, accumulated in ((8, 1), (2, 4)):
        model = SorbetForSequenceClassification.from_bert(bert(vocab_size=len(tokenizer), num_labels=2), "M1")
        arguments = TrainingArguments(
            output_dir=tmp_path, max_steps=1, per_device_train_batch_size=size, gradient_accumulation_steps=accumulated,
            report_to=[], use_cpu=True, save_strategy="no", optim="sgd", learning_rate=1.0, max_grad_norm=1e9,
        )  # fmt: skip
        Trainer(model=model, args=arguments, train_dataset=rows, processing_class=tokenizer).train()
        weights.append({n: p.detach().clone() for n, p in model.named_parameters()})
    for name, first in weights[0].items():
        torch.testing.assert_close(first, weights[1][name], rtol=1e-4, atol=1e-6)  # sums in another order


def test_input_errors():
    model = random_model()
    with pytest.raises(SorbetError, match="token_type_ids holds 2: it must lie in 0 … 1"):
        model(torch.tensor([[1, 2]]), token_type_ids=torch.tensor([[0, 2]]))
    with pytest.raises(SorbetError, match=r"input_ids has shape \(0, 4\): it holds nothing"):
        model(torch.zeros(0, 4, dtype=torch.long))
    with pytest.raises(SorbetError, match="input_ids holds 160: it must lie in 0 … 159"):
        model(torch.tensor([[1, 160]]))
    with pytest.raises(SorbetError, match="41 tokens, the model 40 positions"):
        model(torch.ones(1, 41, dtype=torch.long))
