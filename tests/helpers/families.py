"""Tiny random models of many transformers families."""

import copy
from unittest import mock

import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    Llama4TextConfig,
    PhimoeConfig,
    PreTrainedModel,
)

import heedful

VOCABULARY = 40
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GROUPED = COMMON | {"num_key_value_heads": 2}
FAMILIES = {
    "llama": GROUPED | {"tie_word_embeddings": True},
    "qwen2": GROUPED,
    "qwen3": GROUPED | {"head_dim": 16},
    "qwen3_moe": GROUPED
    | {"head_dim": 16, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mistral": GROUPED | {"sliding_window": 4},
    "gemma": GROUPED | {"head_dim": 16},
    "gemma3_text": GROUPED
    | {
        "head_dim": 16,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gemma2": GROUPED
    | {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 2.0,  # of logits that are larger
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gpt_oss": GROUPED
    | {
        "head_dim": 16,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "phi3": GROUPED,
    "gpt_neox": COMMON | {"attention_dropout": 0.0},
    "gpt2": {
        "vocab_size": VOCABULARY,
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 64,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    },
    "olmo2": GROUPED,
    "starcoder2": GROUPED | {"sliding_window": 4},
    "mixtral": GROUPED | {"num_local_experts": 3},
    "granite": GROUPED | {"attention_multiplier": 0.3},
    "smollm3": GROUPED,
}
# SDPA has no cap and no sinks: their own attention rounds at other places.
EAGER = ("gemma2", "gpt_oss")


def fits(name: str, family: str) -> bool:
    """Whether this family can be given the mechanism of this name."""
    if name.startswith(("grouped", "forgetting")):
        return family not in EAGER
    return name != "mta-flash" or family != "gemma2"


def config_of(family: str, **changes: object):
    return CONFIG_MAPPING[family](**(FAMILIES[family] | changes))


def tiny(family: str = "llama", dtype: torch.dtype = torch.float64, **changes) -> PreTrainedModel:
    """A model with weights large enough that attention is far from uniform, in eval mode."""
    # Fused experts know no fp64.
    expert = family in ("mixtral", "gpt_oss", "qwen3_moe")
    experts = {"experts_implementation": "eager"} if expert else {}
    # Older transformers takes SDPA for them, which leaves cap and sinks out.
    attention = {"attn_implementation": "eager"} if family in EAGER else {}
    config = config_of(family, **changes)
    model = AutoModelForCausalLM.from_config(config, **experts, **attention).to(dtype).eval()
    stir(model, 0.2)
    return model


@torch.no_grad()
def stir(model: torch.nn.Module, by: float, only: str = "") -> None:
    """Add noise to the parameters whose name contains `only`."""
    for name, p in model.named_parameters():
        if only in name:
            p.add_(by * torch.randn_like(p))


def varied(model: PreTrainedModel, mechanism: object, by: float = 0.2, **options):
    """The model, converted, with the mechanism's parameters away from where they start."""
    heedful.convert(model, mechanism, **options)
    stir(model, by, only=".heedful.")
    return model


def twin(model: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(model)


def tokens(batch: int = 2, length: int = 11) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length))


def ragged_mask(batch: int = 2, length: int = 11, left: bool = True) -> Tensor:
    """Row r has 3 r padded places on one side."""
    mask = torch.ones(batch, length, dtype=torch.long)
    for row in range(batch):
        mask[row, : 3 * row] = 0
    return mask if left else mask.flip(1)


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor, **options) -> Tensor:
    with exactly():
        return model(input_ids=ids, use_cache=False, **options).logits


def exactly():
    """Softmax in fp64 for fp64: some families ask for fp32 whatever their precision."""
    return mock.patch("torch.nn.functional.softmax", _softmax)


def _softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None, **_) -> Tensor:
    return x.softmax(dim, dtype=torch.promote_types(x.dtype, dtype or x.dtype))


def checkpoint_layers(model, options: dict | None = None) -> None:
    """Compute layers again in the backward pass; transformers calls it otherwise since 5.23."""
    new, old = "activation_checkpointing_enable", "gradient_checkpointing_enable"
    getattr(model, new if hasattr(model, new) else old)(options)


SMALL = GROUPED | {"num_local_experts": 2, "num_experts_per_tok": 1}


def chunked():
    """A Llama 4 whose attention ends at chunks of 6 tokens in some layers."""
    return model_of(
        Llama4TextConfig(**SMALL, head_dim=16, intermediate_size_mlp=48, attention_chunk_size=6)
    )


def windowed():
    """A PhiMoE, which puts its window into the mask alone."""
    return model_of(PhimoeConfig(**SMALL, sliding_window=6))


def model_of(config):
    experts = {"experts_implementation": "eager"}  # fused ones know no fp64
    model = AutoModelForCausalLM.from_config(config, **experts).double().eval()
    stir(model, 0.2)
    return model
