"""Modules that are never trained on: the pair is judged, and the benchmark prompts are made, from these
alone.

The list is fixed. Changing it makes every earlier figure incomparable, so it is a file of its own.
"""

from typing import Final

HELD_OUT_STDLIB: Final = (
    "bisect",
    "calendar",
    "colorsys",
    "configparser",
    "csv",
    "difflib",
    "fnmatch",
    "fractions",
    "graphlib",
    "heapq",
    "netrc",
    "posixpath",
    "queue",
    "sched",
    "shlex",
    "statistics",
    "string",
    "textwrap",
)
"""Standard-library modules, one file each."""

HELD_OUT_PACKAGES: Final = (
    "click/formatting.py",
    "huggingface_hub/utils/_paths.py",
    "mpmath/identification.py",
    "networkx/algorithms/tournament.py",
    "networkx/algorithms/triads.py",
    "rich/padding.py",
    "rich/rule.py",
)
"""Files of installed packages, as paths below site-packages."""
