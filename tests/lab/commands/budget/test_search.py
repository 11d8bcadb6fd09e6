"""`heedful budget`: trials are what whole evaluations give, and the search is the plain one."""

import json
import math
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import heedful
from heedful.data import ByteTokenizer
from heedful.eviction import MostHidden, StreamingLLM
from heedful.hf import conversion_of
from heedful.hf.adapters import with_low_rank
from heedful.hf.after_eviction import AfterEviction
from heedful.hf.cache.rows_under_budget import evicting
from heedful.nn import MultiToken, Selective
from heedful_lab.commands.budget import rows as text
from heedful_lab.commands.budget import search as budget
from heedful_lab.commands.budget.options import BudgetSearch
from heedful_lab.commands.budget.rows import Rows, read_rows
from heedful_lab.commands.budget.search import LOG, SearchLog, SearchResult, search
from helpers.budget_searches import plain_greedy
from helpers.command_line import refusal, status_of
from helpers.families import stir
from helpers.small_models import files_of, generation_of, small, tokenizer_of_words

TEXT = 2 * "".join(
    f"{a} has a {b} {c}. the {c} of {a} is {b}. "
    for a in ("ann", "bob", "eve", "joe", "kim")
    for b in ("red", "blue", "old")
    for c in ("bus", "car", "hat", "dog")
)
LENGTH, ROWS = 48, 2


