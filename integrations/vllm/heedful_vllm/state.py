"""What is kept of the requests that run, beside their keys and values, for one layer.

A request goes by its first page: no other running one has it (prefix caching is off), and one that
takes it over later begins at its first token, as does one that was preempted.
"""

from collections import OrderedDict

import torch
from jaxtyping import Float, Int
from torch import Tensor


class Rows:
    """The newest rows of every request that runs: queries, or what enters a projection or left it.

    Arguments:
        count: how many rows the newest output depends on.
        requests: how many run at once, at most.
    """

    def __init__(self, count: int, requests: int) -> None:
        # A request that runs is in the next step or soon after it, so what has not been in use for
        # longer than as many others again has ended.
        self.count, self.room = count, 2 * requests
        self._rows: OrderedDict[int, Float[Tensor, "r ..."]] = OrderedDict()

    def join(self, page: int, before: int, new: Float[Tensor, "T ..."]) -> Float[Tensor, "r+T ..."]:
        """The request's kept rows, followed by new ones, of which the newest are kept.

        Arguments:
            page: the request's first page.
            before: how many tokens it had before these.
            new: the rows of its new tokens.
        """
        if not self.count:
            return new
        rows = self._rows.pop(page, None)  # also of one that has ended: the new one is the newest
        rows = rows if before else None
        if (0 if rows is None else rows.shape[0]) != min(before, self.count):
            raise _missing("the rows of a request with {} tokens are", before)
        joined = new if rows is None else torch.cat([rows, new])
        self._rows[page] = joined[-self.count :].clone()  # at the end, as the newest
        while len(self._rows) > self.room:
            self._rows.popitem(last=False)
        return joined


class Slots:
    """What a layer keeps per token, in slots as vLLM's pages have them: F, or a selector's keys."""

    def __init__(self) -> None:
        self._values: Float[Tensor, "slots ..."] | None = None
        self._tokens: dict[int, int] = {}  # how many a request has, by its first page

    def read(self, page: int, slots: Int[Tensor, " n"]) -> Float[Tensor, "n ..."] | None:
        """What was written of a request's tokens; `None` where it has none yet.

        Arguments:
            page: the request's first page.
            slots: those of its tokens before the new ones, in their order.
        """
        if not len(slots):
            return None
        if self._values is None or self._tokens.get(page) != len(slots):
            raise _missing("the state of a request with {} tokens is", len(slots))
        return self._values[slots]

    def write(
        self, page: int, slots: Int[Tensor, " n"], values: Float[Tensor, "m ..."], room: int
    ) -> None:
        """Keep values of a request's newest tokens, or of all.

        Arguments:
            page: the request's first page.
            slots: those of all its tokens, in their order.
            values: of the newest of these.
            room: how many slots there are in all pages.
        """
        if self._values is None:
            self._values = values.new_empty(room, *values.shape[1:])
        self._values[slots[len(slots) - len(values) :]] = values
        self._tokens[page] = len(slots)


def _missing(what: str, tokens: int) -> RuntimeError:
    return RuntimeError(f"{what.format(tokens)} gone; please report this, with the options of vLLM")
