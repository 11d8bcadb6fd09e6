"""`heedful generate`: what it writes, what it counts, and what it refuses."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import heedful
from heedful.data import ByteTokenizer
from heedful.eviction import POLICIES, TOVA, MostHidden, SnapKV, StreamingLLM
from heedful.hf.budgets import write_budgets
from heedful.hf.evicting.layer import EvictingLayer
from heedful.nn import MultiToken
from heedful_lab.cli import main
from heedful_lab.commands.generate.run import CHUNK
from heedful_lab.commands.options import EVICTIONS
from heedful_lab.commands.policies import spelled
from helpers.cached import greedy
from helpers.command_line import refusal, status_of
from helpers.small_models import PROMPT, files_of, generation_of, small, tokenizer_of_words


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Iterator[Path]:
    """plain: an ordinary model; selective, mta: converted ones; words, chat: with a tokenizer."""
    root = tmp_path_factory.mktemp("models")
    small().save_pretrained(root / "plain")
    for name in ("selective", "mta"):
        model = small()
        heedful.convert(model, "selective" if name == "selective" else MultiToken(conv_every=1))
        model.save_pretrained(root / name)
    for name in ("words", "chat"):
        shutil.copytree(root / "selective", root / name)
        tokenizer_of_words(name == "chat").save_pretrained(root / name)
    yield root


def by_hand(model, ids: list[int], new: int, **options) -> list[int]:
    """Greedy, from whole forward passes or with a cache."""
    return greedy(model, torch.tensor([ids]), new, **options)[0, len(ids) :].tolist()


@pytest.mark.parametrize("name", ["plain", "selective", "mta"])
def test_it_goes_on_greedily_and_counts_the_cache(folders, name):
    generation, pieces = generation_of(folders / name)
    load = AutoModelForCausalLM.from_pretrained if name == "plain" else heedful.load
    model = load(folders / name).eval()
    expected = by_hand(model, list(PROMPT.encode()), 12, use_cache=False)
    assert generation.text == bytes(x for x in expected if x < 256).decode(errors="replace")
    assert len(pieces) > 1  # told as it is made
    assert (generation.prompt, generation.tokens) == (len(PROMPT), 12)
    tokens, row = len(PROMPT) + 11, 2 * 8 * 4  # the last token is never read
    per_token = 2 * (2 * row + (4 if name == "selective" else 0))
    assert generation.whole_nbytes == tokens * per_token
    extra = generation.contents_nbytes - generation.whole_nbytes  # the newest rows of queries
    assert extra >= 0 and (extra > 0) == (name == "mta")
    assert generation.contents_nbytes <= generation.nbytes <= generation.peak_nbytes
    assert generation.tokens_per_second > 0


@pytest.mark.parametrize("budget", [None, "20"])
def test_a_cache_can_be_quantized(folders, budget):
    options = {"max_new_tokens": 24, "chunk": 8}
    whole, _ = generation_of(folders / "selective", eviction="none", **options)
    quantized, _ = generation_of(
        folders / "selective", cache_dtype="int8", budget=budget, **options
    )
    model = heedful.load(folders / "selective")
    eviction = MostHidden(tokens=20) if budget else False
    cache = heedful.new_cache(model, eviction, dtype=torch.int8)
    expected = by_hand(model, list(PROMPT.encode()), 24, cache=cache, prefill_chunk_size=8)
    assert quantized.text == ByteTokenizer().decode(expected)
    assert (quantized.nbytes, quantized.peak_nbytes) == (cache.nbytes, cache.peak_nbytes)
    assert quantized.whole_nbytes == whole.whole_nbytes <= whole.nbytes
    assert quantized.nbytes < whole.nbytes / 2


@pytest.mark.parametrize("name", sorted({*EVICTIONS} - {"none", "lowest-gate"}))
def test_every_policy_can_be_named(folders, name):
    generation, _ = generation_of(
        folders / "selective", eviction=name, budget="20", max_new_tokens=24, chunk=8
    )
    policies = {spelled(policy.__name__): policy for policy in POLICIES} | {"auto": MostHidden}
    model = heedful.load(folders / "selective")
    cache = heedful.new_cache(model, policies[name](tokens=20))
    expected = by_hand(model, list(PROMPT.encode()), 24, cache=cache, prefill_chunk_size=8)
    assert generation.text == ByteTokenizer().decode(expected)
    assert cache.tokens == [19, 19]
    assert generation.nbytes == cache.nbytes < generation.whole_nbytes / 2
    assert generation.peak_nbytes == cache.peak_nbytes


@pytest.mark.parametrize("policy", [StreamingLLM, TOVA, SnapKV, None])
def test_an_ordinary_model_stays_as_it_is(folders, policy):
    """Its cache is that of its own attention, which takes fewer bytes than a converted model's."""
    name = "auto" if policy is None else spelled(policy.__name__)
    budget = None if policy is None else "20"
    generation, _ = generation_of(
        folders / "plain", eviction=name, budget=budget, max_new_tokens=24, chunk=8
    )
    model = AutoModelForCausalLM.from_pretrained(folders / "plain").eval()
    cache = heedful.new_cache(model, None if policy is None else policy(tokens=20))
    assert all(isinstance(layer, EvictingLayer) for layer in cache.layers)
    expected = by_hand(model, list(PROMPT.encode()), 24, cache=cache, prefill_chunk_size=8)
    assert generation.text == bytes(x for x in expected if x < 256).decode(errors="replace")
    sizes = (cache.nbytes, cache.peak_nbytes, cache.contents_nbytes)
    assert (generation.nbytes, generation.peak_nbytes, generation.contents_nbytes) == sizes


