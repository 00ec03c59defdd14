"""The client's examples in docs/library.md run, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.processes.pairs import EMBEDDED

from outrider.training.draft.restore import restore_draft

PAGE = Path(__file__).resolve().parents[3] / "docs/library.md"
CLIENT, _, _ = PAGE.read_text(encoding="utf-8").partition("\n## `SpeculativeDecoder`\n")
EXAMPLES = re.findall(r"```python\n(.*?)```", CLIENT, re.DOTALL)


def test_the_examples_print_what_the_page_says(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(EXAMPLES) == 5
    restore_draft(EMBEDDED / "draft", tmp_path)
    names: dict[str, object] = {}
    said = []
    for number, example in enumerate(EXAMPLES):
        assert "localhost:7077" in example, "every example connects"
        example = example.replace("localhost:7077", address).replace("path/to/draft", str(tmp_path))
        exec(compile(example, f"{PAGE}:{number}", "exec"), names)
        said.append(capsys.readouterr().out.splitlines())
    wanted = [re.findall(r"  # prints (.*)", example) for example in EXAMPLES]
    for lines, expected in zip(said, wanted, strict=True):
        assert [line for line in expected if line not in lines] == []
