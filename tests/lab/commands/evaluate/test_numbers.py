"""An evaluation in numbers: intervals and paired differences by hand, the table, the page."""

import math
import re

import numpy as np
import pytest

from heedful_lab.commands.evaluate.numbers import (
    ACCURACY,
    BITS,
    LEAST,
    PERPLEXITY,
    Interval,
    evaluated_table,
    harness_table,
    interval,
    paired,
    summed_up,
    wilson,
)
from heedful_lab.commands.evaluate.page import by_position, shares, write_evaluation
from heedful_lab.records import Sample


def sample(key, model="a", task="needles", digest="x", cell=None, cache="", curve=None, **values):
    cell = {"needles": 1, "length": 1024, "depth": 0.5} if cell is None else cell
    return Sample(model, cache, task, str(key), digest, cell, values, curve=curve or {})


def rights(pattern: str, model="a", **more) -> dict[str, Sample]:
    """Samples that are right where the pattern has a 1."""
    return {str(i): sample(i, model, right=float(c), **more) for i, c in enumerate(pattern)}


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    # Newcombe, "Two-sided confidence intervals for the single proportion", 1998, table I.
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_as_published(right, count, low, high):
    assert wilson(right, count) == pytest.approx((low, high), abs=5e-5)
    assert wilson(count - right, count) == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_accuracy_of_cells_of_one_size_is_that_of_all():
    samples = [sample(i, right=float(i % 4 == 0), cell={"needles": i % 2}) for i in range(40)]
    assert interval(ACCURACY, samples) == Interval(0.25, *wilson(10, 40))
    # Cells of different sizes count alike: 1 of 1 and 0 of 3.
    uneven = [sample(0, right=1.0, cell={"kind": 1})]
    uneven += [sample(i, right=0.0, cell={"kind": 2}) for i in (1, 2, 3)]
    assert interval(ACCURACY, uneven).value == 0.5
    assert math.isnan(interval(ACCURACY, uneven).low)


def test_perplexity_is_of_sums_in_a_domain_and_the_mean_of_domains():
    samples = [
        sample(0, task="perplexity", cell={"domain": "a"}, nats=2.0, tokens=4, bytes=8),
        sample(1, task="perplexity", cell={"domain": "a"}, nats=4.0, tokens=8, bytes=16),
        sample(2, task="perplexity", cell={"domain": "b"}, nats=3.0, tokens=2, bytes=3),
    ]
    value = (math.exp(6 / 12) + math.exp(3 / 2)) / 2
    assert interval(PERPLEXITY, samples).value == pytest.approx(value)
    value = (6 / 24 + 3 / 3) / 2 / math.log(2)
    assert interval(BITS, samples).value == pytest.approx(value)
    assert math.isnan(interval(BITS, samples).low)  # too few to say


def test_the_bootstrap_has_the_width_of_theory():
    rng = np.random.default_rng(0)
    nats = rng.normal(3, 0.5, size=400)
    samples = [
        sample(i, task="perplexity", cell={"domain": "a"}, nats=x, tokens=1, bytes=1)
        for i, x in enumerate(nats)
    ]
    low, high = interval(BITS, samples)[1:]
    width = 2 * 1.96 * nats.std() / math.sqrt(400) / math.log(2)
    assert high - low == pytest.approx(width, rel=0.1)
    assert interval(BITS, samples) == interval(BITS, samples, seed=0)
    assert interval(BITS, samples, seed=1)[1:] != (low, high)


def test_a_paired_bootstrap_by_hand():
    """With one sample that differs, a resample holds it k times of n, binomially."""
    a, b = rights("1010101010"), rights("1110101010", "b")
    difference = paired(ACCURACY, a, b)
    # Quantiles 2.5 and 97.5 % of a binomial of 10 draws with 1/10: 0 and 3.
    assert difference == pytest.approx(Interval(0.1, 0.0, 0.3))
    back = paired(ACCURACY, b, a)
    assert back == pytest.approx(Interval(-0.1, -0.3, 0.0))


def test_what_is_hard_for_both_does_not_count():
    pattern = "10" * 30
    better = pattern[:20].replace("0", "1") + pattern[20:]
    a, b = rights(pattern), rights(better, "b")
    low, high = paired(ACCURACY, a, b)[1:]
    # 10 of 60 differ: sqrt(p (1 - p) / n) is 0.048, unpaired it would be 0.088.
    assert high - low == pytest.approx(2 * 1.96 * 0.048, rel=0.1)
    assert low > 0