LANDMARKS = """
from dataclasses import dataclass
from heedful.eviction import Eviction

@dataclass(frozen=True)
class Landmarks(Eviction):
    every: int = 8

    def score(self, cached):
        landmark = cached.positions % self.every == 0
        return cached.positions.float() + cached.total * landmark

Other = int
"""


@pytest.mark.parametrize("module", ["my_policies", "my_policies.py", "folder/my_policies.py"])
def test_a_policy_of_a_user_s_file(folders, tmp_path, monkeypatch, module):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for folder in (tmp_path, tmp_path / "folder"):
        (folder / "my_policies.py").write_text(LANDMARKS)
    options = {"budget": "20", "max_new_tokens": 24, "chunk": 8}
    generation, _ = generation_of(folders / "plain", eviction=f"{module}:Landmarks", **options)
    assert generation.cached == (19, 19)
    oldest, _ = generation_of(folders / "plain", eviction="streaming-llm", **options)
    assert generation.text != oldest.text
    for name, message in (
        (f"{module}:Landmark", "has no policy Landmark, which must be a class derived from"),
        (f"{module}:Other", "has no policy Other, which must be a class derived from heedful"),
        ("no_such_module:Landmarks", r"no_such_module cannot be imported \(No module named"),
    ):
        with pytest.raises(ValueError, match=message):
            generation_of(folders / "plain", eviction=name, **options)
    with pytest.raises(ValueError, match=r"eviction must be one of .*, 'MODULE:CLASS', got"):
        generation_of(folders / "plain", eviction="tovaa", **options)


KEEPING = """
from dataclasses import dataclass
from heedful.eviction import StreamingLLM

@dataclass(frozen=True)
class Keeping(StreamingLLM):
    keep_prompt: bool = True
"""


@pytest.mark.parametrize("name", ["plain", "selective"])
def test_the_last_token_of_a_prompt_belongs_to_it(folders, tmp_path, monkeypatch, name):
    """Also where it comes alone, as the last piece."""
    monkeypatch.chdir(tmp_path)
    Path("keeping.py").write_text(KEEPING)
    caches = []
    monkeypatch.setattr(
        "heedful_lab.commands.generate.run.new_cache",
        lambda *args, **options: caches.append(heedful.new_cache(*args, **options)) or caches[-1],
    )
    prompt = PROMPT[:33]
    generation_of(
        folders / name, prompt=prompt, eviction="keeping.py:Keeping", budget="42", chunk=8,
        max_new_tokens=20,
    )  # fmt: skip
    for positions in caches[0].positions():
        assert positions[0, :33].tolist() == list(range(33))


