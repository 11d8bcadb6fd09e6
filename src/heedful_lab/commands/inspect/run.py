"""Run a model on one text, and hand on what is to be looked at."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from heedful.checks import UserError
from heedful.hf import conversion_of
from heedful.hf.cache.new import attention_modules
from heedful.hf.look import LayerLook, cached_over_time, look_into
from heedful.nn import MechanismConfig
from heedful_lab.commands.inspect.options import MOST_TOKENS, Inspection
from heedful_lab.commands.models import ModelSource, longest, read_text
from heedful_lab.commands.policies import EvictionChoice


class InspectionResult(NamedTuple):
    """Result of a model's inspection on one text.

    model: its name.
    mechanisms: what it was converted to, with the layers of each.
    tokens: the text of each token.
    looks: index and look of each layer, made one after the other while they are taken.
    cached: by layer, which tokens its cache holds after every token; empty without a budget.
    policy: the eviction policy in words; empty without a budget.
    causal: whether a token sees earlier ones only: a decoder.
    """

    model: str
    mechanisms: Mapping[str, tuple[int, ...]]
    tokens: list[str]
    looks: Iterator[tuple[int, LayerLook]]
    cached: Mapping[int, Bool[Tensor, "T T"]]
    policy: str
    causal: bool


class InspectionPlan(NamedTuple):
    """An inspection in plain values.

    source: the model.
    text, tokens: what it reads, and how many tokens of it at most.
    layers: those that are shown; empty is all.
    choice: of a cache that is shown.
    """

    source: ModelSource
    text: str
    tokens: int | None
    layers: tuple[int, ...]
    choice: EvictionChoice


def inside(options: Inspection) -> InspectionResult:
    """Run the model as `heedful inspect` does.

    Arguments:
        options: the model, the text and the budget.

    Raises:
        ValueError: an option cannot be read, or does not fit the model.
    """
    plan = InspectionPlan(
        ModelSource(
            options.model, options.device, options.dtype, options.adapter, options.tokenizer
        ),
        options.text if options.file is None else read_text(Path(options.file)),
        options.tokens,
        options.layers,
        EvictionChoice(options.budget, options.eviction, options.seed),
    )
    return _run(plan)


def _run(plan: InspectionPlan) -> InspectionResult:
    name, choice = plan.source.name, plan.choice
    if not plan.text:
        raise UserError("text must have at least one character, got an empty one")
    model = plan.source.open(budgets=choice.own_budgets)
    if model.config.is_encoder_decoder:
        raise UserError(
            f"model {name!r} is an encoder-decoder ({model.config.model_type}), whose "
            "cross-attention looks at two sequences; name a decoder or an encoder"
        )
    tokenizer = plan.source.open_tokenizer(model)
    ids, tokens = _tokens(plan.text, tokenizer, plan.tokens, longest(model))
    causal = bool(attention_modules(model))
    if not causal and choice.budget is not None:
        raise UserError(
            f"budget is for decoders, and {name!r} is an encoder, which keeps nothing between "
            "calls; leave it out"
        )
    policy = choice.policy(model)
    if policy is None:
        policy = conversion_of(model).eviction
    torch.manual_seed(choice.seed)
    cached = cached_over_time(model, ids, policy) if policy else {}
    layers = plan.layers or tuple(cached)
    return InspectionResult(
        model=Path(name).resolve().name if Path(name).is_dir() else name,
        mechanisms={_in_words(x): where for x, where in conversion_of(model).mechanisms.items()},
        tokens=tokens,
        looks=look_into(model, ids, plan.layers),
        cached={index: map_ for index, map_ in cached.items() if index in layers},
        policy=str(policy) if policy else "",
        causal=causal,
    )


def _in_words(mechanism: MechanismConfig) -> str:
    """Its name, and what of it is not as by default."""
    changed = (
        f"{field.name}={value!r}"
        for field in fields(mechanism)
        if (value := getattr(mechanism, field.name)) != field.default
    )
    return f"{type(mechanism).__name__}({', '.join(changed)})"


def _tokens(
    text: str, tokenizer, first: int | None, positions: int | None
) -> tuple[Int[Tensor, "1 T"], list[str]]:
    """The first tokens, and what of the text each stands for."""
    ids = tokenizer.encode(text)
    spelled = spelled_tokens(text, ids, tokenizer)[:first]
    ids = ids[:first]
    if not ids:
        raise UserError("text has no tokens; give at least one word")
    most = MOST_TOKENS if positions is None else min(positions, MOST_TOKENS)
    if len(ids) > most:
        whose = "a page shows" if most == MOST_TOKENS else "the model has positions for"
        raise UserError(
            f"text has {len(ids):,} tokens, and {whose} {most:,} at most; shorten it, or take the "
            f"first with --tokens {most}"
        )
    return torch.tensor([ids]), spelled


def spelled_tokens(text: str, ids: list[int], tokenizer) -> list[str]:
    """Text of each token; white space that tokenizers leave out belongs to the next one."""
    if not getattr(tokenizer, "is_fast", False):
        return [tokenizer.decode([token]) for token in ids]
    encoding = tokenizer(text, return_offsets_mapping=True)
    names = tokenizer.convert_ids_to_tokens(ids)
    special = set(tokenizer.all_special_ids)
    texts, end = [], 0
    for token, name, (start, stop) in zip(ids, names, encoding["offset_mapping"], strict=True):
        if token in special or start == stop:
            texts.append(name)
            continue
        texts.append(text[min(end, start) : stop])
        end = stop
    return texts
