"""The modules of a Sorbet: thin state around `functional.py`.

What flows between them is a `Dyadic`: a tensor together with the power of two of which every element is a multiple.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import functional as S
from .encoding import Encoding, count_range


class Dyadic(NamedTuple):
    value: Tensor
    grid: Tensor | None = None  # a power of two, or None where the value is an ordinary float


def _initial_log2_scale(weight: Tensor) -> Tensor:
    centred = weight.detach() - weight.detach().mean(dim=-1, keepdim=True)
    return torch.log2(centred.abs().mean().clamp_min(2.0**-40))


class BinaryLinear(nn.Linear):
    """y = s · α · (B c) + b with B = sign(W − mean W), s = 2^⟦ℓ⟧ and b on the grid s·α of the product.

    With `weight_bits=32` an ordinary linear layer. Behind an activation that is not quantised W stays binary and b
    is left as it is.
    """

    def __init__(self, in_features: int, out_features: int, weight_bits: int = 1, rounding: str = "log"):
        super().__init__(in_features, out_features)
        self.weight_bits, self.rounding = weight_bits, rounding
        if weight_bits == 1:
            self.log2_scale = nn.Parameter(_initial_log2_scale(self.weight))

    def scale(self) -> Tensor:
        return S.scale_from_log2(self.log2_scale, self.rounding)

    def forward(self, x: Dyadic) -> Dyadic:  # type: ignore[override]
        if self.weight_bits == 32:
            return Dyadic(F.linear(x.value, self.weight, self.bias))
        scale = self.scale()
        product = F.linear(x.value, S.binarize(self.weight, scale)).float()
        if x.grid is None:
            return Dyadic(product + self.bias)
        grid = scale.detach() * x.grid.detach()
        return Dyadic(product + S.round_to_grid(self.bias, grid), grid)


class FixedPointLinear(nn.Linear):
    """The classifier: 8-bit weights of one exponent, one addition per spike; bias on the grid of the product."""

    def __init__(self, in_features: int, out_features: int, weight_bits: int = 1):
        super().__init__(in_features, out_features)
        self.weight_bits = weight_bits

    def forward(self, x: Dyadic) -> Tensor:  # type: ignore[override]
        if self.weight_bits == 32:
            return F.linear(x.value, self.weight, self.bias)
        flat = self.weight.flatten()
        weight = S.fixed_point(flat).view_as(self.weight)
        if x.grid is None:
            return F.linear(x.value, weight, self.bias)
        with torch.autocast(x.value.device.type, enabled=False):
            grid = S.fixed_point_scale(flat) * x.grid.detach()
            return F.linear(x.value.float(), weight) + S.round_to_grid(self.bias, grid)


class QuantizedEmbedding(nn.Embedding):
    """A table whose rows are binary (an exponent per row), 8-bit fixed point (likewise), or left as they are."""

    def __init__(self, num: int, dim: int, weight_bits: int, rounding: str = "log", padding_idx: int | None = None):
        super().__init__(num, dim, padding_idx=padding_idx)
        self.weight_bits, self.rounding = weight_bits, rounding

    def quantize(self, rows: Tensor) -> Tensor:
        if self.weight_bits == 1:
            return S.binarize(rows, self.row_scale(rows))
        return S.fixed_point(rows, self.weight_bits) if self.weight_bits == 8 else rows

    def row_scale(self, rows: Tensor) -> Tensor:
        if self.weight_bits == 8:
            return S.fixed_point_scale(rows)
        spread = (rows - rows.mean(dim=-1, keepdim=True)).abs().mean(dim=-1, keepdim=True)
        return S.power_of_two(spread.clamp_min(S.MIN_MAGNITUDE), self.rounding)

    def forward(self, ids: Tensor) -> Tensor:
        return self.quantize(F.embedding(ids, self.weight, self.padding_idx))


class SpikeNeuron(nn.Module):
    """SN(x; α, β, T): hands on α · c, c = clip(⌊(x − β)/α + ½⌋, lo, hi) spikes in T steps.

    α = 2^⟦ℓ⟧ with ℓ trained, β a trained shift per channel, rounded to the grid of the input where it has one.
    With `num_steps=None` nothing is quantised and x passes.
    """

    def __init__(
        self, num_steps: int | None, encoding: Encoding, channels: int | None = None, rounding: str = "log",
        mean_abs: float = 0.8,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_steps, self.encoding, self.rounding = num_steps, encoding, rounding
        self.mean_abs = mean_abs  # what to expect of the input before calibration: a standard normal
        self.shift: nn.Parameter | None = None
        if num_steps is None:
            return
        self.lo, self.hi = count_range(num_steps, encoding)
        self.log2_scale = nn.Parameter(torch.tensor(self.default_log2_scale()))
        if channels is not None:
            self.shift = nn.Parameter(torch.zeros(channels))

    def default_log2_scale(self) -> float:
        return math.log2(self.initial_scale(self.mean_abs))

    def initial_scale(self, mean_abs: float) -> float:
        """BiT's first guess of α from the mean magnitude of the input."""
        one_sided = self.encoding == "unsigned"
        return max((4.0 if one_sided else 2.0) * mean_abs / math.sqrt(max(self.hi, -self.lo)), 2.0**-40)

    def scale(self) -> Tensor:
        return S.scale_from_log2(self.log2_scale, self.rounding)

    def count(self, x: Tensor) -> Tensor:
        """clip(⌊x/α + ½⌋, lo, hi)."""
        return torch.floor(x / self.scale().detach() + 0.5).clamp(self.lo, self.hi)

    def forward(self, x: Dyadic, count: Callable[[], Tensor] | None = None) -> Dyadic:
        """`count`, where given, says what is fired in place of x's own count; x still carries the gradient."""
        if self.num_steps is None:
            return x
        scale = self.scale()
        shift: Tensor | None = self.shift
        if shift is not None and x.grid is not None:
            shift = S.round_to_grid(shift, x.grid)
        fired = None if count is None else count()
        return Dyadic(S.elastic_quantize(x.value.float(), scale, self.lo, self.hi, shift, fired), scale)

    def extra_repr(self) -> str:
        return f"num_steps={self.num_steps}, encoding={self.encoding}"


