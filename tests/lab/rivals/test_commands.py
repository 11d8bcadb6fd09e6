"""Commands train and evaluate baselines by name."""

from pathlib import Path

import pytest
import torch

from heedful_lab.commands.policies import policy_named
from heedful_lab.rivals.models import load
from helpers.command_line import refusal, status_of
from helpers.evaluations import BOOK
from helpers.small_models import small, tokenizer_of_words

TRAINING = ("--data", "book.txt", "--steps", "2", "--batch", "2", "--length", "48")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    small(positions=1024).save_pretrained("plain")
    tokenizer_of_words().save_pretrained("plain")
    Path("book.txt").write_text(BOOK)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["canon", "knocking-heads", "simplicial:every=1", "parallax"])
def test_a_model_is_trained_and_evaluated(name, capsys):
    assert status_of("train", "plain", *TRAINING, "--mechanism", name, "--out", "run") == 0
    assert any(bool(p.any()) for p in load("run")._heedful.parameters().values())
    words = ("--tasks", "perplexity", "needles", "--data", "book.txt", "--samples", "1")
    words += ("--lengths", "420", "--depths", "0.5", "--length", "64", "--out", "answers")
    assert status_of("eval", "run", *words) == 0
    assert "needles" in capsys.readouterr().out
    cached = name in ("knocking-heads", "parallax")
    generation = ("generate", "run", "--prompt", "the", "--max-new-tokens", "3")
    if cached:
        assert status_of(*generation) == 0
        assert type(policy_named("auto", load("run"), 20)).__name__ == "StreamingLLM"
    else:
        assert "does not support one; call the model with use_cache=False" in refusal(
            capsys, *generation
        )


def test_an_adapter_of_a_baseline_opens_again(capsys):
    options = ("--mechanism", "canon", "--train", "lora", "--recipe", "adapt", "--out", "adapter")
    assert status_of("train", "plain", *TRAINING, *options) == 0
    model = load("plain", adapter="adapter")
    ids = torch.arange(3, 23)[None]
    assert status_of("convert", "adapter", "whole") == 0
    expected = model(input_ids=ids).logits
    torch.testing.assert_close(load("whole")(input_ids=ids).logits, expected)
    assert status_of("convert", "plain", "converted", "--mechanism", "canon") == 0
    assert "Canon" in capsys.readouterr().out
