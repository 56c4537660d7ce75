"""The HTML report: complete in itself, fair to those who do not see it, and true to the runs."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from mooncake_simulator.cluster.cluster import ClusterSpec
from mooncake_simulator.cluster.simulation import simulate
from mooncake_simulator.cluster.tiers import StoreTiers
from mooncake_simulator.workloads import Request, generate, write_trace
from mooncakectl.app import build_app
from mooncakectl.simulate.curves import curves_of
from mooncakectl.simulate.report.axes import Axis, plain

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart.yaml"


class _Page(HTMLParser):
    """Headings, links and tables of a page; fails where an element is left open."""

    VOID = frozenset({"meta", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []
        self.references: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [value or "" for name, value in attrs if name in {"src", "href", "xlink:href"}]
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)
        if self.open and self.open[-1] in {"th", "td"}:
            self.tables[-1][-1].append(data)


def _trace(folder: Path, name: str = "trace.jsonl", every_ms: float = 400.0) -> Path:
    path = folder / name
    requests = [
        Request(
            timestamp_ms=every_ms * at, input_length=8_000, output_length=200,
            hash_ids=(1, 2, 3, 4, *range(100 * at, 100 * at + 12)),
        )
        for at in range(1, 120)
    ]  # fmt: skip
    write_trace(path, requests)
    return path


def _report(folder: Path, *arguments: object, trace: Path | None = None) -> str:
    out = folder / "out.html"
    command = ["simulate", "-f", QUICKSTART, "--trace", trace or _trace(folder), "--report", out, *arguments]
    ran = CliRunner().invoke(build_app(), [str(each) for each in command])
    assert ran.exit_code == 0, ran.output
    return out.read_text(encoding="utf-8")


def test_the_file_needs_nothing_else(tmp_path: Path) -> None:
    text = _report(tmp_path, "--sweep", "prefill=1..3")
    page = _Page(text)
    assert page.references == ["#runs"]
    assert "<script" not in text
    assert "url(" not in text
    assert "@import" not in text


def test_every_drawing_is_well_formed_named_and_has_its_numbers_beside_it(tmp_path: Path) -> None:
    text = _report(tmp_path, "--admission", "none,predictive", "--sweep", "prefill=1..3")
    drawings = re.findall(r'<svg role="img".*?</svg>', text)
    assert len(drawings) >= 6
    for each in drawings:
        tree = ElementTree.fromstring(each)
        assert tree.attrib["aria-label"]
        assert tree.attrib["viewBox"]
        assert tree.findall("*")
    page = _Page(text)
    sections = page.headings
    assert sections[:3] == ["All runs", "Time to first token", "Time between tokens"]
    assert "Prefill to decode" in sections
    assert "Load of both stages" in sections
    # One table in each section, the runs' among them.
    assert len(page.tables) == len(sections)
    assert len(page.tables[0]) == 1 + 2 * 3


def test_how_far_predictions_were_off_is_told_of_answers_too(tmp_path: Path) -> None:
    # 256 tokens are assumed before anything was learned; every answer has 200.
    page = _Page(_report(tmp_path, trace=_trace(tmp_path, "few.jsonl", every_ms=1.0)))
    head, row = page.tables[page.headings.index("How well it was foretold")]
    told = dict(zip(head, row, strict=True))
    assert told["answer's tokens, error P50"] == "56"


def test_curves_rise_and_end_at_the_share_that_was_answered(tmp_path: Path) -> None:
    text = _report(tmp_path, "--speed", "1,40")
    first = re.findall(r'<svg role="img".*?</svg>', text)[0]
    lines = [each for each in ElementTree.fromstring(first) if each.tag == "polyline"]
    assert len(lines) == 2
    for line in lines:
        points = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
        assert points == sorted(points, key=lambda point: (point[0], -point[1]))
    assert "SLO 30 s" in first


def test_a_single_request_is_a_line_that_can_be_seen(tmp_path: Path) -> None:
    text = _report(tmp_path, "--limit", "1")
    for drawing in re.findall(r'<svg role="img".*?</svg>', text)[:2]:
        (line,) = [each for each in ElementTree.fromstring(drawing) if each.tag == "polyline"]
        begin, end = line.attrib["points"].split()
        assert begin.split(",")[0] == end.split(",")[0]
        assert begin != end


def test_a_sweep_of_more_lines_than_colours_says_which_are_drawn(tmp_path: Path) -> None:
    text = _report(tmp_path, "--policy", "all", "--sweep", "prefill=1..3", "--limit", "20")
    page = _Page(text)
    assert "Drawn are the 8 of 10 with the highest goodput." in text
    numbers = page.tables[page.headings.index("Prefill to decode")]
    assert {row[1] for row in numbers[1:]} >= {"kv-centric", "sglang-cache-aware", "llm-d-weighted"}
    assert "· <" not in text
    # What all runs have in common is said once, above.
    assert page.tables[0][0][:2] == ["P+D", "policy"]
    assert "speed" not in page.tables[0][0]


def test_what_there_is_nothing_of_is_left_out(tmp_path: Path) -> None:
    page = _Page(_report(tmp_path))
    assert "Refused, by reason" not in page.headings
    assert "Prefill to decode" not in page.headings


def test_refusals_are_told_by_reason(tmp_path: Path) -> None:
    page = _Page(_report(tmp_path, "--speed", "1000", trace=_trace(tmp_path, every_ms=1.0)))
    at = page.headings.index("Refused, by reason")
    head, row = page.tables[at]
    assert "ttft" in head
    assert sum(int(each.replace(",", "")) for each in row[1:]) > 0


def test_names_from_outside_are_text_and_not_markup(tmp_path: Path) -> None:
    text = _report(tmp_path, trace=_trace(tmp_path, "<b>&trace.jsonl"))
    assert "<b>" not in text
    assert "&lt;b&gt;&amp;trace.jsonl" in text


@pytest.mark.parametrize(
    ("name", "said"),
    [("", "that is a folder: name a file"), ("nowhere/out.html", "there is no folder")],
)
def test_a_report_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, name: str, said: str
) -> None:
    command = ["simulate", "-f", str(QUICKSTART), "--trace", str(_trace(tmp_path)), "--report"]
    ran = CliRunner().invoke(build_app(), [*command, str(tmp_path / name)])
    assert ran.exit_code == 1
    assert said in ran.stderr


@pytest.mark.parametrize(
    ("low", "high", "log", "whole", "ticks"),
    [
        (0, 1, False, False, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (5.7, 8.3, False, True, [6, 7, 8]),
        (0.15, 32, True, False, [0.2, 0.5, 1, 2, 5, 10, 20]),
        (0, 3, False, True, [0, 1, 2, 3]),
    ],
)
def test_ticks_are_round(low: float, high: float, log: bool, whole: bool, ticks: list[float]) -> None:
    axis = Axis(low, high, 0, 100, "", plain, log=log, whole=whole)
    assert axis.ticks() == pytest.approx(ticks)
    assert axis.place(low) == 0
    assert axis.place(high) == pytest.approx(100)


def test_hits_of_a_store_with_tiers_are_told_by_tier_and_add_up() -> None:
    trace = generate(60, 1)
    tiers = StoreTiers(dram_tokens=40 * 512, nodes=2, rule="predicted")
    spec = ClusterSpec(2, 2, fetch="store", cache_tokens=30 * 512, tiers=tiers)
    result = simulate(spec, trace)
    tokens = curves_of(spec, result).prompt_tokens
    assert list(tokens) == ["own cache", "store, DRAM", "store, SSD", "computed"]
    assert tokens["store, SSD"] > 0
    assert min(tokens.values()) >= 0
    assert sum(tokens.values()) == sum(request.input_length for request in trace)
