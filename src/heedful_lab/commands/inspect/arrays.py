"""Data of a page about one text, as plain arrays: of every map's rows only the largest entries."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from heedful.checks import UserError
from heedful.hf.look import LayerLook
from heedful_lab.commands.inspect.patterns import kernel_pattern, mixing_pattern

MOST_KEYS = 32  # of a row
LEAST_KEYS = 4
MOST_BYTES = 48 * 2**20  # of all arrays, before base64
NEAR = 16  # tokens back that still are near
LEFT = (0.9, 0.5, 0.1, 0.01)  # of a hidden token's weight: when less is left is written down
DOES = ("first", "self", "previous", "near", "far")
NOBODY = 0xFFFF  # in place of a key, in rows with fewer

_MASKINGS = 8  # of a row
_KERNELS = ("conv", "post_conv")
_MIXINGS = ("mix", "post_mix")


class PageData(NamedTuple):
    """Data that a page shows of a text.

    about: names, sizes and the text, ready for JSON.
    arrays: by name; those of layer l begin with `l/`. Of the n-th map of a layer, where H is heads
        (pairs in differential attention) and K how many keys of a row are kept: `l/n/keys`
        `[H, T, K]`, `l/n/shares` of these keys, the largest first, `l/n/first` `[H, T]` (the
        share of the first token), `l/n/rest` (the sum of the sizes of all others), and of logits
        `l/n/logz`, so that a logit is log(share) + logz. `l/does` `[2, H, 5]`: what heads
        do, with and without the first token, in the order of `DOES`. `l/since` `[4, Hs, T]`: the
        first query for which at most `LEFT` of a token is left, T for none; `l/hidden` `[Hs, T]`:
        F at the end; `l/masks/keys` and `l/masks/amounts` `[Hs, T, 8]`: what each token masked.
        `l/gone` `[T]`: after which token a cache no longer holds this one, T for never. `l/groups`
        `[G, 2]`; `l/conv`, `l/post_conv`, `l/mix`, `l/post_mix` as the layer has them.
    """

    about: dict
    arrays: dict[str, np.ndarray]


def page_data(
    model: str,
    mechanisms: Mapping[str, Sequence[int]],
    tokens: Sequence[str],
    looks: Iterable[tuple[int, LayerLook]],
    cached: Mapping[int, Tensor] | None = None,
    policy: str = "",
    causal: bool = True,
) -> PageData:
    """The arrays of a page, of the layers one after the other.

    Arguments:
        model: a name to show.
        mechanisms: what it was converted to, with the layers of each.
        tokens: the text of each token.
        looks: index and look of each layer.
        cached: by layer `[T, T]`, true at `[t, j]` where token j is cached after token t.
        policy: the eviction policy in words.
        causal: whether tokens see earlier ones only.

    Raises:
        ValueError: the text is so long, and the heads so many, that even a few keys of every row
            are more than a page can hold.
    """
    arrays: dict[str, np.ndarray] = {}
    layers = []
    for index, look in looks:
        if look.weights.shape[-1] != len(tokens):
            raise UserError(
                f"tokens must be those of the maps, got {len(tokens)} for maps of "
                f"{look.weights.shape[-1]}"
            )
        layer_data = layer_arrays(look)
        if cached and index in cached:
            layer_data["gone"] = _eviction_steps(cached[index])
        arrays |= {f"{index}/{name}": x for name, x in layer_data.items()}
        layers.append(_about(index, look, layer_data))
        _most_keys(arrays)  # raises as early as can be known
    keys = _fitted(arrays)
    about = {
        "model": model,
        "mechanisms": {name: list(where) for name, where in mechanisms.items()},
        "tokens": list(tokens),
        "layers": layers,
        "policy": policy,
        "causal": causal,
        "keys": keys,
        "near": NEAR,
        "left": LEFT,
        "does": DOES,
    }
    return PageData(about, arrays)


def layer_arrays(look: LayerLook) -> dict[str, np.ndarray]:
    """Arrays of one layer on a page, by name without the layer's number."""
    arrays: dict[str, np.ndarray] = {}
    maps = [(step.map, step.logits) for step in look.steps] + [(look.weights, False)]
    for number, (map_, logits) in enumerate(maps):
        arrays |= {f"{number}/{name}": x for name, x in _rows(map_.float(), logits).items()}
    arrays["does"] = what_heads_do(look.weights)
    if look.masking is not None:
        arrays |= _masking(look.masking)
    if look.groups is not None:
        arrays["groups"] = look.groups.numpy().astype(np.uint16)
    for name in (*_KERNELS, *_MIXINGS):
        if (x := getattr(look, name)) is not None:
            arrays[name] = x.float().numpy()
    return arrays


def _rows(map_: Tensor, logits: bool) -> dict[str, np.ndarray]:
    """Of every row the entries that are largest, and what they are shares of."""
    arrays = {}
    if logits:
        logz = map_.logsumexp(-1)
        arrays["logz"] = logz.nan_to_num(neginf=0).numpy().astype(np.float32)
        map_ = map_.softmax(-1).nan_to_num()
    size = map_.abs()
    keys = min(MOST_KEYS, map_.shape[-1])
    at = size.topk(keys, dim=-1).indices
    shares = map_.gather(-1, at).half()
    at = at.masked_fill(shares == 0, NOBODY)
    return arrays | {
        "keys": at.numpy().astype(np.uint16),
        "shares": shares.numpy(),
        "first": map_[..., 0].half().numpy(),
        "rest": size[..., 1:].sum(-1).half().numpy(),
    }


