"""A trained M3 to its artefact. Nothing is approximated: every scale is a power of two, so every tensor of the model
in evaluation is an integer on a known grid, and conversion writes those integers down.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from . import __version__
from .artifact import (
    Artifact,
    BinaryTable,
    ByteTable,
    Classifier,
    Embeddings,
    Layer,
    Neuron,
    Norm,
    Pooler,
    Projection,
    Residual,
    Shape,
)
from .errors import ArtifactError, ConversionError
from .functional import fixed_point, fixed_point_scale
from .layers import BinaryLinear, FixedPointLinear, QuantizedEmbedding, SpikeNeuron, SpikingNorm
from .modeling_sorbet import SorbetAttention, SorbetForSequenceClassification, SorbetLayer
from .text import tokenizer_json
from .widths import require_exact

Ints = NDArray[np.integer]


@torch.no_grad()
def convert(
    model: SorbetForSequenceClassification,
    tokenizer: Any = None,
    provenance: dict[str, Any] | None = None,
    max_length: int | None = None,
) -> Artifact:
    """The artefact of a Sorbet at stage M3 (1-bit weights, spikes, PTsoftmax, BSPN); refuses what cannot be exact.

    `tokenizer` is a fast transformers tokenizer or one of the tokenizers library; `provenance` is any JSON-able note
    (teacher, data, recipe, scores) that the file will carry. `max_length` leaves positions out that were never trained:
    longer texts are then cut there.
    """
    _require_convertible(model)
    _require_exponents(model)
    config: Any = model.config
    encoder = model.sorbet
    shape = Shape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        intermediate_size=config.intermediate_size,
        max_positions=min(max_length or config.max_position_embeddings, config.max_position_embeddings),
        type_vocab_size=config.type_vocab_size,
        num_labels=config.num_labels,
        num_steps=config.num_steps,
        encoding=config.encoding,
        pooler_encoding=encoder.pooler.neuron.encoding,
        norm=config.norm_type,
        norm_groups=config.groups,
        norm_fraction_bits=config.bspn_fraction_bits,
        softmax_fraction_bits=config.softmax_fraction_bits,
        softmax_rounding=config.softmax_rounding,
        shift_rounding=config.shift_rounding,
    )
    embeddings = encoder.embeddings
    word, position, token_type = _tables(
        embeddings.word_embeddings, embeddings.position_embeddings, embeddings.token_type_embeddings, shape
    )
    hidden = exponent_of(embeddings.norm.neuron)
    regression = config.problem_type == "regression" or config.num_labels == 1
    layers = []
    for block in encoder.layers:
        assert isinstance(block, SorbetLayer)
        layers.append(_layer(block, hidden))
        hidden = exponent_of(block.norm.neuron)
    artifact = Artifact(
        shape=shape,
        embeddings=Embeddings(word, position, token_type, _norm(embeddings.norm)),
        layers=tuple(layers),
        pooler=_pooler(encoder.pooler.dense, encoder.pooler.neuron, hidden),
        classifier=_classifier(model.classifier, exponent_of(encoder.pooler.neuron)),
        labels=tuple(str(config.id2label[i]) for i in range(config.num_labels)),
        problem_type="regression" if regression else "classification",
        tokenizer=None if tokenizer is None else tokenizer_json(tokenizer, config.vocab_size),
        provenance={"sorbet": __version__, "stage": "M3"} | (provenance or {}),
    )
    try:
        shape.check()
        require_exact(artifact, ConversionError)
        return Artifact.from_bytes(artifact.to_bytes())  # what is handed out is what a file would give back
    except ArtifactError as error:
        raise ConversionError(str(error)) from None
    except (TypeError, ValueError) as error:
        if isinstance(error, ConversionError):
            raise
        raise ConversionError(f"the provenance must be plain JSON ({error})") from None


MAX_EXPONENT = 30


def exponent_of(neuron: SpikeNeuron) -> int:
    """a, with α = 2^a."""
    return _exponent(neuron.scale())


def _exponent(power_of_two: Tensor) -> int:
    mantissa, exponent = math.frexp(abs(float(power_of_two)))
    if mantissa != 0.5:
        raise ConversionError(f"a scale is {float(power_of_two)}: it must be a power of two")
    return exponent - 1


# ---------------------------------------------------------------------------------------------------------------------
# Parts
# ---------------------------------------------------------------------------------------------------------------------


def _tables(
    word: QuantizedEmbedding, position: QuantizedEmbedding, token_type: QuantizedEmbedding, shape: Shape
) -> tuple[BinaryTable, ByteTable, ByteTable]:
    """Three tables on one grid: the finest exponent of any row that is not all zero."""
    word_exponents = _row_exponents(word.row_scale(word.weight))
    values, exponents = [], [word_exponents]
    for weight in (position.weight[: shape.max_positions], token_type.weight):
        scale = fixed_point_scale(weight)
        rows = (fixed_point(weight) / scale).to(torch.int8).numpy()
        used = rows.any(axis=1)
        found = _row_exponents(scale)
        floor = found[used].min() if used.any() else word_exponents.min()
        values.append(rows)
        exponents.append(np.where(used, found, floor))
    grid = min(int(e.min()) for e in exponents)
    shifts = []
    for name, e in zip(("word", "position", "token_type"), exponents, strict=True):
        if (e - grid).max() > 30:
            raise ConversionError(f"embeddings.{name}: its rows' scales differ by more than 2^30: they cannot be added")
        shifts.append((e - grid).astype(np.uint8))
    bits = _pack(_binary(word.weight))
    return BinaryTable(bits, shifts[0]), ByteTable(values[0], shifts[1]), ByteTable(values[1], shifts[2])


def _row_exponents(scales: Tensor) -> Ints:
    return np.frexp(np.abs(scales.numpy().reshape(-1)))[1].astype(np.int64) - 1


def _binary(weight: Tensor) -> Tensor:
    return weight - weight.mean(dim=-1, keepdim=True) >= 0


def _pack(bits: Tensor) -> NDArray[np.uint8]:
    return np.packbits(bits.numpy(), axis=-1, bitorder="little")


def _layer(block: SorbetLayer, hidden: int) -> Layer:
    attention = block.attention
    query, key, value = (
        _projection(linear, neuron, hidden)
        for linear, neuron in (
            (attention.query, attention.query_neuron),
            (attention.key, attention.key_neuron),
            (attention.value, attention.value_neuron),
        )
    )
    context_grid = exponent_of(attention.softmax.neuron) + exponent_of(attention.value_neuron)
    attended = exponent_of(attention.norm.neuron)
    return Layer(
        query=query,
        key=key,
        value=value,
        context=Neuron(*_threshold(attention.context_neuron, context_grid, None)),
        attention_output=_residual(attention.output, exponent_of(attention.context_neuron), attention.norm, hidden),
        intermediate=_projection(block.intermediate, block.intermediate_neuron, attended),
        output=_residual(block.output, exponent_of(block.intermediate_neuron), block.norm, attended),
        score_exponent=_score_exponent(attention),
        probs_exponent=exponent_of(attention.softmax.neuron),
    )


def _score_exponent(attention: SorbetAttention) -> int:
    scales = exponent_of(attention.query_neuron) + exponent_of(attention.key_neuron)
    return scales + attention.softmax.log2_factor


def _steps(values: Tensor, grid: int) -> Ints:
    """`round_to_grid` in integers."""
    return np.clip(np.rint(np.ldexp(values.double().numpy(), -grid)), -(2**22), 2**22).astype(np.int64)


def _threshold(neuron: SpikeNeuron, grid: int, bias: Tensor | None) -> tuple[Ints, int]:
    """(offset, shift) of a neuron whose input lies on 2^grid: b − β in steps, and log2(α / 2^grid)."""
    assert neuron.shift is not None
    offset = -_steps(neuron.shift, grid)
    if bias is not None:
        offset = offset + _steps(bias, grid)
    return offset.astype(np.int32), exponent_of(neuron) - grid


def _projection(linear: BinaryLinear, neuron: SpikeNeuron, grid: int) -> Projection:
    offset, shift = _threshold(neuron, grid + _exponent(linear.scale()), linear.bias)
    return Projection(_pack(_binary(linear.weight)), offset, shift)


def _pooler(linear: BinaryLinear, neuron: SpikeNeuron, grid: int) -> Pooler:
    part = _projection(linear, neuron, grid)
    return Pooler(part.bits, part.offset, part.shift, exponent_of(neuron))


def _norm(norm: SpikingNorm) -> Norm:
    threshold, offset = norm.merged_threshold()
    return Norm(threshold.numpy().astype(np.int32), offset.numpy().astype(np.int32))


def _residual(linear: BinaryLinear, grid: int, norm: SpikingNorm, residual: int) -> Residual:
    product = grid + _exponent(linear.scale())
    finest = min(product, residual)
    bias = _steps(linear.bias, product).astype(np.int32)
    return Residual(
        norm=_norm(norm),
        bits=_pack(_binary(linear.weight)),
        bias=bias,
        shift=product - finest,
        residual_shift=residual - finest,
    )


def _classifier(classifier: FixedPointLinear, grid: int) -> Classifier:
    flat = classifier.weight.flatten()
    scale = fixed_point_scale(flat)
    weight = (fixed_point(flat) / scale).view_as(classifier.weight).to(torch.int8).numpy()
    exponent = _exponent(scale) + grid
    return Classifier(weight, _steps(classifier.bias, exponent).astype(np.int32), exponent)


# ---------------------------------------------------------------------------------------------------------------------
# What cannot be converted
# ---------------------------------------------------------------------------------------------------------------------


def _require_convertible(model: nn.Module) -> None:
    if not isinstance(model, SorbetForSequenceClassification):
        raise ConversionError(
            f"a {type(model).__name__} cannot be converted: it must be a SorbetForSequenceClassification "
            "(make one with SorbetForSequenceClassification.from_bert)"
        )
    for reason in obstacles(model):
        raise ConversionError(f"the model has no exact integer form: {reason}")
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            bad = int((~torch.isfinite(tensor)).sum())
            raise ConversionError(
                f"{name}: {bad} of {tensor.numel()} values are NaN or infinite; "
                "the training diverged: go back to an earlier checkpoint or lower the learning rate"
            )
        if tensor.is_floating_point() and tensor.dtype != torch.float32:
            raise ConversionError(f"{name} is {tensor.dtype}: evaluate and convert in float32 (model.float())")
        if tensor.device.type != "cpu":
            raise ConversionError(f"{name} is on {tensor.device}: convert on the CPU (model.cpu())")


def _require_exponents(model: SorbetForSequenceClassification) -> None:
    """The proof of widths is relative: all scales must also stay well inside float32's own range of exponents."""
    for name, module in model.named_modules():
        if isinstance(module, BinaryLinear | SpikeNeuron):
            exponents = [_exponent(module.scale())]
        elif isinstance(module, QuantizedEmbedding):
            exponents = _row_exponents(module.row_scale(module.weight)).tolist()
        else:
            continue
        worst = max(exponents, key=abs)
        if abs(worst) > MAX_EXPONENT:
            raise ConversionError(
                f"{name}: a scale of 2^{worst} is beyond 2^±{MAX_EXPONENT}; the training diverged, or the input of "
                "this layer is always zero"
            )


def obstacles(model: SorbetForSequenceClassification) -> list[str]:
    """What of the configuration has no integer form; empty for an M3."""
    return list(_obstacles(model.config))


def _obstacles(config: Any) -> Iterator[str]:
    wanted = {
        "weight_bits": (1,),
        "activation_bits": (1, 2, 3, 4),
        "softmax_type": ("ptsoftmax",),
        "norm_type": ("bspn", "bspn-pow2"),
        "hidden_act": ("relu",),
        "pooler_act": ("relu", "identity"),
    }
    for name, values in wanted.items():
        if getattr(config, name) not in values:
            yield f"{name} is {getattr(config, name)!r}, which must be {' or '.join(map(repr, values))} (stage M3)"
    if set(config.id2label) != set(range(config.num_labels)):
        yield f"id2label has the keys {sorted(config.id2label)}, which must be 0 … {config.num_labels - 1}"
    if config.problem_type == "multi_label_classification":
        yield "problem_type is 'multi_label_classification', which must be one label per text, or a regression"
