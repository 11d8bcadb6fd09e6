"""The text that budgets are measured on: of facts only the answers count."""

from itertools import islice

import pytest
import torch
from torch.nn.functional import cross_entropy

import heedful
from heedful.training.sequences import IGNORE
from heedful_lab.commands.budget.options import BudgetSearch
from heedful_lab.commands.budget.rows import Rows, perplexity, read_rows
from heedful_lab.commands.train.mixture import fact_documents
from helpers.small_models import small, tokenizer_of_words

TEXT = "".join(
    f"The {a} house had {b} windows to the sea. " for a in ("old", "low") for b in "2345678"
)


@pytest.fixture
def file(tmp_path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(TEXT * 40)
    return str(path)


def test_facts_come_after_the_text_and_count_by_their_answers(file):
    tokenizer = tokenizer_of_words()
    rows = read_rows((file, "recall"), tokenizer, 512, 3)
    assert rows.ids.shape == rows.labels.shape == (6, 512)
    assert torch.equal(rows.ids[:3], read_rows((file,), tokenizer, 512, 3).ids)
    assert torch.equal(rows.ids[:3], rows.labels[:3])
    counts = rows.labels != IGNORE
    assert torch.equal(rows.labels[counts], rows.ids[counts])
    for ids, count in zip(rows.ids[3:], counts[3:], strict=True):
        assert 0 < count.sum() < 256
        answers = tokenizer.decode(ids[count])
        assert answers[-8:].strip() in tokenizer.decode(ids)
    trained = next(fact_documents((file,), tokenizer, 513, 0)).ids
    assert trained != rows.ids[3].tolist()  # other texts than those of training


def test_every_sequence_begins_with_the_bos_of_the_tokenizer(file):
    tokenizer = tokenizer_of_words()
    rows = read_rows((file, "recall"), tokenizer, 512, 3)
    assert (rows.ids[:, 0] == 256).all() and not (rows.ids[:, 1:] == 256).any()
    text = tokenizer.decode(rows.ids[:3, 1:].flatten())
    assert text == (TEXT * 40)[: 3 * 511]
    chat = list(islice(fact_documents((file,), tokenizer_of_words(chat=True), 513, 0), 8))
    assert all(x.ids.count(256) == 1 == x.ids.index(256) + 1 for x in chat)
    assert all(len(x.ids) == len(x.learned) == 512 and not x.learned[0] for x in chat)


def test_perplexity_is_that_of_the_tokens_that_count():
    model = small(layers=1, vocabulary=64)
    heedful.convert(model, "standard")
    ids = torch.randint(0, 64, (3, 20))
    labels = ids.masked_fill(torch.rand(3, 20) < 0.5, IGNORE)
    logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
    expected = cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=IGNORE).exp()
    assert perplexity(model, Rows(ids, labels)) == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"data": ("recall",)}, "data must name a text beside recall"),
        ({"tokens": 8}, "tokens must be a whole number from 9 to 1024"),
        ({"tokens": 2000}, "tokens must be a whole number from 9 to 1024"),
        ({"tokens": 64, "reference": "m"}, "leave one out"),
    ],
)
def test_what_does_not_go_together_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        BudgetSearch("m", **({"data": ("a.txt",)} | options))


def test_facts_need_a_tokenizer_that_tells_where_tokens_stand(file):
    with pytest.raises(ValueError, match="recall needs a tokenizer that tells where tokens stand"):
        read_rows((file, "recall"), heedful.data.ByteTokenizer(), 64, 1)
