"""What an eviction policy is: a budget, the tokens that are never evicted, and one score."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful.checks import UserError, is_whole


class CachedTokens(NamedTuple):
    """What a policy scores: the `n` tokens of each sequence that one layer has cached.

    positions: the position of every token in its sequence, from 0 for the first one that is no
        padding, `[B, n]`; in any order.
    total: how many tokens of each sequence have been read, padding and evicted ones included.
    hidden: F of the next query, how strongly each token is masked (the least of several selectors),
        `[B, n]`; `None` where the mechanism masks nothing.
    gate: the retention gate of each token, `[B, n]`; `None` where the mechanism has none.
    attention: the weights of the newest queries on each token, summed over these queries, mean of
        the heads' absolute values, `[B, n]`; `None` unless the policy observes queries.
    queries: how many queries `attention` sums over.
    score: the policy's own score after the last call, 0 for tokens that came since, `[B, n]`;
        `None` at the first call.
    logits: what no logit exceeds in size before F is subtracted, `[B]`; as far as is known
        (`Bounded`), and `None` unless the policy reads it.
    keys: every token's key, after the rotary embedding, `[B, Hk, n, D]`; `None` unless the policy
        reads keys, as are the next three.
    layer: the number of the attention layer.
    next: the position of the next token as the rotary embedding counts, `[B]`.
    real: `True` for a token that is no padding, `[B, n]`; `None` also where all are real.
    """

    positions: Int[Tensor, "B n"]
    total: int
    hidden: Float[Tensor, "B n"] | None = None
    gate: Float[Tensor, "B n"] | None = None
    attention: Float[Tensor, "B n"] | None = None
    queries: int = 0
    score: Float[Tensor, "B n"] | None = None
    logits: Float[Tensor, " B"] | None = None
    keys: Float[Tensor, "B Hk n D"] | None = None
    layer: int | None = None
    next: Int[Tensor, " B"] | None = None
    real: Bool[Tensor, "B n"] | None = None


@dataclass(frozen=True)
class Eviction:
    """A budget of tokens per layer, and which tokens are never evicted.

    Between two calls of the model a layer caches one token less than its budget, so that the next
    one fits: a query attends to at most `tokens` tokens, itself included. A call of several tokens
    (a prompt, a chunk of one) caches all of its own tokens until its attention is done.

    Arguments:
        tokens: how many tokens a layer may cache; one number, or one per attention layer, where
            `None` stands for a layer that keeps everything, and a tuple for one whose key heads
            have budgets of their own, one number per key head.
        sinks: how many of the first tokens of a sequence are never evicted.
        recent: how many of the newest tokens are never evicted.
        keep_prompt: never evict what the model was called with before its first step of one token.
    """

    tokens: int | tuple[int | tuple[int, ...] | None, ...]
    sinks: int = 4
    recent: int = 8
    keep_prompt: bool = False

    # How many of the newest queries' weights `score` reads; `None` is those of all queries.
    observes: ClassVar[int | None] = 0
    # Whether `score` reads F, how strongly tokens are masked.
    reads_hidden: ClassVar[bool] = False
    # Whether `score` reads retention gates.
    reads_gate: ClassVar[bool] = False
    # Whether `score` reads how large logits are.
    reads_logits: ClassVar[bool] = False
    # Whether `score` reads keys, and is calibrated for one model.
    reads_keys: ClassVar[bool] = False
    # Evict the tokens whose score is below it, however many these are, and no others; `None` evicts
    # down to the budget. A policy that has it has no `tokens`.
    evicts_below: ClassVar[float | None] = None

    def __post_init__(self) -> None:
        for name in ("sinks", "recent"):
            if not is_whole(getattr(self, name), 0):
                raise UserError(
                    f"{name} must be a whole number of tokens of at least 0, got "
                    f"{getattr(self, name)!r}"
                )
        if not isinstance(self.keep_prompt, bool):
            raise UserError(f"keep_prompt must be True or False, got {self.keep_prompt!r}")
        if self.evicts_below is None:
            self._check_tokens()

    def _check_tokens(self) -> None:
        layers = (self.tokens,)
        if isinstance(self.tokens, tuple | list):
            layers = tuple(tuple(x) if isinstance(x, list) else x for x in self.tokens)
            object.__setattr__(self, "tokens", layers)
            layers = tuple(x for x in layers if x is not None)
        least = self.sinks + self.recent + 1
        for layer in layers:
            for count in layer if isinstance(layer, tuple) and layer else (layer,):
                if not is_whole(count, least):
                    raise UserError(
                        "tokens must be whole numbers of at least sinks + recent + 1 = "
                        f"{least}, got {count!r}; give the layer more tokens, or protect fewer"
                    )

    def budgets(self, layers: int) -> tuple[int | tuple[int, ...] | None, ...]:
        """The budget of every attention layer of a model, or of each of its key heads."""
        if not isinstance(self.tokens, tuple):
            return (self.tokens,) * layers
        if len(self.tokens) != layers:
            raise UserError(
                f"tokens must be one number, or one for each of the model's {layers} attention "
                f"layers, got {len(self.tokens)} numbers"
            )
        return self.tokens

    def score(self, cached: CachedTokens) -> Float[Tensor, "B n"]:
        """How much each token is worth keeping, `[B, n]`; the lowest are evicted first."""
        raise NotImplementedError
