"""What `make bench-methods` asks of the exactness tests."""

from __future__ import annotations

import pytest


def test_a_junit_report_has_a_place_for_what_tests_note(pytestconfig: pytest.Config) -> None:
    """Of another family, each exactness test that notes what it measured would be an error in the report read there."""
    assert pytestconfig.getini("junit_family") in {"xunit1", "legacy"}
