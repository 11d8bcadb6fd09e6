"""The summary of records, table and findings, and the page made of them."""

import math
import os
import re
import tempfile
from html.parser import HTMLParser

import pytest

from heedful_lab.commands.compare import figures
from heedful_lab.commands.compare.findings import (
    configurations,
    findings,
    further,
    summarise,
    table,
)
from heedful_lab.commands.compare.page import write_report
from heedful_lab.commands.compare.run import ModelTexts
from heedful_lab.records import Record
from helpers.invented_runs import looks, run, runs

# Summary.


def test_numbers_against_hand_computed_values():
    standard = [
        run(value=v, seed=i, tokens_per_second=t, peak_memory_mib=m)
        for i, (v, t, m) in enumerate([(0.2, 100, 7), (0.4, 400, 9), (0.9, 200, 8)])
    ]
    row, other = summarise([*standard, *runs("mta", [0.1, 0.3], parameters=1200)])
    assert row.values == (0.2, 0.4, 0.9) and row.seeds == (0, 1, 2)
    assert row.mean == pytest.approx(0.5)
    assert row.std == pytest.approx(math.sqrt((0.09 + 0.01 + 0.16) / 2))
    assert row.ratio == 1.0
    assert (row.tokens_per_second, row.peak_memory_mib, row.parameters) == (200, 9, 1000)
    assert other.ratio == pytest.approx(0.4)
    assert other.std == pytest.approx(0.1 * math.sqrt(2)) and other.parameters == 1200


def test_one_seed_no_baseline_and_divergence():
    (row,) = summarise([run("mta", 0.25)])
    assert math.isnan(row.std) and math.isnan(row.ratio) and row.mean == 0.25
    (row,) = summarise(runs("standard", [0.5, math.nan]))
    assert math.isnan(row.mean) and "1 of 2 diverged" in table([row])


def test_records_that_cannot_be_summed_up():
    with pytest.raises(ValueError, match=r"seeds \[0, 0\] for 'standard' on 'blocks'"):
        summarise([run(), run()])
    with pytest.raises(ValueError, match="one metric, got error and perplexity"):
        summarise([run(), run("mta", metric="perplexity")])


# Table.


def test_table_formats():
    text = runs("standard", [12.0, 13.0], task="text", metric="perplexity")
    rows = summarise([*runs("mta", [0.083, 0.163]), run(value=0.5), *text])
    plain = table(rows)
    assert "error 12.3 ± 5.7 % (2 seeds)" in plain
    assert "error 50.0 % (1 seed)" in plain
    assert "perplexity 12.50 ± 0.71 (2 seeds)" in plain
    lines = plain.splitlines()
    assert len(lines) == 5 and len({len(line) for line in lines}) == 1
    assert "0.25" in lines[2] and lines[3].count("0.25") == 0
    markdown = table(rows, "markdown").splitlines()
    assert {line.count("|") for line in markdown} == {7} and set(markdown[1]) == set("|-: ")
    page = table(summarise([run("<b>")]), "html")
    assert "&lt;b&gt;" in page and "<b>" not in page
    with pytest.raises(ValueError, match="format must be"):
        table(rows, "latex")


# Findings.


def finding(*groups) -> str:
    (sentence,) = findings(summarise([record for group in groups for record in group]))
    assert sentence.startswith("blocks: ") and sentence.endswith(".")
    return sentence


def test_finding_solved():
    text = finding(runs("standard", [0.96, 0.98]), runs("mta", [0.01, 0.02]))
    assert text == "blocks: mta (1.5 % error) solved it where standard stayed at 97.0 % error."


def test_finding_separated_both_ways():
    text = finding(
        runs("standard", [0.5, 0.6]), runs("mta", [0.2, 0.3]), runs("selective", [0.7, 0.8])
    )
    assert "every seed of mta (25.0 % error) did better than any of standard" in text
    assert "every seed of selective (75.0 % error) did worse than any of standard" in text
    assert "no mechanism solved it" in text


