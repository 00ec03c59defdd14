"""Files of prompts: a JSON object on every line, in UTF-8."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.common.errors import UsageError
from outrider.experiments.shared.prompts import Prompt, load_prompts


def test_a_prompt_may_hold_other_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes('{"id": 1, "prompt": "one\u2028two"}\r\n\r\n{"id": "b", "prompt": "three"}'.encode())
    assert load_prompts(path) == [Prompt("1", "one\u2028two"), Prompt("b", "three")]


def test_a_second_prompt_of_one_id_is_refused_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"id": "a", "prompt": "one"}\n\n{"id": "a", "prompt": "two"}\n')
    with pytest.raises(UsageError, match=r"prompts\.jsonl:3: a second prompt has the id 'a'"):
        load_prompts(path)


def test_a_file_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"id": 1, "prompt": "\xff"}\n')
    with pytest.raises(UsageError, match=r"--prompts .*prompts\.jsonl is not UTF-8"):
        load_prompts(path)
