"""Virtual time for a test that itself waits: a deadline passes at once, and always at the same moment."""

from __future__ import annotations

from greenlet import getcurrent, greenlet

from outrider.experiments.simulator.world.world import World


def virtual_world() -> World:
    """Returns a world in which the caller already runs, as a task."""
    caller = getcurrent()

    def run() -> None:
        world = World()
        caller.switch(world)
        world.run()
        raise AssertionError("every task waits, and nothing is planned that would end a wait")

    world: World = greenlet(run).switch()
    return world