def test_only_what_is_the_same_is_paired():
    a = rights("111111")
    assert paired(ACCURACY, a, rights("000000", "b", digest="y")) is None
    some = {k: x for k, x in rights("000000", "b").items() if k != "5"}
    difference = paired(ACCURACY, a, some)
    assert difference == Interval(-1.0, -1.0, -1.0)
    alike = paired(ACCURACY, a, rights("111111", "b"))
    assert alike.value == 0 and math.isnan(alike.low)
    few = paired(ACCURACY, rights("1" * (LEAST - 1)), rights("0" * (LEAST - 1), "b"))
    assert few.value == -1 and math.isnan(few.high)


def test_the_table_says_which_differences_are_sure():
    samples = [*rights("10" * 30).values(), *rights("11" * 30, "b").values()]
    samples += rights("10" * 30, "b", digest="y", cache="own").values()
    lines = summed_up(samples)
    text = evaluated_table(lines)
    assert [line.samples for line in lines] == [60, 60, 60]
    rows = [re.split(r" {2,}", line) for line in text.splitlines()[2:]]
    assert rows[0] == ["needles", "accuracy", "a", "50.0 %", "(37.7 to 62.3)", "60"]
    assert rows[1][:4] == ["needles", "accuracy", "b", "100.0 %"] and rows[1][5] == "+50.0*"
    assert rows[2][2] == "b, own" and rows[2][5] == "other samples"
    alone = evaluated_table(summed_up(list(rights("1010").values())))
    assert "difference" not in alone
    for format in ("markdown", "html"):
        assert "+50.0*" in evaluated_table(lines, format)


def test_parts_have_lines_of_their_own():
    samples = [sample(i, right=1.0, cell={"needles": i % 2 + 1, "length": 9}) for i in range(4)]
    samples += [sample(i, task="recall", error=0.5, cell={"split": x}) for i, x in enumerate("uv")]
    assert [line.task for line in summed_up(samples)] == [
        "needles", "needles, n = 1", "needles, n = 2", "recall, u", "recall, v",
    ]  # fmt: skip
    large = sample(0, task="lambada", cell={}, right=0.0, nats=20.0)
    assert "4.852e+08" in evaluated_table(summed_up([large]))


def test_heat_maps_and_positions_by_hand(tmp_path):
    samples = [
        sample(f"{n} {depth} {i}", right=float(i < 3 * depth), model=model,
               cell={"needles": n, "length": 1024, "depth": depth})
        for model in "ab" for n in (1, 2) for depth in (0.0, 1.0) for i in range(3)
    ]  # fmt: skip
    rows, columns, matrix = shares(samples, "depth")
    assert (rows, columns, matrix.tolist()) == ([0.0, 1.0], [1024], [[0.0], [1.0]])
    curve = {"nats": [1.0, 4.0], "tokens": [1, 2]}
    windows = [
        sample(i, task="perplexity", cell={"domain": "d"}, nats=5.0, tokens=3, bytes=3, curve=curve)
        for i in range(2)
    ]
    assert by_position(windows) == pytest.approx({1: math.e, 2: math.exp(2)})
    harness = {"a": {"arc": {"acc": 0.25, "acc_stderr": 0.1, "samples": 8}}}
    assert harness_table(harness).splitlines()[2].split() == [
        "lm-eval:", "arc", "acc", "a", "0.2500", "±", "0.1000", "8",
    ]  # fmt: skip
    samples[0] = Sample(**vars(samples[0]) | {"reply": "<b>\x00", "expected": "12"})
    page = write_evaluation(tmp_path, [*samples, *windows], harness, {"config": {"seed": 0}})
    text = page.read_text()
    assert "http://" not in text.replace("http://www.w3.org", "") and "<script" not in text
    assert text.count("<figure>") == 2 + 1 and "&lt;b&gt;\\u0000" in text
    assert "lm-eval: arc" in text
    with pytest.raises(ValueError, match="samples must hold at least one answer"):
        write_evaluation(tmp_path, [], {}, {})
