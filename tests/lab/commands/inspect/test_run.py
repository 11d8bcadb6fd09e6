"""`heedful inspect`: what its page holds is what `look` and the caches say, and what is refused."""

import base64
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForMaskedLM,
    BertConfig,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

import heedful
from heedful.data import ByteTokenizer
from heedful.eviction import MostHidden, StreamingLLM
from heedful.hf.budgets import write_budgets
from heedful.hf.cache.new import new_cache
from heedful.hf.look import cached_over_time, look, look_into
from heedful.nn import MultiToken
from heedful.ops import Visibility
from heedful.ops.mta.reference import correlate, mix_heads
from heedful_lab.commands.inspect import arrays as inside_module
from heedful_lab.commands.inspect.arrays import (
    DOES,
    LEFT,
    MOST_KEYS,
    NEAR,
    NOBODY,
    page_data,
    what_heads_do,
)
from heedful_lab.commands.inspect.options import Inspection
from heedful_lab.commands.inspect.page import MOST_PAGE, write_inspection
from heedful_lab.commands.inspect.patterns import kernel_pattern, mixing_pattern
from heedful_lab.commands.inspect.run import inside, spelled_tokens
from helpers.command_line import refusal, status_of
from helpers.small_models import converted, ids_of, small, tokenizer_of_words

HALF = 2**-11  # relative: what rounding to half precision changes
TEXT = "the red bus and the red car: a bus is a bus, and the car is red."


def saved(folder: Path, mechanism=None, **options) -> Path:
    model = small(**options) if mechanism is None else converted(mechanism, **options)
    model.save_pretrained(folder)
    tokenizer_of_words().save_pretrained(folder)
    return folder


def data_of(model, ids, **more):
    tokens = [chr(97 + i % 26) for i in range(ids.shape[1])]
    return page_data("m", {"M": (0, 1)}, tokens, look_into(model, ids), **more)


# What is seen of a layer.


def test_layers_one_by_one_are_the_look_at_all_of_them():
    model, ids = converted(MultiToken(conv_every=1)), ids_of(20)
    whole = look(model, ids)
    for index, layer in look_into(model, ids):
        assert torch.equal(layer.weights, whole[index].weights)
        assert torch.equal(layer.conv, whole[index].conv) and whole[index].steps == ()
    assert [index for index, _ in look_into(model, ids, [1])] == [1]
    with pytest.raises(ValueError, match=r"layers must be converted ones \(0, 1\), got 7"):
        look_into(model, ids, [7])