@pytest.mark.parametrize("values", [[0.1, 0.55], [0.5, 0.5], [0.1, 0.9]])
def test_finding_overlapping(values):
    text = finding(runs("standard", [0.5, 0.6]), runs("mta", values))
    assert "no difference from standard (55.0 % error) beyond the spread of seeds shows" in text
    assert "better" not in text and "worse" not in text


LUCK = "One seed may be luck; run more (--seeds 3)."


def test_finding_one_seed_says_how_the_runs_ended_and_claims_nothing():
    first = [*runs("standard", [1.0]), *runs("mta", [0.031]), *runs("selective", [0.0])]
    about = {"task": "text", "metric": "perplexity"}
    second = [run(value=5.0, **about), run("mta", math.nan, **about), run("canon", 4.851, **about)]
    answers = {"task": "recall", "metric": "answer_error"}
    third = [run(value=0.5, **answers), run("selective", 0.01, **answers)]
    assert findings(summarise([*first, *second, *third])) == [
        "blocks: with one seed mta (3.1 % error), selective (0.0 % error) and standard (100.0 % "
        "error).",
        "text: with one seed mta (1 of 1 seeds diverged), canon (perplexity 4.85) and standard "
        "(perplexity 5.00).",
        "recall: with one seed selective (1.0 % answer error) and standard (50.0 % answer error).",
        LUCK,
    ]
    for one, two in (([0.9], [0.01, 0.02]), ([0.9, 0.95], [0.01])):
        text, luck = findings(summarise([*runs("standard", one), *runs("mta", two)]))
        assert "better" not in text and "where" not in text and luck == LUCK


def test_what_runs_recorded_beside_what_they_are_judged_by():
    final = {"held-out": 5.0, "bits_per_byte": 2.3}
    assert further([run(task="text", metric="perplexity", final=final)]) == []
    (text,) = further([run(final={"in-distribution": 0.5, "bleu": 20.5})])
    assert "BLEU (more is better)" in text and "20.5" in text


def test_one_name_for_two_configurations_is_reported():
    def run_of(task: str, every: int) -> Record:
        return run("mta", task=task, config={"mechanism": {"conv": [6, 11], "conv_every": every}})

    records = [run_of("blocks", 1), run_of("text", 4), run_of("parity", 4), run()]
    sentence = "mta is not the same everywhere: conv_every=1 on blocks, 4 on text and parity."
    assert configurations(records) == [sentence]
    assert configurations(records[1:]) == []
    page = _page(records)
    assert sentence in page


