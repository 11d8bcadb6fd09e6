"""Data to measure budgets on: sequences, and which of their tokens count."""

import math
from itertools import islice
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from heedful.checks import UserError
from heedful.data import corpus
from heedful.eviction import Eviction
from heedful.hf.cache.rows_under_budget import evicting
from heedful.training.sequences import IGNORE, leading_bos
from heedful_lab.commands.models import ModelSource, longest
from heedful_lab.commands.options import RECALL
from heedful_lab.commands.train.mixture import fact_documents

_LOGITS = 2**27  # numbers of logits at a time, which decides how many sequences run together
_MOST = 700.0  # exp of more is no number
_FACTS_SEED = 1_000_000  # far from those of training, so that its texts are others


class Rows(NamedTuple):
    """Sequences without padding.

    ids: their tokens.
    labels: the same, and `IGNORE` where a token does not count.
    """

    ids: Int[Tensor, "N T"]
    labels: Int[Tensor, "N T"]


class Sequences(NamedTuple):
    """Data that is not read yet: names of texts, tokens of a sequence, and how many of these."""

    data: tuple[str, ...]
    length: int
    count: int

    def read(self, source: ModelSource, model: PreTrainedModel) -> Rows:
        """The sequences in a model's tokens; raises unless it has positions for them."""
        tokenizer, most = source.open_tokenizer(model), longest(model)
        if most is not None and self.length > most:
            raise UserError(
                f"length must be at most the {most} tokens that {source.name} has positions for, "
                f"got {self.length}"
            )
        return read_rows(self.data, tokenizer, self.length, self.count)


def read_rows(data: tuple[str, ...], tokenizer, length: int, rows: int) -> Rows:
    """The first sequences of the texts; with `recall` as many again that ask for facts in them.

    Documents stand one behind the other, cut into sequences that begin with BOS where the tokenizer
    puts one before a text. Of facts only the answers count.

    Raises:
        ValueError: the text is too short, or cannot be read.
    """
    texts = tuple(name for name in data if name != RECALL)
    ids: list[int] = []
    bos = [] if (first := leading_bos(tokenizer)) is None else [first]
    needed = rows * (length - len(bos))
    for document in corpus(texts, limit_bytes=64 * rows * length):
        ids += tokenizer.encode(document.text, add_special_tokens=False)
        if len(ids) >= needed:
            break
    if len(ids) < needed:
        raise UserError(
            f"data has {len(ids)} tokens, and {rows} sequences of {length} are requested; give "
            "more text, or fewer or shorter sequences"
        )
    text = torch.tensor(ids[:needed]).view(rows, -1)
    text = torch.cat([torch.tensor(bos * rows, dtype=torch.long).view(rows, -1), text], dim=1)
    if len(texts) == len(data):
        return Rows(text, text)
    documents = list(islice(fact_documents(texts, tokenizer, length + 1, _FACTS_SEED), rows))
    facts = torch.tensor([document.ids for document in documents])
    answers = torch.tensor([document.learned for document in documents])
    labels = torch.cat([text, facts.masked_fill(~answers, IGNORE)])
    return Rows(torch.cat([text, facts]), labels)


@torch.no_grad()
def perplexity(
    model: PreTrainedModel, rows: Rows, eviction: Eviction | None = None, step: int = 1
) -> float:
    """Perplexity of the tokens that count, first ones of sequences aside.

    step: tokens that come in each call of a cache.
    """
    vocabulary, total = model.get_output_embeddings().weight.shape[0], 0.0
    size = max(1, _LOGITS // (rows.ids.shape[1] * vocabulary))
    with evicting(model, eviction, step=step):
        for ids, labels in zip(*(x.to(model.device).split(size) for x in rows), strict=True):
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
            total += _nats(logits, labels[:, 1:]).sum().item()
    mean = total / (rows.labels[:, 1:] != IGNORE).sum().item()
    return math.inf if mean > _MOST else math.exp(mean)


def _nats(logits: Float[Tensor, "N T V"], labels: Int[Tensor, "N T"]) -> Float[Tensor, "N T"]:
    logits = logits if logits.dtype == torch.float64 else logits.float()
    options = {"ignore_index": IGNORE, "reduction": "none"}
    return cross_entropy(logits.transpose(1, 2), labels, **options).double()
