"""Losses over a large vocabulary, computed a few rows at a time so that the logits stay in the cache."""

from typing import Any

import torch
from torch import Tensor

_CHUNK_ROWS = 256


class _LinearCrossEntropy(torch.autograd.Function):
    """Cross-entropy of `hidden @ weight.T` whose gradients are made in the forward pass, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, z_weight: float
    ) -> tuple[Tensor, Tensor]:
        num_rows = hidden.size(0)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight)
        cross_entropy = hidden.new_zeros(())
        z_loss = hidden.new_zeros(())
        for start in range(0, num_rows, _CHUNK_ROWS):
            rows = slice(start, start + _CHUNK_ROWS)
            logits = hidden[rows] @ weight.T  # [chunk, vocab]
            target = targets[rows, None]
            lse = logits.logsumexp(-1, keepdim=True)
            cross_entropy += (lse - logits.gather(-1, target)).sum()
            z_loss += lse.square().sum()
            grad = logits.sub_(lse).exp_().mul_(1 + 2 * z_weight * lse)
            grad.scatter_add_(-1, target, torch.full_like(lse, -1.0))
            torch.mm(grad, weight, out=grad_hidden[rows])
            grad_weight.addmm_(grad.T, hidden[rows])
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
    """Mean cross-entropy in nats, with the z-loss (PaLM, section 5) and without it.

    Args:
        hidden: [num_rows, hidden_size] float32, the last hidden states.
        weight: [vocab, hidden_size], the output embedding.
        targets: [num_rows] int64.

    Returns:
        The loss to differentiate, and the plain cross-entropy to print.
    """
    loss, cross_entropy = _LinearCrossEntropy.apply(hidden, weight, targets, z_weight)  # type: ignore[no-untyped-call]
    return loss, cross_entropy


class _LinearDistillation(torch.autograd.Function):
    """Forward KL between two linear heads over one vocabulary, with the gradient made in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor
    ) -> Tensor:
        num_rows = hidden.size(0)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight)
        divergence = hidden.new_zeros(())
        for start in range(0, num_rows, _CHUNK_ROWS):
            rows = slice(start, start + _CHUNK_ROWS)
            target_log_probs = torch.log_softmax(
                teacher_hidden[rows] @ teacher_weight.T, -1
            )  # [chunk, vocab]
            draft_log_probs = torch.log_softmax(hidden[rows] @ weight.T, -1)
            target_probs = target_log_probs.exp()
            divergence += torch.dot(target_probs.flatten(), target_log_probs.sub_(draft_log_probs).flatten())
            grad = draft_log_probs.exp_().sub_(target_probs)
            torch.mm(grad, weight, out=grad_hidden[rows])
            grad_weight.addmm_(grad.T, hidden[rows])
        ctx.save_for_backward(grad_hidden.div_(num_rows), grad_weight.div_(num_rows))
        return divergence / num_rows

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad_total, grad_weight * grad_total, None, None


def linear_distillation(
    hidden: Tensor, weight: Tensor, target_hidden: Tensor, target_weight: Tensor
) -> Tensor:
    """Mean KL(target ‖ draft) in nats per row (Hinton et al. 2015; DistillSpec, Zhou et al. 2024, section 3).

    Args:
        hidden: [num_rows, draft_size], the draft's last hidden states; gradients flow to it and to `weight`.
        weight: [vocab, draft_size], the draft's output embedding.
        target_hidden: [num_rows, target_size]; no gradient.
        target_weight: [vocab, target_size]; no gradient.
    """
    loss: Tensor = _LinearDistillation.apply(  # type: ignore[no-untyped-call]
        hidden, weight, target_hidden, target_weight
    )
    return loss
