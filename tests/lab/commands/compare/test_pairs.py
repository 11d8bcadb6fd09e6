"""Small encoder-decoders on tasks with a source and a target: trained, scored, shown, resumed."""

import math
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer

import heedful
import heedful_lab.commands.compare.run as room
from heedful.nn import Selective, Standard
from heedful.training.losses import MemoryLoss
from heedful_lab.commands.compare.findings import findings, further, summarise
from heedful_lab.commands.compare.options import Comparison
from heedful_lab.commands.compare.page import write_report
from heedful_lab.commands.compare.scoring import score, write
from heedful_lab.commands.compare.scratch import Hyperparameters, Size, from_scratch
from heedful_lab.commands.models import open_model
from heedful_lab.records import Record, read_records
from heedful_lab.tasks import Spans, Summarise, Translate
from heedful_lab.tasks.translate import bleu, text_error
from helpers.command_line import change_setups, refusal, setups_of, status_of

compare = partial(room.compare, show=write_report)  # as the command does
SIZE = Size(16, 2, 2)
COMPARISON = Comparison(
    tasks=("translate", "summarise", "spans"), mechanisms=("standard", "selective"), steps=4,
    batch=4, device="cpu",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def small():
    with pytest.MonkeyPatch.context() as patch:
        change_setups(patch, lambda _: SIZE, held_out=4, evaluations=2)
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("pairs") / "out"
    return out, compare(COMPARISON, out)


def text_model(mechanism=None, task=None):
    """A model whose weights are far from zero, so that what it writes depends on what it reads."""
    model = from_scratch(task or Translate(), mechanism or Standard(), SIZE, 3).double().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_(0.1 * torch.randn_like(p) if "embed" in name or "shared" in name else
                   0.6 * torch.randn_like(p))  # fmt: skip
    return model


def test_every_run_has_its_measures(finished):
    _, records = finished
    assert [(r.task, r.mechanism) for r in records] == [
        (task, name) for task in COMPARISON.tasks for name in COMPARISON.mechanisms
    ]
    for record in records:
        splits = {"translate": ["held-out", "2x-clauses"]}.get(record.task, ["held-out"])
        assert list(record.splits) == splits
        further = {"translate": {"bleu", "loss"}, "spans": {"loss"}}.get(
            record.task, {"fact_recall", "fact_precision", "rouge_l", "loss"}
        )
        assert record.final.keys() - set(splits) == further
        assert all(map(math.isfinite, record.final.values()))
        assert len(record.curve) >= 2 and record.tokens_per_second > 0
        if record.task == "spans":
            assert record.value == pytest.approx(math.exp(record.final["loss"]), rel=1e-5)


def test_both_mechanisms_start_alike_and_differ_in_the_decoder_alone():
    models = [
        from_scratch(Translate(), mechanism, SIZE, 0) for mechanism in (Standard(), Selective())
    ]
    first, second = (model.state_dict() for model in models)
    assert all(torch.equal(second[name], x) for name, x in first.items() if ".heedful." not in name)
    kinds = {name: type(x.heedful).__name__ for name, x in models[1].named_modules()
             if isinstance(getattr(x, "heedful", None), torch.nn.Module)}  # fmt: skip
    selective = {name for name, kind in kinds.items() if kind == "SelectiveAttention"}
    assert selective == {f"model.decoder.layers.{i}.self_attn" for i in range(2)}


def test_the_page_shows_measures_and_what_was_written(finished):
    out, records = finished
    page = (out / "report.html").read_text()
    for text in ("BLEU (more is better)", "ROUGE-L (more is better)", "fact recall", "fact error"):
        assert text in page
    for task in COMPARISON.tasks:
        assert f"Written: {task}" in page
    task = Translate()
    source = task.decode(task.held_out(4).input_ids[0])
    assert page.count(source) == 1 and page.count("<th>target</th>") == 3 * 4
    assert len(re.findall("<th>selective [✓✗]</th>", page)) == 3 * 4
    assert "translate: standard" not in "".join(findings(summarise(records[:0])))


def test_saved_models_write_what_the_trained_ones_did(finished):
    out, records = finished
    model = heedful.load(out / "models" / "translate-selective-0").eval()
    record = next(r for r in records if (r.task, r.mechanism) == ("translate", "selective"))
    scores = score(model, Translate(), Hyperparameters(batch=4, held_out=4))
    assert scores["loss"] == pytest.approx(record.final["loss"], rel=1e-5)
    assert scores["error"] == record.final["held-out"] and scores["bleu"] == record.final["bleu"]
    tokenizer = AutoTokenizer.from_pretrained(out / "models" / "translate-selective-0")
    task = Translate()
    (source, _), row = task.texts(1, 1)[0], task.sample(1, 1).input_ids[0]
    assert tokenizer(source).input_ids == row.tolist()
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (task.pad, task.eos)


@pytest.mark.parametrize("mechanism", [Standard(), Selective()], ids=str)
def test_scores_of_padded_rows_are_those_of_the_rows_alone(mechanism):
    """The masks are right: loss and texts of a ragged batch are those without padding."""
    task = Translate()
    model, rows = text_model(mechanism), task.held_out(6)
    nats, texts = [], []
    for ids, mask, labels, label_mask in zip(*rows, strict=True):
        ids, labels = ids[mask.bool()][None], labels[label_mask.bool()][None]
        with torch.no_grad():
            logits = model(input_ids=ids, labels=labels, use_cache=False).logits
            nats.append(cross_entropy(logits[0], labels[0], reduction="none"))
        output = model.generate(ids, max_new_tokens=task.target_length, do_sample=False)
        texts.append(task.decode(output[0, 1:]))
    assert len({len(x) for x in nats}) > 1 and len(set(texts)) > 1
    scores = score(model, task, Hyperparameters(batch=4, held_out=6))
    references = task.references(rows.labels)
    assert scores["loss"] == pytest.approx(torch.cat(nats).mean().item(), abs=1e-6)
    assert scores["bleu"] == bleu(texts, references)
    assert scores["error"] == text_error(texts, references)
    assert write(model, task, rows) == texts


def test_padding_teaches_nothing():
    """A ragged batch has the gradient of its sequences, weighted by their targets' tokens."""
    task, model = Translate(), text_model(Selective())
    rows = task.sample(4, 1)
    model(**rows.inputs()).loss.backward()
    together = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for ids, mask, labels, label_mask in zip(*rows, strict=True):
        ids, labels = ids[mask.bool()][None], labels[label_mask.bool()][None]
        loss = model(input_ids=ids, labels=labels).loss
        (loss * label_mask.sum() / rows.decoder_attention_mask.sum()).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, together[name], rtol=1e-8, atol=1e-10)


