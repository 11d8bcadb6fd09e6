"""A folder of models and text to evaluate, in which the tests run."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """plain: an ordinary model; selective: a converted one with a budgets.json; text."""
    # Not above: this file is read before Triton's interpreter is chosen.
    import heedful
    from heedful.eviction import StreamingLLM
    from heedful.hf.budgets import write_budgets
    from helpers.evaluations import BOOK
    from helpers.small_models import small, tokenizer_of_words

    root = tmp_path_factory.mktemp("evaluated")
    small(positions=1024).save_pretrained(root / "plain")
    model = small(positions=1024, seed=1)
    heedful.convert(model, "selective")
    model.save_pretrained(root / "selective")
    write_budgets(root / "selective" / "budgets.json", StreamingLLM(tokens=30), model, {})
    for name in ("plain", "selective"):
        tokenizer_of_words().save_pretrained(root / name)
    (root / "book.txt").write_text(BOOK)
    return root


@pytest.fixture(autouse=True)
def here(folder, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(folder)
