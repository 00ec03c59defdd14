"""The page is one valid file that refers to nothing outside, whatever the folder holds."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.results_folders import CLOUD_ONLY, Plan, Times, make_folder, make_manifest, matrix

from outrider.common.errors import UsageError
from outrider.experiments.links.profile import LinkProfile, Outage
from outrider.experiments.report import render
from outrider.experiments.report.__main__ import main
from outrider.experiments.report.figures.tpot_rtt import charts
from outrider.experiments.report.page import load_figures
from outrider.experiments.report.style import COLOURS, WIDE
from outrider.experiments.report.svg import draw_svg
from outrider.experiments.report.view import View
from outrider.experiments.sweep.results.records import Results

HOSTILE = '<script>alert("1")</script>&\'$x_1$ {{ 7*7 }} ]]> --><img src=x onerror=y>'
VOID = {"meta", "br", "img", "link", "hr", "input"}


class Structure(HTMLParser):
    """Tags in order, and whether they close as they open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag


def svgs_of(html: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", html, re.S)]


def check_page(html: str) -> Structure:
    """Well-formed; nothing from outside; no script; every id once and every reference to one that exists."""
    page = Structure()
    page.feed(html)
    assert page.open == []
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "img", "iframe", "object", "image", "embed", "base"}, names
    for tag, attributes in page.tags:
        for name, value in attributes.items():
            assert not name.startswith("on") and name != "src", (tag, name)
            assert name != "href" or (value or "").startswith("#"), value
    assert "@import" not in html and not re.search(r"url\((?!#)", html)
    without_namespaces = re.sub(r'xmlns(:\w+)?="[^"]*"', "", html)
    assert "http://" not in without_namespaces and "https://" not in without_namespaces
    check_references(html, page)
    return page


