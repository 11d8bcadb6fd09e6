"""The attention function that transformers calls in a converted model, and the hooks around it."""

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from heedful.checks import UserError
from heedful.hf.cache.base import AttentionCache
from heedful.hf.cache.crossing import CrossLayerCache, of_source
from heedful.hf.cache.new import layer_cache
from heedful.hf.family.mask import AttentionContext, attention_context
from heedful.hf.family.modules import SOURCES
from heedful.hf.family.projections import NAME, PROJECTION_HOOKS, begin_call, end_call
from heedful.hf.intercept import interceptors, needs_of, run_layer, using
from heedful.hf.versions import HARMLESS, cache_among, implementation_of
from heedful.nn import Layer, LayerInputs
from heedful.ops import Visibility

ROTATION = "heedful_rotation"
"""What a converted attention module calls its rotary embedding, where its layer needs one."""

IMPLEMENTATION = "heedful_converted"
"""The attention implementation of a converted model; no checkpoint names it."""

_Layer = Layer | nn.Module
"""A layer, or what PEFT wraps around one that it saves whole."""

_TERMS = {"position_bias": "bias", "softcap": "softcap", "s_aux": "sinks"}
"""What families call the terms of `heedful.nn.layer.Term` that they pass to their attention."""

_SERVED = {*_TERMS, "dropout", "output_attentions", "heedful_input", "heedful_source"}


def register_attention() -> None:
    """Make `IMPLEMENTATION` known to transformers, with its mask function; repeats do nothing."""
    AttentionInterface.register(IMPLEMENTATION, attention)
    AttentionMaskInterface.register(IMPLEMENTATION, attention_context)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: AttentionContext | Tensor | None,
    *,
    scaling: float | None = None,
    is_causal: bool | None = None,
    heedful_cache: object | None = None,
    **passed: object,
) -> tuple[Tensor, None]:
    """One layer's attention, in the signature of transformers' attention functions.

    Queries and keys arrive rotated, keys and values straight from the cache and not repeated. A
    sliding window is in the mask, so `sliding_window=` says nothing new.
    """
    layer, context = _layer_in(module), _context(attention_mask)
    _check_passed(module, layer, passed)
    _check_shape(module, layer, query, key)
    call = (module, layer, (query, key, value), context, heedful_cache, is_causal, scaling, passed)
    if attention_mask is None or context.interceptors is interceptors():
        output = _attend(*call)
    else:  # computed again in a backward pass
        with using(context.interceptors):
            output = _attend(*call)
    return output.transpose(1, 2).contiguous(), None


def _attend(
    module: nn.Module, layer: _Layer, qkv: tuple[Tensor, ...], context: AttentionContext,
    cache: object, is_causal: bool | None, scale: float | None, passed: dict,
) -> Tensor:  # fmt: skip
    """The output of a layer for what the family's attention has passed."""
    inputs = _layer_inputs(module, layer, context, passed, cache)
    attend = _ATTEND[layer.shape.role]
    return attend(module, qkv, context, cache, is_causal, scale=scale, inputs=inputs)


def _attend_causally(
    module: nn.Module, qkv: tuple[Tensor, ...], context: AttentionContext, cache: object,
    is_causal: bool | None, **options: object,
) -> Tensor:  # fmt: skip
    """Attention of a decoder's tokens to each other, and to those that its cache has."""
    layer, visibility, (query, key, _) = getattr(module, NAME), context.visibility, qkv
    # Without tokens of this call it was another layer's cache that gave the keys.
    own = cache if isinstance(cache, AttentionCache) and cache.counters.pending else None
    if own is None and not layer.plain_cache and query.shape[2] != key.shape[2]:
        raise UserError(
            f"{type(module).__name__} {layer.shape.layer} was called with keys of earlier tokens "
            "and without its own layer of a cache, and this mechanism needs more of earlier tokens "
            "than their keys; call the model with use_cache=False"
        )
    if is_causal is False and (visibility is None or visibility.causal):
        raise UserError(
            f"{type(module).__name__} was called with is_causal=False and a causal mask; say "
            "is_causal=False to the whole model"
        )
    if own is not None:
        return own.attend(layer, *qkv, visibility=visibility or Visibility(), **options)
    visibility = None if visibility is None else visibility.last(key.shape[2])
    return run_layer(layer, *qkv, visibility=visibility, **options).output