def test_steps_of_multi_token_attention_lead_from_logits_to_weights():
    model, ids = converted(MultiToken(conv_every=1, conv=(3, 5), post_conv=(2, 3))), ids_of(17)
    inputs = {}
    layers = [m.heedful for m in model.modules() if hasattr(m, "heedful")]
    hook = layers[0].register_forward_pre_hook(
        lambda _, args, options: inputs.update(q=args[0], k=args[1], scale=options["scale"]),
        with_kwargs=True,
    )
    (_, layer), _ = look_into(model, ids)
    hook.remove()
    steps = {step.name: step for step in layer.steps}
    assert list(steps) == [
        "logits", "convolved logits", "mixed logits", "softmax", "convolved softmax",
    ]  # fmt: skip
    assert [step.logits for step in layer.steps] == [True, True, True, False, False]
    q, k = inputs["q"], inputs["k"].repeat_interleave(2, dim=1)
    visible = Visibility().dense(17, 17, torch.device("cpu"))[0]
    plain = (q @ k.mT * inputs["scale"])[0].detach()
    assert torch.equal(steps["logits"].map, plain.masked_fill(~visible, -torch.inf))
    expected = correlate(plain.masked_fill(~visible, 0)[None], layer.conv)[0]
    assert torch.equal(steps["convolved logits"].map, expected.masked_fill(~visible, -torch.inf))
    expected = mix_heads(expected[None], layer.mix)[0].masked_fill(~visible, -torch.inf)
    torch.testing.assert_close(steps["mixed logits"].map, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(steps["softmax"].map, expected.softmax(-1), rtol=1e-5, atol=1e-6)
    expected = mix_heads(steps["convolved softmax"].map[None], layer.post_mix)[0]
    torch.testing.assert_close(layer.weights, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("mechanism", "names"),
    [
        ("standard", []),
        (MultiToken(conv=None, post_conv=None, post_mix=None), ["logits", "mixed logits"]),
        ("talking-heads", ["logits", "mixed logits", "softmax"]),
        (MultiToken(conv_every=1, mix=None, post_mix=None),
         ["logits", "convolved logits", "softmax"]),
        ("differential", ["first map", "second map"]),
        ("selective", ["logits"]),
    ],
)  # fmt: skip
def test_every_mechanism_has_the_steps_that_it_takes(mechanism, names):
    for _, layer in look_into(converted(mechanism), ids_of(9)):
        assert [step.name for step in layer.steps] == names
        assert all(step.map.shape == layer.weights.shape for step in layer.steps)
        if names == ["first map", "second map"]:
            first, second = (step.map for step in layer.steps)
            lam = (first - layer.weights)[:, 1:] / second[:, 1:].clamp(min=1e-9)
            visible = Visibility().dense(9, 9, torch.device("cpu"))[0][1:]
            assert lam[:, visible].std() < 1e-4  # one lambda for the layer
        if mechanism == "selective":
            f = layer.masking.cumsum(1) - layer.masking
            expected = (layer.steps[0].map - f).softmax(-1)
            torch.testing.assert_close(expected, layer.weights, rtol=1e-5, atol=1e-6)


# The arrays of the page.


@pytest.mark.parametrize("mechanism", ["mta", "selective", "differential", "standard"])
@pytest.mark.parametrize("count", [1, 2, 50])
def test_rows_hold_their_largest_entries(mechanism, count):
    model, ids = converted(mechanism), ids_of(count)
    data = data_of(model, ids)
    assert data.about["keys"] == min(count, MOST_KEYS)
    for index, layer in look_into(model, ids):
        about = data.about["layers"][index]
        maps = [(step.map, step.logits) for step in layer.steps] + [(layer.weights, False)]
        assert len(about["maps"]) == len(maps) and about["logits"] == [x for _, x in maps]
        for number, (map_, logits) in enumerate(maps):
            whole = map_.softmax(-1) if logits else map_
            arrays = {n: data.arrays[f"{index}/{number}/{n}"] for n in ("keys", "shares", "rest")}
            keys, shares = arrays["keys"].astype(int), arrays["shares"].astype(np.float32)
            assert keys.shape == (len(whole), count, min(count, MOST_KEYS))
            there = keys != NOBODY
            assert (shares[~there] == 0).all() and there[..., 0].all()
            entries = np.take_along_axis(whole.numpy(), np.where(there, keys, 0), -1)
            np.testing.assert_allclose(shares[there], entries[there], rtol=HALF, atol=2**-24)
            # None that is left out is larger than one that is there.
            omitted = np.sort(whole.abs().numpy(), -1)[..., : count - keys.shape[-1]]
            if omitted.size:
                assert (omitted[..., -1] <= np.abs(entries).min(-1) + 1e-7).all()
            first = data.arrays[f"{index}/{number}/first"]
            np.testing.assert_array_equal(first, whole[..., 0].half().numpy())
            others = whole[..., 1:].abs().sum(-1)
            np.testing.assert_allclose(arrays["rest"], others, rtol=HALF, atol=2**-24)
            if logits:
                back = (
                    np.log(np.maximum(entries, 1e-30))
                    + data.arrays[f"{index}/{number}/logz"][..., None]
                )
                at = np.take_along_axis(map_.numpy(), np.where(there, keys, 0), -1)
                np.testing.assert_allclose(back[there], at[there], atol=1e-3)


def test_hidden_since_is_where_F_passes_its_bounds():
    model, ids = converted("selective"), ids_of(40)
    data = data_of(model, ids)
    late = 0
    for index, layer in look_into(model, ids):
        f = layer.masking.double().cumsum(1) - layer.masking  # for query t, of what is before it
        since = data.arrays[f"{index}/since"]
        for level, share in enumerate(LEFT):
            for j in range(40):
                past = [t for t in range(40) if f[0, t, j] >= -math.log(share) - 1e-12]
                assert since[level, 0, j] == (past[0] if past else 40)
                late += 0 < since[level, 0, j] < 40
        np.testing.assert_allclose(
            data.arrays[f"{index}/hidden"], layer.masking.sum(1), rtol=1e-4, atol=1e-5
        )
        keys, amounts = (data.arrays[f"{index}/masks/{n}"] for n in ("keys", "amounts"))
        for t in range(40):
            there = keys[0, t] != NOBODY
            at = layer.masking[0, t, keys[0, t][there].astype(int)]
            np.testing.assert_allclose(amounts[0, t][there], at, rtol=HALF)
            assert amounts[0, t].max() == np.float16(layer.masking[0, t].max())
    assert late > 100  # the bounds are passed in the course of the row


def test_every_selector_has_its_own_since():
    model, ids = converted(heedful.Selective(selector="per-head")), ids_of(12)
    data = data_of(model, ids)
    assert data.arrays["0/since"].shape == (len(LEFT), 4, 12)
    assert data.about["layers"][0]["selectors"] == 4


@pytest.mark.parametrize("policy", [MostHidden(tokens=14), StreamingLLM(tokens=(13, 16))])
def test_what_is_gone_is_what_the_cache_no_longer_holds(policy):
    model, ids = converted("selective"), ids_of(30)
    cached = cached_over_time(model, ids, policy)
    data = data_of(model, ids, cached=cached, policy=str(policy))
    cache = new_cache(model, policy)
    for t in range(30):
        with torch.no_grad():
            model(input_ids=ids[:, t : t + 1], cache=cache)
        for index, at in enumerate(cache.positions()):
            evicted = data.arrays[f"{index}/gone"]
            rest = [j for j in range(t + 1) if evicted[j] > t]
            assert rest == at[0].tolist()
    assert (data.arrays["0/gone"] < 30).sum() > 10


def test_borders_are_those_of_the_groups():
    for grouping, spans in (
        ({"size": 8}, [[0, 7], [8, 15], [16, 19]]),
        ({"size": 8, "grouping": "sliding", "stride": 6}, [[0, 7], [6, 13], [12, 19], [18, 19]]),
    ):
        model = converted(heedful.Grouped(window=10, **grouping))
        data = data_of(model, ids_of(20))
        assert data.arrays["1/groups"].tolist() == spans
    assert "1/groups" not in data_of(converted("standard"), ids_of(9)).arrays


def test_what_heads_do_is_counted_by_hand():
    count = 60
    weights = torch.zeros(3, count, count)
    for t in range(count):
        weights[0, t, max(t - 1, 0)] = 1
        weights[1, t, 0], weights[1, t, t] = 0.75, 0.25
        weights[2, t, max(t - NEAR, 0)] = 0.5
        weights[2, t, max(t - NEAR - 1, 0)] -= 0.5  # its size counts
    shares = what_heads_do(weights)
    queries = count - 1
    by_name = dict(zip(DOES, shares.transpose(2, 0, 1), strict=True))
    assert by_name["previous"][0, 0] == pytest.approx((queries - 1) / queries)
    assert by_name["first"][0, 0] == pytest.approx(1 / queries)  # of query 1
    assert by_name["previous"][1, 0] == pytest.approx(1)
    assert by_name["first"][0, 1] == pytest.approx(0.75) and by_name["self"][1, 1] == 1
    # Query 17 has half on the first; of queries before it nothing is left, as the two cancel.
    later = queries - NEAR
    assert by_name["near"][1, 2] == pytest.approx((1 + 0.5 * (later - 1)) / later)
    assert by_name["far"][1, 2] == pytest.approx(0.5 * (later - 1) / later)
    np.testing.assert_allclose(shares.sum(-1), 1, rtol=1e-5)
    assert what_heads_do(torch.ones(2, 1, 1)).tolist() == np.zeros((2, 2, 5)).tolist()


def test_a_page_of_many_heads_keeps_fewer_keys_and_says_so(monkeypatch, tmp_path):
    model, ids = converted("mta"), ids_of(50)
    whole = data_of(model, ids)
    size = sum(x.nbytes for x in whole.arrays.values())
    monkeypatch.setattr(inside_module, "MOST_BYTES", size // 2)
    data = data_of(model, ids)
    keys = data.about["keys"]
    assert 4 <= keys < MOST_KEYS and sum(x.nbytes for x in data.arrays.values()) <= size // 2
    np.testing.assert_array_equal(data.arrays["0/0/keys"], whole.arrays["0/0/keys"][..., :keys])
    path = write_inspection(tmp_path / "page.html", data)
    assert path.stat().st_size <= size // 2 * 4 // 3 + MOST_PAGE - 48 * 2**20 * 4 // 3
    monkeypatch.setattr(inside_module, "MOST_BYTES", size // 20)
    with pytest.raises(ValueError, match="too many for one page: 4 keys of every row would be"):
        data_of(model, ids)
    assert MOST_PAGE <= 65 * 2**20


# Names of patterns.


def kernel(entries: dict, rows: int = 6, columns: int = 11):
    weight = np.zeros((rows, columns))
    for at, value in entries.items():
        weight[at] = value
    return weight


@pytest.mark.parametrize(
    ("entries", "name"),
    [
        ({(5, 5): 1}, "near identity"),
        ({(5, 5): 3, (2, 2): 0.5}, "near identity"),  # 0.25 of 9.25 of the energy
        ({(5, 5): -1}, "other"),
        ({(5, 5): 1, (4, 4): 1, (3, 3): 0.7}, "diagonal"),
        ({(5, 5): 1, (4, 5): 1, (3, 5): 0.7}, "priming"),
        ({(5, 5): 1, (4, 5): 0.7, (4, 4): 0.8}, "diagonal"),
        ({(5, 5): 1, (5, 4): -1}, "edge"),
        ({(5, 5): 1, (5, 4): -0.6}, "other"),
        ({(5, 5): 1, (5, 6): 1}, "other"),
        ({}, "other"),
    ],
)
def test_kernels_have_the_names_of_their_patterns(entries, name):
    assert kernel_pattern(kernel(entries)) == name
    assert kernel_pattern(10 * kernel(entries)) == name


def test_two_sided_kernels_have_their_identity_in_the_middle():
    weight = kernel({(3, 5): 1, (2, 4): 1, (4, 6): 1}, rows=7)
    assert kernel_pattern(weight, two_sided=True) == "diagonal"
    assert kernel_pattern(kernel({(3, 5): 1}, rows=7), two_sided=True) == "near identity"
    with pytest.raises(ValueError, match=r"kernel must be finite numbers \[c_q, c_k\]"):
        kernel_pattern(np.zeros(3))


def test_mixing_has_the_names_of_its_patterns():
    eye = np.eye(4)
    assert mixing_pattern(eye) == "near identity"
    assert mixing_pattern(0.5 * eye) == "scaled identity"
    against = eye.copy()
    against[2, 0] = -0.6
    assert mixing_pattern(against) == "contrasting"
    against[2, 0] = 0.6
    assert mixing_pattern(against) == "other"
    assert mixing_pattern(1.2 * eye - 0.2) == "contrasting"  # less the mean of the others
    assert mixing_pattern(1.15 * eye - 0.15) == "other"
    assert mixing_pattern(-eye) == "other"
    with pytest.raises(ValueError, match=r"mix must be finite numbers \[g, g\]"):
        mixing_pattern(np.ones((2, 3)))


# The command.


def arrays_in(page: str) -> tuple[dict, dict]:
    """What a page holds, as a browser would read it."""
    about = json.loads(re.search(r'id="about">(.*?)</script>', page)[1])
    arrays = {}
    for name, (number, kind, shape) in about["arrays"].items():
        text = re.search(rf'id="a{number}">([^<]*)</script>', page)[1]
        arrays[name] = np.frombuffer(base64.b64decode(text), kind).reshape(shape)
    return about, arrays


def test_the_command_writes_one_page_that_loads_nothing(tmp_path, capsys):
    folder = saved(tmp_path / "mine", "selective")
    out = tmp_path / "new" / "page.html"
    text = TEXT + "</script><b>&\u2028 é ∑"
    words = (folder, "--text", text, "--out", out, "--budget", "20")
    assert status_of("inspect", *words) == 0
    assert re.fullmatch(r"page: .*page\.html \(\d\.\d MiB\)\n", capsys.readouterr().out)
    page = out.read_text()
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|url\(|@import|src=", page)
    about, arrays = arrays_in(page)
    assert about["tokens"][0] == "<bos>"
    # Every byte is a token; one of several bytes is written out once for each of its bytes.
    assert "".join(about["tokens"][1 : 1 + len(TEXT)]) == TEXT
    assert about["model"] == "mine" and about["mechanisms"] == {"Selective()": [0, 1]}
    assert about["policy"].startswith("MostHidden(tokens=20")
    result = inside(Inspection(str(folder), text=text, budget="20"))
    data = page_data(*result)
    assert data.arrays.keys() == arrays.keys()
    for name, x in data.arrays.items():
        np.testing.assert_array_equal(arrays[name], x)
        assert arrays[name].dtype == x.dtype
    assert (arrays["0/gone"] < len(about["tokens"])).any()
    assert status_of("inspect", *words, "--layers", "1", "--tokens", "30") == 0
    about, arrays = arrays_in(out.read_text())
    assert len(about["tokens"]) == 30 and [x["index"] for x in about["layers"]] == [1]
    assert not [name for name in arrays if name.startswith("0/")]


def test_budgets_beside_the_model_are_shown(tmp_path):
    model = converted("selective")
    folder = saved(tmp_path / "m", "selective")
    write_budgets(folder / "budgets.json", MostHidden(tokens=(13, 17)), model, {})
    assert inside(Inspection(str(folder), text=TEXT)).policy.startswith("MostHidden(tokens=(13, 17")
    assert inside(Inspection(str(folder), text=TEXT, eviction="none")).cached == {}


def test_encoders_are_seen_and_encoder_decoders_refused(tmp_path, capsys):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    config = BertConfig(vocab_size=260, num_attention_heads=4, **sizes)
    model = AutoModelForMaskedLM.from_config(config)
    heedful.convert(model, MultiToken(conv_every=1))
    model.save_pretrained(tmp_path / "encoder")
    tokenizer_of_words().save_pretrained(tmp_path / "encoder")
    out = tmp_path / "page.html"
    assert status_of("inspect", tmp_path / "encoder", "--text", TEXT, "--out", out) == 0
    about, arrays = arrays_in(out.read_text())
    assert about["causal"] is False and about["layers"][0]["two_sided"] is True
    assert set(about["layers"][0]["patterns"]["conv"]) == {"near identity"}
    assert (arrays["0/0/keys"][0, 1] != NOBODY).sum() == MOST_KEYS  # an early row sees later ones
    words = ("--text", TEXT, "--out", out)
    line = refusal(capsys, "inspect", tmp_path / "encoder", *words, "--budget", "9")
    assert "is an encoder, which keeps nothing" in line
    t5 = T5Config(vocab_size=260, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(t5).save_pretrained(tmp_path / "pair")
    tokenizer_of_words().save_pretrained(tmp_path / "pair")
    line = refusal(capsys, "inspect", tmp_path / "pair", *words)
    assert "is an encoder-decoder (t5)" in line


def test_tokens_are_spelled_as_the_text_has_them():
    text = "the  red bus\nis red, is it?"
    vocabulary = {
        word: i for i, word in enumerate(["the", "red", "bus", "is", "it", ",", "?", "[CLS]"])
    }
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # which drops white space
    words.add_special_tokens(["[CLS]"])
    words.post_processor = processors.TemplateProcessing("[CLS] $A", None, [("[CLS]", 7)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, cls_token="[CLS]")
    spelling = spelled_tokens(text, tokenizer.encode(text), tokenizer)
    assert spelling[:5] == ["[CLS]", "the", "  red", " bus", "\nis"]
    assert "".join(spelling[1:]) == text
    own = ByteTokenizer()
    assert spelled_tokens("a é", own.encode("a é"), own) == ["a", " ", "\ufffd", "\ufffd"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--text", ""], "text must have at least one character, got an empty one"),
        (["--text", "binary.txt"], "got the name of a file, .binary.txt.; give it as --file"),
        (["--file", "nothing.txt"], "No such file or directory: nothing.txt"),
        (["--file", "binary.txt"], "file binary.txt is not UTF-8 text"),
        (["--text", "x" * 300], "text has 301 tokens, and the model has positions for 256 at most"),
        (["--text", TEXT, "--layers", "7"], r"layers must be converted ones \(0, 1\), got 7"),
        (["--text", TEXT, "--budget", "many"], "budget must be a number of tokens, or a budgets"),
        (["--text", TEXT, "--tokenizer", "larger"], "has 600 tokens and the model 260"),
    ],
)  # fmt: skip
def test_bad_input_is_answered(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    saved(Path("m"))
    Path("binary.txt").write_bytes(b"\xff\xfe\x00")
    larger = tokenizer_of_words()
    larger.add_tokens([f"<more {i}>" for i in range(600 - len(larger))])
    larger.save_pretrained("larger")
    assert re.search(message, refusal(capsys, "inspect", "m", *words))
    assert not Path("inspect.html").exists()


def test_a_text_longer_than_a_page_is_refused(tmp_path, capsys):
    folder = saved(tmp_path / "m", positions=4096)
    words = ("--text", "x" * 2048, "--out", tmp_path / "page.html")
    line = refusal(capsys, "inspect", folder, *words)
    assert "text has 2,049 tokens, and a page shows 2,048 at most" in line


def test_a_failure_leaves_the_old_page(tmp_path):
    data = data_of(converted("standard"), ids_of(5))
    path = write_inspection(tmp_path / "page.html", data)
    before = path.read_bytes()
    data.about["model"] = float("nan")
    with pytest.raises(ValueError):
        write_inspection(path, data)
    assert path.read_bytes() == before and [x.name for x in tmp_path.iterdir()] == ["page.html"]