def check_references(html: str, page: Structure) -> None:
    ids = [value for _, attributes in page.tags if (value := attributes.get("id"))]
    assert len(ids) == len(set(ids))
    drawn = "".join(re.findall(r"<svg.*?</svg>", html, re.S))
    referred = set(re.findall(r'href="#([^"]+)"', drawn)) | set(re.findall(r"url\(#([^)]+)\)", drawn))
    assert referred <= set(ids)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every figure, and names that mean harm wherever a name can stand."""
    gone = LinkProfile(name="gone", rtt_ms=50, outages=(Outage(1, 2),))
    slow = LinkProfile(name=HOSTILE, rtt_ms=30, up_mbit=0.1)
    plans = matrix((1, 60), (2, 4))
    plans += [
        Plan(gone, variant="keeps", on_timeout="first_token"),
        Plan(gone, CLOUD_ONLY, None, baseline=CLOUD_ONLY),
    ]
    plans += [Plan(slow, variant=HOSTILE), Plan(LinkProfile(name="fast", rtt_ms=30), variant=HOSTILE)]
    plans += [replace(plans[2], twin=plans[2].name, baseline="")]
    folder = make_folder(plans, seed=3, num_tokens=40)
    folder.manifest = make_manifest(
        name=HOSTILE,
        command=HOSTILE,
        commit=HOSTILE,
        is_dirty=True,
        machine={HOSTILE: HOSTILE},
        config={HOSTILE: HOSTILE},
    )
    folder.sweep.cells[0] = replace(folder.sweep.cells[0], labels=[HOSTILE], num_errors=1)
    path = folder.write(tmp_path_factory.mktemp("full"))
    assert render(path) == path / "report.html"
    return path


def test_a_whole_page_is_well_formed_and_self_contained(full: Path) -> None:
    check_page((full / "report.html").read_text(encoding="utf-8"))


def test_every_figure_is_drawn_wide_and_narrow_with_text_as_text(full: Path) -> None:
    html = (full / "report.html").read_text(encoding="utf-8")
    drawings = svgs_of(html)
    assert len(drawings) >= 2 * len(load_figures())
    assert [svg.get("class") for svg in drawings[:2]] == ["wide figure", "narrow figure"]
    for svg in drawings:
        assert svg.get("viewBox") and svg.get("aria-label") and svg.get("role") == "img"
        assert any(element.tag.endswith("text") and element.text for element in svg.iter())
        assert not any(element.tag.endswith(("image", "style", "script")) for element in svg.iter())
    for name, figure in load_figures().items():
        assert f'<section id="{name}">' in html and figure.title.split("'")[0] in html


def test_drawings_take_their_colours_from_the_page(full: Path) -> None:
    html = (full / "report.html").read_text(encoding="utf-8")
    drawn = "".join(re.findall(r"<svg.*?</svg>", html, re.S))
    assert "var(--ink)" in drawn and not any(stand_in in drawn for stand_in, _, _ in COLOURS.values())
    assert "prefers-color-scheme: dark" in html and "@media print" in html


def test_hostile_names_are_text(full: Path) -> None:
    html = (full / "report.html").read_text(encoding="utf-8")
    assert (
        "<script" not in html and "<img" not in html and "{{ 7*7 }}" in re.findall(r"<h1>(.*?)</h1>", html)[0]
    )
    assert "&lt;script&gt;" in html
    labels = "".join(text for svg in svgs_of(html) for text in svg.itertext())
    assert "<script>alert" in labels and "$x_1$" in labels


def test_the_same_figure_gives_the_same_bytes() -> None:
    folder = make_folder(matrix((1, 60)), num_prompts=2, num_tokens=16)
    view = View(Results(Path(), folder.manifest, folder.requests, [], [], folder.sweep), folder.sweep)
    first, second = (draw_svg(chart.draw, WIDE, "x", "x") for chart in (charts(view)[0], charts(view)[0]))
    assert first == second and 'id="x-wide-' in first


def test_figures_without_data_are_left_out_in_a_line(tmp_path: Path) -> None:
    path = make_folder([Plan(LinkProfile(name="lan", rtt_ms=0.5))]).write(tmp_path)
    html = render(path).read_text(encoding="utf-8")
    check_page(html)
    assert "Left out" in html and "needs a sweep over links of at least two round-trip times" in html
    assert '<section id="tpot_rtt">' not in html and '<section id="commit_gap">' in html


def test_two_hundred_cells_make_a_page_of_bounded_size(tmp_path: Path) -> None:
    plans = matrix((1, 15, 30, 60, 100, 200, 600), tuple(range(1, 28)))
    folder = make_folder(plans, num_prompts=2, num_tokens=16)
    assert len(folder.sweep.cells) >= 200
    html = render(folder.write(tmp_path)).read_text(encoding="utf-8")
    check_page(html)
    assert len(html) < 2_000_000
    table = html[html.index('<section id="cells">') : html.index('<section id="manifest">')]
    assert table.count("<tr>") == 1 + len(folder.sweep.cells)


def test_where_cloud_only_wins_the_page_begins_with_it(tmp_path: Path) -> None:
    path = make_folder(matrix((1, 60)), Times(draft_ms=60), num_prompts=2, num_tokens=16).write(tmp_path)
    html = render(path).read_text(encoding="utf-8")
    first = html[html.index('<ul class="statements">') :]
    assert first.index('class="loss"') < len(first) and 'class="win"' not in first
    assert "Cloud-only is" in first[: first.index("</ul>")]


def test_what_is_no_finished_folder_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match="holds no results"):
        render(tmp_path)
    path = make_folder([]).write(tmp_path / "cut-off")
    (path / "sweep.json").unlink()
    assert main([str(path)]) == 2
    assert "no sweep.json" in capsys.readouterr().err


def test_asking_for_help_draws_nothing() -> None:
    code = "import outrider.experiments.report.__main__, sys; sys.exit(len({'matplotlib', 'jinja2'} & {*sys.modules}))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])
