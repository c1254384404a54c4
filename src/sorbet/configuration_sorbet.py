"""Configuration of a Sorbet: BERT's shape plus six independent switches.

| switch            | paper's BERT | Sorbet   | what it turns on                                      |
| ----------------- | ------------ | -------- | ----------------------------------------------------- |
| `weight_bits`     | 32           | 1        | W = 2^e · sign(W − mean W)                            |
| `activation_bits` | 32           | 4        | spike neurons with T = 2^bits steps                   |
| `softmax_type`    | softmax      | ptsoftmax| Algorithm 2: shifts instead of exponentials           |
| `norm_type`       | layernorm    | bspn     | Algorithm 1: shifts instead of a square root          |
| `hidden_act`      | gelu         | relu     | a spike neuron is a ReLU by itself                    |
| `pooler_act`      | tanh         | relu     | the same                                              |

The stages M0 to M3 of Algorithm 4 are four settings of these switches (`STAGES`).
"""

from typing import Any, Literal

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

STAGES: dict[str, dict[str, Any]] = {
    "M0": {"weight_bits": 32, "activation_bits": 32, "softmax_type": "softmax", "norm_type": "layernorm"},
    "M1": {
        "weight_bits": 1, "activation_bits": 4, "softmax_type": "softmax", "norm_type": "layernorm",
        "hidden_act": "relu", "pooler_act": "relu",
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    },
}  # fmt: skip
STAGES["M2"] = STAGES["M1"] | {"softmax_type": "ptsoftmax"}
STAGES["M3"] = STAGES["M2"] | {"norm_type": "bspn"}


@strict
class SorbetConfig(PreTrainedConfig):
    model_type = "sorbet"

    # The shape, under BERT's names.
    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: Literal["relu", "gelu"] = "relu"
    pooler_act: Literal["relu", "tanh", "identity"] = "relu"
    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0
    classifier_dropout: float | int | None = None

    # The switches.
    weight_bits: int = 1
    activation_bits: int = 4
    softmax_type: Literal["ptsoftmax", "softmax"] = "ptsoftmax"
    norm_type: Literal["bspn", "bspn-pow2", "layernorm"] = "bspn"  # bspn-pow2 is the paper's ‡ variant
    encoding: Literal["signed", "unsigned", "offset"] = "signed"  # of hidden states, queries and contexts

    # Choices that the paper leaves open.
    norm_groups: int | None = None  # BSPN's h; None: one group per attention head
    norm_momentum: float = 0.9  # α of BSPN's running moment
    bspn_fraction_bits: int = 8  # F: fraction bits that survive BSPN's right shift
    softmax_fraction_bits: int = 16  # PTsoftmax: 2^s' below 2^-16 vanishes
    scale_rounding: Literal["log", "value"] = "log"  # which power of two is the nearest to a scale
    softmax_rounding: Literal["log", "value"] = "log"  # which power of two is the nearest to Z
    shift_rounding: Literal["floor", "nearest"] = "floor"  # what a right shift does with the bits it drops
    group_gradient: Literal["shift", "scale"] = "shift"  # of X ≫ k: k constant (the paper's proof), or as X / S

    @property
    def num_steps(self) -> int | None:
        """T, the steps of one spike train; None where activations are not quantised."""
        return None if self.activation_bits == 32 else 2**self.activation_bits

    @property
    def groups(self) -> int:
        return self.num_attention_heads if self.norm_groups is None else self.norm_groups

    def validate_sorbet(self) -> None:
        if self.weight_bits not in (1, 32):
            raise ValueError(f"weight_bits is {self.weight_bits}: it must be 1 (binary) or 32 (full precision)")
        if self.activation_bits not in (1, 2, 3, 4, 32):
            raise ValueError(f"activation_bits is {self.activation_bits}: it must be 1, 2, 3, 4 (T = 2^bits) or 32")
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
                     "max_position_embeddings", "type_vocab_size"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} does not divide into {self.num_attention_heads} attention heads"
            )
        if self.groups < 1 or self.hidden_size % self.groups:
            raise ValueError(f"hidden_size {self.hidden_size} does not divide into {self.groups} norm groups")
        if not 0 <= self.bspn_fraction_bits <= 12:
            raise ValueError(f"bspn_fraction_bits is {self.bspn_fraction_bits}: it must lie in 0 … 12")
        if not 1 <= self.softmax_fraction_bits <= 20:
            raise ValueError(f"softmax_fraction_bits is {self.softmax_fraction_bits}: it must lie in 1 … 20")


__all__ = ["STAGES", "SorbetConfig"]