def test_the_memory_loss_of_padded_targets_is_that_of_the_rows_alone():
    """Per token of the targets, as `heedful.MemoryLoss` says; and compare trains with it."""
    model, rows, memory_sum = text_model(Selective()), Translate().sample(4, 1), 0.0
    with torch.no_grad(), MemoryLoss(model) as memory:
        model(**rows.inputs())
        together = memory().item()
        for ids, mask, labels, label_mask in zip(*rows, strict=True):
            model(input_ids=ids[mask.bool()][None], labels=labels[label_mask.bool()][None])
            memory_sum += memory().item() * int(label_mask.sum())
    tokens = int(rows.decoder_attention_mask.sum())
    assert together == pytest.approx(memory_sum / tokens, rel=1e-9) and together > 0
    setup = setups_of(replace(COMPARISON, memory_loss=0.1))["translate"]
    assert setup.mechanisms == ("standard", "selective", "selective + memory loss")


@pytest.mark.parametrize("options", [[], ["--budget", "14"]], ids=str)
def test_generate_makes_a_target_of_a_source(finished, capsys, options):
    """By the command: what the model writes by itself; under a budget its cache stays small."""
    folder = finished[0] / "models" / "translate-selective-0"
    task = Translate()
    (source, _) = task.texts(1, 1)[0]
    model = heedful.load(folder).eval()
    expected = write(model, task, task.sample(1, 1))[0]
    command = ["generate", str(folder), "--prompt", source, "--max-new-tokens"]
    assert status_of(*command, str(task.target_length), *options) == 0
    output = capsys.readouterr()
    if not options:
        assert output.out.strip() == expected
    assert f"{len(task.sample(1, 1).input_ids[0])} tokens read" in output.err
    line = refusal(capsys, *command, "9999")
    assert "max_new_tokens asks for 9999 tokens, and the model" in line