def _attend_to_source(
    module: nn.Module, qkv: tuple[Tensor, ...], context: AttentionContext, cache: object,
    is_causal: bool | None, **options: object,
) -> Tensor:  # fmt: skip
    """Attention of a decoder's tokens to an encoder's."""
    layer, visibility = getattr(module, NAME), _two_sided(module, context, qkv[1])
    if isinstance(cache, CrossLayerCache):
        return cache.attend(layer, *qkv, visibility=visibility, target=context.target, **options)
    visibility = of_source(visibility, context.target, qkv[0].shape[2])
    return run_layer(layer, *qkv, visibility=visibility, **options).output


def _attend_both_ways(
    module: nn.Module, qkv: tuple[Tensor, ...], context: AttentionContext, cache: object,
    is_causal: bool | None, **options: object,
) -> Tensor:  # fmt: skip
    """Attention of an encoder's tokens to each other."""
    visibility = _two_sided(module, context, qkv[1])
    return run_layer(getattr(module, NAME), *qkv, visibility=visibility, **options).output


_ATTEND = {
    "decoder": _attend_causally,
    "encoder": _attend_both_ways,
    "cross": _attend_to_source,
}


def _two_sided(module: nn.Module, context: AttentionContext, key: Tensor) -> Visibility:
    """Who sees whom in an encoder, or of a source: no mask shows everything."""
    role, visibility = getattr(module, NAME).shape.role, context.visibility
    if visibility is None:
        return Visibility(causal=False)
    if visibility.causal:
        raise UserError(
            f"{type(module).__name__} was called with a causal mask, and it was converted as "
            f"{role!r} attention, which sees later tokens; call heedful.revert(model) first"
        )
    batch, tokens = key.shape[0], key.shape[2]
    sequences = batch if visibility.padding is None else len(visibility.padding)
    if context.keys != tokens or sequences not in (1, batch):
        name = "encoder_attention_mask (attention_mask of the whole model)"
        raise UserError(
            f"{name if role == 'cross' else 'attention_mask'} must be [{batch}, {tokens}], one "
            f"entry per token of the source, got {(sequences, context.keys)}"
        )
    return visibility


def _layer_in(module: nn.Module) -> _Layer:
    layer = getattr(module, NAME, None)
    if layer is None:
        raise UserError(
            f"attn_implementation={IMPLEMENTATION!r} needs a converted model, and this "
            f"{type(module).__name__} is none: heedful.convert(model, ...) makes one, "
            "heedful.load(folder) loads one"
        )
    return layer


def _context(mask: AttentionContext | Tensor | None) -> AttentionContext:
    if mask is None:
        return AttentionContext()
    if not isinstance(mask, AttentionContext):
        raise UserError(
            f"attention_mask must be 2-D [B, tokens] with 1 for real tokens, got a mask of shape "
            f"{tuple(mask.shape)}; for packed documents pass position_ids that restart at 0"
        )
    return mask


def _check_passed(module: nn.Module, layer: _Layer, passed: dict[str, object]) -> None:
    """Raise unless all that the family passes to its attention is served."""
    if passed.get("output_attentions"):
        raise UserError(
            "output_attentions=True is not supported: no map is ever whole in memory; "
            "heedful.look(model, input_ids) gives the maps of a short sequence"
        )
    values = {name for name, value in passed.items() if value is not None}
    absent = {name for name, term in _TERMS.items() if term not in layer.host.terms}
    if _has_no_cross_bias(module, layer):
        absent.discard("position_bias")
    if unknown := values & absent | values - _SERVED - HARMLESS:
        raise UserError(
            f"{type(module).__name__} passes {', '.join(sorted(unknown))} to its attention, which "
            "a converted model does not serve and will not drop; call heedful.revert(model)"
        )
    if passed.get("dropout") and "dropout" not in layer.takes:
        raise UserError(
            f"attention dropout must be 0 with {type(layer).__name__}, got {passed['dropout']}; "
            "set config.attention_dropout (attn_pdrop; of BERT attention_probs_dropout_prob, of T5 "
            "dropout_rate) to 0 before building it, or call model.eval()"
        )


def _has_no_cross_bias(module: nn.Module, layer: _Layer) -> bool:
    """Whether the family passes zeros for a bias: T5 does in cross-attention, for want of one."""
    return layer.shape.role == "cross" and not getattr(module, "has_relative_attention_bias", True)


