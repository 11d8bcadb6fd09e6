"""What an eviction policy is: a budget, the tokens that it must not touch, and one score."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from heedful.checks import is_whole


class Held(NamedTuple):
    """What a policy may look at: the tokens that one layer holds, `n` in each row of the batch.

    positions: where every token stands in its row, from 0, `[B, n]`; in any order.
    seen: how many tokens the layer has seen.
    hidden: F of the next query, how far each token is hidden (the least of several selectors),
        `[B, n]`; `None` where the mechanism hides nothing.
    attention: what the newest queries gave each token, summed over them, mean of the heads'
        absolute weights, `[B, n]`; `None` unless the policy observes queries.
    queries: how many queries `attention` sums over.
    score: what the policy said last time, 0 for tokens that came since, `[B, n]`; `None` before.
    """

    positions: Int[Tensor, "B n"]
    seen: int
    hidden: Float[Tensor, "B n"] | None = None
    attention: Float[Tensor, "B n"] | None = None
    queries: int = 0
    score: Float[Tensor, "B n"] | None = None


@dataclass(frozen=True)
class Eviction:
    """A budget of tokens per layer, and which tokens are never asked about.

    Between two calls of the model a layer holds one token less than its budget, so that the next
    one fits: a query attends to at most `tokens` tokens, itself included. A call of several tokens
    (a prompt, a chunk of one) holds all of its own tokens until its attention is done.

    Arguments:
        tokens: how many tokens a layer may hold; one number, or one per attention layer, where
            `None` stands for a layer that keeps everything.
        sinks: how many of the first tokens of a row are never evicted.
        recent: how many of the newest tokens are never evicted.
        keep_prompt: never evict what the model was called with before its first step of one token.
    """

    tokens: int | tuple[int | None, ...]
    sinks: int = 4
    recent: int = 8
    keep_prompt: bool = False

    # How many of the newest queries' weights `score` reads; `None` is those of all queries.
    observes: ClassVar[int | None] = 0
    # Whether `score` reads how far tokens are hidden.
    reads_hidden: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("sinks", "recent"):
            if not is_whole(getattr(self, name), 0):
                raise ValueError(
                    f"{name} must be a whole number of tokens of at least 0, got "
                    f"{getattr(self, name)!r}"
                )
        if not isinstance(self.keep_prompt, bool):
            raise ValueError(f"keep_prompt must be True or False, got {self.keep_prompt!r}")
        several = isinstance(self.tokens, tuple | list)
        if several:
            object.__setattr__(self, "tokens", tuple(self.tokens))
        least = self.sinks + self.recent + 1
        for count in self.tokens if several else (self.tokens,):
            if several and count is None:
                continue
            if not is_whole(count, least):
                raise ValueError(
                    f"tokens must be whole numbers of at least sinks + recent + 1 = {least}, got "
                    f"{count!r}; give the layer more tokens, or protect fewer"
                )

    def budgets(self, layers: int) -> tuple[int | None, ...]:
        """The budget of every attention layer of a model."""
        if not isinstance(self.tokens, tuple):
            return (self.tokens,) * layers
        if len(self.tokens) != layers:
            raise ValueError(
                f"tokens must be one number, or one for each of the model's {layers} attention "
                f"layers, got {len(self.tokens)} numbers"
            )
        return self.tokens

    def score(self, held: Held) -> Float[Tensor, "B n"]:
        """How much each token is worth keeping; the lowest go first."""
        raise NotImplementedError
