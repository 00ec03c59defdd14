"""Serves the web page at `/`: one file, and headers that let it load nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@cache
def page_html() -> str:
    """Returns the page."""
    return (files("outrider.edge_client.daemon.http") / "page.html").read_text(encoding="utf-8")


def _policy() -> str:
    """Returns the content security policy: only the page's own script and style run, known by their hashes,
    and they may call only this daemon."""
    found = {"script": [], "style": []}  # type: dict[str, list[str]]
    for kind, content in _INLINE.findall(page_html()):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        found[kind].append(f"'sha256-{digest}'")
    return (
        f"default-src 'none'; script-src {' '.join(found['script'])}; style-src {' '.join(found['style'])}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


PAGE_HEADERS = {
    "Content-Security-Policy": _policy(),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
