"""Runs `edge-client doctor`: checks that everything is in order, and says what to do where it is not."""

from __future__ import annotations

import argparse
import json
import sys

from outrider.common.errors import OutriderError
from outrider.common.printable import one_line
from outrider.common.process.logs import setup_logging
from outrider.edge_client.config.flags import CONFIG_NOTE, add_config, load_run_config
from outrider.edge_client.config.run_config import RunConfig
from outrider.edge_client.doctor.finding import Finding, Status, fault, skipped

_DESCRIPTION = """\
Checks what decoding here needs, in this order, and says for each fault what to do: the draft and its speed,
the chat template, this machine's clock; the verifier's address, TLS and token, protocol, round trip and
jitter, clock; that tokenizer, method and mode fit it; and, by decoding a dozen tokens, its load."""
_EPILOG = f"""\
Exit status: 0 nothing wrong (warnings included), 1 a fault was found, 2 used wrongly.

{CONFIG_NOTE}"""
_MARKS = {Status.OK: "ok", Status.WARNING: "warn", Status.FAULT: "FAULT", Status.SKIPPED: "-"}
_COLOURS = {Status.OK: "32", Status.WARNING: "33", Status.FAULT: "31", Status.SKIPPED: "2"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `doctor`."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--no-trial", action="store_true", help="skip the check that decodes a dozen tokens")
    add_config(parser)


def main(namespace: argparse.Namespace) -> int:
    """Prints the findings; returns 0, or 1 where there is a fault."""
    config = load_run_config(namespace).value
    setup_logging("error")
    findings = examine(config, has_trial=not namespace.no_trial)
    is_well = all(finding.status is not Status.FAULT for finding in findings)
    if namespace.json:
        print(json.dumps({"ok": is_well, "findings": [finding.as_json() for finding in findings]}))
    else:
        for finding in findings:
            print(_line(finding, sys.stdout.isatty()))
    return 0 if is_well else 1


def examine(config: RunConfig, has_trial: bool = True) -> list[Finding]:
    """Returns the findings of all checks; a fault leaves out the checks that depend on it."""
    from outrider.edge_client.core.options import ExecutionMode
    from outrider.edge_client.doctor.compatibility import check_compatibility, check_trial
    from outrider.edge_client.doctor.local import check_local
    from outrider.edge_client.doctor.remote import check_remote

    local = check_local(config)
    findings, edge = list(local.findings), local.edge
    try:
        if config.mode is ExecutionMode.EDGE_ONLY:
            return [*findings, skipped("verifier", "mode edge-only asks none")]
        remote = check_remote(config)
        findings += remote.findings
        if edge is None or remote.model is None:
            return findings
        findings += check_compatibility(config, edge, remote.model)
        if has_trial and all(finding.status is not Status.FAULT for finding in findings):
            findings.append(check_trial(config, edge))
        return findings
    except OutriderError as error:
        todo = "correct it; `edge-client config show --origin` says where it comes from"
        return [*findings, fault("settings", str(error), todo)]
    finally:
        if edge is not None:
            edge.close()


def _line(finding: Finding, is_coloured: bool) -> str:
    mark = f"{_MARKS[finding.status]:<5}"
    if is_coloured:
        mark = f"\x1b[{_COLOURS[finding.status]}m{mark}\x1b[0m"
    text = f"{mark} {finding.check:<14}{one_line(finding.found)}"
    return f"{text}\n{'':20}-> {finding.todo}" if finding.todo else text
