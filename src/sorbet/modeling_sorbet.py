"""Sorbet as a Hugging Face model: one class for every stage M0 … M3, readable from top to bottom.

    embeddings ─ norm ─ SN ─┬─ Q, K, V ─ SN ─ softmax ─ SN ─ context ─ SN ─ linear ─┬─ norm ─ SN ─┬─ FFN ─┬─ norm ─ SN
                            └─────────────────── the same spikes ───────────────────┘             └───────┘

At stage M0, every switch of the configuration off, this is transformers' own BERT.
"""

import os
import re
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertModel,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPooling, SequenceClassifierOutput
from transformers.utils.generic import can_return_tuple

from .calibration import calibrate, random_batch
from .configuration_sorbet import STAGES, SorbetConfig
from .encoding import Encoding
from .errors import SorbetError
from .functional import valid_token_weight
from .layers import (
    BinaryLinear,
    Dyadic,
    FixedPointLinear,
    QuantizedEmbedding,
    SpikeNeuron,
    SpikingNorm,
    SpikingSoftmax,
    _initial_log2_scale,
)


def _neuron(config: SorbetConfig, encoding: Encoding, channels: int | None) -> SpikeNeuron:
    return SpikeNeuron(config.num_steps, encoding, channels, config.scale_rounding)


def _norm(config: SorbetConfig) -> SpikingNorm:
    return SpikingNorm(
        config.hidden_size,
        _neuron(config, config.encoding, config.hidden_size),
        norm_type=config.norm_type,
        groups=config.groups,
        fraction_bits=config.bspn_fraction_bits,
        momentum=config.norm_momentum,
        eps=config.layer_norm_eps,
        shift_rounding=config.shift_rounding,
        scale_rounding=config.scale_rounding,
        group_gradient=config.group_gradient,
    )


def _linear(config: SorbetConfig, n_in: int, n_out: int) -> BinaryLinear:
    return BinaryLinear(n_in, n_out, config.weight_bits, config.scale_rounding)


class SorbetEmbeddings(nn.Module):
    """Binary word rows + 8-bit position and token-type rows, then norm and neuron."""

    def __init__(self, config: SorbetConfig):
        super().__init__()
        bits, table_bits = config.weight_bits, 8 if config.weight_bits == 1 else 32
        self.word_embeddings = QuantizedEmbedding(
            config.vocab_size, config.hidden_size, bits, config.scale_rounding, config.pad_token_id
        )
        self.position_embeddings = QuantizedEmbedding(config.max_position_embeddings, config.hidden_size, table_bits)
        self.token_type_embeddings = QuantizedEmbedding(config.type_vocab_size, config.hidden_size, table_bits)
        self.norm = _norm(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self, input_ids: Tensor, token_type_ids: Tensor, position_ids: Tensor, token_weight: Tensor | None
    ) -> Dyadic:
        x = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        hidden = self.norm(x + self.position_embeddings(position_ids), token_weight)
        return Dyadic(self.dropout(hidden.value), hidden.grid)


class SorbetAttention(nn.Module):
    """SN(PTsoftmax(2^-m · SN(Q) Kᵀ)) V: in either product one operand is spikes, the other a level held in memory."""

    def __init__(self, config: SorbetConfig):
        super().__init__()
        dim = config.hidden_size
        self.num_heads, self.head_dim = config.num_attention_heads, dim // config.num_attention_heads
        self.query, self.key, self.value = (_linear(config, dim, dim) for _ in range(3))
        self.query_neuron = _neuron(config, config.encoding, dim)
        self.key_neuron = _neuron(config, "offset", dim)
        self.value_neuron = _neuron(config, "offset", dim)
        self.softmax = SpikingSoftmax(
            self.head_dim,
            SpikeNeuron(config.num_steps, "unsigned", rounding=config.scale_rounding, mean_abs=1 / 32),
            config.softmax_type,
            config.softmax_fraction_bits,
            config.softmax_rounding,
        )
        self.context_neuron = _neuron(config, config.encoding, dim)
        self.output = _linear(config, dim, dim)
        self.norm = _norm(config)
        self.probs_dropout = nn.Dropout(config.attention_probs_dropout_prob)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def heads(self, x: Tensor) -> Tensor:  # [B, L, d] -> [B, H, L, d/H]
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def forward(self, hidden: Dyadic, mask: Tensor, token_weight: Tensor | None) -> tuple[Dyadic, Tensor]:
        query = self.query_neuron(self.query(hidden))
        key = self.key_neuron(self.key(hidden))
        value = self.value_neuron(self.value(hidden))

        scores = self.heads(query.value) @ self.heads(key.value).transpose(-1, -2)  # [B, H, L, L]
        spikes, probs = self.softmax(scores, mask)
        context = (self.probs_dropout(spikes.value) @ self.heads(value.value)).transpose(1, 2).flatten(-2)
        grid = None if spikes.grid is None or value.grid is None else spikes.grid.detach() * value.grid.detach()
        out = self.output(self.context_neuron(Dyadic(context, grid)))
        return self.norm(self.dropout(out.value) + hidden.value, token_weight), probs


