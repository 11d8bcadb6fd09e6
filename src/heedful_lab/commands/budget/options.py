"""The options of `heedful budget`; imports nothing heavy."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from heedful.checks import UserError, check_literals, check_whole
from heedful_lab.commands.options import (
    RECALL,
    EvictionName,
    ModelDevice,
    ModelDtype,
    TokenizerName,
    check_device,
    check_eviction_name,
    is_users_policy,
)


@dataclass(frozen=True)
class BudgetSearch:
    """Search how many tokens each layer's KV cache needs, and write budgets.json into the model's
    folder.

    First a budget that all layers share; then tokens go where they are missed most; then the layer
    that loses least gives up a few, again and again. The perplexity of the data stays below a
    limit, or with --tokens their sum is given. --trials bounds the time. The result is used by
    `heedful.load`, `heedful.new_cache` and `heedful generate` by themselves. The same command goes
    on where it was stopped.
    """

    model: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="MODEL")]]
    """Folder of a model, converted or not, or of an adapter."""
    data: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FILE ...")] = ()
    """Text files, folders of them, or hf:NAME; a part of the training texts is right. recall beside
    them: as many sequences again, of facts in these texts and questions about them, of which only
    the answers count."""
    adapter: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None
    """An adapter to open MODEL with, which is then its base; budgets.json is written into it."""
    eviction: EvictionName = "auto"
    """Policy of eviction. auto: the tokens that are masked most (most-hidden); for
    other mechanisms all but the first and the newest (streaming-llm). Not lowest-gate."""
    loss: float = 0.5
    """Percent by which the perplexity may rise above that of the full cache."""
    reference: Annotated[str | None, tyro.conf.arg(metavar="MODEL")] = None
    """A model whose perplexity, with its full cache, is the limit in place of --loss."""
    tokens: int | None = None
    """Give layers so many tokens on average, each as many as help most, in place of --loss."""
    length: int = 1024
    """Tokens per sequence of data."""
    rows: int = 8
    """Sequences of data."""
    sinks: int | None = None
    """First tokens that are never evicted; 4 by default, for window none."""
    recent: int = 8
    """Newest tokens that are never evicted."""
    trials: int = 120
    """The most budgets that are tried; 0: until nothing is left to try."""
    tokenizer: TokenizerName = None
    dtype: ModelDtype = "auto"
    device: ModelDevice = "auto"
    restart: bool = False
    """Begin anew where the folder holds the trials of another search."""

    def __post_init__(self) -> None:
        check_literals(self)
        check_device(self.device)
        if not self.data:
            raise UserError("data must name at least one text file: add --data FILE")
        if set(self.data) == {RECALL}:
            raise UserError("data must name a text beside recall, for facts to stand in: add one")
        if self.tokens is not None:
            check_whole("tokens", self.tokens, self.recent + 1, self.length)
            if self.reference is not None:
                raise UserError(
                    "tokens gives the sum of the budgets and reference their limit: leave one out"
                )
        if self.eviction == "none":
            raise UserError("eviction='none' keeps everything: there is nothing to search")
        check_eviction_name(self.eviction)
        if is_users_policy(self.eviction):
            raise UserError(
                f"eviction={self.eviction!r} is a policy of yours, and budgets.json names those of "
                "heedful: search with one of these, or hand yours to heedful.new_cache"
            )
        check_whole("length", self.length, 32)
        check_whole("rows", self.rows, 1)
        if self.sinks is not None:
            check_whole("sinks", self.sinks, 0)
        check_whole("recent", self.recent, 0)
        check_whole("trials", self.trials, 0)
        if not 0 <= self.loss < float("inf"):
            raise UserError(f"loss must be a percentage of at least 0, got {self.loss}")
