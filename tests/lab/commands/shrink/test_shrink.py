"""`heedful shrink`: one folder out of a model, in the bytes that were asked for."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import heedful
from heedful.eviction import MostHidden, StreamingLLM
from heedful.hf.evicting.layer import EvictingLayer
from heedful.hf.stock import stock_model
from heedful.hf.versions import cache_argument
from heedful.training.run import Stopped
from heedful_lab.commands.budget.rows import perplexity, read_rows
from heedful_lab.commands.models import open_model, open_tokenizer
from heedful_lab.commands.shrink.options import Shrink
from heedful_lab.commands.shrink.run import ABOUT, shrink, size_for
from helpers.command_line import refusal
from helpers.families import logits
from helpers.small_models import small, tokenizer_of_words

LENGTH = 128
TEXT = "".join(f"the red bus {i} and the re-bu car of {i * i} is a bus. " for i in range(900))


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small(layers=3, vocabulary=262, positions=256).save_pretrained("base")
    tokenizer_of_words(pairs=("re", "bu")).save_pretrained("base")
    Path("text.txt").write_text(TEXT)
    return tmp_path


def options(**more) -> Shrink:
    trained = {} if more.get("train") == "none" else {"steps": 3}
    return Shrink("base", length=LENGTH, data=("text.txt",), trials=4, rows=2, **trained, **more)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("train", ["none", "selectors", "lora"])
def test_one_folder_that_decodes_in_a_quarter_of_the_bytes(here, train):
    said = []
    result = shrink(options(train=train, ratio=3), said.append)
    assert result.bf16_nbytes == 3 * LENGTH * 2 * 2 * 8 * 2
    assert 3 <= result.bf16_nbytes / result.nbytes < 3.4
    assert "about 1 minutes" in said[0] and "3 × fewer bytes" in said[0]
    folder = Path("runs/shrink")
    assert not (folder / "unfinished").exists()
    assert json.loads((folder / ABOUT).read_text())["result"] == result._asdict()
    model, base = heedful.load(folder), stock_model("base").eval()
    kind = StreamingLLM if train == "none" else MostHidden
    assert isinstance(model._heedful.eviction, kind)
    ids = torch.arange(5, 5 + LENGTH)[None]
    assert torch.equal(logits(model, ids), logits(base, ids))
    cache = heedful.new_cache(model)
    assert all(isinstance(layer, EvictingLayer) for layer in cache.layers)
    with torch.no_grad():
        for piece in ids.split(16, dim=1):
            model(piece, **cache_argument(model, cache))
    assert cache.nbytes == result.nbytes
    # The loss that it reports is that of calls of 32 tokens with this cache.
    tokenizer = open_tokenizer(None, str(folder), model)
    Path("end.txt").write_text(TEXT[round(len(TEXT) * 0.95) :])
    rows = read_rows(("end.txt",), tokenizer, LENGTH, 2)
    total = []
    for row in rows.ids:
        cache = heedful.new_cache(model)
        with torch.no_grad():
            calls = row[None].split(32, dim=1)
            parts = [model(x, **cache_argument(model, cache)).logits for x in calls]
        total.append(torch.nn.functional.cross_entropy(torch.cat(parts, 1)[0, :-1], row[1:]))
    assert torch.stack(total).mean().exp().item() == pytest.approx(result.perplexity, rel=1e-4)
    whole = perplexity(open_model("base"), rows)
    assert result.whole == pytest.approx(whole, rel=1e-5)
    assert shrink(options(train=train, ratio=3)) == result  # it is there


@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_same_result(here):
    whole = shrink(options(train="lora", ratio=3, out="whole"))
    stops = iter([False, True, True])
    with pytest.raises(Stopped):
        shrink(
            options(train="lora", ratio=3, out="stopped"), should_stop=lambda: next(stops, False)
        )
    assert json.loads((Path("stopped") / ABOUT).read_text())["result"] is None
    with pytest.raises(ValueError, match="another run: ratio was 3 and is 2 now"):
        shrink(options(train="lora", out="stopped", ratio=2))
    assert shrink(options(train="lora", ratio=3, out="stopped"))._replace(
        folder="", ms_per_token=0, whole_ms_per_token=0
    ) == whole._replace(folder="", ms_per_token=0, whole_ms_per_token=0)
    first, second = (heedful.load(name) for name in ("whole", "stopped"))
    assert first._heedful.eviction == second._heedful.eviction
    for name, x in first.state_dict().items():
        assert torch.equal(x, second.state_dict()[name]), name


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ended", [True, False])
def test_another_model_or_text_under_the_same_name_is_refused(here, ended):
    """Law 32: what the folder holds belongs to one model and one text."""
    plan = options(ratio=3)
    if ended:
        shrink(plan)
    else:
        with pytest.raises(Stopped):
            shrink(plan, should_stop=lambda: True)
    text, weights = Path("text.txt"), Path("base/model.safetensors")
    originals = text.read_text(), weights.read_bytes()
    text.write_text(TEXT.replace("red", "big"))
    with pytest.raises(ValueError, match=r"another run: inputs\.data.* was .* choose"):
        shrink(plan)
    text.write_text(originals[0])
    small(layers=3, vocabulary=262, positions=256, seed=1).save_pretrained("base")
    with pytest.raises(ValueError, match=r"another run: inputs\.model was .* choose"):
        shrink(plan)
    weights.write_bytes(originals[1])
    shrink(plan)


@pytest.mark.slow
def test_texts_of_a_command_that_was_refused_are_not_used(here):
    text = Path("text.txt")
    text.write_text(TEXT[:3000])  # the end of it is shorter than one sequence
    with pytest.raises(ValueError):
        shrink(options(ratio=3))
    text.write_text(TEXT)
    again = shrink(options(ratio=3))
    anew = shrink(options(ratio=3, out="anew"))
    assert (again.whole, again.perplexity) == (anew.whole, anew.perplexity)


def test_the_size_is_that_of_real_caches(here):
    for dtype in ("float32", "bfloat16"):
        model = stock_model("base", dtype=getattr(torch, dtype)).eval()
        size = size_for(model, LENGTH, 2.5, selects=False)
        cache = heedful.new_cache(model, StreamingLLM(tokens=size.tokens))
        with torch.no_grad():
            for piece in torch.ones(1, LENGTH, dtype=torch.long).split(16, 1):
                model(piece, **cache_argument(model, cache))
        assert cache.nbytes <= size.nbytes <= cache.bf16_nbytes / 2.5
        assert size.bf16_nbytes == cache.bf16_nbytes


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"ratio": 40},
            r"ratio=40 leaves no room for the 13 tokens .* of 128: at most \d\.\d here",
        ),
        ({"length": 512}, "length must be at most 256, the model's positions, got 512"),
        ({"data": ("recall",)}, "data names texts alone"),
    ],
)
def test_what_cannot_be_had_is_one_line(here, capsys, more, message):
    words = {"ratio": 4, "length": LENGTH, "data": ("text.txt",), "steps": 3} | more
    arguments = [f"--{k}={v}" for k, v in words.items() if k != "data"]
    line = refusal(capsys, "shrink", "base", *arguments, "--data", *words["data"])
    assert re.search(message, line), line
    assert not Path("runs").exists()


def test_a_model_with_a_mechanism_is_refused(here):
    shrink(options(train="none", ratio=3, out="small"))
    with pytest.raises(ValueError, match="has a mechanism already; name the model that it"):
        shrink(replace(options(train="none", out="again"), model="small"))
