"""The paper's mathematics as pure differentiable functions, each under its equation.

Every scale is a power of two, so every quantised value is an integer times 2^e and float32 computes with it exactly.
Powers of two are therefore never computed by `exp2` or `log2` (vectorised versions need not be exact) but written to
and read from the exponent field.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

LN2 = math.log(2.0)
MASKED = -(2.0**100)  # below any score
MAX_OFFSET = 2**20  # of a neuron behind BSPN, in units of 2^-F
LEAK = 2.0**-6  # the share of the gradient that passes a quantiser outside its range
MIN_MAGNITUDE = 2.0**-12  # a row of weights smaller than this is scaled as if it were this large


# ---------------------------------------------------------------------------------------------------------------------
# Powers of two
# ---------------------------------------------------------------------------------------------------------------------


def exp2_int(k: Tensor) -> Tensor:
    """2^k for integral k in -126 … 127, exactly: k goes into the exponent field of a float32."""
    return ((k.to(torch.int32).clamp(-126, 127) + 127) << 23).view(torch.float32)


def frexp(x: Tensor) -> tuple[Tensor, Tensor]:
    """x = m · 2^e with m in [½, 1) for normal x > 0 of float32 or float64 (bit fields: `torch.frexp` is not fused)."""
    if x.dtype == torch.float64:
        bits = x.view(torch.int64)
        exponent = (bits >> 52) - 1022
        mantissa = ((bits & 0xFFFFFFFFFFFFF) | (1022 << 52)).view(torch.float64)
    else:
        bits = x.float().view(torch.int32)
        exponent = (bits >> 23) - 126
        mantissa = ((bits & 0x7FFFFF) | (126 << 23)).view(torch.float32)
    return mantissa, exponent.to(torch.int32)


def log2_nearest(x: Tensor, rounding: str = "log") -> Tensor:
    """The integer k for which 2^k is nearest to x > 0: in the logarithm (the lemma's ⟦log2 x⟧) or in value."""
    mantissa, exponent = frexp(x)
    threshold = math.sqrt(0.5) if rounding == "log" else 0.75
    return exponent - 1 + (mantissa >= threshold).to(torch.int32)


class _StraightThrough(Function):
    """hard in the forward pass, the gradient of soft in the backward pass."""

    @staticmethod
    def forward(ctx: Any, hard: Tensor, soft: Tensor) -> Tensor:
        return hard.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, grad


def straight_through(hard: Tensor, soft: Tensor) -> Tensor:
    return _StraightThrough.apply(hard.detach(), soft)


def power_of_two(x: Tensor, rounding: str = "log") -> Tensor:
    """sign(x) · 2^⟦log2 |x|⟧, never 0. Straight through in the logarithm: ∂out/∂x = out / x."""
    magnitude = x.detach().float().abs().clamp_min(2.0**-60)
    hard = exp2_int(log2_nearest(magnitude, rounding))
    hard = torch.where(x < 0, -hard, hard)
    return straight_through(hard, x * (hard.abs() / magnitude))


class _ScaleFromLog2(Function):
    @staticmethod
    def forward(ctx: Any, log2_scale: Tensor, rounding: str) -> Tensor:
        round_up = 0.5 if rounding == "log" else 1 - math.log2(1.5)
        scale = exp2_int(torch.floor(log2_scale.float() + round_up))
        ctx.save_for_backward(scale)
        return scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (scale,) = ctx.saved_tensors
        return grad * scale * LN2, None


def scale_from_log2(log2_scale: Tensor, rounding: str = "log") -> Tensor:
    """α = 2^⟦ℓ⟧ for the trained parameter ℓ: a power of two after every optimizer step. ∂α/∂ℓ = α ln 2."""
    return _ScaleFromLog2.apply(log2_scale, rounding)


# ---------------------------------------------------------------------------------------------------------------------
# Quantisers
# ---------------------------------------------------------------------------------------------------------------------


def binarize(weight: Tensor, scale: Tensor) -> Tensor:
    """W_B = s · sign(W − mean W), the mean over each row; sign(0) = +1.

    Straight through without clipping, so no weight ever stops learning: ∂W_B/∂W = 1 (around the row's mean).
    """
    centred = weight - weight.mean(dim=-1, keepdim=True)
    sign = torch.where(centred < 0, -1.0, 1.0)
    return straight_through(scale * sign, centred) + (scale - scale.detach()) * sign


def fixed_point(weight: Tensor, bits: int = 8) -> Tensor:
    """Each row of W as `bits`-bit integers times 2^e, e the least exponent that holds the row. Straight through."""
    top = 2 ** (bits - 1) - 1
    scale = fixed_point_scale(weight, bits)
    return straight_through((weight / scale).round().clamp(-top, top) * scale, weight)


def fixed_point_scale(weight: Tensor, bits: int = 8) -> Tensor:
    top = 2 ** (bits - 1) - 1
    largest = weight.detach().float().abs().amax(dim=-1, keepdim=True).clamp_min(MIN_MAGNITUDE) / top
    mantissa, exponent = frexp(largest)
    return exp2_int(exponent - (mantissa == 0.5).to(torch.int32))


def round_to_grid(x: Tensor, grid: Tensor) -> Tensor:
    """x rounded to a multiple of the power of two `grid`, at most 2^22 steps from 0. Straight through."""
    steps = torch.round(x.detach() / grid.detach()).clamp(-(2.0**22), 2.0**22)
    return straight_through(steps * grid.detach(), x)


def elastic_quantize(
    x: Tensor, scale: Tensor, lo: int, hi: int, shift: Tensor | None = None, count: Tensor | None = None
) -> Tensor:
    """α · clip(⌊(x − β)/α + ½⌋, lo, hi), the value that a spike neuron hands on.

    Backward: the floor is skipped, so LSQ's gradient falls out: ∂/∂α = c − (x − β)/α in range, lo or hi outside.
    A little (LEAK) passes outside the range as well: a neuron that has fallen silent for every input can come back.
    `count`, where given, replaces the rounded value in the forward pass (the exact count of a fused threshold).
    """
    level = (x if shift is None else x - shift) / scale
    if count is None:
        count = torch.floor(level.detach() + 0.5).clamp(lo, hi)
    clipped = level.clamp(lo, hi)
    return straight_through(count, clipped + LEAK * (level - clipped)) * scale


# ---------------------------------------------------------------------------------------------------------------------
# PTsoftmax (Algorithm 2)
# ---------------------------------------------------------------------------------------------------------------------


def ptsoftmax(z: Tensor, mask: Tensor | None = None, fraction_bits: int = 16, rounding: str = "log") -> Tensor:
    """P = A ≫ k with A = 2^{s'}, s' = ⌈z⌉ − max⌈z⌉, Z = Σ A, k = ⟦log2 Z⟧ (Algorithm 2).

    `mask` is True where a position counts; the others get 0 and add nothing to Z. A keeps `fraction_bits` bits.
    `rounding="log"` is what the lemma's bound needs; "value" (threshold 1.5·2^m) is the published code's.
    Backward: straight through to the base-2 softmax that PTsoftmax stands for.
    """
    return straight_through(power_of_two_softmax(z.detach(), mask, fraction_bits, rounding), base2_softmax(z, mask))


def base2_softmax(z: Tensor, mask: Tensor | None = None) -> Tensor:
    """F_2(z_i) = 2^{z_i} / Σ_j 2^{z_j} over the positions that count."""
    z = z.float() * LN2
    return F.softmax(z if mask is None else z.masked_fill(~mask, MASKED), dim=-1)


def power_of_two_softmax(z: Tensor, mask: Tensor | None, fraction_bits: int, rounding: str) -> Tensor:
    """The forward pass of PTsoftmax."""
    ceiled = torch.ceil(z.float())
    if mask is not None:
        ceiled = ceiled.masked_fill(~mask, MASKED)
    shifted = ceiled - ceiled.amax(dim=-1, keepdim=True)
    keep = shifted >= -fraction_bits
    if mask is not None:
        keep = keep & mask
    # Z needs up to fraction_bits + log2(length) bits: float64 holds it exactly at every length.
    total = torch.where(keep, exp2_int(shifted), 0.0).sum(dim=-1, keepdim=True, dtype=torch.float64)
    k = log2_nearest(total.clamp_min(1.0), rounding)
    return torch.where(keep, exp2_int(shifted - k), 0.0)


# ---------------------------------------------------------------------------------------------------------------------
# BSPN (Algorithm 1)
# ---------------------------------------------------------------------------------------------------------------------


def group_exponent(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """k = ⌈log2 S⌉ and Σ|X| of each group, S = mean |X| over its n channels; x [..., d] -> [..., groups, 1].

    The mean is never taken: with Σ|X| = m_x 2^{e_x} and n = m_n 2^{e_n}, ⌈log2(Σ|X| / n)⌉ = e_x − e_n + [m_x > m_n].
    """
    grouped = x.unflatten(-1, (groups, -1))
    total = grouped.abs().sum(dim=-1, keepdim=True, dtype=torch.float64)  # exact, whatever the order of the sum
    mantissa, exponent = frexp(total)
    n_mantissa, n_exponent = math.frexp(grouped.shape[-1])
    return exponent - n_exponent + (mantissa > n_mantissa).to(torch.int32), total


class _GroupShift(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: int, fraction_bits: int, rounding: str, through_scale: bool) -> Tensor:
        x = x.float()
        k, total = group_exponent(x, groups)
        k = torch.where(total > 0, k, 0).clamp(-100, 100)  # a group of zeros is not shifted
        half = 0.5 if rounding == "nearest" else 0.0
        scaled = torch.floor(x.unflatten(-1, (groups, -1)) * exp2_int(fraction_bits - k) + half)
        x_hat = (scaled * 2.0**-fraction_bits).flatten(-2)
        ctx.groups, ctx.through_scale = groups, through_scale
        ctx.save_for_backward(x, x_hat, exp2_int(-k), total.float())
        return x_hat

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, x_hat, inverse, total = ctx.saved_tensors
        grad = grad.float().unflatten(-1, (ctx.groups, -1))
        grad_x = grad * inverse
        if ctx.through_scale:  # as if 2^k were proportional to Σ|X|
            x, x_hat = x.unflatten(-1, (ctx.groups, -1)), x_hat.unflatten(-1, (ctx.groups, -1))
            pull = (grad * x_hat).sum(dim=-1, keepdim=True) / total.clamp_min(1e-30)
            grad_x = grad_x - torch.sign(x) * pull
        return grad_x.flatten(-2), None, None, None, None


def group_shift(
    x: Tensor, groups: int, fraction_bits: int, rounding: str = "floor", through_scale: bool = False
) -> Tensor:
    """Step 1 of BSPN: Φ(X) = X ≫ k per group, with `fraction_bits` fraction bits kept (floor, as a shifter does).

    A group of zeros stays zero. Backward: 2^-k (k constant, as in the paper's proof), or, with `through_scale`,
    as for a division by S itself.
    """
    return _GroupShift.apply(x, groups, fraction_bits, rounding, through_scale)


class _PowerNorm(Function):
    """X̂ = X / ψ with PowerNorm's backward, in which ψ and ν are running statistics, not functions of X:

    dX = (dX̂ − ν ⊙ X̂) / ψ
    Γ = mean X̂²,  Λ = mean dX̂ ⊙ X̂   (over valid tokens)
    ν ← ν (1 − (1−α) Γ) + (1−α) Λ
    ψ² ← α ψ² + (1−α) ψ_B²,  ψ_B² = ψ² Γ

    Both are updated by the backward pass. An update of ψ² in the forward pass would reach a compiled backward too
    early: it may recompute ψ from a buffer that has changed by then.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, square: Tensor, nu: Tensor, weight: Tensor, momentum: float) -> Tensor:
        psi = root_mean_square(square)
        x_norm = x / psi
        ctx.save_for_backward(x_norm, psi, weight)
        ctx.square, ctx.nu, ctx.momentum = square, nu, momentum  # changed by the backward pass, hence not saved
        return x_norm

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x_norm, psi, weight = ctx.saved_tensors
        # ν belongs to the loss of the whole batch, of which each of several processes averages over its own share.
        processes = number_of_processes()
        corrected = (grad / processes - ctx.nu * x_norm) * (weight > 0)  # padding neither gives nor takes
        owed = sum_over_processes((corrected * x_norm * weight).flatten(0, -2).sum(dim=0))  # Λ − ν Γ
        gamma = sum_over_processes((x_norm.square() * weight).flatten(0, -2).sum(dim=0))
        owed = torch.where(torch.isfinite(owed), owed, 0.0)  # one overflow must not stay in ν for ever
        ctx.nu.add_(owed, alpha=1.0 - ctx.momentum)
        ctx.square.lerp_(psi.square() * gamma, 1.0 - ctx.momentum)
        return corrected * processes / psi, None, None, None, None


def power_norm(x: Tensor, square: Tensor, nu: Tensor, weight: Tensor, momentum: float) -> Tensor:
    """Step 2 of BSPN in training: X / ψ. `square` is the running ψ², `weight` is `valid_token_weight`."""
    return _PowerNorm.apply(x, square, nu, weight, momentum)


def root_mean_square(square: Tensor) -> Tensor:
    """ψ, kept away from 0."""
    return square.clamp_min(2.0**-16).sqrt()


def bspn(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    square: Tensor,
    nu: Tensor,
    groups: int,
    *,
    token_weight: Tensor | None = None,
    momentum: float = 0.9,
    power_of_two_gain: bool = False,
    fraction_bits: int = 8,
    shift_rounding: str = "floor",
    scale_rounding: str = "log",
    group_gradient: str = "shift",
) -> tuple[Tensor, Tensor]:
    """Y = γ ⊙ X̂/ψ + β with X̂ = X ≫ k, k = ⌈log2 S(X)⌉ for each of `groups` groups (Algorithm 1). Returns Y and X̂.

    In training give `token_weight` (`valid_token_weight`): X̂/ψ then has PowerNorm's backward, which also updates the
    running ψ² (`square`) and ν. `power_of_two_gain` is the paper's ‡ variant: γ/ψ goes to the nearest power of two.
    """
    x_hat = group_shift(x, groups, fraction_bits, shift_rounding, group_gradient == "scale")
    gain = bspn_gain(gamma, square, power_of_two_gain, scale_rounding)
    if token_weight is None:
        return x_hat * gain + beta, x_hat
    x_norm = power_norm(x_hat, square, nu, token_weight, momentum)
    return x_norm * (gain * root_mean_square(square)) + beta, x_hat


def bspn_gain(gamma: Tensor, square: Tensor, power_of_two_gain: bool = False, rounding: str = "log") -> Tensor:
    """γ/ψ; the nearest power of two in the ‡ variant."""
    gain = gamma / root_mean_square(square)
    return power_of_two(gain, rounding) if power_of_two_gain else gain


def valid_token_weight(x: Tensor, mask: Tensor | None) -> Tensor:
    """1/N on valid tokens and 0 on padding, [..., 1]: a sum with it is a mean over the tokens that exist.

    Where several processes train together, N counts the tokens of all of them.
    """
    weight = x.new_ones((*x.shape[:-1], 1)) if mask is None else mask.to(x.dtype).unsqueeze(-1)
    return weight / sum_over_processes(weight.sum()).clamp_min(1.0)


def number_of_processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def sum_over_processes(x: Tensor) -> Tensor:
    """The sum of x over all processes that train together; x itself where there is one."""
    if number_of_processes() == 1:
        return x
    group: Any = dist.group.WORLD
    return funcol.all_reduce(x, "sum", group)


def merge_threshold(
    gain: Tensor, bias: Tensor, scale: Tensor, shift: Tensor, fraction_bits: int
) -> tuple[Tensor, Tensor]:
    """Fold BSPN's affine part into the neuron behind it: integers (θ, b) per channel, in units of 2^-F.

    ⌊(g X̂ + β − β_SN)/α + ½⌋ = ⌊(±X̂ + b)/|θ| + ½⌋ with θ = α/g, whose sign is the sign of X̂, and b = (β − β_SN)·|θ|/α.
    """
    gain, bias, scale, shift = (t.detach().double() for t in (gain, bias, scale, shift))
    size = torch.round(scale * 2.0**fraction_bits / gain.abs().clamp_min(1e-30)).clamp(1, max_threshold(fraction_bits))
    offset = torch.round((bias - shift) / scale * size).clamp(-MAX_OFFSET, MAX_OFFSET)
    return torch.where(gain < 0, -size, size).float(), offset.float()


def max_threshold(fraction_bits: int) -> int:
    """Where |θ| ends: a channel of gain below α/16 (F ≤ 10: α/64) hears X̂ no fainter than that."""
    return 2 ** (min(fraction_bits, 10) + 6)


def merged_count(x_hat: Tensor, threshold: Tensor, offset: Tensor, fraction_bits: int, lo: int, hi: int) -> Tensor:
    """clip(⌊(±X̂ + b + |θ|/2) / |θ|⌋, lo, hi) for `merge_threshold`'s integers.

    The numerator is a multiple of ½: a quarter more never changes the floor, and keeps the quotient at least 1/(4θ)
    away from an integer, so that a division that is off by a rounding error (as a GPU's may be) floors alike.
    """
    size = threshold.abs()
    current = x_hat * (torch.sign(threshold) * 2.0**fraction_bits) + offset
    return torch.floor((current + (0.5 * size + 0.25)) / size).clamp(lo, hi)
