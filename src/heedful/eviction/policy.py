"""Definition of an eviction policy: a budget, the tokens that are never evicted, and one score."""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful.checks import UserError, is_whole
from heedful.nn import Layer

Need = str | tuple[Literal["attention"], int | None]
"""One thing that a policy reads of the cached tokens, beside their positions."""

OF_EVERY_LAYER = ("keys", "values", "positions")
"""Needs that a cache serves for every layer; another word names what the layer itself keeps."""


def _is_attention(need: object) -> bool:
    if not isinstance(need, tuple) or len(need) != 2 or need[0] != "attention":
        return False
    return need[1] is None or is_whole(need[1], 1)


class CachedTokens(NamedTuple):
    """Tokens that a policy scores: the `n` of each sequence that one layer has cached.

    positions: the position of every token in its sequence, from 0 for the first one that is no
        padding, `[B, n]`; in any order.
    total: how many tokens of each sequence have been read, padding and evicted ones included.
    number: the layer's own number of each token (the least of several selectors), `[B, n]`, of a
        policy that needs a stream of the layer by its name. Of `"F"`, how strongly each token is
        masked for the next query. `None` otherwise.
    attention: the weights of the newest queries on each token, summed over these queries, mean of
        the heads' absolute values, `[B, n]`; `None` unless the policy needs attention.
    queries: how many queries `attention` sums over.
    score: the policy's own score after the last call, 0 for tokens that came since, `[B, n]`;
        `None` at the first call.
    keys: every token's key, after the rotary embedding, `[B, Hk, n, D]`; `None` unless the policy
        needs keys.
    values: every token's value, `[B, Hk, n, Dv]`; `None` unless the policy needs values.
    layer: the number of the attention layer.
    next: the position of the next token as the rotary embedding counts, `[B]`; `None` unless the
        policy needs positions.
    real: `True` for a token that is no padding, `[B, n]`; `None` where all are real, or where the
        policy needs neither keys nor values.
    """

    positions: Int[Tensor, "B n"]
    total: int
    number: Float[Tensor, "B n"] | None = None
    attention: Float[Tensor, "B n"] | None = None
    queries: int = 0
    score: Float[Tensor, "B n"] | None = None
    keys: Float[Tensor, "B Hk n D"] | None = None
    values: Float[Tensor, "B Hk n Dv"] | None = None
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
            `None` stands for a layer that keeps everything.
        sinks: how many of the first tokens of a sequence are never evicted.
        recent: how many of the newest tokens are never evicted.
        keep_prompt: never evict what the model was called with before its first step of one token.
            A last chunk of one token belongs to the prompt only in `generate` of a converted model,
            which knows the prompt's length.

    Attributes:
        needs: what `score` reads of the cached tokens beside their positions: `"keys"`, `"values"`,
            `"positions"` (as the rotary embedding counts), `("attention", n)`, the weights of the
            newest n queries, of all with `None`; `"F"`, or another running stream of the layers, by
            its name.
    """

    tokens: int | tuple[int | None, ...]
    sinks: int = 4
    recent: int = 8
    keep_prompt: bool = False

    needs: ClassVar[tuple[Need, ...]] = ()
    # By `needs`: how many of the newest queries' weights `score` reads; `None` is those of all.
    observes: ClassVar[int | None] = 0

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        for need in (None,) if isinstance(cls.needs, str) else cls.needs:
            if not isinstance(need, str) and not _is_attention(need):
                names = ", ".join(map(repr, OF_EVERY_LAYER))
                raise UserError(
                    f"needs of {cls.__name__} must be a tuple of {names}, ('attention', n), with n "
                    "of the newest queries or None for all, and names of streams, got "
                    f"{cls.needs!r}"
                )
        cls.observes = next((need[1] for need in cls.needs if _is_attention(need)), 0)

    def __post_init__(self) -> None:
        for name in ("sinks", "recent"):
            if not is_whole(getattr(self, name), 0):
                raise UserError(
                    f"{name} must be a whole number of tokens of at least 0, got "
                    f"{getattr(self, name)!r}"
                )
        if not isinstance(self.keep_prompt, bool):
            raise UserError(f"keep_prompt must be True or False, got {self.keep_prompt!r}")
        layers = (self.tokens,)
        if isinstance(self.tokens, tuple | list):
            object.__setattr__(self, "tokens", tuple(self.tokens))
            layers = tuple(x for x in self.tokens if x is not None)
        least = self.sinks + self.recent + 1
        for count in layers:
            if isinstance(count, tuple | list):
                raise UserError(
                    f"tokens must be one number per layer, got {count!r} for one: budgets of "
                    "single key heads were removed; give the layer one number"
                )
            if not is_whole(count, least):
                raise UserError(
                    f"tokens must be whole numbers of at least sinks + recent + 1 = {least}, got "
                    f"{count!r}; give the layer more tokens, or protect fewer"
                )

    def check(self, layer: Layer) -> None:
        """Raise a `ValueError` unless the policy supports a layer."""
        name, kind = type(self).__name__, type(layer).__name__
        if "F" in self.needs and layer.running != "F":
            raise UserError(
                f"eviction: {name} needs a mechanism that masks tokens (selective or forgetting "
                f"attention), and this layer is {kind}; take another policy"
            )
        own = [x for x in self.needs if isinstance(x, str) and x not in OF_EVERY_LAYER]
        if missing := [x for x in own if x != layer.running]:
            raise UserError(
                f"eviction: {name} needs {missing[0]!r}, which {kind} does not keep per token; "
                f"needs that every layer serves are {', '.join(OF_EVERY_LAYER)}, so take another "
                "policy or mechanism"
            )

    def budgets(self, layers: int) -> tuple[int | None, ...]:
        """The budget of every attention layer of a model."""
        if not isinstance(self.tokens, tuple):
            return (self.tokens,) * layers
        if len(self.tokens) != layers:
            raise UserError(
                f"tokens must be one number, or one for each of the model's {layers} attention "
                f"layers, got {len(self.tokens)} numbers"
            )
        return self.tokens

    def score(self, cached: CachedTokens) -> Float[Tensor, "B n"]:
        """Score each token, `[B, n]`; the lowest are evicted first."""
        raise NotImplementedError


@dataclass(frozen=True)
class Budget:
    """The policy of one layer, and its number of tokens.

    Arguments:
        policy: chooses what is evicted.
        tokens: less than so many are cached between two calls.
    """

    policy: Eviction
    tokens: int

    def __deepcopy__(self, memo: dict) -> "Budget":
        return self  # nothing in it changes


def layer_budgets(policy: Eviction | None, layers: int) -> list[Budget | None]:
    """The budget of each of so many attention layers; `None` keeps everything.

    Raises:
        ValueError: the policy has budgets for another number of layers.
    """
    if policy is None:
        return [None] * layers
    return [None if x is None else Budget(policy, x) for x in policy.budgets(layers)]