def test_a_prompt_under_a_budget_comes_in_pieces_but_for_snapkv(folders):
    prompt = PROMPT * 5  # 190 tokens
    lengths = {
        name: generation_of(folders / "selective", prompt=prompt, eviction=name, budget="20")[
            0
        ].peak_nbytes
        for name in ("auto", "streaming-llm", "snap-kv")
    }
    row = 2 * 2 * 8 * 4  # of one layer; the other has evicted before this one reads the prompt
    assert lengths["snap-kv"] > len(prompt) * row
    for name in ("auto", "streaming-llm"):
        assert lengths[name] < (2 * 20 + CHUNK + CHUNK // 2) * (row + 16)


def test_tokens_are_drawn_by_a_seed(folders):
    texts = [
        generation_of(folders / "plain", temperature=1.5, seed=seed)[0].text for seed in (3, 3, 4)
    ]
    assert texts[0] == texts[1] != texts[2]
    greedy = generation_of(folders / "plain")[0].text
    assert greedy not in texts
    assert generation_of(folders / "plain", temperature=1e-6)[0].text == greedy


def test_a_prompt_from_a_file(folders, tmp_path):
    (tmp_path / "prompt.txt").write_text(PROMPT)
    generation, _ = generation_of(folders / "plain", prompt=None, file=str(tmp_path / "prompt.txt"))
    assert generation.text == generation_of(folders / "plain")[0].text


def test_a_tokenizers_own_way(folders):
    """Its BOS without a chat template; the template where there is one, unless told not to."""
    model = heedful.load(folders / "words")
    tokenizer = tokenizer_of_words()
    plain = [256, *ids_of(tokenizer, PROMPT)]
    chat = [256, 257, *ids_of(tokenizer, PROMPT), 258]
    for folder, options, ids in (
        ("words", {}, plain),
        ("chat", {}, chat),
        ("chat", {"chat": False}, plain),
        ("selective", {"tokenizer": str(folders / "chat")}, chat),
    ):
        generation, _ = generation_of(folders / folder, **options)
        expected = by_hand(model, ids, 12)
        assert generation.prompt == len(ids)
        assert generation.text == tokenizer.decode(expected, skip_special_tokens=True)


def ids_of(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def test_characters_of_several_bytes_are_printed_whole():
    """And what comes is what was decoded, also where it ends within a character."""
    from heedful_lab.commands.generate.run import _Streamer

    for cut in (0, 1):
        pieces: list[str] = []
        streamer = _Streamer(ByteTokenizer(), pieces.append)
        streamer.put(torch.zeros(1, 5))
        data = "é – ∞ and 🚌".encode()
        data = data[: len(data) - cut]
        for byte in data:
            streamer.put(torch.tensor([byte]))
        streamer.end()
        assert "".join(pieces) == data.decode(errors="replace")
        assert pieces[:3] == ["é", " ", "–"]


def test_budgets_beside_a_model_are_used(folders, tmp_path):
    for name, policy in (("selective", MostHidden), ("plain", StreamingLLM)):
        folder = shutil.copytree(folders / name, tmp_path / name)
        model = small()
        heedful.convert(model, "selective" if name == "selective" else "standard")
        policy = policy(tokens=(16, 24))
        write_budgets(folder / "budgets.json", policy, model, {})
        generation, _ = generation_of(folder, max_new_tokens=30)
        cache = heedful.new_cache(model, policy)
        options = {"cache": cache, "prefill_chunk_size": CHUNK}
        expected = by_hand(model, list(PROMPT.encode()), 30, **options)
        assert generation.text == ByteTokenizer().decode(expected)
        assert generation.nbytes == cache.nbytes
        assert (
            generation_of(folder, max_new_tokens=30, eviction="none")[0].nbytes
            > 2 * generation.nbytes
        )
        as_file = generation_of(
            folders / name, max_new_tokens=30, budget=str(folder / "budgets.json")
        )[0]
        assert as_file._replace(tokens_per_second=0) == generation._replace(tokens_per_second=0)


def test_as_a_command_the_text_goes_to_stdout_and_the_sum_to_stderr(folders, capsys):
    expected, _ = generation_of(folders / "chat", budget="20")
    capsys.readouterr()
    words = ["--prompt", PROMPT, "--budget", "20", "--max-new-tokens", "12"]
    assert status_of("generate", str(folders / "chat"), *words) == 0
    out, err = capsys.readouterr()
    assert out == expected.text + "\n"
    keys = 2 * 2 * 2 * 8  # numbers of a token: two layers, keys and values, two heads of 8
    assert expected.bf16_nbytes == 2 * keys * 52
    size = expected.contents_nbytes
    assert size < expected.nbytes
    error = r"41 tokens read, 12 written at [\d.]+ tokens/s; the cache has 19 of 52 tokens per "
    error += rf"layer in {size / 1024:.1f} KiB, {expected.bf16_nbytes / size:.1f} × smaller than a "
    error += rf"full one in bf16 \({expected.bf16_nbytes / 1024:.1f} KiB\); peak with reserve "
    assert re.fullmatch(error + rf"{expected.peak_nbytes / 1024:.1f} KiB\ndevice: cpu\n", err)


WRONG = {
    "prompt has 48 tokens, and with 240 new ones that is more than the 256 that the model has "
    "positions for; give --max-new-tokens 208 at most": ["--prompt", "x" * 48, "--max-new-tokens",
                                                         "240"],
    "prompt has 300 tokens, .* positions for; shorten it": ["--prompt", "x" * 300],
    "prompt has no tokens": ["--prompt", ""],
    "No such file or directory: nowhere.txt": ["--file", "nowhere.txt"],
    "tokens must be whole numbers of at least sinks . recent . 1 = 13, got 12": [
        "--prompt", "x", "--budget", "12"],
    "budget must be a number of tokens, or a budgets.json .* got 'few'": [
        "--prompt", "x", "--budget", "few"],
    "cache b is not a file": ["--prompt", "x", "--cache", "b"],
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_wrong_options_are_one_line(folders, message, capsys):
    words = ("generate", folders / "selective", "--tokenizer", "bytes", *WRONG[message])
    assert re.search(message, refusal(capsys, *words))


def test_tokenizers_that_do_not_fit_are_one_line(folders, tmp_path, capsys):
    model = small(vocabulary=200)
    heedful.convert(model, "standard")
    model.save_pretrained(tmp_path / "few")
    options = ["--prompt", "x", "--tokenizer"]
    for name in ("bytes", str(folders / "words")):
        error = refusal(capsys, "generate", tmp_path / "few", *options, name)
        assert re.search(r"has 25[69] tokens and the model 200; it belongs to another model", error)
    small(vocabulary=1000).save_pretrained(tmp_path / "many")
    error = refusal(capsys, "generate", tmp_path / "many", *options, "bytes")
    assert "'bytes' has 256 tokens and the model 1000, which are not bytes" in error
    error = refusal(capsys, "generate", folders / "selective", "--prompt", "x")
    assert "cannot be read" in error and "--tokenizer bytes if these are bytes" in error
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    error = refusal(capsys, "generate", folders / "selective", *options, tmp_path / "broken")
    assert "broken' cannot be read" in error


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


DAMAGE = {
    "config": lambda folder: cut(folder / "config.json"),
    "weights": lambda folder: cut(folder / "model.safetensors"),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "empty": lambda folder: [path.unlink() for path in folder.iterdir()],
    "another shape": lambda folder: (folder / "config.json").write_text(
        (folder / "config.json").read_text().replace('"hidden_size": 32', '"hidden_size": 64')),
    "another type": lambda folder: (folder / "config.json").write_text(
        (folder / "config.json").read_text().replace('"hidden_size": 32', '"hidden_size": "x"')),
    "a file": lambda folder: [shutil.rmtree(folder), folder.write_text("model")],
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_models_are_one_line_and_nothing_changes(folders, damage, tmp_path, capsys):
    folder = shutil.copytree(folders / "selective", tmp_path / "broken")
    DAMAGE[damage](folder)
    before = files_of(tmp_path)
    error = refusal(capsys, "generate", folder, "--prompt", "x", "--tokenizer", "bytes")
    assert str(folder) in error
    assert files_of(tmp_path) == before


def test_budgets_that_do_not_fit_are_one_line(folders, tmp_path, capsys):
    folder = shutil.copytree(folders / "selective", tmp_path / "model")
    words = ("generate", folder, "--prompt", "x", "--tokenizer", "bytes")
    model = small()
    heedful.convert(model, "selective")
    path = folder / "budgets.json"

    def error(model=model, eviction=None, change=None) -> str:
        write_budgets(path, eviction or MostHidden(tokens=(16, 16)), model, {})
        if change is not None:
            data = json.loads(path.read_text())
            change(data)
            path.write_text(json.dumps(data))
        before = files_of(tmp_path)
        line = refusal(capsys, *words)
        assert files_of(tmp_path) == before
        # The same as an option, and without them the model works.
        away = path.rename(tmp_path / "away.json")
        other = refusal(capsys, *words, "--budget", away)
        assert other == line.replace(str(path), str(away))
        shutil.copy(away, path)
        generation_of(folder, eviction="none", max_new_tokens=1)
        return line

    other = small(seed=1)
    heedful.convert(other, "selective")
    assert "belongs to another model, or to this one before it was trained on" in error(other)
    three = MostHidden(tokens=(16, 16, 16))
    assert "one for each of the model's 2 attention layers, got 3" in error(eviction=three)
    assert "names no policy of this version" in error(change=lambda x: x["eviction"].pop("kind"))
    assert "names no policy" in error(change=lambda x: x["eviction"].update(more=1))
    assert "must be a file of heedful budget in format 2" in error(change=lambda x: x.clear())
    wrong = {"tokens": ["a", "b"]}
    assert "tokens must be whole numbers" in error(change=lambda x: x["eviction"].update(wrong))
    write_budgets(path, MostHidden(tokens=(16, 16)), model, {})
    cut(path)
    assert "is not valid JSON" in refusal(capsys, *words)
    write_budgets(path, StreamingLLM(tokens=(16, 16)), model, {})
    line = refusal(capsys, *words, "--budget", path, "--eviction", "tova")
    assert "eviction='tova' is not what" in line and "streaming-llm; leave --eviction out" in line


def test_the_whole_cache_writes_first_where_both_are_requested(folders, capsys):
    words = ["--prompt", PROMPT, "--tokenizer", "bytes", "--max-new-tokens", "8"]
    command = ["generate", str(folders / "selective"), *words, "--budget", "16"]
    with pytest.raises(SystemExit, match="0"):
        main([*command, "--beside-whole"])
    captured = capsys.readouterr()
    whole, small_cache = (generation_of(folders / "selective", max_new_tokens=8, budget=x)
                          for x in (None, "16"))  # fmt: skip
    assert captured.out == f"{whole[0].text}\n{small_cache[0].text}\n"
    first, second = re.findall(r"per layer in ([\d.]+) KiB", captured.err)
    assert float(first) > float(second)
    line = refusal(capsys, "generate", folders / "selective", *words, "--beside-whole")
    assert "beside_whole needs a smaller cache to compare; give a --budget or a --cache" in line


@pytest.mark.parametrize(("name", "budget"), [("plain", "24"), ("selective", None), ("chat", None)])
def test_a_kept_cache_is_answered_many_times(folders, tmp_path, name, budget):
    """As one prompt would be, in the same pieces; of a chat, as a second turn would be."""
    path = str(tmp_path / "kept.cache")
    whole = {"prompt": PROMPT * 4, "budget": budget, "chunk": 1000}
    first, _ = generation_of(folders / name, **whole, save_cache=path)
    assert (first.text, first.tokens) == ("", 0) and first.passed == first.prompt
    before = Path(path).read_bytes()
    for question in ("a red bus", "a tree"):
        last, pieces = generation_of(folders / name, prompt=question, cache=path, max_new_tokens=6)
        assert last.text == "".join(pieces) and last.passed >= first.passed + last.prompt
        if name != "chat":
            options = {"budget": budget, "chunk": first.prompt, "max_new_tokens": 6}
            expected, _ = generation_of(folders / name, prompt=PROMPT * 4 + question, **options)
            assert last.text == expected.text
    assert Path(path).read_bytes() == before
