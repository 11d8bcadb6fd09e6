"""Averaged attention maps before and after convolution, on a model that takes seconds."""

import json
import sys
from pathlib import Path

import pytest
import torch

import heedful
from benchmarks.real import maps
from heedful.hf.look import look
from helpers.families import stir
from helpers.small_models import save_base_of_bytes

LENGTH, QUERIES = 100, 40


@pytest.fixture
def model(tmp_path, monkeypatch):
    """Kernels and mixing from the identity in every layer, beside saved base weights."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = save_base_of_bytes(Path("base"), 512)
    heedful.convert(model, heedful.MultiToken(conv_every=1))
    return model


@pytest.fixture
def books():
    return list(torch.randint(300, (2, 1, LENGTH)))


def layers_of(model):
    return [x for x in model.modules() if isinstance(x, heedful.nn.MultiTokenAttention)]


def test_identity_kernels_leave_the_map_as_it_is(model, books):
    records = list(maps.averages(model, books, QUERIES))
    assert [r["layer"] for r in records] == [0, 1]
    for record in records:
        assert not any(map(any, record["learned"].values()))
        assert list(record["maps"]) == [*maps.STAGES.values(), "weights"]
        before = record["maps"]["before"]
        for stage in record["maps"].values():
            assert max(stage["from_before"] + stage["from_former"]) < 1e-6
            for measure in {"entropy", "first", "by_distance"} & stage.keys():
                got, expected = (torch.tensor(x[measure]) for x in (stage, before))
                torch.testing.assert_close(got, expected, rtol=0.01, atol=0)
        assert all("by_distance" in record["maps"][stage] for stage in maps.SPREAD)
        for shares, first in zip(before["by_distance"], before["first"], strict=True):
            assert sum(shares) + first == pytest.approx(1, abs=0.01)


def test_means_are_those_of_the_maps(model, books):
    """Distance by distance, from the whole map; everything but the first token in some bin."""
    stir(model, 0.1, ".heedful.")
    (record, _) = maps.averages(model, books, QUERIES)
    weights = torch.stack([look(model, ids)[0].weights for ids in books])[:, :, -QUERIES:]
    got = torch.tensor(record["maps"]["weights"]["by_distance"])
    assert maps.starts(LENGTH) == [*range(32), 32, 64] and maps.starts(20) == list(range(20))
    for near, far in ((0, 1), (5, 6), (32, 64), (64, LENGTH)):
        bin_of = maps.starts(LENGTH).index(near)
        expected = 0
        for at in range(QUERIES):
            query = LENGTH - QUERIES + at
            keys = [key for key in range(1, query + 1) if near <= query - key < far]
            expected = expected + weights[:, :, at, keys].sum(-1).mean(0) / QUERIES
        torch.testing.assert_close(got[:, bin_of], expected, rtol=0.01, atol=1e-4)
    first = torch.tensor(record["maps"]["weights"]["first"])
    torch.testing.assert_close(first, weights[..., 0].mean((0, 2)), rtol=0.01, atol=1e-4)


def test_a_kernel_that_shifts_by_one_key_moves_the_weight_by_one(model, books):
    with torch.no_grad():
        for layer in layers_of(model):
            layer.post_conv.zero_()
            layer.post_conv[:, -1, layer.post_conv.shape[2] // 2 - 1] = 1
    for record in maps.averages(model, books, QUERIES):
        before, after = (record["maps"][x] for x in ("before", "weights"))
        assert record["learned"]["post_conv"] == [1.0] * 4 and max(record["learned"]["conv"]) == 0
        assert after["first"] == [0.0] * 4
        for old, new in zip(before["by_distance"], after["by_distance"], strict=True):
            # A key's weight comes from the one before it.
            assert new[:31] == pytest.approx(old[1:32], rel=0.01)
        assert max(record["maps"]["probabilities"]["from_before"]) < 1e-6
        moved = record["maps"]["post-convolution"]["from_former"]
        assert moved == pytest.approx(after["from_before"], rel=0.01) and min(moved) > 0.05


def test_half_of_a_map_differs_from_none(model, books):
    with torch.no_grad():
        for layer in layers_of(model):
            layer.post_mix.zero_()
    for record in maps.averages(model, books, QUERIES):
        assert record["maps"]["weights"]["from_former"] == [0.5] * 4
        assert record["maps"]["post-convolution"]["from_former"] == pytest.approx([0] * 4, abs=1e-6)


def test_larger_logits_make_a_sharper_map(model, books):
    with torch.no_grad():
        for layer in layers_of(model):
            layer.conv.mul_(4)
    for record in maps.averages(model, books, QUERIES):
        assert record["learned"]["conv"] == [3.0] * 4
        former = record["maps"]["before"]["entropy"]
        sharp = record["maps"]["pre-convolution"]["entropy"]
        assert all(x < y for x, y in zip(sharp, former, strict=True))


def test_the_command_writes_one_record_per_layer_and_nothing_over(model, monkeypatch, capsys):
    heedful.save_adapter(model, "adapter", base="base")
    Path("books").mkdir()
    for number in range(3):
        text = f"Book {number} has many lines, and this is one of them.\n" * 100
        Path(f"books/{number}.txt").write_text(text)
    options = "adapter --books books --length 64 --queries 16 --rows 2 --out "
    monkeypatch.setattr(sys, "argv", ["benchmarks.real.maps", *options.split(), "maps.jsonl"])
    maps.main()
    lines = [json.loads(line) for line in Path("maps.jsonl").read_text().splitlines()]
    assert [(x["layer"], x["books"], x["length"]) for x in lines] == [(0, 2, 64), (1, 2, 64)]
    assert all(max(x["maps"]["weights"]["from_before"]) < 1e-6 for x in lines)
    for more, message in {
        "maps.jsonl": "maps.jsonl is there already",
        "new.jsonl --queries 64": "--queries must be 1 to 63, got 64",
        "new.jsonl --length 9000": "--books books: no books of 9000 tokens",
        "new.jsonl --books base": "--books base: no books of 64 tokens",
    }.items():
        monkeypatch.setattr(sys, "argv", ["benchmarks.real.maps", *(options + more).split()])
        with pytest.raises(SystemExit):
            maps.main()
        assert message in capsys.readouterr().err
    words = options.replace("adapter", "base").split()
    monkeypatch.setattr(sys, "argv", ["maps", *words, "new.jsonl"])
    with pytest.raises(SystemExit):
        maps.main()
    assert "base has no layer with kernels" in capsys.readouterr().err
    assert not Path("new.jsonl").exists()