def what_heads_do(weights: Tensor) -> np.ndarray:
    """The mean share of a row that goes where `DOES` says, with and without the first token.

    Shares are of absolute values. Of every query but the first, the key is the sequence's first
    token, the query itself, the token before it, another one at most `NEAR` away (on either side),
    or any other. Without the first token it is the shares of the others, of the queries that have
    any.

    Arguments:
        weights: `[H, T, T]`.

    Returns:
        `[2, H, 5]`; of a row of one token zeros.
    """
    size = weights.float().abs()
    count = size.shape[-1]
    back = torch.arange(count)[:, None] - torch.arange(count)
    first = torch.zeros(count, count, dtype=torch.bool)
    first[:, 0] = True
    kinds = [first, (back == 0) & ~first, (back == 1) & ~first]
    kinds.append((back.abs() <= NEAR) & ~torch.stack(kinds).any(0))
    kinds.append(~torch.stack(kinds).any(0))
    # [H, T, 5], by a product with each kind: a copy of the map per kind would be too much.
    parts = torch.stack([torch.einsum("hqk,qk->hq", size, kind.float()) for kind in kinds], -1)
    parts = parts[:, 1:]
    without = parts.clone()
    without[..., 0] = 0
    return torch.stack([_mean_share(parts), _mean_share(without)]).numpy().astype(np.float32)


def _mean_share(parts: Tensor) -> Tensor:
    total = parts.sum(-1, keepdim=True)
    some = total > 1e-6
    shares = torch.where(some, parts / total.where(some, 1), 0)
    return shares.sum(1) / some.sum(1).clamp(min=1)


def _masking(masking: Tensor) -> dict[str, np.ndarray]:
    count = masking.shape[-1]
    total = masking.double().cumsum(1)  # [Hs, p, j]: F of token j for the query after p
    # F never falls, so how many rows are below a bound tells which is the first that is not.
    rows = [(total < -math.log(share)).sum(1) + 1 for share in LEFT]
    amounts, keys = masking.topk(min(_MASKINGS, count), dim=-1)
    return {
        "since": torch.stack(rows).clamp(max=count).numpy().astype(np.uint16),
        "hidden": total[:, -1].numpy().astype(np.float32),
        "masks/keys": keys.masked_fill(amounts == 0, NOBODY).numpy().astype(np.uint16),
        "masks/amounts": amounts.numpy().astype(np.float16),
    }


def _eviction_steps(cached: Tensor) -> np.ndarray:
    """After which token each one is no longer cached: evicted tokens never come back."""
    count = len(cached)
    times = torch.arange(count)[:, None]
    absent = ~cached & (times >= torch.arange(count))
    return torch.where(absent, times, count).amin(0).numpy().astype(np.uint16)


def _about(index: int, look: LayerLook, arrays: dict[str, np.ndarray]) -> dict:
    patterns = {
        name: [kernel_pattern(matrix, look.two_sided) for matrix in arrays[name]]
        for name in _KERNELS
        if name in arrays
    }
    patterns |= {
        name: [mixing_pattern(matrix) for matrix in arrays[name]]
        for name in _MIXINGS
        if name in arrays
    }
    return {
        "index": index,
        "heads": len(look.weights),
        "unit": "head" if look.heads_per_map == 1 else "pair",
        "maps": [*(step.name for step in look.steps), "weights"],
        "logits": [*(step.logits for step in look.steps), False],
        "selectors": 0 if look.masking is None else len(look.masking),
        "two_sided": look.two_sided,
        "patterns": patterns,
    }


def _fitted(arrays: dict[str, np.ndarray]) -> int:
    """Cut rows to as many keys as a page can hold; returns how many."""
    keys = _most_keys(arrays)
    for name in _of_rows(arrays):
        arrays[name] = np.ascontiguousarray(arrays[name][..., :keys])
    return keys


def _of_rows(arrays: dict[str, np.ndarray]) -> list[str]:
    """Names of the arrays that have something for each key."""
    endings = ("/keys", "/shares")
    return [name for name in arrays if name.endswith(endings) and "masks" not in name]


def _most_keys(arrays: dict[str, np.ndarray]) -> int:
    cut = _of_rows(arrays)
    fixed = sum(x.nbytes for name, x in arrays.items() if name not in cut)
    most = max((arrays[name].shape[-1] for name in cut), default=0)
    per_key = sum(arrays[name][..., 0].nbytes for name in cut)
    keys = min(most, (MOST_BYTES - fixed) // max(per_key, 1))
    if keys < min(most, LEAST_KEYS):
        raise UserError(
            f"text and heads are too many for one page: {LEAST_KEYS} keys of every row would be "
            f"{(fixed + LEAST_KEYS * per_key) / 2**20:,.0f} MiB, and {MOST_BYTES / 2**20:.0f} are "
            "the most; take fewer --tokens, or only some --layers"
        )
    return keys