class SorbetLayer(nn.Module):
    def __init__(self, config: SorbetConfig):
        super().__init__()
        self.attention = SorbetAttention(config)
        self.intermediate = _linear(config, config.hidden_size, config.intermediate_size)
        self.hidden_act = config.hidden_act
        encoding: Encoding = "unsigned" if config.hidden_act == "relu" else config.encoding
        self.intermediate_neuron = _neuron(config, encoding, config.intermediate_size)
        self.output = _linear(config, config.intermediate_size, config.hidden_size)
        self.norm = _norm(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden: Dyadic, mask: Tensor, token_weight: Tensor | None) -> tuple[Dyadic, Tensor]:
        hidden, probs = self.attention(hidden, mask, token_weight)
        current = self.intermediate(hidden)
        if self.hidden_act == "gelu":
            current = Dyadic(F.gelu(current.value))
        elif self.intermediate_neuron.num_steps is None:
            current = Dyadic(F.relu(current.value))
        out = self.output(self.intermediate_neuron(current))  # an unsigned neuron is a ReLU by itself
        return self.norm(self.dropout(out.value) + hidden.value, token_weight), probs


class SorbetPooler(nn.Module):
    def __init__(self, config: SorbetConfig):
        super().__init__()
        self.dense = _linear(config, config.hidden_size, config.hidden_size)
        self.pooler_act = config.pooler_act
        encoding: Encoding = "unsigned" if config.pooler_act == "relu" else config.encoding
        self.neuron = _neuron(config, encoding, config.hidden_size)

    def forward(self, hidden: Dyadic) -> Dyadic:
        current = self.dense(Dyadic(hidden.value[:, 0], hidden.grid))
        if self.pooler_act == "tanh":
            current = Dyadic(torch.tanh(current.value))
        elif self.pooler_act == "relu" and self.neuron.num_steps is None:
            current = Dyadic(F.relu(current.value))
        return self.neuron(current)


class SorbetPreTrainedModel(PreTrainedModel):
    config_class = SorbetConfig
    config: SorbetConfig
    base_model_prefix = "sorbet"
    # The attention is Sorbet's own: any other implementation would silently run an ordinary softmax.
    _supports_sdpa = False
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_attention_backend = False
    accepts_loss_kwargs = False  # or Trainer would leave the mean over accumulated batches to the model
    _no_split_modules = ["SorbetLayer", "SorbetEmbeddings"]  # noqa: RUF012

    exact_evaluation = True  # in evaluation, autocast is off: rounding an output to bfloat16 would break the contract

    def precision(self, device: torch.device) -> AbstractContextManager[Any]:
        exact = self.exact_evaluation and not self.training
        return torch.autocast(device.type, enabled=False) if exact else nullcontext()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
            init.zeros_(module.bias)
            if isinstance(module, BinaryLinear) and module.weight_bits == 1:
                init.copy_(module.log2_scale, _initial_log2_scale(module.weight))
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
            if module.padding_idx is not None and module.weight.device.type != "meta":
                init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, SpikingNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
            if module.norm_type != "layernorm":
                init.ones_(module.running_square)
                init.zeros_(module.running_nu)
        elif isinstance(module, SpikeNeuron) and module.num_steps is not None:
            init.constant_(module.log2_scale, module.default_log2_scale())
            if module.shift is not None:
                init.zeros_(module.shift)


