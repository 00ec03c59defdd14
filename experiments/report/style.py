"""Defines the look of the figures: one palette, two sizes. A series has its own colour, line style and marker.

matplotlib draws with stand-in colours; `svg.py` turns each into a CSS variable, so that one drawing serves
light, dark and print. Colours after Okabe and Ito (2008), darkened or lightened for 3:1 against each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# name -> (stand-in that matplotlib sees, light, dark); the name is the CSS variable's
COLOURS: Mapping[str, tuple[str, str, str]] = {
    "ink": ("#010101", "#1d2126", "#e8eaed"),
    "muted": ("#020202", "#5c6570", "#a3adb8"),
    "grid": ("#030303", "#dde1e6", "#343b44"),
    "paper": ("#040404", "#ffffff", "#14181d"),
    "s0": ("#010201", "#0062ad", "#5cb3f5"),
    "s1": ("#010202", "#c1500a", "#ff9a52"),
    "s2": ("#010203", "#007a5a", "#33c79a"),
    "s3": ("#010204", "#9d3a84", "#e48fcf"),
    "s4": ("#010205", "#8a6a00", "#e0be3a"),
    "s5": ("#010206", "#5b4fc0", "#a79cff"),
    "s6": ("#010207", "#4a5560", "#b9c2cc"),
    "s7": ("#010208", "#b3261e", "#ff8f86"),
}
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (8, 2)), (0, (3, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
HATCHES = ("", "//", "--", "\\\\", "xx", "||", "++", "/-")  # lines alone: dots are large in SVG
NUM_SERIES = 8


def colour(name: str) -> str:
    """Returns the stand-in for a colour of the palette."""
    return COLOURS[name][0]


@dataclass(frozen=True, slots=True)
class SeriesStyle:
    """Holds the look of one series."""

    colour: str
    line: Any  # a name, or matplotlib's (offset, (on, off, ...))
    marker: str
    hatch: str

    def line_arguments(self) -> dict[str, Any]:
        """Returns keyword arguments of `Axes.plot` and `Axes.errorbar`."""
        return {
            "color": self.colour,
            "linestyle": self.line,
            "marker": self.marker,
            "markerfacecolor": self.colour,
            "markeredgecolor": self.colour,
        }


def series_style(index: int) -> SeriesStyle:
    """Returns the look of the index-th series; the ninth has the first one's colour with the second one's
    line."""
    turn = index // NUM_SERIES
    place = index % NUM_SERIES
    shifted = (place + turn) % NUM_SERIES
    return SeriesStyle(colour(f"s{place}"), LINES[shifted], MARKERS[shifted], HATCHES[shifted])


@dataclass(frozen=True, slots=True)
class Size:
    """Holds a drawing's size in CSS pixels, and the type on it."""

    name: str
    width: int
    height: int
    font_px: float

    @property
    def is_narrow(self) -> bool:
        """Returns whether the drawing is the one for narrow screens."""
        return self.name == "narrow"


WIDE = Size("wide", 760, 400, 13.0)
NARROW = Size("narrow", 344, 320, 11.5)


def rc_parameters(size: Size) -> dict[str, Any]:
    """Returns matplotlib's settings for one drawing; 1 point is 1 CSS pixel."""
    ink, muted, grid = colour("ink"), colour("muted"), colour("grid")
    return {
        "svg.fonttype": "none",
        "svg.hashsalt": "outrider",
        "figure.dpi": 72,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "font.family": "DejaVu Sans",  # what text is measured with: wider than most, so nothing gets cut
        "font.size": size.font_px,
        "axes.labelsize": size.font_px,
        "legend.fontsize": size.font_px,
        "xtick.labelsize": size.font_px - 0.5,
        "ytick.labelsize": size.font_px - 0.5,
        "text.parse_math": False,  # names may hold a $
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.edgecolor": muted,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.grid": True,
        "axes.unicode_minus": True,
        "axes.formatter.use_mathtext": False,
        "grid.color": grid,
        "grid.linewidth": 0.8,
        "xtick.color": muted,
        "xtick.labelcolor": ink,
        "ytick.color": muted,
        "ytick.labelcolor": ink,
        "legend.frameon": False,
        "legend.handlelength": 3.2 if not size.is_narrow else 2.6,
        "lines.linewidth": 1.9,
        "lines.markersize": 5.5,
        "hatch.linewidth": 0.7,
        "hatch.color": colour("paper"),
    }


def css_variables(is_dark: bool) -> str:
    """Returns `--ink: #1d2126; ...` of one theme."""
    place = 2 if is_dark else 1
    return " ".join(f"--{name}: {values[place]};" for name, values in COLOURS.items())
