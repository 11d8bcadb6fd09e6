"""A cache as one file of safetensors: what it was made for, and what it keeps.

What is cached is written without the room for later tokens, whose size is noted, so that a cache
from a file has the bytes of the one that was saved. Nothing in a file is code: classes are those of
the library, and a policy of a user's own is handed over again.
"""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from heedful.checks import UserError
from heedful.eviction import POLICIES, Eviction
from heedful.files import write_whole
from heedful.hf.cache.layer import LayerCache
from heedful.hf.cache.slots import Slots
from heedful.hf.evicting.layer import EvictingLayer
from heedful.hf.identity import cache_identity, json_digest, tensors_digest

FORMAT = 3
_NAME, _DIGEST = "heedful.cache", "heedful.digest"  # of the metadata
_PARTS = {
    "weights": "other weights, or the same in another precision",
    "adapter": "other selectors or LoRA",
    "mechanism": "another mechanism",
    "configuration": "another configuration",
}


class Contents(NamedTuple):
    """Contents of a cache file.

    policy: the description of the policy; `None` where nothing is evicted.
    slack: of the cache.
    int8: whether its tokens are stored as int8.
    maps: the slot maps of a cache of a model as it is, packed.
    layers: each layer, packed.
    tensors: by the names in these.
    """

    policy: dict | None
    slack: int
    int8: bool
    maps: list
    layers: list
    tensors: dict[str, Tensor]


def write_cache(path: Path, layers: list, model: nn.Module | None) -> None:
    """Write the layers of a cache, whole or not at all.

    Arguments:
        path: the file.
        layers: of the cache.
        model: that it belongs to; `None` where that is not known.

    Raises:
        ValueError: the cache cannot be saved, or its model is not known.
    """
    if model is None:
        raise UserError(
            "save needs the model that the cache was made for, and it is gone, or the cache was "
            "pickled; save the cache while the model is there"
        )
    for layer in layers:
        _check(layer)
    tensors: dict[str, Tensor] = {}
    maps = _maps(layers)
    for slot_map in maps:
        slot_map.settle()  # what has been read is final
    policies = [x.budget.policy for x in layers if x.budget is not None]
    about = {
        "format": FORMAT,
        "model": cache_identity(model),
        "policy": describe(policies[0]) if policies else None,
        "slack": max((x.slack for x in maps), default=0),
        "int8": layers[0].int8,
        "maps": [pack(x, f"maps.{i}", tensors) for i, x in enumerate(maps)],
        "layers": [pack(x, f"layers.{i}", tensors) for i, x in enumerate(layers)],
    }
    text = json.dumps(about)
    write_whole(path, save(tensors, {_NAME: text, _DIGEST: _digest(text, tensors)}))


