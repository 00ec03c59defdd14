"""Losses over a large vocabulary, computed a few rows at a time so that the logits stay in the cache."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def _chunks(hidden: Tensor, vocab_size: int) -> Iterator[slice]:
    num_logits = 2**26 if hidden.is_cuda else 2**21
    size = max(16, num_logits // vocab_size)
    for start in range(0, hidden.size(0), size):
        yield slice(start, start + size)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, z_weight: float
    ) -> tuple[Tensor, Tensor]:
        num_rows = hidden.size(0)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight)
        head = weight.to(hidden.dtype)
        cross_entropy = weight.new_zeros(())
        z_loss = weight.new_zeros(())
        for rows in _chunks(hidden, weight.size(0)):
            logits = (hidden[rows] @ head.T).float()  # [chunk, vocab]
            target = targets[rows, None]
            lse = logits.logsumexp(-1, keepdim=True)
            cross_entropy += (lse - logits.gather(-1, target)).sum()
            z_loss += lse.square().sum()
            grad = logits.sub_(lse).exp_().mul_(1 + 2 * z_weight * lse)
            grad.scatter_add_(-1, target, torch.full_like(lse, -1.0))
            grad = grad.to(hidden.dtype)
            torch.mm(grad, head, out=grad_hidden[rows])
            _add_product(grad_weight, grad.T, hidden[rows])
        ctx.save_for_backward(grad_hidden.div_(num_rows), grad_weight.div_(num_rows))
        cross_entropy = cross_entropy / num_rows
        ctx.mark_non_differentiable(cross_entropy)
        return cross_entropy + z_weight * z_loss / num_rows, cross_entropy

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad_total, grad_weight * grad_total, None, None


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, z_weight: float = 1e-4
) -> tuple[Tensor, Tensor]:
    """Returns the mean cross-entropy in nats, with the z-loss (PaLM, section 5) and without it.

    Args:
        hidden: [num_rows, hidden_size] float32 or bfloat16 (the products' dtype), the last hidden states.
        weight: [vocab, hidden_size] float32, the output embedding.
        targets: [num_rows] int64.

    Returns:
        The loss to differentiate, and the plain cross-entropy to print.
    """
    loss, cross_entropy = _LinearCrossEntropy.apply(hidden, weight, targets, z_weight)  # type: ignore[no-untyped-call]
    return loss, cross_entropy


Rows = tuple[Tensor, Tensor]
"""Divergence of each row, [num_rows], and its gradient by the draft's logits, [num_rows, vocab]."""


def _forward_kl(target_log: Tensor, draft_log: Tensor) -> Rows:
    target_probs = target_log.exp()
    return (target_probs * (target_log - draft_log)).sum(-1), draft_log.exp().sub_(target_probs)


def _reverse_kl(target_log: Tensor, draft_log: Tensor) -> Rows:
    draft_probs, slope = draft_log.exp(), draft_log - target_log
    return (draft_probs * slope).sum(-1), _through_softmax(draft_probs, slope)


def _jensen_shannon(target_log: Tensor, draft_log: Tensor) -> Rows:
    target_probs, draft_probs = target_log.exp(), draft_log.exp()
    middle_log = torch.logaddexp(target_log, draft_log).sub_(math.log(2))
    slope = draft_log - middle_log
    rows = target_probs.mul_(target_log - middle_log).add_(draft_probs * slope).sum(-1) / 2
    return rows, _through_softmax(draft_probs, slope.div_(2))


def _total_variation(target_log: Tensor, draft_log: Tensor) -> Rows:
    draft_probs = draft_log.exp()
    excess = draft_probs - target_log.exp()
    return excess.abs().sum(-1) / 2, _through_softmax(draft_probs, excess.sign_().div_(2))


def _through_softmax(probs: Tensor, slope: Tensor) -> Tensor:
    """Turns the derivative by each probability into the derivative by each logit."""
    return slope.sub_((probs * slope).sum(-1, keepdim=True)).mul_(probs)


DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Rows]] = {
    "fkl": _forward_kl,
    "rkl": _reverse_kl,
    "js": _jensen_shannon,
    "tvd": _total_variation,
}
"""KL(target ‖ draft), KL(draft ‖ target), Jensen-Shannon, and total variation, which is one minus the chance
that rejection sampling accepts (DistillSpec, Zhou et al. 2024, section 3 and appendix).
"""


class _LinearDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kind: str, hidden: Tensor, weight: Tensor, target_hidden: Tensor, target_weight: Tensor
    ) -> Tensor:
        num_rows = hidden.size(0)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[2] else None
        head, target_head = weight.to(hidden.dtype), target_weight.to(target_hidden.dtype)
        total = weight.new_zeros(())
        for rows in _chunks(hidden, weight.size(0)):
            logs = _log_probs(target_hidden[rows], target_head), _log_probs(hidden[rows], head)
            values, grad = DIVERGENCES[kind](*logs)
            total += values.sum()
            grad = grad.to(hidden.dtype)
            torch.mm(grad, head, out=grad_hidden[rows])
            if grad_weight is not None:
                _add_product(grad_weight, grad.T, hidden[rows])
        ctx.save_for_backward(
            grad_hidden.div_(num_rows), None if grad_weight is None else grad_weight.div_(num_rows)
        )
        return total / num_rows

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[None, Tensor, Tensor | None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            None,
            grad_hidden * grad_total,
            None if grad_weight is None else grad_weight * grad_total,
            None,
            None,
        )


def linear_divergence(
    kind: str, hidden: Tensor, weight: Tensor, target_hidden: Tensor, target_weight: Tensor
) -> Tensor:
    """Returns the mean divergence in nats per row (total variation: a share) between a draft's and a target's
    next token.

    Args:
        kind: one of `DIVERGENCES`.
        hidden: [num_rows, draft_size], the draft's last hidden states; gradients flow to it and to `weight`.
        weight: [vocab, draft_size], the draft's output embedding.
        target_hidden: [num_rows, target_size]; no gradient.
        target_weight: [vocab, target_size]; no gradient. Where one model's table is padded further than the
            other's, the caller passes the rows that both have.
    """
    loss: Tensor = _LinearDivergence.apply(  # type: ignore[no-untyped-call]
        kind, hidden, weight, target_hidden, target_weight
    )
    return loss


@torch.no_grad()
def row_divergence(
    kind: str, hidden: Tensor, weight: Tensor, target_hidden: Tensor, target_weight: Tensor
) -> Tensor:
    """Returns the divergence of each row, [num_rows] float32, without a gradient."""
    head, target_head = weight.to(hidden.dtype), target_weight.to(target_hidden.dtype)
    values = [
        DIVERGENCES[kind](_log_probs(target_hidden[rows], target_head), _log_probs(hidden[rows], head))[0]
        for rows in _chunks(hidden, weight.size(0))
    ]
    return torch.cat(values)


def _log_probs(hidden: Tensor, head: Tensor) -> Tensor:
    return torch.log_softmax((hidden @ head.T).float(), -1)  # [chunk, vocab]
