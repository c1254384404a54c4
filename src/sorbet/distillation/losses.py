"""L = L_logits + L_reps (section 4.4 of the paper): every term a mean over examples, so that batches can be split.

L_logits = KL(p, q)                  p, q: the distributions of teacher and student
L_reps   = Σ_i ‖r_i^s − r_i^t‖²      r_i: the output of block i, averaged over the example's tokens and channels
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor


def logits_loss(student: Tensor, teacher: Tensor, temperature: float = 1.0, regression: bool = False) -> Tensor:
    """KL(p, q) at a temperature, scaled by its square to keep the size of gradients; MSE where there is one logit.

    Through a softmax over one logit the loss of a regression would be 0 whatever the student says.
    """
    student, teacher = student.float(), teacher.float()
    if regression:
        return F.mse_loss(student, teacher)
    q = F.log_softmax(student / temperature, dim=-1)
    p = F.log_softmax(teacher / temperature, dim=-1)
    return F.kl_div(q, p, log_target=True, reduction="batchmean") * temperature**2


def representation_loss(student: Sequence[Tensor], teacher: Sequence[Tensor], mask: Tensor) -> Tensor:
    """Σ over blocks of the squared distance of [B, L, d] states: mean over channels and valid tokens, then examples."""
    weight = mask.float() / mask.sum(dim=1, keepdim=True)  # [B, L], adds up to 1 for each example
    total = student[0].new_zeros((), dtype=weight.dtype)
    for ours, theirs in zip(student, teacher, strict=True):
        total = total + ((ours.float() - theirs.float()).square().mean(dim=-1) * weight).sum(dim=1).mean()
    return total


def attention_loss(student: Sequence[Tensor], teacher: Sequence[Tensor], mask: Tensor) -> Tensor:
    """Σ over blocks of the squared distance of attention probabilities [B, H, L, L] on valid queries."""
    weight = mask.float() / mask.sum(dim=1, keepdim=True)
    total = student[0].new_zeros((), dtype=weight.dtype)
    for ours, theirs in zip(student, teacher, strict=True):
        squared = (ours.float() - theirs.float()).square().sum(dim=-1).mean(dim=1)  # [B, L]
        total = total + (squared * weight).sum(dim=1).mean()
    return total
