"""Whoever is to be alone is, and is not overtaken."""

from __future__ import annotations

import threading
from pathlib import Path

from support.turns import turn


def test_one_that_must_be_alone_waits_for_those_inside_and_keeps_the_others_out(tmp_path: Path) -> None:
    inside: set[str] = set()
    seen: dict[str, set[str]] = {}
    is_in, may_leave = threading.Event(), threading.Event()

    def first() -> None:
        with turn(tmp_path, alone=False):
            inside.add("first")
            is_in.set()
            may_leave.wait(30)
            inside.remove("first")

    def later(name: str, *, alone: bool) -> None:
        with turn(tmp_path, alone=alone):
            inside.add(name)
            seen[name] = set(inside)
            inside.remove(name)

    threads = [threading.Thread(target=first)]
    threads += [threading.Thread(target=later, args=("alone",), kwargs={"alone": True})]
    for name in ("second", "third"):
        threads += [threading.Thread(target=later, args=(name,), kwargs={"alone": False})]
    threads[0].start()
    assert is_in.wait(30)
    with turn(tmp_path, alone=False):
        seen["beside"] = set(inside)
    for thread in threads[1:]:
        thread.start()
    may_leave.set()
    for thread in threads:
        thread.join(30)
    assert seen.pop("beside") == {"first"}, "those that share do not wait for each other"
    assert seen.pop("alone") == {"alone"}
    assert seen.keys() == {"second", "third"}
