"""The chunked losses, Muon and the INT4 rounding against their plain definitions."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from outrider.edge_client.drafting.export import quantize as exporter
from outrider.training.common.loss import DIVERGENCES, linear_cross_entropy, linear_divergence, row_divergence
from outrider.training.common.optim import Muon, orthogonalise
from outrider.training.draft.quant import fake_quantize, straight_through

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


def plain_divergence(kind: str, target_log: torch.Tensor, draft_log: torch.Tensor) -> torch.Tensor:
    target, draft = target_log.exp(), draft_log.exp()
    middle = ((target + draft) / 2).log()
    return {
        "fkl": lambda: (target * (target_log - draft_log)).sum(-1),
        "rkl": lambda: (draft * (draft_log - target_log)).sum(-1),
        "js": lambda: ((target * (target_log - middle) + draft * (draft_log - middle)) / 2).sum(-1),
        "tvd": lambda: (target - draft).abs().sum(-1) / 2,
    }[kind]()


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_chunked_divergences_and_their_gradients_equal_the_plain_ones(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "outrider.training.common.loss._chunks",
        lambda hidden, vocab: (slice(i, i + 128) for i in range(0, len(hidden), 128)),
    )
    hidden, weight, target_hidden, target_weight = leaves(
        (ROWS, SIZE), (VOCAB, SIZE), (ROWS, 24), (VOCAB, 24)
    )
    target_log = torch.log_softmax(target_hidden @ target_weight.T / 3, -1).detach()
    rows = plain_divergence(kind, target_log, torch.log_softmax(hidden @ weight.T, -1))
    inputs = hidden, weight, target_hidden.detach() / 3, target_weight.detach()
    loss = linear_divergence(kind, *inputs)
    torch.testing.assert_close(loss, rows.mean())
    torch.testing.assert_close(gradients(loss, hidden, weight), gradients(rows.mean(), hidden, weight))
    torch.testing.assert_close(row_divergence(kind, *inputs), rows.detach())


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_equal_heads_have_no_divergence(kind: str) -> None:
    hidden, weight = leaves((ROWS, SIZE), (VOCAB, SIZE))
    loss = linear_divergence(kind, hidden, weight, hidden.detach(), weight.detach())
    assert float(loss.detach()) == pytest.approx(0.0, abs=1e-5)


def test_bfloat16_hidden_states_give_the_same_loss_roughly_and_a_float32_gradient_of_the_weight() -> None:
    hidden, weight, target_hidden, target_weight = leaves(
        (ROWS, SIZE), (VOCAB, SIZE), (ROWS, 24), (VOCAB, 24)
    )
    exact = linear_divergence("fkl", hidden, weight, target_hidden.detach(), target_weight.detach())
    short = hidden.detach().bfloat16().requires_grad_()
    loss = linear_divergence("fkl", short, weight, target_hidden.detach().bfloat16(), target_weight.detach())
    assert float(loss.detach()) == pytest.approx(float(exact.detach()), rel=0.02)
    grad_hidden, grad_weight = gradients(loss, short, weight)
    assert (grad_hidden.dtype, grad_weight.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(grad_weight, gradients(exact, weight)[0], rtol=0.1, atol=2e-3)
    entropy, _ = linear_cross_entropy(short, weight, torch.arange(ROWS) % VOCAB)
    assert gradients(entropy, weight)[0].dtype == torch.float32


@pytest.mark.parametrize("shape", [(64, 160), (160, 64), (3, 64, 160)])
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
