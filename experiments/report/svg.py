"""A matplotlib drawing as an inline SVG: text as text, the page's colours, no id that another drawing has."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from typing import Any

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from outrider.experiments.report.style import COLOURS, Size, rc_parameters

SVG = "http://www.w3.org/2000/svg"
XLINK_HREF = "{http://www.w3.org/1999/xlink}href"

Draw = Callable[["Figure", Size], None]

_FONT = re.compile(r"font-family:[^;]*;?\s*")
_COORDINATE = re.compile(r"-?\d+\.\d{2,}")
_STAND_INS = {values[0]: f"var(--{name})" for name, values in COLOURS.items()}
_HEX = re.compile(r"#0[0-9a-f]{5}\b")


def draw_svg(draw: Draw, size: Size, prefix: str, label: str) -> str:
    """Lets `draw` fill an empty figure, and returns its SVG; `label` is for screen readers, `prefix` makes
    ids unique."""

    parameters: Any = rc_parameters(size)
    with matplotlib.rc_context(parameters):
        figure = Figure(figsize=(size.width / 72, size.height / 72), layout="constrained")
        draw(figure, size)
        out = io.StringIO()
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        canvas: Any = FigureCanvasSVG(figure)
        canvas.print_svg(out, metadata=metadata)  # `savefig` would draw everything twice
    return _clean(out.getvalue(), f"{prefix}-{size.name}-", f"{size.name} figure", label)


def _clean(text: str, prefix: str, css_class: str, label: str) -> str:
    ElementTree.register_namespace("", SVG)
    root = ElementTree.fromstring(text)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{SVG}}}metadata", f"{{{SVG}}}style"):
                parent.remove(child)
    for element in root.iter():
        _clean_element(element, prefix)
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.set("class", css_class)
    root.set("role", "img")
    root.set("aria-label", label)
    return re.sub(r">\s+<", "><", ElementTree.tostring(root, encoding="unicode"))


def _clean_element(element: ElementTree.Element, prefix: str) -> None:
    attributes = element.attrib
    if XLINK_HREF in attributes:
        attributes["href"] = attributes.pop(XLINK_HREF)
    for name, value in list(attributes.items()):
        if name == "id":
            value = prefix + value
        elif name == "href":
            value = "#" + prefix + value.removeprefix("#")
        else:
            value = re.sub(r"url\(#", f"url(#{prefix}", value)
        if name == "style":
            value = _FONT.sub("", value)
        if name in ("style", "fill", "stroke") and _HEX.search(value):
            value = _HEX.sub(lambda match: _STAND_INS.get(match[0], match[0]), value)
            if name != "style":  # a variable is not allowed there
                del attributes[name]
                name, value = "style", f"{attributes.get('style', '')};{name}: {value}".lstrip(";")
        if name in ("d", "x", "y", "transform", "points", "width", "height"):
            value = _COORDINATE.sub(lambda match: f"{float(match[0]):.1f}", value).replace("\n", "")
        attributes[name] = value
