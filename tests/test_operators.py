"""The paper's operators and what the paper states of them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sorbet import functional as S
from sorbet.encoding import count_range
from sorbet.layers import BinaryLinear, Dyadic, SpikeNeuron

floats = st.floats(-30, 30, width=32)
vectors = st.lists(floats, min_size=1, max_size=64).map(torch.tensor)


# -- powers of two ----------------------------------------------------------------------------------------------------


def test_powers_of_two_are_exact():
    k = torch.arange(-126, 128)
    assert torch.equal(S.exp2_int(k).double(), torch.ldexp(torch.ones(254, dtype=torch.float64), k))
    assert torch.equal(S.log2_nearest(S.exp2_int(k)), k.int())


@given(st.floats(2.0**-50, 2.0**50))
def test_nearest_power_of_two_in_the_logarithm_and_in_value(x):
    t = torch.tensor(x, dtype=torch.float64)
    k = int(S.log2_nearest(t, "log"))
    assert abs(math.log2(x) - k) <= 0.5 + 1e-12  # the tolerance is that of math.log2
    v = int(S.log2_nearest(t, "value"))
    assert abs(x - 2.0**v) <= min(abs(x - 2.0 ** (v - 1)), abs(x - 2.0 ** (v + 1)))


@given(st.floats(-1e6, 1e6, allow_subnormal=False).filter(lambda x: abs(x) > 1e-12))
def test_power_of_two_keeps_the_sign_and_passes_a_gradient(x):
    t = torch.tensor(x, requires_grad=True)
    out = S.power_of_two(t)
    assert math.frexp(abs(float(out)))[0] == 0.5
    assert math.copysign(1, float(out)) == math.copysign(1, x)
    out.backward()
    assert t.grad is not None
    assert float(t.grad) > 0


# -- quantisers -------------------------------------------------------------------------------------------------------


def test_binarize_is_sign_of_centred_weights_times_scale():
    torch.manual_seed(0)
    weight = torch.randn(6, 10, requires_grad=True)
    scale = torch.tensor(0.25, requires_grad=True)
    out = S.binarize(weight, scale)
    expected = torch.where(weight - weight.mean(dim=1, keepdim=True) >= 0, 0.25, -0.25)
    assert torch.equal(out, expected)
    (out * torch.randn(6, 10)).sum().backward()
    assert (weight.grad != 0).all()
    assert scale.grad != 0


@pytest.mark.parametrize("encoding", ["unsigned", "signed", "offset"])
@pytest.mark.parametrize("num_steps", [2, 4, 8, 16])
def test_elastic_quantize_is_the_papers_quantiser(encoding, num_steps):
    lo, hi = count_range(num_steps, encoding)
    torch.manual_seed(1)
    x = (torch.randn(200) * 8).requires_grad_()
    scale = torch.tensor(0.5, requires_grad=True)
    shift = torch.full((200,), 0.3, requires_grad=True)
    out = S.elastic_quantize(x, scale, lo, hi, shift)
    expected = [0.5 * min(max(math.floor((float(v) - float(shift[0])) / 0.5 + 0.5), lo), hi) for v in x.detach()]
    assert out.detach().tolist() == expected
    out.square().sum().backward()
    inside = ((x - shift) / 0.5 > lo) & ((x - shift) / 0.5 < hi) & (out != 0)
    assert (x.grad[inside] != 0).all()
    assert scale.grad != 0
    assert shift.grad.abs().sum() > 0


def test_a_silent_neuron_can_come_back():
    """Every input below the range of an unsigned neuron: all counts 0, and yet x, α and β are told."""
    x = torch.full((8,), -3.0, requires_grad=True)
    scale, shift = torch.tensor(0.5, requires_grad=True), torch.zeros(8, requires_grad=True)
    out = S.elastic_quantize(x, scale, 0, 15, shift)
    assert (out == 0).all()
    out.sum().backward()
    assert (x.grad > 0).all()
    assert (shift.grad < 0).all()


def test_a_scale_is_a_power_of_two_and_learns():
    for log2 in np.linspace(-6, 6, 49):
        parameter = torch.tensor(float(log2), requires_grad=True)
        scale = S.scale_from_log2(parameter)
        assert math.frexp(float(scale))[0] == 0.5
        assert abs(math.log2(float(scale)) - log2) <= 0.5
        scale.backward()
        assert float(parameter.grad) == pytest.approx(float(scale) * math.log(2))


# -- PTsoftmax --------------------------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(vectors)
def test_ptsoftmax_bound(z):
    """1/(2√2) F₂ ≤ PTsoftmax ≤ 2√2 F₂, wherever 2^s' is not below the last fraction bit."""
    probs = S.ptsoftmax(z, fraction_bits=20).double()
    base2 = torch.softmax(z.double() * math.log(2), dim=-1)
    kept = probs > 0
    ratio = probs[kept] / base2[kept]
    bound = 2 * math.sqrt(2) * (1 + 1e-9)  # float64 softmax is not exact
    # What vanishes below 2^-20 shortens Z by less than 64 · 2^-20, too little to matter unless z sits on the bound.
    assert (ratio <= bound * (1 + 2.0**-13)).all()
    assert (ratio >= 1 / bound).all()
    assert ((torch.ceil(z) - torch.ceil(z).max() < -20) == ~kept).all()