class SorbetModel(SorbetPreTrainedModel):
    """The encoder with its pooler. `last_hidden_state` and `pooler_output` are what the last neurons hand on."""

    def __init__(self, config: SorbetConfig):
        super().__init__(config)
        self.embeddings = SorbetEmbeddings(config)
        self.layers = nn.ModuleList(SorbetLayer(config) for _ in range(config.num_hidden_layers))
        self.pooler = SorbetPooler(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: Any) -> None:
        self.embeddings.word_embeddings = value

    def encode(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> tuple[Dyadic, list[Tensor], list[Tensor]]:
        """The pooled spikes, every block's output and every block's attention probabilities."""
        length = input_ids.shape[1]
        if length > self.config.max_position_embeddings:
            raise SorbetError(
                f"the input has {length} tokens, the model {self.config.max_position_embeddings} positions: "
                "truncate it (tokenizer(..., truncation=True))"
            )
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        if position_ids is None:
            position_ids = torch.arange(length, device=input_ids.device).unsqueeze(0)
        if input_ids.device.type == "cpu" and not torch.compiler.is_compiling():
            _require_range("input_ids", input_ids, self.config.vocab_size)
            _require_range("token_type_ids", token_type_ids, self.config.type_vocab_size)
            _require_range("position_ids", position_ids, self.config.max_position_embeddings)
        valid = attention_mask.bool()
        token_weight = valid_token_weight(valid.unsqueeze(-1).float(), valid) if self.training else None
        mask = valid[:, None, None, :]

        hidden = self.embeddings(input_ids, token_type_ids, position_ids, token_weight)
        states, attentions = [hidden.value], []
        for layer in self.layers:
            hidden, probs = layer(hidden, mask, token_weight)
            states.append(hidden.value)
            attentions.append(probs)
        return self.pooler(hidden), states, attentions

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **_: Any,
    ) -> BaseModelOutputWithPooling:
        with self.precision(input_ids.device):
            pooled, states, attentions = self.encode(input_ids, attention_mask, token_type_ids, position_ids)
        return BaseModelOutputWithPooling(
            last_hidden_state=states[-1],
            pooler_output=pooled.value,
            hidden_states=tuple(states) if output_hidden_states or self.config.output_hidden_states else None,
            attentions=tuple(attentions) if output_attentions or self.config.output_attentions else None,
        )


def _require_range(name: str, ids: Tensor, size: int) -> None:
    if ids.numel() == 0:
        raise SorbetError(f"{name} has shape {tuple(ids.shape)}: it holds nothing")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= size:
        raise SorbetError(
            f"{name} holds {low if low < 0 else high}: it must lie in 0 … {size - 1} "
            "(does the tokenizer belong to this model?)"
        )


