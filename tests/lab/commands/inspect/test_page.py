"""The page of `heedful inspect` in a real browser: it opens, answers clicks and keys, and loads
nothing; also the comparison page, which has the same frame."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import heedful
from heedful.eviction import MostHidden
from heedful.hf.look import cached_over_time, look_into
from heedful.nn import MultiToken
from heedful_lab.commands.compare.page import write_report
from heedful_lab.commands.inspect.arrays import NOBODY, PageData, page_data
from heedful_lab.commands.inspect.page import write_inspection
from helpers.browser import CHROMIUM, Browser
from helpers.invented_runs import looks, runs
from helpers.small_models import converted, ids_of, small

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine: the pages are not opened"
)

TOKENS = ["<s>", "</script>", " a", " ", "\n", "<b>&", "\t", "é", "\x07", "word"]
COUNT = 40


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


def data_of(mechanism, **more) -> PageData:
    model, ids = converted(mechanism), ids_of(COUNT)
    tokens = (TOKENS * COUNT)[:COUNT]
    if more:
        more["cached"] = cached_over_time(model, ids, more["policy"])
        more["policy"] = str(more["policy"])
    return page_data("small", {"M": (0, 1)}, tokens, look_into(model, ids), **more)


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, tuple[PageData, Path]]:
    folder = tmp_path_factory.mktemp("pages")
    torch.manual_seed(0)
    data_by_name = {
        "mta": data_of(MultiToken(conv_every=1)),
        "selective": data_of("selective", policy=MostHidden(tokens=16)),
        "grouped": data_of(heedful.Grouped(size=8, window=10)),
        "differential": data_of("differential"),
    }
    return {
        n: (data, write_inspection(folder / f"{n}.html", data)) for n, data in data_by_name.items()
    }


@pytest.fixture(autouse=True)
def sound(browser) -> Iterator[None]:
    """Whatever a test does, no page says or throws an error, or asks for anything but itself."""
    browser.problems.clear()
    browser.requests.clear()
    browser.prefer("light")
    yield
    assert browser.problems == []
    assert [x for x in browser.requests if not x.startswith(("file:///", "about:", "data:"))] == []
    assert len({x.partition("#")[0] for x in browser.requests if x.startswith("file:")}) <= 1


def shaded(browser) -> list[int]:
    places = browser.run(
        "[...document.querySelectorAll('#tokens > .w, #tokens > .n')].map(x => +x.dataset.at)"
    )
    return sorted(places)


def each(browser, selector: str, what: str) -> list:
    """An expression of every element x that a selector finds."""
    return browser.run(f"[...document.querySelectorAll('{selector}')].map(x => {what})")


def hash_of(browser) -> dict[str, str]:
    return dict(x.split("=") for x in browser.run("location.hash").lstrip("#").split("&"))


@pytest.mark.parametrize("name", ["mta", "selective", "grouped", "differential"])
def test_the_page_opens_at_the_last_token(browser, pages, name):
    data, path = pages[name]
    browser.open(path)
    assert browser.run("document.title") == "Inside small"
    state = browser.run(
        "[...document.querySelectorAll('#tokens > [data-at]')].map(x => x.textContent)"
    )
    assert len(state) == COUNT
    assert state[:10] == ["<s>", "</script>", " a", " ", "↵", "<b>&", "⇥", "é", "\\u0007", "word"]
    heads = sum(layer["heads"] for layer in data.about["layers"])
    for inside in ("#scatter circle", "#heads button", "#everywhere button"):
        assert browser.run(f"document.querySelectorAll('{inside}').length") == heads
    assert browser.run("document.querySelectorAll('#scatter .here, #heads .here').length") == 2
    assert hash_of(browser)["token"] == str(COUNT - 1)
    last = len(data.about["layers"][0]["maps"]) - 1
    keys = data.arrays[f"0/{last}/keys"][0, -1]
    assert shaded(browser) == sorted(keys[keys != NOBODY].tolist())
    kernels = sum(len(x) for layer in data.about["layers"] for x in layer["patterns"].values())
    assert browser.run("document.querySelectorAll('#gallery canvas').length") == kernels
    assert browser.run("document.getElementById('gallery-section').hidden") is (kernels == 0)


def test_numbers_in_the_page_are_those_of_the_data(browser, pages):
    data, path = pages["mta"]
    browser.open(path)
    for name in data.arrays:
        array = browser.run(
            f"(() => {{ const x = heedful.arrayOf('{name}'); return [x.shape, [...x.data]]; }})()"
        )
        assert tuple(array[0]) == data.arrays[name].shape
        np.testing.assert_array_equal(np.array(array[1]), data.arrays[name].ravel())


def test_clicks_choose_token_layer_and_head(browser, pages):
    data, path = pages["mta"]
    browser.open(path)
    browser.click("#tokens > [data-at='12']")
    assert hash_of(browser)["token"] == "12"
    assert browser.run("document.querySelector('#tokens > .here').dataset.at") == "12"
    keys = data.arrays["0/5/keys"][0, 12]
    assert shaded(browser) == sorted(keys[keys != NOBODY].tolist())
    assert browser.run("document.querySelectorAll('#tokens > .apart').length") == COUNT - 13
    browser.click("#scatter circle[data-layer='1'][data-head='2']")
    assert (hash_of(browser)["layer"], hash_of(browser)["head"]) == ("1", "2")
    browser.click("#heads button[data-layer='0'][data-head='3']")
    assert (hash_of(browser)["layer"], hash_of(browser)["head"]) == ("0", "3")
    assert (
        browser.run("document.getElementById('text-title').textContent")
        == "The text in layer 0, head 3"
    )
    browser.click("#everywhere button[data-layer='1'][data-head='0']")
    assert (hash_of(browser)["layer"], hash_of(browser)["head"]) == ("1", "0")
    browser.click("#gallery .kernels button:nth-child(3)")
    assert (hash_of(browser)["layer"], hash_of(browser)["head"]) == ("0", "2")
    browser.click("[data-move=token][data-by='1']")
    assert hash_of(browser)["token"] == "13"
    # The table's first line is the largest key, and leads to it.
    first = int(browser.run("document.querySelector('#row td').textContent"))
    assert first == data.arrays["0/5/keys"][2, 13, 0]
    browser.click("#row td")
    assert hash_of(browser)["token"] == str(first)


def test_keys_move_and_switch(browser, pages):
    _, path = pages["mta"]
    browser.open(path, "#token=20&layer=0&head=1")
    assert hash_of(browser) == {
        "token": "20",
        "layer": "0",
        "head": "1",
        "before": "0",
        "after": "5",
    }
    for key, shift, name, value in (
        ("ArrowLeft", False, "token", "19"),
        ("ArrowRight", False, "token", "20"),
        ("ArrowDown", False, "layer", "1"),
        ("ArrowDown", False, "layer", "1"),  # there is none below
        ("ArrowUp", False, "layer", "0"),
        ("ArrowRight", True, "head", "2"),
        ("ArrowLeft", True, "head", "1"),
        ("Home", False, "token", "0"),
        ("End", False, "token", str(COUNT - 1)),
        ("f", False, "without", "1"),
        ("d", False, "from", "1"),
        ("s", False, "after", "0"),
        ("t", False, "theme", "light"),
    ):
        browser.press(key, shift)
        assert hash_of(browser)[name] == value, key
    browser.press("?")
    assert browser.run("document.getElementById('help').open") is True
    browser.press("ArrowLeft")  # not while help is read
    assert hash_of(browser)["token"] == str(COUNT - 1)
    browser.press("Escape")
    assert browser.run("document.getElementById('help').open") is False
    browser.press("f")
    assert "without" not in hash_of(browser)


def test_the_address_brings_the_view_back(browser, pages):
    _, path = pages["mta"]
    view = "#token=7&layer=1&head=3&before=1&after=4&without=1&from=1&theme=dark"
    browser.open(path, view)
    assert browser.run("location.hash") == view
    assert browser.run("document.getElementById('without').checked") is True
    assert browser.run("document.getElementById('direction').value") == "from"
    assert browser.run("document.getElementById('after').value") == "4"
    browser.run("location.hash = '#token=9&layer=0'")
    browser.run("new Promise((done) => setTimeout(done, 50))")
    assert browser.run("document.querySelector('#tokens > .here').dataset.at") == "9"
    # What is not there is not followed.
    browser.open(path, "#token=999&layer=77&head=-1&before=x&after=99")
    assert hash_of(browser)["token"] == str(COUNT - 1) and hash_of(browser)["layer"] == "0"


def test_without_the_first_token_shares_are_of_the_rest(browser, pages):
    data, path = pages["selective"]
    browser.open(path, "#token=30&layer=0&head=1")
    keys, shares = (data.arrays[f"0/1/{name}"][1, 30] for name in ("keys", "shares"))
    row = browser.run("heedful.row(1, 1, 30)")
    there = keys != NOBODY
    assert row["keys"] == keys[there].tolist()
    np.testing.assert_allclose(row["values"], shares[there])
    browser.press("f")
    row = browser.run("heedful.row(1, 1, 30)")
    rest, first = (float(data.arrays[f"0/1/{name}"][1, 30]) for name in ("rest", "first"))
    expected = {
        int(k): float(s) * (rest + first) / rest
        for k, s in zip(keys, shares, strict=True)
        if k not in (0, NOBODY)
    }
    assert row["keys"] == list(expected)
    np.testing.assert_allclose(row["values"], list(expected.values()), rtol=1e-4)
    does = browser.run("heedful.does(heedful.about.layers[0], 1)")
    np.testing.assert_allclose(list(does.values()), data.arrays["0/does"][1, 1], rtol=1e-6)
    browser.press("Home")
    assert "Nothing but the first token." in browser.run(
        "document.getElementById('rest').textContent"
    )


def test_what_attends_to_a_token_is_the_column(browser, pages):
    data, path = pages["mta"]
    browser.open(path, "#token=5&layer=1&head=2&from=1")
    keys, shares = data.arrays["1/5/keys"][2], data.arrays["1/5/shares"][2]
    at = [(t, shares[t][keys[t] == 5]) for t in range(COUNT)]
    expected = {t: float(x[0]) for t, x in at if len(x)}
    assert shaded(browser) == sorted(expected)
    column = browser.run("heedful.column(5, 2, 5)")
    assert dict(zip(column["keys"], column["values"], strict=True)) == expected
    assert column["values"] == sorted(expected.values(), key=abs, reverse=True)


def test_hidden_and_evicted_tokens_are_marked(browser, pages):
    data, path = pages["selective"]
    browser.open(path, "#token=33&layer=1&head=0")
    marked = browser.run(
        "[...document.querySelectorAll('#tokens > span')].map(x => x.className.split(' '))"
    )
    since, evicted = data.arrays["1/since"][:, 0], data.arrays["1/gone"]
    assert any(evicted[:34] <= 33) and any(since[0][:34] <= 33)
    for j in range(COUNT):
        level = int((since[:, j] <= 33).sum()) if j <= 33 else 0
        assert [x for x in marked[j] if re.fullmatch("h[1-4]", x)] == (
            [f"h{level}"] if level else []
        )
        assert ("out" in marked[j]) is (j <= 33 and bool(evicted[j] <= 33))
        assert ("apart" in marked[j]) is (j > 33)
    facts = browser.run("document.getElementById('facts').textContent")
    cached = sum(int(x) > 33 for x in evicted[:34])
    assert f"after it {cached} of 34 are cached" in facts and "it masks" in facts


def test_groups_are_marked(browser, pages):
    data, path = pages["grouped"]
    browser.open(path, "#token=17")
    starts = browser.run(
        "[...document.querySelectorAll('#tokens > .start')].map(x => +x.dataset.at)"
    )
    assert starts == data.arrays["0/groups"][:, 0].tolist() == [0, 8, 16, 24, 32]
    mine = browser.run("[...document.querySelectorAll('#tokens > .mine')].map(x => +x.dataset.at)")
    assert mine == list(range(16, 24))


def test_the_map_shows_what_is_in_the_rows_and_leads_to_a_token(browser, pages):
    data, path = pages["mta"]
    browser.open(path, "#token=3&layer=0&head=1")
    pixels = browser.run(
        "[...document.querySelectorAll('#maps canvas')[2].getContext('2d')"
        f".getImageData(0, 0, {COUNT}, {COUNT}).data]"
    )
    pixels = np.array(pixels).reshape(COUNT, COUNT, 4)
    keys, shares = data.arrays["0/5/keys"][1], data.arrays["0/5/shares"][1].astype(float)
    filled = np.zeros((COUNT, COUNT), bool)
    for t in range(COUNT):
        for key, share in zip(keys[t], shares[t], strict=True):
            if key != NOBODY:
                red, _, blue, alpha = pixels[t, key]
                assert alpha == pytest.approx(255 * min(1, abs(share) ** 0.5), abs=1.5)
                assert alpha < 9 or (blue > red) == (share > 0)  # a faint one is rounded
                filled[t, key] = True
    later = np.arange(COUNT) > np.arange(COUNT)[:, None]
    assert (pixels[later][:, 3] == 28).all() and (pixels[~later & ~filled][:, 3] == 0).all()
    browser.click("#maps figure:nth-child(2) .map")
    assert int(hash_of(browser)["token"]) in (COUNT // 2 - 1, COUNT // 2)  # the middle


def test_gallery_filters_by_the_name_of_a_pattern(browser, pages):
    data, path = pages["mta"]
    browser.open(path)
    names = [
        x for layer in data.about["layers"] for kinds in layer["patterns"].values() for x in kinds
    ]
    buttons = browser.run(
        "[...document.querySelectorAll('#filters button')].map(x => x.textContent)"
    )
    assert buttons[0] == f"all {len(names)}"
    assert sorted(buttons[1:]) == sorted(f"{x} {names.count(x)}" for x in set(names))
    browser.click("#filters button:nth-child(2)")
    labels = browser.run(
        "[...document.querySelectorAll('.kernels button')].filter(x => x.offsetParent)"
        ".map(x => x.dataset.pattern)"
    )
    assert len(set(labels)) == 1 and len(labels) == names.count(labels[0])


def darkness(browser: Browser) -> list[int]:
    colour = browser.run("getComputedStyle(document.body).backgroundColor")
    return [int(x) for x in re.findall(r"\d+", colour)[:3]]


def test_colours_follow_the_reader_and_the_choice(browser, pages, tmp_path):
    report = write_report(tmp_path, runs("standard", [0.9, 0.8]), {}, looks())
    for path in (pages["mta"][1], report):
        browser.prefer("light")
        browser.open(path)
        assert min(darkness(browser)) > 240
        browser.prefer("dark")
        assert max(darkness(browser)) < 40
        dark = each(browser, "img", "getComputedStyle(x).filter")
        browser.click("label:has(#light)")
        assert min(darkness(browser)) > 240
        assert set(each(browser, "img", "getComputedStyle(x).filter")) <= {"none"}
        browser.prefer("light")
        browser.click("label:has(#dark)")
        assert max(darkness(browser)) < 40
        assert each(browser, "img", "getComputedStyle(x).filter") == dark
        assert "none" not in dark and (path != report or dark)
        browser.requests.clear()


def test_text_is_readable_in_both_colours(browser, pages):
    """Contrast of the text with the page, by WCAG 2: at least 4.5, of what is dim too."""
    script = (
        "(() => ['ink', 'dim'].map((name) => { const p = document.createElement('p');"
        "p.style.color = `var(--${name})`; document.body.append(p);"
        "const found = getComputedStyle(p).color; p.remove(); return found; }))()"
    )
    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        browser.open(pages["mta"][1])
        paper = luminance(darkness(browser))
        for colour in browser.run(script):
            ink = luminance([int(x) for x in re.findall(r"\d+", colour)[:3]])
            contrast = (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05)
            assert contrast >= 4.5, (scheme, colour)
        browser.requests.clear()


def luminance(rgb: list[int]) -> float:
    linear = [x / 255 / 12.92 if x <= 10 else ((x / 255 + 0.055) / 1.055) ** 2.4 for x in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_a_narrow_window_does_not_scroll_sideways(browser, pages):
    for width in (1280, 390):
        browser.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=800, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        browser.open(pages["selective"][1])
        assert browser.run("document.documentElement.scrollWidth") <= width
    browser.ask(
        "Emulation.setDeviceMetricsOverride",
        width=1280, height=900, deviceScaleFactor=1, mobile=False,
    )  # fmt: skip


def test_two_thousand_tokens_answer_at_once(browser, tmp_path):
    """Within a second each, on whatever machine; on two cores of a server it is a tenth of that."""
    model = small(layers=2, positions=2048)
    heedful.convert(model, "selective")
    ids = ids_of(2048)
    tokens = [f" w{i}" for i in range(2048)]
    data = page_data("long", {"M": (0, 1)}, tokens, look_into(model, ids))
    path = write_inspection(tmp_path / "long.html", data)
    assert browser.open(path) < 10
    took = browser.run(
        "(() => { const times = []; for (const change of ["
        "{token: 1000}, {token: 1001}, {head: 2}, {layer: 1}, {without: true}, {direction: 'from'},"
        "{token: 3}]) { const start = performance.now(); heedful.choose(change);"
        "document.body.getBoundingClientRect(); times.push(performance.now() - start); }"
        "return times; })()"
    )
    assert max(took) < 1000, took
    assert hash_of(browser)["token"] == "3"
