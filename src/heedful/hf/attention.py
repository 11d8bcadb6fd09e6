"""The attention function that transformers calls in a converted model, and the hooks around it."""

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from heedful.hf.cache.base import AttentionCache
from heedful.hf.cache.crossing import CrossLayerCache, of_source
from heedful.hf.cache.new import layer_cache
from heedful.hf.family.mask import Seen, seen
from heedful.hf.family.modules import SOURCES
from heedful.hf.family.projections import DOORS, NAME, begin_call, end_call
from heedful.hf.versions import HARMLESS, cache_among, implementation_of
from heedful.nn import Given, Layer
from heedful.ops import Visibility

ROTATION = "heedful_rotation"
"""What a converted attention module calls its rotary embedding, where its layer needs one."""

IMPLEMENTATION = "heedful_converted"
"""The attention implementation of a converted model; no checkpoint names it."""

_UNKNOWN = (
    "{} passes {} to its attention, which a converted model does not serve and will not drop; call "
    "heedful.revert(model)"
)


def register_attention() -> None:
    """Make `IMPLEMENTATION` known to transformers, with its mask function; repeats do nothing."""
    AttentionInterface.register(IMPLEMENTATION, attention)
    AttentionMaskInterface.register(IMPLEMENTATION, seen)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Seen | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    output_attentions: bool | None = None,
    position_bias: Tensor | None = None,
    heedful_input: Tensor | None = None,
    heedful_source: Tensor | None = None,
    heedful_cache: object | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """One layer's attention, in the signature of transformers' attention functions.

    Queries and keys arrive rotated, keys and values straight from the cache and not repeated. A
    sliding window is in the mask, so `sliding_window=` says nothing new.
    """
    if output_attentions:
        raise ValueError(
            "output_attentions=True is not supported: no map is ever whole in memory; "
            "heedful.look(model, input_ids) gives the maps of a short row"
        )
    if unknown := [x for x, value in others.items() if value is not None and x not in HARMLESS]:
        raise ValueError(_UNKNOWN.format(type(module).__name__, ", ".join(sorted(unknown))))
    layer = getattr(module, NAME, None)
    if layer is None:
        raise ValueError(
            f"attn_implementation={IMPLEMENTATION!r} needs a converted model, and this "
            f"{type(module).__name__} is none: heedful.convert(model, ...) makes one, "
            "heedful.load(folder) loads one"
        )
    if dropout and not layer.takes_dropout:
        raise ValueError(
            f"attention dropout must be 0 with {type(layer).__name__}, got {dropout}; set "
            "config.attention_dropout (attn_pdrop; of BERT attention_probs_dropout_prob, of T5 "
            "dropout_rate) to 0 before building it, or call model.eval()"
        )
    _check_shape(module, layer, query, key)
    if softcap is not None and not layer.capped:
        raise ValueError(_UNKNOWN.format(type(module).__name__, "softcap"))
    if s_aux is not None and not layer.sunk:
        raise ValueError(_UNKNOWN.format(type(module).__name__, "s_aux"))
    if attention_mask is not None and not isinstance(attention_mask, Seen):
        raise ValueError(
            f"attention_mask must be 2-D [B, tokens] with 1 for real tokens, got a mask of shape "
            f"{tuple(attention_mask.shape)}; for packed documents pass position_ids that restart "
            "at 0"
        )
    visibility, ids, positions, _, target, shared = attention_mask or (None,) * 6
    given = Given(
        input=heedful_input,
        source=heedful_source,
        token_ids=_needed(module, layer, "token_ids", ids),
        positions=_needed(module, layer, "positions", positions),
        cache=heedful_cache if "cache" in layer.needs else None,
        bias=_bias(module, layer, position_bias),
        softcap=softcap,
        sinks=s_aux,
        dropout=dropout,
        shared=shared,
    )
    if "rotation" in layer.needs and (rotation := getattr(module, ROTATION)) is not None:
        if positions is None:
            raise ValueError(
                f"{type(module).__name__} was called with positions of several axes, as of images, "
                "and groups of tokens have none; give the model text alone"
            )
        given = given._replace(positions=positions, rotation=rotation)
    if layer.shape.role != "decoder":
        visibility = _both_ways(module, attention_mask, key)
        held = heedful_cache if isinstance(heedful_cache, CrossLayerCache) else None
        options = {"scale": scaling, "given": given}
        if held is not None:
            out = held.attend(
                layer, query, key, value, visibility=visibility, target=target, **options
            )
        else:
            if layer.shape.role == "cross":
                visibility = of_source(visibility, target, query.shape[2])
            out = layer(query, key, value, visibility=visibility, **options).output
        return out.transpose(1, 2).contiguous(), None
    held = heedful_cache if isinstance(heedful_cache, AttentionCache) else None
    if held is not None and not held.counters.pending:
        held = None  # it was called with another layer's keys
    if held is None and not layer.plain_cache and query.shape[2] != key.shape[2]:
        raise ValueError(
            f"{type(module).__name__} {layer.shape.layer} was called with keys of earlier tokens "
            "and without its own part of a cache, and this mechanism needs more of earlier tokens "
            "than their keys; call the model with use_cache=False"
        )
    if is_causal is False and (visibility is None or visibility.causal):
        raise ValueError(
            f"{type(module).__name__} was called with is_causal=False and a causal mask; say "
            "is_causal=False to the whole model"
        )
    if held is not None:
        visibility = Visibility() if visibility is None else visibility
        out = held.attend(
            layer, query, key, value, visibility=visibility, scale=scaling, given=given
        )
    else:
        visibility = None if visibility is None else visibility.last(key.shape[2])
        out = layer(query, key, value, visibility=visibility, scale=scaling, given=given).output
    return out.transpose(1, 2).contiguous(), None