class SorbetForSequenceClassification(SorbetPreTrainedModel):
    """A Sorbet with a classification or regression head."""

    def __init__(self, config: SorbetConfig):
        super().__init__(config)
        self.num_labels: int = config.num_labels or 2
        self.sorbet = SorbetModel(config)
        dropout = config.classifier_dropout
        self.dropout = nn.Dropout(config.hidden_dropout_prob if dropout is None else dropout)
        self.classifier = FixedPointLinear(config.hidden_size, self.num_labels, config.weight_bits)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **_: Any,
    ) -> SequenceClassifierOutput:
        with self.precision(input_ids.device):
            pooled, states, attentions = self.sorbet.encode(input_ids, attention_mask, token_type_ids, position_ids)
            logits = self.classifier(Dyadic(self.dropout(pooled.value), pooled.grid))
        return SequenceClassifierOutput(
            loss=None if labels is None else self.task_loss(logits, labels),
            logits=logits,
            hidden_states=tuple(states) if output_hidden_states or self.config.output_hidden_states else None,
            attentions=tuple(attentions) if output_attentions or self.config.output_attentions else None,
        )

    def task_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        problem = self.config.problem_type
        if problem == "regression" or (problem is None and self.num_labels == 1):
            return F.mse_loss(logits.float().view(-1), labels.float().view(-1))
        if problem == "multi_label_classification":
            return F.binary_cross_entropy_with_logits(logits.float(), labels.float())
        return F.cross_entropy(logits.float().view(-1, self.num_labels), labels.view(-1))

    @classmethod
    def from_bert(
        cls,
        source: "str | os.PathLike[str] | PreTrainedModel",
        stage: str = "M3",
        calibration: dict[str, Tensor] | None = None,
        **overrides: Any,
    ) -> "SorbetForSequenceClassification":
        """A Sorbet at `stage` with the weights of a BERT, or of a Sorbet at an earlier stage.

        New scales and statistics are set from one forward pass over `calibration` (a tokenised batch); without one,
        over random tokens, which serves for shape tests and little else. `overrides` go into the configuration.
        """
        model = source if isinstance(source, PreTrainedModel) else _load_source(source)
        config = stage_config(model.config, stage, overrides)
        sorbet = cls(config)
        state = _sorbet_state(model)
        own = sorbet.state_dict()
        wrong = [n for n, v in state.items() if n in own and own[n].shape != v.shape]
        wrong = [n for n in wrong if not n.startswith("classifier.")]  # a head of another task is not taken over
        if wrong:
            raise SorbetError(
                f"{wrong[0]}: the checkpoint has shape {tuple(state[wrong[0]].shape)}, "
                f"its configuration says {tuple(own[wrong[0]].shape)}"
            )
        taken = {n: v for n, v in state.items() if n in own and own[n].shape == v.shape}
        sorbet.load_state_dict(taken, strict=False)
        learned = ("embeddings.weight", "query.weight", "intermediate.weight", "output.weight", "dense.weight")
        missing = [name for name in own if name.endswith(learned) and name not in taken]
        if missing:
            warnings.warn(
                f"{len(missing)} weights are not in the checkpoint and start at random: {', '.join(missing[:3])}"
                f"{', …' * (len(missing) > 3)}",
                stacklevel=2,
            )
        with torch.no_grad():
            for name, module in sorbet.named_modules():
                if isinstance(module, BinaryLinear) and module.weight_bits == 1 and f"{name}.log2_scale" not in taken:
                    module.log2_scale.copy_(_initial_log2_scale(module.weight))
        new = {name.rpartition(".")[0] for name in own if name not in taken} | _changed_modules(sorbet, model.config)
        calibrate(sorbet, random_batch(config) if calibration is None else calibration, new)
        nn.Module.to(sorbet, model.device)
        return sorbet


def _changed_modules(sorbet: SorbetForSequenceClassification, before: Any) -> set[str]:
    """Modules whose scales were learned under options that are others now: they have to be calibrated again."""

    def changed(*options: str) -> bool:
        return any(getattr(before, name, None) != getattr(sorbet.config, name) for name in options)

    if before.model_type != "sorbet":
        return set()
    neurons = changed("activation_bits", "encoding", "hidden_act", "pooler_act")
    norms = changed("norm_type", "norm_groups")
    kinds = (SpikeNeuron,) * neurons + (SpikingNorm,) * norms
    return {name for name, module in sorbet.named_modules() if isinstance(module, kinds)}


# BERT's names on the left, Sorbet's on the right.
_RENAMES = [
    (r"^bert\.", ""),
    (r"^encoder\.layer\.(\d+)\.attention\.self\.", r"layers.\1.attention."),
    (r"^encoder\.layer\.(\d+)\.attention\.output\.dense\.", r"layers.\1.attention.output."),
    (r"^encoder\.layer\.(\d+)\.attention\.output\.LayerNorm\.", r"layers.\1.attention.norm."),
    (r"^encoder\.layer\.(\d+)\.intermediate\.dense\.", r"layers.\1.intermediate."),
    (r"^encoder\.layer\.(\d+)\.output\.dense\.", r"layers.\1.output."),
    (r"^encoder\.layer\.(\d+)\.output\.LayerNorm\.", r"layers.\1.norm."),
    (r"^embeddings\.LayerNorm\.", "embeddings.norm."),
    (r"^(embeddings|layers|pooler)\.", r"sorbet.\1."),
]


def _sorbet_state(model: PreTrainedModel) -> dict[str, Tensor]:
    state = {}
    for name, value in model.state_dict().items():
        if model.config.model_type == "bert":
            for pattern, replacement in _RENAMES:
                name = re.sub(pattern, replacement, name)
        elif isinstance(model, SorbetModel):
            name = f"sorbet.{name}"
        state[name] = value.detach().float() if value.is_floating_point() else value
    return state