def test_budgets_are_not_searched_for_encoder_decoders(finished, capsys, tmp_path):
    (tmp_path / "a.txt").write_text("word " * 3000)
    folder = finished[0] / "models" / "translate-selective-0"
    line = refusal(capsys, "budget", folder, "--data", tmp_path / "a.txt", "--length", "40")
    assert "has an encoder, and budgets are searched for decoders" in line


def test_an_ordinary_encoder_decoder_is_opened_as_one(tmp_path):
    task = Translate()
    model = heedful.revert(text_model(Standard(), task)).float()
    model.save_pretrained(tmp_path)
    opened = open_model(str(tmp_path))
    assert type(opened).__mro__[1].__name__ != "BartForCausalLM" and opened.model.encoder
    assert write(opened, task, task.sample(3, 1)) == write(model, task, task.sample(3, 1))


def test_pairs_of_a_file_are_learnt_from_and_their_texts_scored(tmp_path, capsys):
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"this is {i}\tand {i * i} it is\n" for i in range(60)))
    out = tmp_path / "out"
    command = ["compare", "--tasks", "translate", "summarise", "--data", str(path), "--steps", "2"]
    command += ["--batch", "2", "--tokenizer", "bpe", "--length", "40", "--device", "cpu"]
    assert status_of(*command, "--mechanisms", "standard", "--out", str(out)) == 0
    records = {r.task: r for r in read_records(out / "results.jsonl")}
    assert records["translate"].metric == "bleu" and records["summarise"].metric == "rouge_l"
    assert 0 <= records["translate"].value <= 100
    output = capsys.readouterr().out
    assert "translate: only standard (BLEU " in output and "solved" not in output
    page = (out / "report.html").read_text()
    assert "higher is better" in page and "lower is better" not in page


@pytest.mark.parametrize("line", ["only a source", "a\tb\tc", "a source\t"])
def test_a_bad_line_of_pairs_is_one_clean_line(line, tmp_path, capsys):
    path = tmp_path / "pairs.tsv"
    path.write_text(f"a\tb\n{line}\n")
    words = ("compare", "--tasks", "translate", "--data", path, "--out", tmp_path / "o")
    assert "pairs.tsv': line 2 has" in refusal(capsys, *words)
    assert not (tmp_path / "o").exists()


def run(mechanism: str, seed: int, value: float) -> Record:
    final = {"held-out": value, "error": 1 - value / 100, "loss": 2.0}
    return Record("translate", mechanism, seed, "bleu", 1, 1, 1, final)


def test_of_bleu_more_is_better():
    records = [run("standard", seed, 40.0 + seed) for seed in (0, 1)]
    records += [run("selective", seed, 50.0 + seed) for seed in (0, 1)]
    (finding,) = findings(summarise(records))
    assert "every seed of selective (BLEU 50.5) did better than any of standard" in finding
    (table,) = further(records)
    assert "error" in table and "59.5 % ± 0.7" not in table and "59.5 ± 0.7 %" in table
    assert "BLEU" not in table  # what they are judged by stands in the first table


def test_tasks_of_both_kinds_fit_their_models():
    for task in (Translate(clauses=1), Summarise(facts=2, salient=1), Spans(length=20)):
        model = from_scratch(task, Standard(), SIZE, 0)
        rows = task.sample(2, 0)
        assert model(**rows.inputs()).logits.shape == (*rows.labels.shape, task.vocab_size)
        longest = max(max(x.length, x.target_length) for x in task.evaluations().values())
        assert model.config.max_position_embeddings == longest
