"""The attention function that transformers calls in a converted model, and the hooks around it."""

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache

from heedful.checks import UserError
from heedful.hf.cache.base import AttentionCache
from heedful.hf.cache.crossing import of_source
from heedful.hf.cache.places import check_caches, layer_cache
from heedful.hf.family.mask import AttentionContext, attention_context
from heedful.hf.family.modules import NAME, SOURCES
from heedful.hf.intercept import interceptors, needs_of, run_layer, using
from heedful.hf.versions import HARMLESS, cache_among, implementation_of
from heedful.nn import Layer, LayerInputs
from heedful.nn.layer import NO_INPUTS
from heedful.ops import Visibility

ROTATION = "heedful_rotation"
"""The name under which a converted attention module has its rotary embedding, if needed."""

IMPLEMENTATION = "heedful_converted"
"""The attention implementation of a converted model; no checkpoint names it."""

_Layer = Layer | nn.Module
"""A layer, or what PEFT wraps around one that it saves whole."""

_NAMES = {"bias": "position_bias", "sinks": "s_aux"}
"""Names of families for terms of `heedful.nn.layer.Term` that they pass to their attention."""

_MAPS = "output_attentions"
_UNREAD = HARMLESS - {_MAPS}

# Of what a layer can need: what is the forward pass's.
_OF_PASS = frozenset({"token_ids", "positions", "rotation"})


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
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    heedful_cache: AttentionCache | None = None,
    heedful_input: Tensor | None = None,
    heedful_source: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """One layer's attention, in the signature of transformers' attention functions.

    Queries and keys arrive rotated, keys and values straight from the cache and not repeated. A
    sliding window is in the mask, so `sliding_window=` says nothing new.
    """
    layer = module._modules.get(NAME)
    if layer is None:
        raise UserError(
            f"attn_implementation={IMPLEMENTATION!r} needs a converted model, and this "
            f"{type(module).__name__} is not converted: heedful.convert(model, ...) converts "
            "one, heedful.load(folder) loads one"
        )
    for name in others:
        if name not in _UNREAD:
            _check_unknown(module, name, others[name])
    inputs = NO_INPUTS
    if layer.needs:
        inputs = LayerInputs(input=heedful_input, source=heedful_source)
    if dropout or position_bias is not None or softcap is not None or s_aux is not None:
        terms = {"bias": position_bias, "softcap": softcap, "sinks": s_aux}
        inputs = _with_terms(module, layer, inputs, terms, dropout or 0.0)
    _check_shape(module, layer, query, key)
    context = _context(attention_mask)
    call = (module, layer, (query, key, value), context, heedful_cache, is_causal, scaling, inputs)
    if attention_mask is None or context.interceptors is interceptors():
        output = _attend(*call)
    else:  # computed again in a backward pass
        with using(context.interceptors):
            output = _attend(*call)
    return output.transpose(1, 2).contiguous(), None


def _attend(
    module: nn.Module, layer: _Layer, qkv: tuple[Tensor, ...], context: AttentionContext,
    cache: AttentionCache | None, is_causal: bool | None, scale: float | None, inputs: LayerInputs,
) -> Tensor:  # fmt: skip
    """The output of a layer for what the family's attention has passed."""
    reads_positions = cache is not None and cache.reads_positions
    if layer.needs & _OF_PASS or reads_positions or interceptors():
        inputs = _of_pass(module, layer, context, cache, inputs)
    if layer.shape.role == "decoder":
        return _attend_causally(module, layer, qkv, context, cache, is_causal, scale, inputs)
    visibility = _two_sided(module, layer, context, qkv[1])
    options = {"scale": scale, "inputs": inputs}
    if layer.shape.role == "cross":
        if cache is not None:
            of_target = {"visibility": visibility, "target": context.target}
            return cache.attend(layer, *qkv, **of_target, **options)
        visibility = of_source(visibility, context.target, qkv[0].shape[2])
    return run_layer(layer, *qkv, visibility=visibility, **options).output


def _attend_causally(
    module: nn.Module, layer: _Layer, qkv: tuple[Tensor, ...], context: AttentionContext,
    cache: AttentionCache | None, is_causal: bool | None, scale: float | None, inputs: LayerInputs,
) -> Tensor:  # fmt: skip
    """Attention of a decoder's tokens to each other, and to those that its cache has."""
    visibility, (query, key, _) = context.visibility, qkv
    if is_causal is False and (visibility is None or visibility.causal):
        raise UserError(
            f"{type(module).__name__} was called with is_causal=False and a causal mask; say "
            "is_causal=False to the whole model"
        )
    # Without tokens of this call it was another layer's cache that gave the keys.
    if cache is not None and cache.counters.pending:
        visibility = Visibility() if visibility is None else visibility
        return cache.attend(layer, *qkv, visibility=visibility, scale=scale, inputs=inputs)
    if not layer.plain_cache and query.shape[2] != key.shape[2]:
        raise UserError(
            f"{type(module).__name__} {layer.shape.layer} was called with keys of earlier tokens "
            "and without its own layer of a cache, and this mechanism needs more of earlier tokens "
            "than their keys; call the model with use_cache=False"
        )
    visibility = None if visibility is None else visibility.last(key.shape[2])
    return run_layer(layer, *qkv, visibility=visibility, scale=scale, inputs=inputs).output


