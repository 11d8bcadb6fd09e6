"""The attention function that transformers calls in a converted model, and the swapped classes."""

import functools
import inspect

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from heedful.hf.mask import compact_mask, visibility_of
from heedful.nn import HeadShape

NAME = "heedful"


def register_attention() -> None:
    """Make `attn_implementation="heedful"` known, with its mask function; repeats do nothing."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, compact_mask)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    heedful_hidden: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """One layer's attention, in the signature of transformers' attention functions.

    Queries and keys arrive rotated, keys and values straight from the cache and not repeated.
    """
    if dropout:
        raise ValueError(
            f"attention dropout must be 0 in a converted model, got {dropout}; set "
            "config.attention_dropout (attn_pdrop) to 0 before building it, or call model.eval()"
        )
    if softcap is not None:
        raise ValueError(f"softcap={softcap} (soft-capped logits) is not supported")
    layer = getattr(module, NAME, None)
    if layer is None:
        raise ValueError(
            f"attn_implementation={NAME!r} needs a converted model, and this "
            f"{type(module).__name__} is none: heedful.convert(model, ...) makes one, "
            "heedful.load(folder) loads one"
        )
    if layer.needs_past_queries and query.shape[2] != key.shape[2]:
        raise ValueError(
            "use_cache=True keeps keys and values only, but this mechanism needs what earlier "
            "queries did: call generate(..., use_cache=False), the converted model's default"
        )
    visibility = visibility_of(attention_mask, key.shape[2], sliding_window, kwargs)
    out = layer(query, key, value, visibility=visibility, scale=scaling, hidden=heedful_hidden)
    return out.transpose(1, 2).contiguous(), None


class ConvertedAttention:
    """Mixed into a family's attention class: guards the route and hands over the layer's input."""

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object):
        if self.config._attn_implementation != NAME:
            raise ValueError(
                f"attn_implementation was changed to {self.config._attn_implementation!r}, which "
                "would switch the mechanism off silently; call revert() to go back"
            )
        if (factor := getattr(self.heedful, "input_factor", 1.0)) != 1.0:
            hidden_states = hidden_states * factor
        if getattr(self.heedful, "query", None) is not None:
            kwargs["heedful_hidden"] = hidden_states
        return super().forward(hidden_states, *args, **kwargs)


@functools.cache
def converted_attention(base: type) -> type:
    """The converted form of a family's attention class; one per class, so that copies agree."""
    return type(f"Heedful{base.__name__}", (ConvertedAttention, base), {"__module__": __name__})


def find_attention(model: PreTrainedModel) -> dict[int, nn.Module]:
    """The model's self-attention modules by layer index; raises where one cannot be converted."""
    found: dict[int, nn.Module] = {}
    for name, module in model.named_modules():
        kind = type(module)
        if not kind.__name__.endswith("Attention") or not hasattr(module, "layer_idx"):
            continue
        reason = _obstacle(module)
        if reason is None and module.layer_idx in found:
            reason = "it has two attention modules with the same layer index (an encoder-decoder?)"
        if reason is not None:
            raise ValueError(
                f"model: {type(model).__name__} cannot be converted: its {kind.__name__} ({name}) "
                f"does not fit because {reason}"
            )
        found[module.layer_idx] = module
    if not found:
        raise ValueError(
            f"model: {type(model).__name__} cannot be converted: no attention module with a layer "
            "index that goes through transformers' attention interface was found; decoder-only "
            "families such as Llama, Mistral, Qwen, Gemma, Phi, GPT-NeoX and GPT-2 have one"
        )
    return dict(sorted(found.items()))


def find_mlp(model: PreTrainedModel, attention: nn.Module) -> nn.Module:
    """The MLP of the decoder layer that holds this attention module."""
    for layer in model.modules():
        if any(child is attention for child in layer.children()):
            for name in ("mlp", "block_sparse_moe", "feed_forward"):
                if isinstance(mlp := getattr(layer, name, None), nn.Module):
                    return mlp
    raise ValueError(
        f"model: no MLP was found beside attention layer {attention.layer_idx} of "
        f"{type(model).__name__}, which input_scaling needs; use input_scaling='none'"
    )


def head_shape(module: nn.Module) -> HeadShape:
    """Heads and widths of a family's attention module, from its configuration."""
    config = module.config
    heads = config.num_attention_heads
    dim = getattr(module, "head_dim", None) or getattr(config, "head_dim", None)
    return HeadShape(
        heads=heads,
        key_heads=getattr(config, "num_key_value_heads", None) or heads,
        dim=dim or config.hidden_size // heads,
        hidden=config.hidden_size,
        layer=module.layer_idx,
    )


def _obstacle(module: nn.Module) -> str | None:
    source = inspect.getmodule(type(module))
    config = getattr(module, "config", None)
    if not hasattr(source, "ALL_ATTENTION_FUNCTIONS") or config is None:
        return "it does not go through transformers' attention interface"
    if not getattr(module, "is_causal", True) or getattr(module, "is_cross_attention", False):
        return "it is not causal self-attention"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return (
            "it soft-caps its logits; set config.attn_logit_softcapping = None if the model can "
            "do without"
        )
    if any(isinstance(p, nn.Parameter) for p in (getattr(module, "sinks", None),)):
        return "it has attention sinks as parameters"
    if getattr(config, "kv_lora_rank", None) is not None:
        return "it compresses keys and values (multi-head latent attention)"
    if not isinstance(module.layer_idx, int):
        return "its layer index is not set"
    return None


def parameter_device(module: nn.Module) -> torch.device:
    """Where the module's own parameters are."""
    return next(module.parameters()).device
