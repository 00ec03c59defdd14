"""Nothing that is secret comes out: what both sides print and log at their chattiest, in success or failure.

Metrics and spans are searched where a whole run is looked at (tests/cloud/test_observability.py).
"""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.calls import eventually
from support.dev_security import make_dev_security
from support.edge.tiny_draft import make_backend, make_tiny_draft
from support.processes.server import serving
from support.secrets import secrets_of

from outrider.cloud_verifier.config import ServeConfig
from outrider.cloud_verifier.security.token_file import change_tokens
from outrider.cloud_verifier.server.cli import main as cloud_main
from outrider.edge_client.commands.cli import main as edge_main

PROMPT = "def marker_quagga(value_77): return 4761"


def test_neither_side_says_a_token_a_key_or_a_prompt(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outrider.cloud_verifier.server.server.RELOAD_S", 0.02)
    security = make_dev_security(tmp_path / "security", "acme")
    secrets = secrets_of(security)
    draft = make_tiny_draft(tmp_path)
    certificate, key = security.certificates.server
    config = ServeConfig(tls_cert=certificate, tls_key=key, tokens=security.tokens_file)
    wrong = tmp_path / "wrong.token"
    wrong.write_text(f"outrider_{'0' * 12}_{'wrongsecret' * 4}"[:65])
    with serving(make_backend(draft), config) as server:
        flags = ["--verifier", f"localhost:{server.port}", "--draft", str(draft), "--log-level", "debug"]
        flags += ["--max-new-tokens", "8"]
        assert edge_main(["run", PROMPT, *flags, *security.edge_flags, "--json"]) == 0
        assert edge_main(["run", PROMPT, *flags, *security.edge_flags, "--transport", "unary"]) == 0
        assert edge_main(["run", PROMPT, *flags, *security.edge_flags[:4], "--token-file", str(wrong)]) == 4
        assert edge_main(["run", PROMPT, *flags]) == 3, "plaintext"
        monkeypatch.setenv("OUTRIDER_EDGE_TOKEN", secrets[0])
        assert edge_main(["config", "show", "--origin", *security.edge_flags[:4]]) == 0
        monkeypatch.delenv("OUTRIDER_EDGE_TOKEN")
        now = datetime.now(UTC)
        change_tokens(security.tokens_file, lambda old: [replace(each, revoked=now) for each in old])
        assert eventually(lambda: edge_main(["run", PROMPT, *flags, *security.edge_flags]) == 4)
        # That one may have begun before the token was revoked; this one is refused.
        assert edge_main(["run", PROMPT, *flags, *security.edge_flags]) == 4
    assert cloud_main(["token", "list", "--tokens", str(security.tokens_file)]) == 0
    assert cloud_main(["config", "show", *security.serve_flags]) == 0
    shown = capfd.readouterr()
    answer = json.loads(next(line for line in shown.out.splitlines() if line.startswith("{")))
    said = shown.err + shown.out.replace(answer["text"], "").replace(PROMPT, "")
    assert (
        "outrider.cloud_verifier.engine.observe: answered" in said
        and "refused a call: its token is unknown" in said
    )
    assert "is revoked" in said and "<secret>" in said
    assert not [secret for secret in (*secrets, "wrongsecret") if secret in shown.out + shown.err]
    assert "marker_quagga" not in said