def _two_sided(
    module: nn.Module, layer: _Layer, context: AttentionContext, key: Tensor
) -> Visibility:
    """Visibility in an encoder, or of a source; without a mask everything is visible."""
    role, visibility = layer.shape.role, context.visibility
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


def _context(mask: AttentionContext | Tensor | None) -> AttentionContext:
    if mask is None:
        return AttentionContext()
    if type(mask) is not AttentionContext:
        raise UserError(
            f"attention_mask must be 2-D [B, tokens] with 1 for real tokens, got a mask of shape "
            f"{tuple(mask.shape)}; for packed documents pass position_ids that restart at 0"
        )
    return mask


def _check_unknown(module: nn.Module, name: str, value: object) -> None:
    """Raise where a family passes a value to its attention that nothing here reads."""
    if name == _MAPS and value:
        raise UserError(
            "output_attentions=True is not supported: no map is ever whole in memory; "
            "heedful.look(model, input_ids) gives the maps of a short sequence"
        )
    if value is not None and name != _MAPS:
        raise _unserved(module, name)


def _unserved(module: nn.Module, name: str) -> UserError:
    return UserError(
        f"{type(module).__name__} passes {name} to its attention, which a converted model does not "
        "serve and will not drop; call heedful.revert(model)"
    )


def _with_terms(
    module: nn.Module, layer: _Layer, inputs: LayerInputs, terms: dict, dropout: float
) -> LayerInputs:
    """The inputs with what the family does to logits and weights."""
    if layer.shape.role == "cross" and not getattr(module, "has_relative_attention_bias", True):
        terms["bias"] = None  # T5 passes zeros, for want of one
    for term, value in terms.items():
        if value is not None and term not in layer.host.terms:
            raise _unserved(module, _NAMES.get(term, term))
    if terms["bias"] is not None and "bias" not in layer.takes:
        raise UserError(
            f"{type(module).__name__} adds a position bias to its logits, which "
            f"{type(layer).__name__} does not take; convert to another mechanism"
        )
    if dropout and "dropout" not in layer.takes:
        raise UserError(
            f"attention dropout must be 0 with {type(layer).__name__}, got {dropout}; "
            "set config.attention_dropout (attn_pdrop; of BERT attention_probs_dropout_prob, of T5 "
            "dropout_rate) to 0 before building it, or call model.eval()"
        )
    return inputs._replace(**terms, dropout=dropout)


def _check_shape(module: nn.Module, layer: _Layer, query: Tensor, key: Tensor) -> None:
    shape = layer.shape
    actual = (query.shape[1], key.shape[1], query.shape[3])
    if actual != (shape.heads, shape.key_heads, shape.dim) and not layer.any_heads:
        raise UserError(
            f"{type(module).__name__} attends with {actual[0]} heads, {actual[1]} key heads and "
            f"head dim {actual[2]}, and its configuration says {shape}; this family does not fit"
        )


def _of_pass(
    module: nn.Module, layer: _Layer, context: AttentionContext, cache: AttentionCache | None,
    inputs: LayerInputs,
) -> LayerInputs:  # fmt: skip
    """The inputs with what the layer needs to know of the forward pass."""
    inputs = inputs._replace(
        token_ids=_needed(module, layer, "token_ids", context.token_ids),
        positions=_positions(module, layer, context, cache),
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
    module: nn.Module, layer: _Layer, context: AttentionContext, cache: AttentionCache | None
) -> Tensor | None:
    """The positions of the new tokens, where the layer or what its cache evicts by needs them."""
    if cache is None or not cache.reads_positions:
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
    if type(kwargs.get("attention_mask")) is not AttentionContext:  # that was made for ours
        _check_implementation(module)
    layer, own = module._modules[NAME], {}
    if (cache := cache_among(kwargs)) is not None:
        check_caches(layer)
        own["heedful_cache"] = part = _cache_of(layer, module, cache)
        if layer.tails.get("keys") and part is not None:
            part.expect(visibility_among(args, kwargs))
    hidden_states = args[0] if args else kwargs["hidden_states"]
    if "source" in layer.needs:
        sources = (kwargs[name] for name in SOURCES if kwargs.get(name) is not None)
        own["heedful_source"] = next(sources, None)
    if "input" in layer.needs:
        own["heedful_input"] = hidden_states
    if layer.input_factor == 1.0:
        return args, kwargs | own
    hidden_states = hidden_states * layer.input_factor
    if "input" in layer.needs:
        own["heedful_input"] = hidden_states
    others = {name: x for name, x in kwargs.items() if name != "hidden_states"}
    return (hidden_states, *args[1:]), others | own


def _cache_of(layer: _Layer, module: nn.Module, cache: Cache) -> AttentionCache | None:
    """The layer's part of a cache; as of `layer_cache`, where they have not met before."""
    parts, index = getattr(cache, "layers", ()), module.layer_idx
    belongs = getattr(parts[index], "is_of", None) if index < len(parts) else None
    if belongs is not None and belongs(layer):
        return parts[index]
    return layer_cache(cache, module)


def _check_implementation(module: nn.Module) -> None:
    if (now := implementation_of(module.config)) != IMPLEMENTATION:
        raise UserError(
            f"attn_implementation was changed to {now!r}, which would switch the mechanism off "
            "silently; call revert() to go back"
        )


def visibility_among(args: tuple, kwargs: dict) -> Visibility | None:
    """Visibility of the call with these arguments."""
    contexts = (x for x in (*args, *kwargs.values()) if isinstance(x, AttentionContext))
    return next(contexts, AttentionContext()).visibility
