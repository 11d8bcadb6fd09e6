"""Inspection of a transformers family: its attention modules, their heads, what does not fit."""

import ast
import inspect
import textwrap
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple, get_args

import torch
from torch import nn
from transformers import PreTrainedModel

from heedful.checks import UserError
from heedful.nn import HeadShape, Layer, Role
from heedful.nn.layer import Term

NAME = "heedful"
"""The name under which a converted attention module has its layer."""

# What a family may pass to its attention function by name: without a say in the weights, or read.
_PASSED = frozenset(
    {
        *("query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal"),
        *("sliding_window", "softcap", "s_aux", "position_ids", "output_attentions"),
        "position_bias",
        "deterministic",
    }
)
# How a family calls what attention takes its keys from, where that is another row.
SOURCES = ("key_value_states", "encoder_hidden_states")


class Attention(NamedTuple):
    """An attention module, where it stands, and its number among those of its role."""

    module: nn.Module
    role: Role
    index: int


def find_attention(model: PreTrainedModel, purpose: str = "be converted") -> dict[str, Attention]:
    """The model's attention modules by path; raises where one cannot be converted.

    But for encoders of images and sound beside a decoder, which are left alone.

    Arguments:
        model: of transformers.
        purpose: what an unfit model cannot, for messages.
    """
    placed = {
        name: (module, role_of(module))
        for name, module in model.named_modules()
        if type(module).__name__.endswith("Attention") and hasattr(module, "layer_idx")
    }
    decodes = any(role == "decoder" for _, role in placed.values())
    modules: dict[str, Attention] = {}
    encoders = 0
    for name, (module, role) in placed.items():
        if role == "encoder" and decodes and not model.config.is_encoder_decoder:
            continue
        reason = _obstacle(module, role)
        if role == "cross" and not decodes:
            reason = "it does not tell causal self-attention from cross-attention"
        if reason is not None:
            raise UserError(
                f"model: {type(model).__name__} cannot {purpose}: its {type(module).__name__} "
                f"({name}) does not fit because {reason}"
            )
        index = encoders if module.layer_idx is None else module.layer_idx
        encoders += role == "encoder"
        modules[name] = Attention(module, role, index)
    if not modules:
        raise UserError(
            f"model: {type(model).__name__} cannot {purpose}: no attention module with a layer "
            "index that goes through transformers' attention interface was found; decoder-only "
            "families such as Llama, Mistral, Qwen, Gemma, Phi, GPT-NeoX and GPT-2 have one, "
            "encoder-decoders such as T5 and BART, and encoders such as BERT and ModernBERT"
        )
    return modules


def attention_modules(model: nn.Module, role: Role = "decoder") -> list[nn.Module]:
    """The attention modules of a converted model in that role, in order."""
    # PEFT puts a module of its own around a layer that it saves, which answers as the layer does.
    shapes = [(m, getattr(getattr(m, "heedful", None), "shape", None)) for m in model.modules()]
    return [m for m, shape in shapes if isinstance(shape, HeadShape) and shape.role == role]


def layers_of(model: nn.Module) -> list[Layer]:
    """The layers of a converted model in every role, those of a decoder first."""
    return [module.heedful for role in get_args(Role) for module in attention_modules(model, role)]


def role_of(module: nn.Module) -> Role:
    """Role of a family's attention module.

    Causal is a decoder's self-attention. What is not, and can be handed another row's states in a
    decoder, attends to that row; the rest is an encoder's.
    """
    crosses = getattr(module, "is_cross_attention", False) or "Cross" in type(module).__name__
    if not crosses and getattr(module, "is_causal", True):
        return "decoder"
    config = getattr(module, "config", None)
    decodes = getattr(module, "is_decoder", getattr(config, "is_decoder", False))
    takes = any(x in inspect.signature(module.forward).parameters for x in SOURCES)
    return "cross" if crosses or (decodes and takes) else "encoder"


def terms_of(module: nn.Module) -> frozenset[Term]:
    """Terms in the logits of a family's attention: a bias as T5's, a cap as Gemma 2's, sinks."""
    passed = _passed(_own_class(type(module)))
    terms = {
        "bias": "position_bias" in passed,
        "softcap": "softcap" in passed
        and getattr(module, "attn_logit_softcapping", None) is not None,
        "sinks": "s_aux" in passed and isinstance(getattr(module, "sinks", None), nn.Parameter),
    }
    return frozenset(name for name, present in terms.items() if present)


def find_mlp(model: PreTrainedModel, attention: nn.Module) -> nn.Module:
    """The MLP of the layer that holds this attention module."""
    for layer in model.modules():
        if any(child is attention for child in layer.children()):
            for name in ("mlp", "block_sparse_moe", "feed_forward"):
                if isinstance(mlp := getattr(layer, name, None), nn.Module):
                    return mlp
    raise UserError(
        f"model: no MLP was found beside attention layer {attention.layer_idx} of "
        f"{type(model).__name__}, which input_scaling needs; use input_scaling='none'"
    )