def _both_ways(module: nn.Module, seen: Seen | None, key: Tensor) -> Visibility:
    """Who sees whom in an encoder, or of a source: no mask shows everything."""
    if seen is None:
        return Visibility(causal=False)
    role, visibility = getattr(module, NAME).shape.role, seen.visibility
    if visibility.causal:
        raise ValueError(
            f"{type(module).__name__} was called with a causal mask, and it was converted as "
            f"{role!r} attention, which sees later tokens; call heedful.revert(model) first"
        )
    batch, tokens = key.shape[0], key.shape[2]
    rows = batch if visibility.padding is None else len(visibility.padding)
    if seen.keys != tokens or rows not in (1, batch):
        name = "encoder_attention_mask (attention_mask of the whole model)"
        raise ValueError(
            f"{name if role == 'cross' else 'attention_mask'} must be [{batch}, {tokens}], one "
            f"entry per token of the source, got {(rows, seen.keys)}"
        )
    return visibility


def _bias(module: nn.Module, layer: Layer, bias: Tensor | None) -> Tensor | None:
    """What the family adds to the logits, if it does."""
    if layer.shape.role == "cross" and not getattr(module, "has_relative_attention_bias", True):
        return None  # T5 makes zeros there, for want of a table
    if bias is not None and not layer.biased:
        raise ValueError(_UNKNOWN.format(type(module).__name__, "position_bias"))
    if bias is not None and not layer.takes_bias:
        raise ValueError(
            f"{type(module).__name__} adds a position bias to its logits, which "
            f"{type(layer).__name__} does not take; convert to another mechanism"
        )
    return bias


def _check_shape(module: nn.Module, layer: Layer, query: Tensor, key: Tensor) -> None:
    shape = layer.shape
    heads = query.shape[1] // layer.queries_per_head
    found = (heads, key.shape[1] // layer.keys_per_head, query.shape[3])
    if found != (shape.heads, shape.key_heads, shape.dim) and not layer.any_shape:
        raise ValueError(
            f"{type(module).__name__} attends with {found[0]} heads, {found[1]} key heads and head "
            f"dim {found[2]}, and its configuration says {shape}; this family does not fit"
        )


def _needed(module: nn.Module, layer: Layer, name: str, x: Tensor | None) -> Tensor | None:
    if name not in layer.needs:
        return None
    if x is None:
        raise ValueError(
            f"this mechanism needs {name}, and {type(module).__name__} was called without; give "
            "the model input_ids and positions of one axis"
        )
    return x


def before_attention(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The forward pre-hook of attention modules: hands over what the layer needs beside q, k, v.

    The family's forward passes what it does not know on to its attention function.
    """
    if (now := implementation_of(module.config)) != IMPLEMENTATION:
        raise ValueError(
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
    if layer.needs & {"unprojected", "unrotated"}:
        for door in getattr(module, DOORS):
            door.follow()
        mask = next((x for x in (*rest, *kwargs.values()) if isinstance(x, Seen)), None)
        visibility = None if mask is None else mask.visibility
        call = begin_call(layer, visibility, own.get("heedful_cache"))
        if "unprojected" in layer.needs:
            tokens = call.tokens(layer, "input", hidden_states)
            hidden_states = layer.before_projection(hidden_states, tokens)
    if "input" in layer.needs:
        own["heedful_input"] = hidden_states
    others = {name: x for name, x in kwargs.items() if name != "hidden_states"}
    return (hidden_states, *rest), others | own


def after_attention(module: nn.Module, args: tuple, output: object) -> None:
    """The forward hook of attention modules: ends what `before_attention` began."""
    end_call()
