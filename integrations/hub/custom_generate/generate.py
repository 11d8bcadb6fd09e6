"""`generate` with a small KV cache: no layer caches more than `budget` tokens."""

import inspect

import torch
from transformers import GenerationMixin, PreTrainedModel

import heedful
from heedful import eviction

_PARAMETERS = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
_CACHE = "cache" if "cache" in _PARAMETERS else "past_key_values"  # before transformers 5.24


def generate(
    model: PreTrainedModel,
    budget: int | None = None,
    policy: str = "StreamingLLM",
    slack: int = 0,
    cache_dtype: str | None = None,
    prefill_chunk_size: int | None = None,
    **options: object,
) -> object:
    """Generate under a budget of tokens per layer; returns what `model.generate` returns.

    Arguments:
        model: a decoder of transformers as it is, or one that heedful has opened.
        budget: how many tokens a layer caches; `None` takes the model's own budgets.
        policy: a class of `heedful.eviction`, by its name.
        slack: how many tokens more a layer may cache before it evicts all of these at once.
        cache_dtype: `"int8"` quantizes the cached tokens.
        prefill_chunk_size: how many tokens of the prompt are read at a time; by default a quarter
            of the budget, since a call caches all of its own tokens until its attention is done.
        options: of `model.generate`.

    Raises:
        ValueError: there is no budget, no such policy, or the model is not supported.
    """
    if any(options.get(name) is not None for name in ("cache", "past_key_values")):
        raise ValueError(f"{_CACHE} must be left out: the cache is made here, for this call")
    for name in ("cache", "past_key_values"):
        options.pop(name, None)
    if cache_dtype not in (None, "int8"):
        raise ValueError(f"cache_dtype must be 'int8' or None, got {cache_dtype!r}")
    rule = None
    if budget is not None:
        kinds = {kind.__name__: kind for kind in eviction.POLICIES}
        if policy not in kinds:
            raise ValueError(f"policy must be one of {', '.join(kinds)}, got {policy!r}")
        rule = kinds[policy](tokens=budget)
    dtype = None if cache_dtype is None else torch.int8
    cache = heedful.new_cache(model, rule, slack=slack, dtype=dtype)
    tokens = [x.budget.tokens for x in cache.layers if x.budget is not None]
    if not tokens:
        raise ValueError("budget must be a number of tokens per layer, such as budget=256")
    if prefill_chunk_size is None and not (rule is not None and rule.observes):
        prefill_chunk_size = max(1, min(tokens) // 4)
    if prefill_chunk_size is not None:
        options["prefill_chunk_size"] = prefill_chunk_size
    options = {name: x for name, x in options.items() if x is not None}
    return model.generate(**options, **{_CACHE: cache})