def head_shape(attention: Attention) -> HeadShape:
    """Heads and widths of a family's attention module: its own, else its configuration's."""
    module, config = attention.module, attention.module.config
    heads = _first(module, ("num_heads", "num_attention_heads")) or config.num_attention_heads
    shared = getattr(module, "num_key_value_groups", None)
    key_heads = _first(module, ("num_key_value_heads", "num_kv_heads"))
    if key_heads is None and isinstance(shared, int):
        key_heads = heads // shared
    dim = getattr(module, "head_dim", None) or getattr(config, "head_dim", None)
    return HeadShape(
        heads=heads,
        key_heads=key_heads or getattr(config, "num_key_value_heads", None) or heads,
        dim=dim or config.hidden_size // heads,
        hidden=_input_width(module, "q_proj", "qkv_proj", "query_key_value") or config.hidden_size,
        layer=attention.index,
        role=attention.role,
        source=_input_width(module, "k_proj", "k") if attention.role == "cross" else None,
    )


def only_attention_mixes(model: PreTrainedModel, attention: Iterable[nn.Module]) -> bool:
    """Test whether tokens mix in these attention modules alone: no recurrence, no convolution.

    Looked for in the lists of layers that hold the attention modules.
    """
    ids = {id(module) for module in attention}
    for module in model.modules():
        if not isinstance(module, nn.ModuleList):
            continue
        holding = [any(id(part) in ids for part in layer.modules()) for layer in module]
        if not any(holding):
            continue
        if not all(holding) or any(isinstance(part, nn.Conv1d) for part in module.modules()):
            return False
    return True


def parameter_device(module: nn.Module) -> torch.device:
    """Device of the module's own parameters."""
    return next(module.parameters()).device


def _input_width(module: nn.Module, *projections: str) -> int | None:
    """Width of what the first of these projections reads; some modules' input joins two streams."""
    linear = (x for name in projections if isinstance(x := getattr(module, name, None), nn.Linear))
    return next((x.in_features for x in linear), None)


def _first(module: nn.Module, names: tuple[str, ...]) -> int | None:
    values = (getattr(module, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), None)


def _obstacle(module: nn.Module, role: Role) -> str | None:
    """Why this attention module cannot be converted, as a clause, or `None`."""
    source = inspect.getmodule(type(module))
    config = getattr(module, "config", None)
    if not hasattr(source, "ALL_ATTENTION_FUNCTIONS") or config is None:
        return "it does not go through transformers' attention interface"
    if any(hasattr(module, name) for name in ("kv_lora_rank", "kv_a_proj_with_mqa")):
        return "it compresses keys and values (multi-head latent attention)"
    terms = terms_of(module)
    if getattr(config, "attn_logit_softcapping", None) is not None and "softcap" not in terms:
        return (
            "its configuration soft-caps logits and it does not tell its attention function; set "
            "config.attn_logit_softcapping = None if the model can do without"
        )
    if isinstance(getattr(module, "sinks", None), nn.Parameter) and "sinks" not in terms:
        return "it has attention sinks and does not tell its attention function"
    if not isinstance(module.layer_idx, int) and role != "encoder":
        return "its layer index is not set"
    return _obstacle_in_source(type(module))


@cache
def attends_twice(kind: type) -> bool:
    """Test whether an attention class calls its attention function more than once per pass."""
    calls = [node for node in _source(_own_class(kind)) if isinstance(node, ast.Call)]
    return sum(ast.unparse(call.func) == "attention_interface" for call in calls) > 1


def _own_class(kind: type) -> type:
    """The family's class of a converted attention class."""
    ours = ("Heedful", "ConvertedAttention")
    return next((base for base in kind.__mro__ if not base.__name__.startswith(ours)), kind)


@cache
def _passed(kind: type) -> frozenset[str]:
    """Keywords that an attention class passes to its attention function."""
    calls = [node for node in _source(kind) if isinstance(node, ast.Call)]
    ours = [call for call in calls if ast.unparse(call.func) == "attention_interface"]
    return frozenset(keyword.arg for call in ours for keyword in call.keywords if keyword.arg)


def _source(kind: type) -> list[ast.AST]:
    """The parts of the source of a class's forward; none where it cannot be read."""
    try:
        return list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(kind.forward)))))
    except (OSError, TypeError, SyntaxError):
        return []


@cache
def _obstacle_in_source(kind: type) -> str | None:
    """Change to the attention call in the family's forward that a converted one would lose.

    Where the source cannot be read, the attention function still refuses what it does not know.
    """
    masks = {"attention_mask", "mask"} & inspect.signature(kind.forward).parameters.keys()
    for node in _source(kind):
        if isinstance(node, ast.Assign | ast.AugAssign) and not isinstance(node.value, ast.Name):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if masks & set(map(ast.unparse, targets)):
                return "it changes the attention mask inside its attention"
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        if node.func.id != "attention_interface":
            continue
        keywords = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
        mask = keywords.get("attention_mask", node.args[4] if len(node.args) > 4 else None)
        if mask is not None and ast.unparse(mask) not in masks:
            return f"it makes its own attention mask ({ast.unparse(mask)})"
        if unknown := sorted(keywords.keys() - _PASSED):
            return f"it passes {', '.join(unknown)} to its attention, which is not supported"
    return None
