"""`lib.fields`: the fields of `SpeculativeConfig` whose tests pass, honoured, without effect or refused."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import fields
from pathlib import Path

from benchmarks.results_file import ROOT, Found
from outrider.decoder.config import SpeculativeConfig
from outrider.experiments.shared.results import at_least, judged

TESTS = "tests/decoder/test_fields.py"


def run() -> Found:
    """Returns the measure, of one run of the tests: a field counts where all of its own pass, one at least."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", TESTS, "-q", f"--junitxml={report}"]
        subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
        cases = list(ElementTree.parse(report).iter("testcase"))
    passed, failed = Counter[str](), Counter[str]()
    for case in cases:
        if found := re.search(r"_a_field_is_\w+\[(\w+)-", case.get("name", "")):
            (failed if len(case) else passed)[found[1]] += 1
    names = [each.name for each in fields(SpeculativeConfig)]
    good = [name for name in names if passed[name] and not failed[name]]
    what = (
        f"fields of {len(names)} whose tests pass: honoured, refused by name, or in no_effect with the reason"
    )
    measure = judged("lib.fields", what, len(good), "fields", at_least(len(names)))
    return [measure], {"tests": dict(passed), "failed": dict(failed), "all_tests": len(cases)}