class SpikingSoftmax(nn.Module):
    """Attention probabilities and the spike neuron behind them, SN(softmax(z)).

    PTsoftmax: z = scores · 2^-m, the power of two nearest to log2(e)/√d standing for both change of base and √d; what
    queries and keys learn makes up the rest. The count is taken from PTsoftmax's P. α learns from the base-2 softmax
    that P stands for: P itself lies on the neuron's grid and would leave α without a gradient.
    """

    def __init__(self, head_dim: int, neuron: SpikeNeuron, kind: str, fraction_bits: int = 16, rounding: str = "log"):
        super().__init__()
        self.head_dim, self.neuron, self.kind = head_dim, neuron, kind
        self.log2_factor = round(math.log2(math.log2(math.e) / math.sqrt(head_dim)))
        self.fraction_bits, self.rounding = fraction_bits, rounding

    def forward(self, scores: Tensor, mask: Tensor) -> tuple[Dyadic, Tensor]:
        scores = scores.float()
        if self.kind == "softmax":
            z = scores * self.head_dim**-0.5
            probs = F.softmax(z.masked_fill(~mask, torch.finfo(z.dtype).min), dim=-1)
            return self.neuron(Dyadic(probs)), probs
        z = scores * 2.0**self.log2_factor
        hard = S.power_of_two_softmax(z.detach(), mask, self.fraction_bits, self.rounding)
        soft = S.base2_softmax(z, mask)
        probs = S.straight_through(hard, soft)  # PTsoftmax(z)
        if self.neuron.num_steps is None:
            return Dyadic(probs), probs
        return self.neuron(Dyadic(soft), lambda: self.neuron.count(hard)), probs

    def extra_repr(self) -> str:
        return self.kind


class SpikingNorm(nn.Module):
    """A norm and the spike neuron behind it.

    LayerNorm, or BSPN: y = (γ/ψ) · (X ≫ k) + β. In BSPN's case the neuron's threshold takes in γ/ψ and β, as integers
    per channel, so what leaves is exact. ψ is the running root mean square of X ≫ k over valid tokens.
    """

    running_square: Tensor
    running_nu: Tensor

    def __init__(
        self, dim: int, neuron: SpikeNeuron, norm_type: str = "bspn", groups: int = 1, fraction_bits: int = 8,
        momentum: float = 0.9, eps: float = 1e-12, shift_rounding: str = "floor", scale_rounding: str = "log",
        group_gradient: str = "shift",
    ):  # fmt: skip
        super().__init__()
        self.norm_type, self.groups, self.fraction_bits = norm_type, groups, fraction_bits
        self.momentum, self.eps = momentum, eps
        self.shift_rounding, self.scale_rounding = shift_rounding, scale_rounding
        self.group_gradient = group_gradient
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.neuron = neuron
        if norm_type != "layernorm":
            self.register_buffer("running_square", torch.ones(dim))  # ψ²
            self.register_buffer("running_nu", torch.zeros(dim))  # ν of PowerNorm's backward

    def gain(self) -> Tensor:
        return S.bspn_gain(self.weight, self.running_square, self.norm_type == "bspn-pow2", self.scale_rounding)

    def forward(self, x: Tensor, token_weight: Tensor | None = None) -> Dyadic:
        if self.norm_type == "layernorm":
            return self.neuron(Dyadic(F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)))
        y, x_hat = self.bspn(x, token_weight if self.training else None)
        if self.neuron.num_steps is None:
            return Dyadic(y)
        return self.neuron(Dyadic(y), lambda: self.merged_count(x_hat.detach()))

    def bspn(self, x: Tensor, token_weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return S.bspn(
            x,
            self.weight,
            self.bias,
            self.running_square,
            self.running_nu,
            self.groups,
            token_weight=token_weight,
            momentum=self.momentum,
            power_of_two_gain=self.norm_type == "bspn-pow2",
            fraction_bits=self.fraction_bits,
            shift_rounding=self.shift_rounding,
            scale_rounding=self.scale_rounding,
            group_gradient=self.group_gradient,
        )

    def merged_count(self, x_hat: Tensor) -> Tensor:
        threshold, offset = self.merged_threshold()
        return S.merged_count(x_hat, threshold, offset, self.fraction_bits, self.neuron.lo, self.neuron.hi)

    def merged_threshold(self) -> tuple[Tensor, Tensor]:
        shift = self.neuron.shift
        assert shift is not None
        return S.merge_threshold(self.gain(), self.bias, self.neuron.scale(), shift, self.fraction_bits)

    def extra_repr(self) -> str:
        return f"{self.norm_type}, dim={self.weight.numel()}, groups={self.groups}"