def perplexity(model, rows, policy) -> float:
    """By the whole forward pass, and nothing else."""
    with evicting(model, policy), torch.no_grad():
        logits = model(input_ids=rows, use_cache=False).logits[:, :-1].double()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).exp()


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A selective model and a standard one that have seen the text, with it beside them."""
    root = tmp_path_factory.mktemp("trained")
    (root / "text.txt").write_text(TEXT)
    rows = read_rows((str(root / "text.txt"),), ByteTokenizer(), 64, 64).ids
    for name in ("selective", "standard"):
        model = small(layers=3, vocabulary=256)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.2 if p.ndim > 1 else 1)
        heedful.convert(model, name)
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        for step in range(150):
            batch = rows[step * 8 % 64 :][:8]
            model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        # In fp64 the two ways to a perplexity agree far closer than any two trials of a search.
        model.eval().double().save_pretrained(root / name)
    return root


@pytest.fixture
def folder(trained, tmp_path) -> Path:
    """A copy that may be written to."""
    return shutil.copytree(trained, tmp_path / "here")


@pytest.fixture(scope="module")
def finished(trained, tmp_path_factory) -> tuple[Path, SearchResult]:
    """The selective model after a search."""
    root = shutil.copytree(trained, tmp_path_factory.mktemp("finished") / "here")
    return root, search(options_for(root))


@pytest.fixture
def searched(finished, tmp_path) -> tuple[Path, SearchResult]:
    """A copy of it that may be written to."""
    folder = shutil.copytree(finished[0], tmp_path / "searched")
    return folder, finished[1]


def options_for(folder: Path, name: str = "selective", **options) -> BudgetSearch:
    defaults = {"model": str(folder / name), "data": (str(folder / "text.txt"),),
                "length": LENGTH, "rows": ROWS, "tokenizer": "bytes", "sinks": 1, "recent": 4,
                "loss": 1.0}  # fmt: skip
    return BudgetSearch(**(defaults | options))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["selective", "standard"])
def test_the_search_finds_no_more_tokens_than_the_plain_one(folder, finished, name):
    result = finished[1] if name == "selective" else search(options_for(folder, name))
    model = heedful.load(folder / name)
    rows = read_rows((str(folder / "text.txt"),), ByteTokenizer(), LENGTH, ROWS).ids
    policy = MostHidden if name == "selective" else StreamingLLM
    values: dict[tuple, float] = {}

    def value(budgets: tuple[int, ...]) -> float:
        if budgets not in values:
            eviction = policy(tokens=budgets, sinks=1, recent=4)
            values[budgets] = float(perplexity(model, rows, eviction))
        return values[budgets]

    whole = value((LENGTH,) * 3)
    assert result.whole == pytest.approx(whole, rel=1e-5)
    assert result.perplexity == pytest.approx(value(result.eviction.tokens), rel=1e-5)
    assert result.perplexity <= result.limit == result.whole * 1.01
    for i in range(3):  # no layer can give up one more
        less = tuple(n - (j == i) for j, n in enumerate(result.eviction.tokens))
        assert less[i] < 6 or value(less) > result.limit
    values.clear()
    plain = plain_greedy((LENGTH,) * 3, 6, LENGTH // 8, whole * 1.01, value)
    assert result.eviction == policy(tokens=result.eviction.tokens, sinks=1, recent=4)
    assert result.ended and result.share_of_tokens <= sum(plain) / (3 * LENGTH) < 0.9
    assert len(set(result.eviction.tokens)) > 1  # layers differ


@pytest.mark.slow
def test_a_sum_of_tokens_is_spread_over_the_layers(folder):
    result = search(options_for(folder, tokens=24))
    model = heedful.load(folder / "selective")
    rows = read_rows((str(folder / "text.txt"),), ByteTokenizer(), LENGTH, ROWS).ids
    level = MostHidden(tokens=24, sinks=1, recent=4)
    assert sum(result.eviction.tokens) <= 3 * 24 and min(result.eviction.tokens) >= 6
    assert result.perplexity == pytest.approx(float(perplexity(model, rows, result.eviction)))
    assert result.perplexity < float(perplexity(model, rows, level))
    assert result.limit is None and result.ended
    again = search(options_for(folder, tokens=24))
    assert again.measured == 0 and again.eviction == result.eviction
    with pytest.raises(ValueError, match="tokens must be at least the 6 that every budget holds"):
        search(options_for(folder, tokens=5, restart=True))
    few = search(options_for(folder, tokens=24, trials=3, restart=True))
    assert few.eviction.tokens == (24, 24, 24) and not few.ended


def test_rows_are_measured_in_one_batch_or_several(folder, monkeypatch):
    model = heedful.load(folder / "standard")
    rows = read_rows((str(folder / "text.txt"),), ByteTokenizer(), LENGTH, 3).ids
    policy = StreamingLLM(tokens=(48, 20, 10), sinks=1, recent=4)
    expected = float(perplexity(model, rows, policy))
    assert budget.perplexity(model, Rows(rows, rows), policy) == pytest.approx(expected, rel=1e-10)
    monkeypatch.setattr(text, "_LOGITS", 2 * LENGTH * 256)  # two rows, then one
    assert budget.perplexity(model, Rows(rows, rows), policy) == pytest.approx(expected, rel=1e-10)


def test_what_is_written_is_used(searched):
    folder, result = searched
    data = json.loads((folder / "selective" / "budgets.json").read_text())
    assert data["eviction"] == {"kind": "MostHidden", "tokens": list(result.eviction.tokens),
                                "sinks": 1, "recent": 4, "keep_prompt": False}  # fmt: skip
    about = data["about"]
    assert about["perplexity"] == {"whole": result.whole, "found": result.perplexity,
                                   "limit": result.limit}  # fmt: skip
    assert (about["length"], about["rows"]) == (48, 2)
    assert about["limit"] == "1.0 % above the full cache"
    assert about["share_of_tokens_kept"] == result.share_of_tokens
    assert {"commit", "machine", "date", "command"} <= about["environment"].keys()
    model = heedful.load(folder / "selective")
    cache = heedful.new_cache(model)
    assert [layer.policy for layer in cache.layers] == [result.eviction] * 3
    assert [layer.budget.tokens for layer in cache.layers] == list(result.eviction.tokens)
    text, _ = generation_of(folder / "selective", prompt=TEXT[:100], max_new_tokens=20)
    assert text.nbytes < text.whole_nbytes
    assert not (folder / "selective" / ".heedful.lock").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tova", "h2o", "snap-kv", "random", "window"])
def test_other_policies_are_searched_too(folder, name):
    result = search(options_for(folder, "standard", eviction=name, sinks=None, length=40, rows=2))
    assert result.perplexity <= result.limit and result.share_of_tokens < 1
    assert result.eviction.sinks == (0 if name == "window" else 4)
    assert heedful.new_cache(heedful.load(folder / "standard")).layers[0].policy == result.eviction


def test_an_ordinary_model_gets_budgets_too(folder):
    model = heedful.revert(heedful.load(folder / "standard"))
    model.save_pretrained(folder / "ordinary")
    result, other = (
        search(options_for(folder, name, trials=20)) for name in ("ordinary", "standard")
    )
    assert result.eviction.tokens == other.eviction.tokens
    assert generation_of(folder / "ordinary", prompt=TEXT[:80])[0].nbytes < 80 * 3 * 2 * 2 * 8 * 4


def test_layers_that_cannot_let_go_keep_everything(folder):
    model = small(layers=3, vocabulary=256)
    heedful.convert(model, {MultiToken(conv_every=1): [1], Selective(): [0, 2]})
    model.save_pretrained(folder / "mixed")
    result = search(options_for(folder, "mixed", eviction="most-hidden", loss=50.0, trials=20))
    assert result.start == (LENGTH, None, LENGTH) and result.eviction.tokens[1] is None
    assert "    1     all  100.0%" in budget.format_result(result)
    with pytest.raises(ValueError, match="MostHidden needs a mechanism that masks tokens"):
        search(options_for(folder, "standard", eviction="most-hidden"))


def test_windows_are_where_the_search_begins(folder):
    torch.manual_seed(0)
    config = CONFIG_MAPPING["mistral"](
        vocab_size=256, num_hidden_layers=2, hidden_size=32, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=48, max_position_embeddings=64, sliding_window=24,
        initializer_range=0.3,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "windows")
    result = search(options_for(folder, "windows", loss=5.0, trials=20))
    assert result.start == (24, 24) and result.share_of_tokens <= 1


@pytest.mark.slow
def test_a_reference_sets_the_limit(folder):
    worse = heedful.load(folder / "selective")
    with torch.no_grad():
        worse.lm_head.weight.mul_(0.5)
    worse.save_pretrained(folder / "worse")
    rows = read_rows((str(folder / "text.txt"),), ByteTokenizer(), LENGTH, ROWS).ids
    result = search(options_for(folder, reference=str(folder / "worse")))
    assert result.limit == pytest.approx(float(perplexity(worse, rows, None)), rel=1e-6)
    assert result.whole < result.perplexity <= result.limit
    message = "has a perplexity of .* and the model with its full cache has .*: no budget can"
    with pytest.raises(ValueError, match=message):
        search(options_for(folder, "worse", reference=str(folder / "selective")))
    other = shutil.copytree(folder / "selective", folder / "other")
    # The same bytes in another order: as many tokens, and other ones.
    tokenizer = tokenizer_of_words()
    text = tokenizer._tokenizer.to_str()
    changed = json.loads(text)
    vocabulary = changed["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    tokenizers = {"selective": text, "other": json.dumps(changed)}
    for name, text in tokenizers.items():
        model = small(layers=3)
        heedful.convert(model, "selective")
        model.save_pretrained(folder / name)
        type(tokenizer._tokenizer).from_str(text).save(str(folder / name / "tokenizer.json"))
        shutil.copy(_tokenizer_config(folder), folder / name / "tokenizer_config.json")
    with pytest.raises(ValueError, match="splits the data into other tokens than"):
        search(options_for(folder, reference=str(other), tokenizer=None))


def _tokenizer_config(folder: Path) -> Path:
    tokenizer_of_words().save_pretrained(folder / "tokenizer")
    return folder / "tokenizer" / "tokenizer_config.json"


def test_a_search_goes_on_where_it_was_killed(searched, monkeypatch):
    """After any number of trials, also with half a line at the end."""
    folder, whole = searched
    lines = (folder / "selective" / LOG).read_bytes().splitlines(keepends=True)
    assert whole.trials == whole.measured == len(lines) - 1
    (folder / "selective" / "budgets.json").unlink()
    for count, half in (
        (len(lines) - 20, b'{"budg'),
        (len(lines) - 5, b""),
        (len(lines) - 1, lines[-1][:-3]),
    ):
        (folder / "selective" / LOG).write_bytes(b"".join(lines[:count]) + half)
        if half:
            with pytest.warns(UserWarning, match="a last line that was cut off"):
                again = search(options_for(folder))
        else:
            again = search(options_for(folder))
        assert again.measured == len(lines) - count
        assert (folder / "selective" / LOG).read_bytes() == b"".join(lines)
        same = {"path": whole.path, "measured": 0, "seconds": 0}
        assert again._replace(**same) == whole._replace(**same)
    monkeypatch.setattr(budget, "perplexity", None)  # all is known
    again = search(options_for(folder))
    assert again.eviction == whole.eviction and again.measured == 0


def test_trials_bound_the_search_and_more_of_them_go_on(folder, finished):
    few = search(options_for(folder, trials=8))
    assert (few.trials, few.measured, few.ended) == (8, 8, False)
    assert few.perplexity <= few.limit
    assert "a higher --trials goes on" in budget.format_result(few)
    assert (folder / "selective" / "budgets.json").is_file()
    more = search(options_for(folder, trials=20))
    assert (more.trials, more.measured, more.ended) == (
        20,
        12,
        False,
    ) and more.share_of_tokens <= few.share_of_tokens
    shutil.copy(finished[0] / "selective" / LOG, folder / "selective" / LOG)
    whole = search(options_for(folder, trials=0))
    assert whole.ended and whole.measured == 0 and whole.share_of_tokens <= more.share_of_tokens
    assert whole.eviction == finished[1].eviction


def test_long_sequences_are_searched_in_pieces_and_measured_by_tokens(folder, monkeypatch):
    monkeypatch.setattr(budget, "PIECES", LENGTH // 4)
    result = search(options_for(folder, trials=30))
    model = heedful.load(folder / "selective", budgets=False)
    rows = read_rows((str(folder / "text.txt"),), ByteTokenizer(), LENGTH, ROWS).ids
    by_token = float(perplexity(model, rows, result.eviction))
    assert result.perplexity == pytest.approx(by_token, rel=1e-10) and by_token <= result.limit
    log = SearchLog(folder / "selective" / LOG, _first(folder / "selective" / LOG), False)
    assert {step for _, step in log.perplexities} == {1, 4}
    for (tokens, step), value in log.perplexities.items():
        with evicting(model, MostHidden(tokens=tokens, sinks=1, recent=4), step=step):
            logits = model(input_ids=rows, use_cache=False).logits[:, :-1]
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        assert value == pytest.approx(float(expected.exp()), rel=1e-10)
    again = search(options_for(folder, trials=30))
    assert again.measured == 0 and again.eviction == result.eviction


def _first(path: Path) -> dict:
    identity = json.loads(path.read_text().splitlines()[0])
    del identity["format"]
    return identity


def test_another_search_is_refused_without_restart(searched):
    folder, first = searched
    before = files_of(folder)
    for options, message in (
        ({"loss": 2.0}, "loss was 1.0 and is 2.0 now"),
        ({"rows": 3}, "rows was 2 and is 3 now"),
        ({"recent": 5}, "policy.recent was 4 and is 5 now"),
        ({"eviction": "tova"}, 'policy.kind was "MostHidden" and is "TOVA" now'),
    ):
        with pytest.raises(ValueError, match=f"holds another search: .*{message}.*--restart"):
            search(options_for(folder, **options))
        assert files_of(folder) == before
    second = search(options_for(folder, loss=20.0, rows=1, restart=True, trials=40))
    assert second.share_of_tokens < first.share_of_tokens and second.measured == second.trials
    model = heedful.load(folder / "selective")
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.02)
    model.save_pretrained(folder / "selective")
    with pytest.raises(ValueError, match=r"holds another search: model\.weights was"):
        search(options_for(folder, loss=20.0, rows=1))
    (folder / "selective" / LOG).write_text("{}\n[1]\n")
    with pytest.raises(ValueError, match=r"is damaged .*; add --restart to search"):
        search(options_for(folder))


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT: the base has no name
def test_trials_of_another_adapter_are_refused(tmp_path):
    """Of the same selectors beside the same base, with other LoRA."""
    (tmp_path / "text.txt").write_text(TEXT)
    small(vocabulary=256).save_pretrained(tmp_path / "base")
    for seed in (1, 2):
        model = small(vocabulary=256)
        torch.manual_seed(0)
        heedful.convert(model, Selective(selector="extra"))
        stir(model, 0.5, ".heedful.")
        torch.manual_seed(seed)
        wrapped = with_low_rank(model, 2)
        stir(wrapped, 0.3, "lora_")
        conversion_of(model).after_eviction = AfterEviction(model)
        heedful.save_adapter(wrapped, tmp_path / f"a{seed}", base=str(tmp_path / "base"))

    def searching(name, **options):
        return search(options_for(tmp_path, name, trials=3, **options))

    first = searching("a1")
    shutil.copy(tmp_path / "a1" / LOG, tmp_path / "a2" / LOG)
    before = files_of(tmp_path)
    with pytest.raises(ValueError, match=r"holds another search: model\.adapter was .*--restart"):
        searching("a2")
    assert files_of(tmp_path) == before
    assert searching("a2", restart=True).whole == pytest.approx(first.whole)
    log = tmp_path / "a1" / LOG
    identity, *trials = log.read_text().splitlines()
    log.write_text("\n".join([json.dumps(json.loads(identity) | {"format": 1}), *trials, ""]))
    before = files_of(tmp_path)
    with pytest.raises(ValueError, match=r"written by an older version.*; add --restart"):
        searching("a1")
    assert files_of(tmp_path) == before


def command(folder: Path, *more: str, name: str = "selective") -> list[str]:
    options = shlex.split("--length 48 --rows 2 --tokenizer bytes --sinks 1 --recent 4")
    return ["budget", str(folder / name), "--data", str(folder / "text.txt"), *options, *more]


def test_as_a_command(searched, capsys):
    folder, result = searched
    assert status_of(*command(folder, "--loss", "1")) == 0
    captured = capsys.readouterr()
    tokens = result.eviction.tokens
    printed = captured.out.splitlines()
    assert printed[0] == "layer  tokens   share"
    for i, n in enumerate(tokens):
        assert printed[1 + i].split() == [str(i), str(n), f"{n / 48:.1%}"]
    assert printed[4].split() == ["sum", str(sum(tokens)), f"{sum(tokens) / 144:.1%}"]
    assert "MostHidden: perplexity " in captured.out and "written: " in captured.out
    progress = r"perplexity [\d.]+ \(limit [\d.]+\) with [\d.]+% of the tokens "
    left = r"\[\d+ of at most 120 --trials, [\d:]+, at most [\d:?]+ left\]"
    assert re.search(progress + left, captured.err)


WRONG = {
    "text 'nowhere.txt' does not exist": ["--data", "nowhere.txt"],
    "length must be at most the 256 tokens that .* has positions for, got 512": ["--length", "512"],
    "data has 5120 tokens, and 1000 sequences of 48 are requested": ["--rows", "1000"],
    "tokens must be whole numbers of at least sinks . recent . 1 = 75, got 48": ["--sinks", "70"],
    "length must be more than the 48 tokens that every budget holds, got 48": ["--recent", "46"],
    "model '/nothing' cannot be opened": ["--reference", "/nothing"],
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_options_are_one_line_and_nothing_changes(folder, message, capsys):
    before = files_of(folder)
    assert re.search(message, refusal(capsys, *command(folder, *WRONG[message])))
    assert files_of(folder) == before


def test_models_that_are_no_folder_are_one_line(folder, capsys):
    for name, message in {
        "nothing": "model must be a folder, as budgets.json is written into it",
        "": "is a folder without a config.json; name a model's folder",
    }.items():
        assert message in refusal(capsys, *command(folder, name=name))


def test_a_folder_that_another_search_writes_to_is_refused(folder, capsys):
    with budget.only_writer(folder / "selective"):
        assert "is in use by process" in refusal(capsys, *command(folder))


def test_ctrl_c_keeps_the_trials(folder, monkeypatch, capsys):
    add = SearchLog.add

    def interrupted(self, *arguments):
        add(self, *arguments)
        if len(self.perplexities) == 3:
            raise KeyboardInterrupt  # as Python raises on SIGINT

    monkeypatch.setattr(SearchLog, "add", interrupted)
    assert status_of(*command(folder, "--loss", "1", "--length", "72")) == 130
    out, err = capsys.readouterr()
    assert out == "", err
    message = (
        "heedful: stopped: the trials so far are kept beside the model; the same command goes on"
    )
    assert message in err and "Traceback" not in err
    assert not (folder / "selective" / "budgets.json").exists()
    log = folder / "selective" / LOG
    assert log.read_bytes().endswith(b"}\n") and log.read_bytes().count(b"\n") == 4


def test_a_model_that_diverged_is_refused(folder):
    model = heedful.load(folder / "standard")
    with torch.no_grad():
        model.lm_head.weight.fill_(math.nan)
    model.save_pretrained(folder / "standard")
    with pytest.raises(ValueError, match="has a perplexity of nan on the data"):
        search(options_for(folder, "standard"))
