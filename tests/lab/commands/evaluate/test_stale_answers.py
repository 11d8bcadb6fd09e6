"""Law 32: a kept answer belongs to exactly one model, adapter, cache and text."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig

import heedful
from heedful.eviction import MostHidden, StreamingLLM
from heedful.hf import conversion_of, load
from heedful.hf.after_eviction import AfterEviction
from heedful.hf.budgets import write_budgets
from heedful_lab.commands.evaluate.run import evaluate
from heedful_lab.records import Sample, read
from helpers.evaluations import evaluation_of
from helpers.families import stir
from helpers.small_models import small

READ = {"tasks": ("perplexity",), "length": 48, "samples": 3}
OTHER = "choose another --out, or add --restart"


def save_selectors(folder, base: str, seed: int, policy=None) -> None:
    """An adapter of selectors, and budgets beside it."""
    model = heedful.hf.stock.stock_model(base)
    torch.manual_seed(seed)
    heedful.convert(model, heedful.Selective(selector="extra"))
    stir(model, 0.5, ".heedful.")
    heedful.save_adapter(model, folder, base=base)
    if policy is not None:
        loaded = load(base, adapter=folder, budgets=False)
        write_budgets(folder / "budgets.json", policy, loaded, {})


def save_matrices(folder, base: str, seed: int) -> None:
    """An adapter of the same selectors, with other matrices for each seed."""
    model = heedful.hf.stock.stock_model(base)
    torch.manual_seed(0)
    heedful.convert(model, heedful.Selective(selector="extra"))
    stir(model, 0.5, ".heedful.")
    config = LoraConfig(
        target_modules="all-linear", exclude_modules=r".*\.heedful(\..*)?", r=2, lora_alpha=2
    )
    wrapped = heedful.get_peft_model(model, config)
    torch.manual_seed(seed)
    stir(wrapped, 0.3, "lora_")
    conversion_of(model).after_eviction = AfterEviction(model)
    heedful.save_adapter(wrapped, folder, base=base)


def nats(result, cache: str) -> list[float]:
    return [x.values["nats"] for x in result.samples if x.cache == cache]


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT: the base has no name
@pytest.mark.parametrize("save", [save_selectors, save_matrices])
@pytest.mark.parametrize("by", ["trained again", "--adapter"])
def test_another_adapter_s_answers_are_not_taken(tmp_path, save, by):
    first, second = tmp_path / "first", tmp_path / "second"
    save(first, "plain", 1)
    save(second, "plain", 2)
    options = READ | {"budget": ("16",), "eviction": "most-hidden"}

    def answers(adapter, out):
        if by == "--adapter":
            return evaluate(evaluation_of(tmp_path / out, adapter=str(adapter), **options))
        shutil.copytree(adapter, tmp_path / "same", dirs_exist_ok=True)
        return evaluate(evaluation_of(tmp_path / out, str(tmp_path / "same"), **options))

    before = answers(first, "one")
    path = tmp_path / "one" / "run" / "samples.jsonl"
    kept = path.read_bytes()
    assert nats(answers(first, "one"), "most-hidden 16") == nats(before, "most-hidden 16")
    with pytest.raises(ValueError, match=rf"\(adapter differs\); {OTHER}"):
        answers(second, "one")
    assert path.read_bytes() == kept
    (tmp_path / "one" / "run" / "evaluation.json").unlink()
    with pytest.raises(ValueError, match=rf"another adapter, other budgets .*{OTHER}"):
        answers(second, "one")
    assert nats(answers(second, "two"), "most-hidden 16") != nats(before, "most-hidden 16")


def test_other_budgets_answers_are_not_taken(tmp_path):
    adapter = tmp_path / "adapter"
    options = READ | {"budget": ("own",)}
    save_selectors(adapter, "plain", 1, MostHidden(tokens=16))
    before = evaluate(evaluation_of(tmp_path, str(adapter), **options))
    save_selectors(adapter, "plain", 1, MostHidden(tokens=24))
    with pytest.raises(ValueError, match=rf"by the name 'own': policy was .*{OTHER}"):
        evaluate(evaluation_of(tmp_path, str(adapter), **options))
    again = evaluate(evaluation_of(tmp_path, str(adapter), restart=True, **options))
    assert nats(again, "own") != nats(before, "own") and nats(again, "") == nats(before, "")


def test_another_seed_or_dtype_is_another_cache(tmp_path):
    options = READ | {"budget": ("16",), "eviction": "random"}
    before = evaluate(evaluation_of(tmp_path, **options))
    with pytest.raises(ValueError, match="by the name 'random 16': policy was "):
        evaluate(evaluation_of(tmp_path, seed=1, **options))
    assert evaluate(evaluation_of(tmp_path, **options)).samples == before.samples
    int8 = evaluate(evaluation_of(tmp_path, cache_dtype="int8", **options))
    assert {x.cache for x in int8.samples} == {"", "int8", "random 16, int8"}
    path = tmp_path / "run" / "samples.jsonl"
    identities = {x.identity for x in read(path, Sample)}
    assert len(identities) == 4 and all(len(x) == 16 for x in identities)


def test_the_same_model_in_another_precision_is_another(tmp_path, folder):
    for dtype in (torch.float32, torch.bfloat16):
        small(positions=1024).to(dtype).save_pretrained(tmp_path / str(dtype))
        for path in (folder / "plain").glob("tokenizer*"):
            shutil.copy(path, tmp_path / str(dtype))
    shutil.copytree(tmp_path / "torch.float32", tmp_path / "model")
    evaluate(evaluation_of(tmp_path, str(tmp_path / "model"), **READ))
    shutil.copytree(tmp_path / "torch.bfloat16", tmp_path / "model", dirs_exist_ok=True)
    with pytest.raises(ValueError, match=r"knows another model .* \(weights, dtype differ\)"):
        evaluate(evaluation_of(tmp_path, str(tmp_path / "model"), **READ))


def test_answers_of_an_older_version_are_refused_and_stay(tmp_path):
    evaluate(evaluation_of(tmp_path, **READ))
    about, samples = (tmp_path / "run" / x for x in ("evaluation.json", "samples.jsonl"))
    content = json.loads(about.read_text())
    about.write_text(json.dumps(content | {"format": 1}))
    before = about.read_bytes(), samples.read_bytes()
    with pytest.raises(ValueError, match=rf"evaluation\.json was written by an older.*{OTHER}"):
        evaluate(evaluation_of(tmp_path, **READ))
    assert (about.read_bytes(), samples.read_bytes()) == before
    about.unlink()
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    for line in lines:
        del line["identity"]
    samples.write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = samples.read_bytes()
    with pytest.raises(ValueError, match=rf"samples\.jsonl was written by an older.*{OTHER}"):
        evaluate(evaluation_of(tmp_path, **READ))
    assert samples.read_bytes() == before
    assert evaluate(evaluation_of(tmp_path, restart=True, **READ)).samples


def test_a_model_converted_by_a_folder_s_own_budgets_knows_its_policy(tmp_path):
    model = small(positions=1024, seed=3)
    heedful.convert(model, "standard")
    model.save_pretrained(tmp_path / "m")
    write_budgets(tmp_path / "m" / "budgets.json", StreamingLLM(tokens=16), model, {})
    loaded = load(tmp_path / "m")
    assert loaded._heedful.eviction == StreamingLLM(tokens=16)
