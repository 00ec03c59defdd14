"""The chunked losses, Muon and the INT4 rounding against their plain definitions."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from edge_client.drafting import quantize as exporter
from training.loss import linear_cross_entropy, linear_distillation
from training.muon import Muon, orthogonalise
from training.quant import fake_quantize, straight_through

ROWS, SIZE, VOCAB = 300, 16, 50


def leaves(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def gradients(loss: torch.Tensor, *inputs: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, inputs))


def test_chunked_cross_entropy_and_its_gradients_equal_the_plain_ones() -> None:
    hidden, weight = leaves((ROWS, SIZE), (VOCAB, SIZE))
    targets = torch.arange(ROWS) % VOCAB
    logits = hidden @ weight.T
    plain = functional.cross_entropy(logits, targets)
    expected = plain + 0.01 * logits.logsumexp(-1).square().mean()
    loss, cross_entropy = linear_cross_entropy(hidden, weight, targets, z_weight=0.01)
    torch.testing.assert_close(cross_entropy, plain.detach())
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients(loss, hidden, weight), gradients(expected, hidden, weight))


def test_chunked_distillation_and_its_gradients_equal_the_plain_ones() -> None:
    hidden, weight, target_hidden, target_weight = leaves(
        (ROWS, SIZE), (VOCAB, SIZE), (ROWS, 24), (VOCAB, 24)
    )
    target_log_probs = torch.log_softmax(target_hidden @ target_weight.T, -1).detach()
    expected = functional.kl_div(
        torch.log_softmax(hidden @ weight.T, -1), target_log_probs, log_target=True, reduction="batchmean"
    )
    loss = linear_distillation(hidden, weight, target_hidden.detach(), target_weight.detach())
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients(loss, hidden, weight), gradients(expected, hidden, weight))


@pytest.mark.parametrize("shape", [(64, 160), (160, 64)])
def test_orthogonalised_matrices_have_singular_values_about_one(shape: tuple[int, int]) -> None:
    values = torch.linalg.svdvals(
        orthogonalise(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    )
    assert 0.3 < values.min() and values.max() < 1.7
    assert values.median() == pytest.approx(1.0, abs=0.3)


def test_muon_descends_and_refuses_vectors() -> None:
    (weight,) = leaves((8, 8))
    optimizer = Muon([weight], lr=0.05)
    losses = []
    for _ in range(150):
        loss = (weight - torch.eye(8)).square().sum()
        losses.append(float(loss.detach()))
        (weight.grad,) = torch.autograd.grad(loss, [weight])
        optimizer.step()
    assert losses[-1] < 0.1 * losses[0]
    with pytest.raises(ValueError, match="matrices only"):
        Muon([torch.zeros(3, requires_grad=True)])


def test_the_rounding_in_training_is_the_exporters_bit_for_bit() -> None:
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(0))
    weight[0, :32] = 0  # a block of zeros
    weight[1, :32] = 0.5  # ties for the largest
    weight[2, 0] = -weight[2].abs().max() * 2
    once = fake_quantize(weight)
    np.testing.assert_array_equal(once.numpy(), exporter.fake_quantize(weight.numpy()))
    np.testing.assert_array_equal(fake_quantize(once).numpy(), once.numpy())


def test_the_straight_through_gradient_is_the_identity() -> None:
    (weight,) = leaves((4, 32))
    quantized = straight_through(weight)
    torch.testing.assert_close(quantized.detach(), fake_quantize(weight.detach()))
    assert torch.equal(gradients((quantized * 3).sum(), weight)[0], torch.full((4, 32), 3.0))