def load_sorbet(path: "str | os.PathLike[str]") -> SorbetForSequenceClassification:
    """A Sorbet checkpoint, or an error that says what is there instead."""
    kind = _source_config(path).model_type
    if kind != "sorbet":
        raise SorbetError(
            f"{path} is a {kind!r} checkpoint, not a Sorbet: make one of it first "
            "(SorbetForSequenceClassification.from_bert)"
        )
    return _load(path, SorbetForSequenceClassification)


def load_tokenizer(path: "str | os.PathLike[str]") -> Any:
    """The fast tokenizer beside a model. Where there is none, transformers may make up one that knows no words."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        words = len(tokenizer) - len(tokenizer.all_special_tokens)
    except Exception as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise SorbetError(f"{path}: no usable tokenizer there ({reason.strip()[:120]})") from None
    if words < 1:
        raise SorbetError(f"{path}: no usable tokenizer there; save it beside the model (tokenizer.save_pretrained)")
    return tokenizer


def _source_config(path: "str | os.PathLike[str]") -> Any:
    return _load(path, AutoConfig)


def _load(path: "str | os.PathLike[str]", kind: Any) -> Any:
    """kind.from_pretrained(path), or what is wrong with the folder: the libraries raise a dozen kinds of errors."""
    try:
        return kind.from_pretrained(path)
    except SorbetError:
        raise
    except Exception as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise SorbetError(f"{path}: no model to load here ({reason.strip()[:200]})") from error


def _load_source(path: "str | os.PathLike[str]") -> PreTrainedModel:
    config = _source_config(path)
    if config.model_type == "sorbet":
        return _load(path, SorbetForSequenceClassification)
    if config.model_type != "bert":
        raise SorbetError(f"{path} is a {config.model_type!r} checkpoint: Sorbet is made from a BERT (or a Sorbet)")
    if any("SequenceClassification" in name for name in config.architectures or []):
        return _load(path, AutoModelForSequenceClassification)
    return _load(path, BertModel)


def stage_config(source: Any, stage: str, options: dict[str, Any]) -> SorbetConfig:
    """The configuration of a stage, made of a BERT's (or of an earlier Sorbet's)."""
    if stage not in STAGES:
        raise SorbetError(f"stage is {stage!r}: it must be one of {', '.join(STAGES)}")
    unknown = sorted(set(options) - set(SorbetConfig.__annotations__) - {"num_labels", "id2label", "label2id"})
    if unknown:
        raise SorbetError(f"{unknown[0]!r} is no option of SorbetConfig")
    try:
        return _sorbet_config(source, STAGES[stage] | options)
    except (TypeError, ValueError, StrictDataclassError) as error:
        if isinstance(error, SorbetError):
            raise
        reason = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise SorbetError(f"stage {stage}: {' '.join(reason)[:200]}") from None


def _sorbet_config(source: Any, settings: dict[str, Any]) -> SorbetConfig:
    if source.model_type not in ("bert", "sorbet"):
        raise SorbetError(f"the model is a {source.model_type!r}: Sorbet is made from a BERT (or a Sorbet)")
    positions, decoder = getattr(source, "position_embedding_type", None), getattr(source, "is_decoder", False)
    if positions not in ("absolute", None) or decoder:
        raise SorbetError("Sorbet needs a BERT encoder with absolute positions (no decoder, no relative positions)")
    kept = {name: getattr(source, name) for name in SorbetConfig.__annotations__ if hasattr(source, name)}
    kept |= {n: getattr(source, n) for n in ("id2label", "label2id", "problem_type")}
    if source.model_type == "bert":
        kept["pooler_act"] = "tanh"
    kept |= settings
    if "num_labels" in settings and settings["num_labels"] != len(kept["id2label"]):
        for name in ("id2label", "label2id", "problem_type"):  # those of another task
            kept.pop(name)
    if kept["hidden_act"] not in ("relu", "gelu"):
        raise SorbetError(f"hidden_act is {kept['hidden_act']!r}: at stage M0 Sorbet knows 'gelu' and 'relu'")
    return SorbetConfig(**kept)


AutoConfig.register("sorbet", SorbetConfig, exist_ok=True)
AutoModel.register(SorbetConfig, SorbetModel, exist_ok=True)
AutoModelForSequenceClassification.register(SorbetConfig, SorbetForSequenceClassification, exist_ok=True)

__all__ = ["SorbetConfig", "SorbetForSequenceClassification", "SorbetModel", "SorbetPreTrainedModel"]
