"""Logs are for operators: facts, never a user's text."""

import io
import json
import logging

import pytest

from outrider.common.process.logs import setup_logging


@pytest.fixture
def stream():
    return io.StringIO()


def test_json_lines_carry_the_facts_and_drop_the_users_text(stream):
    setup_logging("info", json=True, stream=stream)
    facts = {"session": "ab", "num_tokens": 3, "token_ids": [1, 2], "prompt": "secret"}
    logging.getLogger("outrider.cloud_verifier.engine.engine").info("opened", extra=facts)
    entry = json.loads(stream.getvalue())
    assert (entry["message"], entry["session"], entry["num_tokens"]) == ("opened", "ab", 3)
    assert (entry["level"], entry["logger"]) == ("info", "outrider.cloud_verifier.engine.engine")
    assert "secret" not in stream.getvalue() and "token_ids" not in entry


def test_lines_for_a_person_have_level_name_message_and_facts(stream):
    setup_logging(stream=stream)
    logging.getLogger("outrider.edge_client").warning("link is back", extra={"after_s": 2, "text": "secret"})
    assert stream.getvalue().endswith(" warning outrider.edge_client: link is back after_s=2\n")


def test_a_line_for_a_person_shows_nobodys_control_characters(stream):
    setup_logging(stream=stream)
    foreign = "\x1b[2Jgone\r\nfor good\u202e \x9b1m"
    logging.getLogger("outrider.edge_client").warning("it says %s", foreign, extra={"labels": foreign})
    line = stream.getvalue()
    assert line.removesuffix("\n").isprintable() and line.count("gone  for good") == 2


def test_exceptions_come_with_their_trace_in_both_forms(stream):
    for is_json in (False, True):
        setup_logging(json=is_json, stream=stream)
        try:
            raise KeyError("x")
        except KeyError:
            logging.getLogger("outrider.common").exception("failed")
    assert stream.getvalue().count("KeyError: 'x'") == 2


def test_other_libraries_stay_at_warning_and_the_last_setup_holds(stream):
    setup_logging("debug", stream=io.StringIO())
    setup_logging("debug", stream=stream)
    logging.getLogger("elsewhere").info("chatter")
    logging.getLogger("outrider.edge_client").debug("once")
    assert stream.getvalue().count("\n") == 1


def test_an_unknown_level_is_refused():
    with pytest.raises(ValueError, match="none of debug"):
        setup_logging("loud")


def test_what_a_client_sent_cannot_forge_a_line(stream):
    setup_logging(stream=stream)
    logging.getLogger("outrider.x").info("refused", extra={"param": "a\nb\x1b[2J\x85"})
    assert stream.getvalue().endswith(" refused param=a b\ufffd[2J \n")