def _page(records: list[Record]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        return write_report(folder, records).read_text()


def test_peak_memory_is_shown_of_gpus_alone():
    cases = {True: [run(device="cuda")], False: [run(device="cpu"), run("mta", device="cuda")]}
    for shown, records in cases.items():
        assert ("GPU peak MiB" in table(summarise(records))) is shown
        assert ("GPU peak MiB" in _page(records)) is shown


def test_finding_divergence_counts_as_worst():
    text = finding(runs("standard", [0.5, math.nan]), runs("mta", [0.1, 0.2]))
    assert "mta (15.0 % error) did better than any of standard (1 of 2 seeds diverged)" in text
    text = finding(runs("standard", [0.5, 0.6]), runs("mta", [0.1, math.nan]))
    assert "for mta (1 of 2 seeds diverged) no difference" in text
    text = finding(runs("standard", [0.1, 0.2]), runs("mta", [math.nan, math.nan]))
    assert "mta (2 of 2 seeds diverged) did worse than any of standard" in text


def test_finding_without_a_fair_comparison():
    assert "standard was not run" in finding(runs("mta", [0.1, 0.2]))
    assert "nothing to compare" in finding(runs("standard", [0.1, 0.2]))
    text = finding(runs("standard", [0.5, 0.6]), runs("mta", [0.1, 0.2], steps=200))
    assert "not like for like" in text


# The page.


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    text = runs("standard", [30.0, 31.0], task="text", metric="perplexity")
    records = [
        *runs("standard", [0.9, 0.95], final={"in-distribution": 0.9, "4x": math.nan}),
        *runs("mta", [0.01, 0.02], final={"in-distribution": 0.01, "4x": 0.5}),
        *text,
        run("<i>&", 0.5, task="a$b$"),
    ]
    path = write_report(tmp_path_factory.mktemp("page"), records, {"note": "</pre>"}, looks())
    assert os.listdir(path.parent) == ["report.html"]
    return path.read_text(encoding="utf-8")


class Balanced(HTMLParser):
    """Fails on tags that do not close, and gathers what a browser would load."""

    VOID = ("meta", "img", "br", "input")

    def __init__(self) -> None:
        super().__init__()
        self.open, self.loads, self.tags = [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.loads += [value for name, value in attributes if name in ("src", "href", "srcset")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_page_is_whole_and_loads_nothing(page):
    parser = Balanced()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    assert "script" not in parser.tags and "link" not in parser.tags
    assert parser.loads and all(x.startswith("data:image/svg+xml;base64,") for x in parser.loads)
    assert not re.search(r"https?://|url\(|@import", page)
    headings = re.findall(r"<h2>(.*?)</h2>", page)
    assert headings == [
        "What it shows",
        "Results",
        "Learning curves",
        "Beyond the training distribution",
        "Inside: blocks",
        "How it was run",
    ]


def test_page_shows_special_characters_escaped(page):
    assert "<script" not in page and "&lt;script&gt;" in page
    assert "&lt;i&gt;&amp;" in page and "&lt;/pre&gt;" in page
    for glyph in ("␣", "↵", "⇥", "\\u0007", "∅"):
        assert f">{glyph}<" in page
    assert "token 5 <code>$x$</code> masked token 0 <code>&lt;script&gt;</code> (2.41)" in page
    assert re.search(r"<s [^>]*>␣</s>", page)  # exp(-9) is less than one percent
    assert page.count("Patterns: ") == 2  # alt and caption: a kernel near the identity is not drawn
    assert figures.visible(" a\u200b") == "␣a\\u200b"


def test_page_of_one_run(tmp_path):
    with pytest.raises(ValueError, match="records must hold at least one"):
        write_report(tmp_path, [])
    bare = Record("blocks", "mta", 0, "error", 10, 2, 5, {"error": 0.5})
    page = write_report(tmp_path / "new", [bare]).read_text()
    assert "Learning curves" not in page and "Inside" not in page and "nan" not in page


@pytest.mark.parametrize("broken", ["draw", "replace"])
def test_old_page_survives_a_failure(tmp_path, monkeypatch, broken):
    path = write_report(tmp_path, [run()])
    before = path.read_bytes()

    def fail(*args, **options):
        raise RuntimeError("no more disk")

    monkeypatch.setattr(*((figures, "svg") if broken == "draw" else (os, "replace")), fail)
    with pytest.raises(RuntimeError, match="no more disk"):
        write_report(tmp_path, [run(value=0.1)])
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["report.html"]


def test_pictures_repeat_and_keep_one_colour_per_mechanism():
    records = [*runs("standard", [0.9, 0.8]), *runs("mta", [0.1, 0.2])]
    colour = figures.colours(["mta", "standard", "selective"])
    assert len({shade for shade, _ in colour.values()}) == 3
    assert len(set(figures.colours([str(i) for i in range(12)]).values())) == 13
    assert figures.svg(figures.curves(records, colour)) == figures.svg(
        figures.curves(records, colour)
    )


def test_what_models_wrote_is_beside_its_source(tmp_path):
    rows = [("a <source>", "right", "right"), ("x" * 700, "asked", "other & more")]
    other = [(source, target, "no") for source, target, _ in rows]
    texts = [ModelTexts("t", "one", rows), ModelTexts("t", "two", other)]
    page = write_report(tmp_path, [run()], texts=texts).read_text()
    assert page.count("a &lt;source&gt;") == 1
    assert "<th>one ✓</th><td>right</td>" in page and "<th>two ✗</th><td>no</td>" in page
    assert "<th>one ✗</th><td>other &amp; more</td>" in page
    assert "x" * 600 + " …" in page and "x" * 601 not in page
