"""`outrider.ir`: a scheduler's node runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import outrider
from outrider import IRNode, SpeculativeConfig, SpeculativeDecoder

PROMPT = list(range(40, 60))


def node(**asked: Any) -> IRNode:
    return IRNode(type="decode_speculative", config={"speculative": asked})


def test_a_node_runs_and_its_decoder_is_used_again(tiny: Path, tiny_draft: Path) -> None:
    asked = {"draft_model": str(tiny_draft), "num_tokens": 5, "adaptive": False}
    try:
        first = outrider.ir.execute(node(**asked), PROMPT, 12, verify_model_path=tiny, seed=4)
        (decoder,) = outrider.ir._kept.values()
        again = outrider.ir.execute(
            node(**(asked | {"num_tokens": 3})), PROMPT, 12, verify_model_path=tiny, seed=4
        )
        assert [*outrider.ir._kept.values()] == [decoder], "a length needs no other decoder"
        assert first[0] == again[0] and len(first[0]) == 12
        direct = outrider.ir.execute(
            node(**asked), PROMPT, 12, decoder=decoder, config=SpeculativeConfig(), seed=4
        )
        assert direct[0] == first[0]
    finally:
        outrider.ir.close()
    with pytest.raises(outrider.ClosedError):
        decoder.report()


def test_what_a_node_leaves_out_is_as_its_decoder_was_set_up(tiny: Path, tiny_draft: Path) -> None:
    with SpeculativeDecoder() as decoder:
        config = SpeculativeConfig(draft_model_path=str(tiny_draft), temperature=0.0)
        decoder.setup(tiny, config)
        wanted, _ = decoder.decode_step(PROMPT, 12, seed=4)
        assert outrider.ir.execute(node(num_tokens=3), PROMPT, 12, decoder=decoder, seed=5)[0] == wanted


def test_what_a_node_leaves_out_is_the_configurations() -> None:
    found = outrider.ir.node_config(node(num_tokens=12), SpeculativeConfig(temperature=0.5))
    assert (found.num_speculative_tokens, found.max_speculative_tokens, found.temperature) == (12, 12, 0.5)
    assert found.adaptive_depth and found.draft_model_path is None
    assert outrider.ir.node_config(IRNode("decode_speculative")) == SpeculativeConfig()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (IRNode("decode"), "type 'decode': only 'decode_speculative'"),
        (IRNode("decode_speculative", {"speculation": {}}), "'speculation'; did you mean speculative"),
        (IRNode("decode_speculative", {"speculative": 3}), "want a mapping"),
        (node(draft="x"), "'draft'; did you mean draft_model"),
        (node(num_tokens="4"), "num_tokens is '4'"),
    ],
)
def test_a_wrong_node_is_named(wrong: IRNode, words: str) -> None:
    with pytest.raises(outrider.UsageError, match=words):
        outrider.ir.execute(wrong, PROMPT, decoder=SpeculativeDecoder())


def test_a_node_needs_a_target() -> None:
    with pytest.raises(outrider.UsageError, match="verify_model_path or decoder"):
        outrider.ir.execute(node(), PROMPT)
    with pytest.raises(outrider.ClosedError, match="setup"):
        outrider.ir.execute(node(), PROMPT, decoder=SpeculativeDecoder())
