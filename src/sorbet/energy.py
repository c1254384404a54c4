"""The paper's energy formula: E_Sorbet = T · r · E_BERT · E_ACC / E_MAC (appendix C), from counted operations."""

from dataclasses import dataclass

from .artifact import Shape

E_MAC_FP32 = 4.6e-12  # joules, 45 nm (Horowitz 2014, as the paper quotes it)
E_ACC = 0.0243e-12  # joules, one accumulation in Sorbet, 45 nm (the paper: measured at 22 nm, doubled)


@dataclass(frozen=True)
class Energy:
    """Of one text of a given length, matrix products only, without memory traffic."""

    macs: int
    bert: float  # joules in float32
    sorbet: float


def macs(shape: Shape, length: int) -> int:
    """Multiply-accumulates of the encoder of a BERT of this shape: projections, both products of attention, FFN."""
    d, ffn = shape.hidden_size, shape.intermediate_size
    per_layer = length * (4 * d * d + 2 * d * ffn) + 2 * length * length * d
    return shape.num_layers * per_layer


def energy(shape: Shape, length: int, spike_rate: float) -> Energy:
    number = macs(shape, length)
    bert = number * E_MAC_FP32
    return Energy(number, bert, shape.num_steps * spike_rate * bert * E_ACC / E_MAC_FP32)