def _check_shape(module: nn.Module, layer: _Layer, query: Tensor, key: Tensor) -> None:
    shape = layer.shape
    heads = query.shape[1] // layer.queries_per_head
    actual = (heads, key.shape[1], query.shape[3])
    if actual != (shape.heads, shape.key_heads, shape.dim) and not layer.any_heads:
        raise UserError(
            f"{type(module).__name__} attends with {actual[0]} heads, {actual[1]} key heads and "
            f"head dim {actual[2]}, and its configuration says {shape}; this family does not fit"
        )


def _layer_inputs(
    module: nn.Module, layer: _Layer, context: AttentionContext, passed: dict, cache: object
) -> LayerInputs:
    """What the layer gets beside queries, keys and values."""
    bias = passed.get("position_bias")
    if _has_no_cross_bias(module, layer):
        bias = None
    if bias is not None and "bias" not in layer.takes:
        raise UserError(
            f"{type(module).__name__} adds a position bias to its logits, which "
            f"{type(layer).__name__} does not take; convert to another mechanism"
        )
    inputs = LayerInputs(
        input=passed.get("heedful_input"),
        source=passed.get("heedful_source"),
        token_ids=_needed(module, layer, "token_ids", context.token_ids),
        positions=_positions(module, layer, context, cache),
        cache=cache if "cache" in layer.needs else None,
        bias=bias,
        softcap=passed.get("softcap"),
        sinks=passed.get("s_aux"),
        dropout=passed.get("dropout") or 0.0,
        shared=context.shared,
    )
    if "rotation" not in layer.needs or (rotation := getattr(module, ROTATION)) is None:
        return inputs
    if context.positions is None:
        raise UserError(
            f"{type(module).__name__} was called with positions of several axes, as of images, "
            "and groups of tokens have none; give the model text alone"
        )
    return inputs._replace(positions=context.positions, rotation=rotation)


def _positions(
    module: nn.Module, layer: _Layer, context: AttentionContext, cache: object
) -> Tensor | None:
    """The positions of the new tokens, where the layer or what its cache evicts by needs them."""
    if not getattr(cache, "reads_positions", False):
        return _needed(module, layer, "positions", context.positions)
    if context.positions is None:
        raise UserError(
            f"{type(module).__name__} was called without positions of one axis, and what its cache "
            "evicts depends on them; give the model text alone"
        )
    return context.positions


def _needed(module: nn.Module, layer: _Layer, name: str, x: Tensor | None) -> Tensor | None:
    if name not in needs_of(layer):
        return None
    if x is None:
        raise UserError(
            f"this mechanism needs {name}, and {type(module).__name__} was called without; give "
            "the model input_ids and positions of one axis"
        )
    return x


def before_attention(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The forward pre-hook of attention modules: passes what the layer needs beside q, k, v.

    The family's forward passes what it does not know on to its attention function.
    """
    if (now := implementation_of(module.config)) != IMPLEMENTATION:
        raise UserError(
            f"attn_implementation was changed to {now!r}, which would switch the mechanism off "
            "silently; call revert() to go back"
        )
    layer, own = getattr(module, NAME), {}
    hidden_states, *rest = args or (kwargs["hidden_states"],)
    if layer.input_factor != 1.0:
        hidden_states = hidden_states * layer.input_factor
    if "source" in layer.needs:
        sources = (kwargs[name] for name in SOURCES if kwargs.get(name) is not None)
        own["heedful_source"] = next(sources, None)
    if (cache := cache_among(kwargs)) is not None:
        own["heedful_cache"] = layer_cache(cache, module)
        if layer.past_keys and own["heedful_cache"] is not None:
            own["heedful_cache"].expect(_visibility_among(rest, kwargs))
    if layer.needs & {"unprojected", "unrotated"}:
        for hook in getattr(module, PROJECTION_HOOKS):
            hook.follow()
        call = begin_call(layer, _visibility_among(rest, kwargs), own.get("heedful_cache"))
        if "unprojected" in layer.needs:
            tokens = call.tokens(layer, "input", hidden_states)
            hidden_states = layer.before_projection(hidden_states, tokens)
    if "input" in layer.needs:
        own["heedful_input"] = hidden_states
    others = {name: x for name, x in kwargs.items() if name != "hidden_states"}
    return (hidden_states, *rest), others | own


def _visibility_among(rest: list, kwargs: dict) -> Visibility | None:
    """Who sees whom in the call with these arguments."""
    contexts = (x for x in (*rest, *kwargs.values()) if isinstance(x, AttentionContext))
    return next(contexts, AttentionContext()).visibility


def after_attention(module: nn.Module, args: tuple, output: object) -> None:
    """The forward hook of attention modules: ends what `before_attention` began."""
    end_call()