def test_ptsoftmax_nearest_in_value_breaks_the_bound():
    """Why the rounding is done in the logarithm: Z just below 1.5 goes to 1 in value, a ceiled z doubles: factor 3."""
    z = torch.tensor([0.0, -2, -3, -4, -5, -10 + 1e-3])
    base2 = torch.softmax(z.double() * math.log(2), dim=-1)
    worst = {rounding: float((S.ptsoftmax(z, rounding=rounding) / base2).max()) for rounding in ("log", "value")}
    assert worst["log"] <= 2 * math.sqrt(2)
    assert 2.9 < worst["value"] <= 3


@given(vectors)
def test_ptsoftmax_gives_powers_of_two_and_ignores_the_masked(z):
    mask = torch.arange(len(z)) % 3 != 1
    probs = S.ptsoftmax(z, mask)
    mantissa, _ = torch.frexp(probs[probs > 0])
    assert (mantissa == 0.5).all()
    assert (probs[~mask] == 0).all()
    assert torch.equal(probs[mask], S.ptsoftmax(z[mask]))


def test_ptsoftmax_gradient_is_that_of_base2_softmax():
    torch.manual_seed(0)
    z, upstream = torch.randn(3, 9), torch.randn(3, 9)
    a, b = z.clone().requires_grad_(), z.clone().requires_grad_()
    S.ptsoftmax(a).backward(upstream)
    S.base2_softmax(b).backward(upstream)
    assert torch.equal(a.grad, b.grad)
    assert (a.grad != 0).all()


# -- BSPN -------------------------------------------------------------------------------------------------------------


def phi(x: torch.Tensor) -> torch.Tensor:
    """Φ(X) with 12 fraction bits."""
    return S.group_shift(x, 1, 12)


@settings(max_examples=200)
@given(st.lists(st.integers(-4096, 4096), min_size=8, max_size=8), st.sampled_from([1, 2, 4, 8]))
def test_group_exponent_is_ceil_log2_of_the_mean(values, groups):
    from fractions import Fraction

    x = torch.tensor(values, dtype=torch.float32) / 64
    k, _ = S.group_exponent(x, groups)
    for group, found in zip(x.reshape(groups, -1), k.flatten().tolist(), strict=True):
        mean = sum(abs(Fraction(float(v))) for v in group) / len(group)
        if mean:
            assert Fraction(2) ** (found - 1) < mean <= Fraction(2) ** found


@pytest.mark.parametrize("n", [6, 12, 48])
def test_group_exponent_where_n_is_no_power_of_two(n):
    from fractions import Fraction

    torch.manual_seed(n)
    for _ in range(200):
        x = torch.randint(-500, 500, (n,)).float()
        k = int(S.group_exponent(x, 1)[0])
        mean = Fraction(int(x.abs().sum()), n)
        assert Fraction(2) ** (k - 1) < mean <= Fraction(2) ** k
    for power in range(5):  # the mean exactly a power of two
        assert int(S.group_exponent(torch.full((n,), 2.0**power), 1)[0]) == power


cells = st.lists(st.floats(-64, 64, width=32), min_size=4, max_size=16)


