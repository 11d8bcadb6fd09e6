"""Files of results: what is written is read, whatever was cut off, and what is wrong is named."""

import json
import math
import re
from dataclasses import replace

import pytest

from heedful_lab.records import (
    WHOLE,
    Record,
    Sample,
    UnderBudget,
    append,
    read,
    read_numbered,
    read_records,
)
from helpers.invented_runs import run

SCORE = UnderBudget("text", "m", 0, WHOLE, 64, 64, "perplexity", {"x": 2.0}, 9.0, 8, 3, {})
SAMPLE = Sample("m", "", "needles", "0", "d", {"length": 9}, {"right": 1.0}, "é\n", "12")


def test_a_record_survives_its_line():
    record = run(config={"lr": 1e-3, "path": "a\nb"}, loss_curve=[(1, math.inf), (2, 1.5)])
    line = record.to_json()
    assert "\n" not in line
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    back = Record.from_json(line)
    assert back.to_json() == line
    assert back.config == record.config and back.curve == ((50, 0.9), (100, 0.5))
    assert math.isnan(back.loss_curve[0][1]) and back.loss_curve[1] == (2, 1.5)
    assert Record.from_json(run().to_json()) == run()


def test_the_value_of_a_run_is_its_metric_or_its_first_split():
    assert run(final={"bits_per_byte": 1.0, "held-out": 9.0}, metric="perplexity").value == 9.0
    assert run(final={"held-out": 9.0, "perplexity": 8.0}, metric="perplexity").value == 8.0
    with pytest.raises(ValueError, match="final must hold a value of the metric 'error'"):
        run(final={"perplexity": 2.0})
    with pytest.raises(ValueError, match="metric must be one of"):
        run(metric="accuracy")


@pytest.mark.parametrize("entry", [run(), SCORE, SAMPLE], ids=lambda x: type(x).__name__)
def test_a_line_that_was_cut_off_is_left_out_and_repaired(tmp_path, entry):
    path, kind = tmp_path / "results.jsonl", type(entry)
    other = replace(entry, task="other")
    assert read(path, kind) == []
    append(path, entry)
    whole = path.read_bytes()
    path.write_bytes(whole + other.to_json().encode()[:40])
    with pytest.warns(UserWarning, match="cut off"):
        assert read(path, kind) == [entry]
    with pytest.warns(UserWarning, match="cut off"):
        append(path, other, entry)
    assert path.read_bytes().startswith(whole)
    assert read_numbered(path, kind) == [(1, entry), (2, other), (3, entry)]
    # Cut off just before its newline, a line is whole.
    path.write_bytes(path.read_bytes()[:-1])
    append(path, other)
    assert read(path, kind) == [entry, other, entry, other]


@pytest.mark.parametrize("bad", ["{", "[]", '{"task": "blocks"}', None, "\xff"])
def test_any_other_bad_line_is_named(tmp_path, bad):
    path = tmp_path / "results.jsonl"
    if bad is None:
        bad = json.dumps({**json.loads(run().to_json()), "colour": 1})
    good = run().to_json().encode()
    path.write_bytes(good + b"\n" + bad.encode("latin-1") + b"\n" + good + b"\n")
    with pytest.raises(ValueError, match=re.escape(str(path)) + ", line 2: not a record"):
        read_records(path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("task", 3, "task must be a text, got 3"),
        ("metric", ["error"], "metric must be a text"),
        ("seed", "x", "seed must be a whole number, 0 or more, got 'x'"),
        ("steps", "many", "steps must be a whole number, 0 or more, got 'many'"),
        ("batch", 1.5, "batch must be a whole number"),
        ("parameters", True, "parameters must be a whole number"),
        ("final", [0.5], r"final must be an object, got \[0.5\]"),
        ("final", {"held-out": "low"}, "final must be a number or null, got 'low'"),
        ("curve", "steep", "curve must be pairs of step and value, got 'steep'"),
        ("loss_curve", [["1", 2]], "loss_curve must count steps in whole numbers, got '1'"),
        ("seconds", "long", "seconds must be a number or null, got 'long'"),
        ("environment", "here", "environment must be an object, got 'here'"),
        ("device", 0, "device must be a text or null, got 0"),
    ],
)
def test_a_wrong_typed_field_is_named_with_its_line(tmp_path, field, value, message):
    path = tmp_path / "results.jsonl"
    wrong = json.dumps(json.loads(run().to_json()) | {field: value})
    # Also as a last line without its newline: it is wrong, but not cut off.
    for content in (f"\n{wrong}\n", f"\n{wrong}"):
        path.write_text(content)
        with pytest.raises(ValueError, match=rf"results\.jsonl, line 2: not a record \({message}"):
            read_records(path)


def test_values_of_samples_are_numbers_and_older_scores_are_refused(tmp_path):
    for values in ({"right": "yes"}, {"right": True}):
        with pytest.raises(ValueError, match="values must be a number or null"):
            replace(SAMPLE, values=values)
    path = tmp_path / "budgets.jsonl"
    older = {key: x for key, x in json.loads(SCORE.to_json()).items() if key != "bf16_bytes"}
    path.write_text(json.dumps(older) + "\n")
    with pytest.raises(ValueError, match=r"line 1.*bf16_bytes; if an older.*name another folder"):
        read(path, UnderBudget)
    assert json.loads(path.read_text()) == older