def read_cache(path: Path, model: nn.Module) -> Contents:
    """Read a file that `write_cache` wrote for this model.

    Raises:
        ValueError: there is no such file, it is damaged, of another version or another model.
    """
    if not path.is_file():
        raise UserError(f"cache {path} is not a file; cache.save(path) writes one")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            about = json.loads(metadata.get(_NAME, "null"))
            if not isinstance(about, dict) or about.get("format") != FORMAT:
                raise UserError(
                    f"cache {path} must be a file of cache.save in format {FORMAT}; save the cache "
                    "again with this version of heedful"
                )
            own, theirs = cache_identity(model), about["model"]
            if others := [words for part, words in _PARTS.items() if own[part] != theirs[part]]:
                raise UserError(
                    f"cache {path} belongs to another model ({'; '.join(others)}); load it with "
                    "the one that it was made with, or read the text again"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if metadata[_DIGEST] != _digest(metadata[_NAME], tensors):
            raise ValueError("it is not what was written")
        fields = [about[name] for name in Contents._fields[:-1]]
    except UserError:
        raise
    except (OSError, ValueError, LookupError, TypeError, SafetensorError) as error:
        raise UserError(f"cache {path} is damaged ({error}); read the text again") from None
    return Contents(*fields, tensors)


def policy_of(contents: Contents, given: Eviction | None) -> Eviction | None:
    """The policy of a saved cache.

    Arguments:
        contents: of the file.
        given: the policy that the caller hands over; needed for one that is not heedful's.

    Raises:
        ValueError: it is another policy, or must be handed over and is not.
    """
    saved = contents.policy
    if given is not None:
        if saved != describe(given):
            raise UserError(f"eviction must be the policy of the saved cache, {saved}, got {given}")
        return given
    if saved is None:
        return None
    kind = next((x for x in POLICIES if x.__name__ == saved["kind"]), None)
    if kind is None:
        raise UserError(
            f"the saved cache has a policy of your own, {saved['kind']}: hand it over with "
            f"eviction={saved['kind']}(...)"
        )
    return kind(**saved["fields"])


def describe(policy: Eviction) -> dict:
    """A policy as JSON can hold it.

    Raises:
        ValueError: it has an argument that JSON has no form for.
    """
    fields = {x.name: getattr(policy, x.name) for x in dataclasses.fields(policy) if x.init}
    try:
        return json.loads(json.dumps({"kind": type(policy).__name__, "fields": fields}))
    except TypeError as error:
        raise UserError(
            f"eviction: {type(policy).__name__} has an argument that a saved cache cannot hold "
            f"({error}); save a cache under another policy"
        ) from None


def fill(layers: list, contents: Contents, devices: Iterable[torch.device]) -> None:
    """Give an empty cache's layers what was saved, each on its device."""
    maps, places = _maps(layers), list(devices)
    if (len(maps), len(layers)) != (len(contents.maps), len(contents.layers)):
        raise UserError(
            f"the saved cache has {len(contents.layers)} layers in {len(contents.maps)} groups, "
            f"and this model's has {len(layers)} in {len(maps)}, as its layers are on other "
            "devices; read the text again"
        )
    first = {x.map: place for x, place in reversed(list(zip(layers, places, strict=True)))
             if isinstance(x, EvictingLayer)}  # fmt: skip
    for slot_map, packed in zip(maps, contents.maps, strict=True):
        unpack(slot_map, packed, contents.tensors, first[slot_map])
    for layer, packed, device in zip(layers, contents.layers, places, strict=True):
        unpack(layer, packed, contents.tensors, device)
        layer.resume(device)


def pack(x: object, name: str, tensors: dict[str, Tensor]) -> object:
    """The state of a part of a cache, whose tensors go under names that begin with this one."""
    if isinstance(x, Tensor):
        tensors[name] = x.detach().cpu().contiguous()
        return {"tensor": name}
    if isinstance(x, torch.dtype):
        return {"dtype": str(x).removeprefix("torch.")}
    if isinstance(x, Slots):
        if x.buffer is None:
            return {"slots": None}
        tensors[name] = x.contents.detach().cpu().contiguous()
        return {"slots": name, "room": x.buffer.shape[2], "start": x.start, "own": x.own}
    if isinstance(x, dict):
        return {"each": {key: pack(y, f"{name}.{key}", tensors) for key, y in x.items()}}
    if hasattr(x, "parts"):
        parts = {key: getattr(x, key, None) for key in x.parts}
        return {"parts": {key: pack(y, f"{name}.{key}", tensors) for key, y in parts.items()}}
    return x


def unpack(old: object, packed: object, tensors: dict[str, Tensor], device: torch.device) -> object:
    """Unpack what `pack` packed; a part of a cache that exists already is filled."""
    if not isinstance(packed, dict):
        return packed
    if "tensor" in packed:
        return tensors[packed["tensor"]].to(device)
    if "dtype" in packed:
        return getattr(torch, packed["dtype"])
    if "slots" in packed:
        slots = old if isinstance(old, Slots) else Slots()
        if packed["slots"] is not None:
            tokens = tensors[packed["slots"]].to(device)
            slots.refill(tokens, packed["room"], packed["start"], packed["own"])
        return slots
    if "each" in packed:
        before = old if isinstance(old, dict) else {}
        each = packed["each"].items()
        new = {key: unpack(before.get(key), x, tensors, device) for key, x in each}
        if before is not old:
            return new
        old.clear()
        old.update(new)
        return old
    for key, x in packed["parts"].items():
        setattr(old, key, unpack(getattr(old, key, None), x, tensors, device))
    return old


def _digest(text: str, tensors: dict[str, Tensor]) -> str:
    """Digest that detects changes to a file."""
    return json_digest([text, tensors_digest(tensors.items())])


def _maps(layers: list) -> list:
    """The slot maps of layers, each once, in order."""
    return list(dict.fromkeys(x.map for x in layers if isinstance(x, EvictingLayer)))


def _check(layer: object) -> None:
    """Raise unless a layer's cache can be saved as it is."""
    if type(layer) not in (EvictingLayer, LayerCache):
        raise UserError(
            f"save: {type(layer).__name__} keeps more than tokens one by one, which no file holds; "
            "save a cache of a model as it is, or of one whose mechanism keeps keys and values"
        )
    layer.check_between_calls()