@settings(max_examples=300)
@given(cells, st.integers(0, 2**32 - 1))
def test_phi_is_1_lipschitz_inside_a_cell(values, seed):
    """‖Φ(X) − Φ(Y)‖ ≤ ‖X − Y‖ where ⌈log2 S⌉ is the same k ≥ 0 for both, up to the floor's 2^-12 per channel."""
    x = torch.tensor(values, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    y = x + torch.randn(len(x), generator=generator) * float(torch.rand((), generator=generator))
    k_x, k_y = int(S.group_exponent(x, 1)[0]), int(S.group_exponent(y, 1)[0])
    if k_x != k_y or k_x < 0:
        return
    floor = 2.0**-12 * math.sqrt(len(x))  # a shifter drops less than 2^-12 of either
    assert torch.linalg.norm(phi(x) - phi(y)) <= torch.linalg.norm(x - y) * (1 + 1e-6) + floor


def test_phi_is_not_1_lipschitz_across_cells():
    """The lemma's counterexample: where S crosses a power of two, Φ jumps by half its size while X moves by ε."""
    x = torch.tensor([2.0, 2.0, 2.0, 2.0])
    y = x + 2.0**-8
    assert torch.linalg.norm(phi(x) - phi(y)) > 100 * torch.linalg.norm(x - y)


@settings(max_examples=200)
@given(cells)
def test_gradient_bound(values):
    """‖∂L/∂X‖ ≤ ‖∂L/∂Φ‖ for k ≥ 0 (the theorem); for k < 0 it may grow by 2^-k."""
    x = torch.tensor(values, dtype=torch.float32, requires_grad=True)
    k = int(S.group_exponent(x.detach(), 1)[0].clamp(-100, 100)) if x.any() else 0  # zeros are not shifted
    upstream = torch.linspace(-1, 1, len(values))
    phi(x).backward(upstream)
    assert torch.equal(x.grad, upstream * 2.0**-k)
    if k >= 0:
        assert torch.linalg.norm(x.grad) <= torch.linalg.norm(upstream)


def test_group_shift_floors_as_a_shifter_does():
    x = torch.tensor([[-3.0, 5.0, 1.0, -1.0]])  # S = 2.5, k = 2
    assert torch.equal(S.group_shift(x, 1, 1), torch.tensor([[-1.0, 1.0, 0.0, -0.5]]))  # −0.75 floors to −1
    assert torch.equal(S.group_shift(x, 1, 1, "nearest"), torch.tensor([[-0.5, 1.5, 0.5, 0.0]]))
    assert torch.equal(S.group_shift(torch.zeros(1, 4), 2, 8), torch.zeros(1, 4))


def test_power_norm_backward_is_the_papers():
    """dX = (dX̂ − ν X̂)/ψ; ν ← ν (1 − (1−α) Γ) + (1−α) Λ; ψ² ← αψ² + (1−α)ψ_B²; over valid tokens only."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 3, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]).bool()
    psi, nu = torch.tensor([0.5, 1.0, 2.0]), torch.tensor([0.1, -0.2, 0.3])
    square, weight, before = psi.square(), S.valid_token_weight(x, mask), nu.clone()
    upstream = torch.randn(2, 5, 3)
    out = S.power_norm(x, square, nu, weight, 0.9)
    assert torch.equal(out, x / psi)
    assert torch.equal(square, psi.square()), "a forward pass alone changes nothing"
    out.backward(upstream)
    x_norm = x.detach() / psi
    assert torch.equal(x.grad[mask], ((upstream - before * x_norm) / psi)[mask])
    assert (x.grad[~mask] == 0).all(), "padding gets no gradient"
    gamma = (x_norm**2)[mask].mean(dim=0)
    lam = (upstream * x_norm)[mask].mean(dim=0)
    # summed in another order than the implementation does
    torch.testing.assert_close(nu, before * (1 - 0.1 * gamma) + 0.1 * lam)
    torch.testing.assert_close(square, 0.9 * psi.square() + 0.1 * (x.detach() ** 2)[mask].mean(dim=0))


@pytest.mark.parametrize("double_dagger", [False, True])
def test_bspn_by_hand(double_dagger):
    """Two groups of two: S = 3 → k = 2; S = 0.5 → k = −1."""
    x = torch.tensor([[4.0, -2.0, 0.75, 0.25]])
    gamma, beta = torch.tensor([3.0, 3.0, -3.0, 1.0]), torch.tensor([0.0, 1.0, 0.0, 0.0])
    square, nu = torch.tensor([1.0, 4.0, 1.0, 1.0]), torch.zeros(4)
    y, x_hat = S.bspn(x, gamma, beta, square, nu, groups=2, power_of_two_gain=double_dagger)
    assert x_hat.tolist() == [[1.0, -0.5, 1.5, 0.5]]
    gain = [4.0, 2.0, -4.0, 1.0] if double_dagger else [3.0, 1.5, -3.0, 1.0]
    assert y.tolist() == [[g * v + b for g, v, b in zip(gain, x_hat[0].tolist(), beta.tolist(), strict=True)]]
    for token_weight in (None, S.valid_token_weight(x, None)):
        leaf = gamma.clone().requires_grad_()
        S.bspn(x.clone().requires_grad_(), leaf, beta, square, nu, 2, token_weight=token_weight)[0].sum().backward()
        assert (leaf.grad != 0).all()


def test_an_overflow_does_not_stay_in_nu():
    x, square, nu = torch.ones(1, 2, 2, requires_grad=True), torch.ones(2), torch.zeros(2)
    S.power_norm(x, square, nu, S.valid_token_weight(x, None), 0.9).backward(
        torch.tensor([[[float("inf"), 1], [1, 1]]])
    )
    assert torch.isfinite(nu).all()
    assert nu[1] != 0


# -- layers -----------------------------------------------------------------------------------------------------------


def test_binary_linear_is_a_sum_over_spikes():
    torch.manual_seed(0)
    layer = BinaryLinear(32, 8)
    counts = torch.randint(-15, 16, (4, 32)).float()
    out, grid = layer(Dyadic(counts * 0.25, torch.tensor(0.25)))
    signs = torch.where(layer.weight - layer.weight.mean(1, keepdim=True) >= 0, 1.0, -1.0)
    bias = torch.round(layer.bias / grid) * grid
    assert torch.equal(out, (counts @ signs.T) * grid + bias)


def test_neuron_without_steps_lets_everything_pass():
    x = torch.randn(3)
    assert SpikeNeuron(None, "signed")(Dyadic(x)).value is x
