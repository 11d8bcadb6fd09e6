"""Converted models by name, and their tokens in one call or in several."""

import torch
from torch import Tensor

from heedful.eviction import MostHidden
from heedful.hf.versions import cache_argument, cache_of, generate_argument
from heedful.nn import (
    NAMES,
    Forgetting,
    Grouped,
    LocalGlobal,
    MultiToken,
    Selective,
    Standard,
    mechanism,
)
from helpers.families import exactly, tiny, varied

MECHANISMS = {name: mechanism(name) for name in NAMES} | {
    "mta-everywhere": MultiToken(conv=(4, 5), post_conv=(3, 3), conv_every=1),
    "mta-pre": MultiToken(conv=(4, 5), post_conv=None, conv_every=1),
    "selective-extra": Selective(selector="extra"),
    "selective-per-head": Selective(selector="per-head"),
    "local": Standard(window=4),
    "local-global": LocalGlobal(window=5, every=2),
    "forgetting-identity": Forgetting("identity"),
    "grouped": Grouped(size=3, window=2),
    "grouped-sliding": Grouped("sliding", size=4, stride=2, window=3, queries="groups"),
    "grouped-sentence": Grouped("sentence", size=3, window=1, closing=(2, 5, 11, 17, 23, 31)),
    "grouped-cif": Grouped(
        "cif", size=3, window=2, share=2, refine="attention", size_bias="learned"
    ),
}


def serves(policy: type | None, name: str) -> bool:
    """Whether a policy with a budget serves a mechanism that keeps tokens one by one."""
    supported = {MostHidden: ("selective", "selective-extra", "selective-per-head", "mta-selective",
                          "forgetting", "forgetting-identity")}  # fmt: skip
    return name in supported.get(policy, (name,))


def converted(name: str, family: str = "llama", **options):
    return varied(tiny(family, **options), MECHANISMS[name])


def greedy(model, ids: Tensor, new: int = 8, **options) -> Tensor:
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False} | options
    if "cache" in options:
        options |= generate_argument(options.pop("cache"))
    return model.generate(ids, max_new_tokens=new, **options)


@torch.no_grad()
def in_steps(model, ids: Tensor, sizes: list[int], cache=None, **options) -> Tensor:
    """Logits of all tokens, from calls of so many tokens each."""
    parts, mask, position = [], options.pop("attention_mask", None), 0
    for piece in ids.split(sizes, dim=1):
        position += piece.shape[1]
        if mask is not None:
            options["attention_mask"] = mask[:, :position]
        with exactly():
            named = cache_argument(model, cache)
            out = model(input_ids=piece, use_cache=True, **named, **options)
        cache = cache_of(out)
        parts.append(out.logits)
    return torch.cat(parts, dim=1)


def tensors_in(x: object) -> list[torch.Tensor]:
    """All tensors that an object of a cache keeps, but those of calls to take back."""
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, tuple | list):
        return [y for item in x for y in tensors_in(item)]
    if isinstance(x, dict):
        return tensors_in([item for name, item in x.items() if name != "_undo"])
    own = type(x).__module__.startswith("heedful.hf.cache")
    return tensors_in(vars(x)) if own and hasattr(x, "__dict__") else []
