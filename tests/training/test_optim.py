"""Which optimiser takes which parameters."""

from outrider.training.common.model import ModelConfig, create_model
from outrider.training.common.muon import Muon
from outrider.training.common.optim import Rates, make_optimizers

TOY = ModelConfig(
    32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, ffn_size=64, tied=False, vocab_size=64
)


def test_adamw_takes_the_matrices_where_it_has_a_rate() -> None:
    model = create_model(TOY)
    every = set(model.parameters())
    for rates, kinds in ((Rates(), [Muon, None]), (Rates(adamw=0.002), [None])):
        optimizers = make_optimizers(model, rates)
        assert [isinstance(each, Muon) for each in optimizers] == [kind is Muon for kind in kinds]
        owned = [param for each in optimizers for group in each.param_groups for param in group["params"]]
        assert len(owned) == len(every) and set(owned) == every
    assert Rates(adamw=0.002).times(0.5).adamw == 0.001
