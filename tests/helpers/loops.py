"""Who sees whom, and the softmax, in plain Python: what the definitions by loops share."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from heedful.ops import Visibility


def sight(visibility: Visibility | None, queries: int, keys: int) -> Callable[..., bool]:
    """`sees(row, query, key)` as the docstring of `Visibility` states it."""
    visibility = Visibility() if visibility is None else visibility
    own = visibility.queries
    last = slice(keys - queries, None)

    def pair(name: str, default: Callable[[int], list]) -> tuple[Callable, Callable]:
        """What the queries and what the keys of a row have by this name."""
        of_keys = getattr(visibility, name, None)
        of_queries = None if own is None else getattr(own, name, None)

        def keys_have(row: int) -> list:
            return default(keys) if of_keys is None else of_keys[row % len(of_keys)].tolist()

        def queries_have(row: int) -> list:
            if own is None:
                return keys_have(row)[last]
            if of_queries is None:
                return default(queries)
            return of_queries[row % len(of_queries)].tolist()

        return queries_have, keys_have

    documents = pair("documents", lambda n: [0] * n)
    padding = pair("padding", lambda n: [True] * n)
    positions = pair("positions", lambda n: list(range(n)))
    mutual = pair("mutual", lambda n: [-1] * n)

    def sees(row: int, query: int, key: int) -> bool:
        def both(functions: tuple[Callable, Callable]) -> tuple:
            return functions[0](row)[query], functions[1](row)[key]

        (at, there), (run, other) = both(positions), both(mutual)
        if visibility.causal and there > at and not (run >= 0 and run == other):
            return False
        far = at - there if visibility.causal else abs(at - there)
        if visibility.window is not None and far >= visibility.window:
            return False
        document, another = both(documents)
        return document == another and document >= 0 and all(both(padding))

    return sees


def dot(x: list[float], y: list[float]) -> float:
    return sum(a * b for a, b in zip(x, y, strict=True))


def capped(logit: float, softcap: float | None) -> float:
    return logit if softcap is None else softcap * math.tanh(logit / softcap)


def softmax(logits: list[float | None], sink: float | None = None) -> list[float]:
    """Over the entries that are not `None`; those get zero. A sink takes a share of its own."""
    visible = [x for x in logits if x is not None]
    if not visible:
        return [0.0] * len(logits)
    if sink is not None:
        visible.append(sink)
    top = max(visible)
    weights = [0.0 if x is None else math.exp(x - top) for x in logits]
    total = sum(weights) + (0.0 if sink is None else math.exp(sink - top))
    return [w / total for w in weights]


def grid(*sizes: int) -> list:
    """Nested lists of zeros."""
    if len(sizes) == 1:
        return [0.0] * sizes[0]
    return [grid(*sizes[1:]) for _ in range(sizes[0])]


def weighted(weights: list, values: list, group: int) -> Tensor:
    """Sum of values by weights `[B][H][Tq][Tk]`, with `group` heads per value head."""
    width = len(values[0][0][0])
    return torch.tensor(
        [
            [
                [
                    [
                        sum(w * x[d] for w, x in zip(row, values[b][h // group], strict=True))
                        for d in range(width)
                    ]
                    for row in head
                ]
                for h, head in enumerate(heads)
            ]
            for b, heads in enumerate(weights)
        ],
        dtype=torch.float64,
    )


def cases(keys: int) -> dict[str, Visibility | None]:
    """Kinds of visibility for two rows of `keys` tokens, at least 5."""
    padding = torch.ones(2, keys, dtype=torch.bool)
    padding[0, : keys // 3] = False
    padding[1, keys - keys // 4 :] = False
    documents = torch.tensor(
        [[int(t >= keys // 3) for t in range(keys)], [2 * t // keys + 3 for t in range(keys)]]
    )
    return {
        "causal": None,
        "window": Visibility(window=3),
        "documents": Visibility(documents=documents),
        "padding": Visibility(padding=padding),
        "both in a window": Visibility(documents=documents, padding=padding, window=4),
    }
