"""Tiny random encoder-decoders and encoders: one table of families."""

import torch
from torch import Tensor
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BertConfig,
    MarianConfig,
    MBartConfig,
    ModernBertConfig,
    PreTrainedModel,
    T5Config,
    T5GemmaConfig,
)

from helpers.families import VOCABULARY, stir

_BART = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}
_GEMMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "attn_logit_softcapping": None,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dropout_rate": 0.0,
    "max_position_embeddings": 64,
}
_BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
ENCODER_DECODERS = {
    "t5": lambda: T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=3,
        num_heads=4, pad_token_id=0, eos_token_id=2, decoder_start_token_id=1, dropout_rate=0.0,
        relative_attention_num_buckets=8, relative_attention_max_distance=12,
    ),
    "bart": lambda: BartConfig(**_BART),
    "marian": lambda: MarianConfig(**_BART),
    "mbart": lambda: MBartConfig(**_BART),
    "t5gemma": lambda: T5GemmaConfig(
        encoder=dict(_GEMMA), decoder=dict(_GEMMA), vocab_size=VOCABULARY, dropout_rate=0.0,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    ),
}  # fmt: skip
ENCODERS = {
    "bert": lambda: BertConfig(
        **_BERT, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    ),
    "modernbert": lambda: ModernBertConfig(
        **_BERT, local_attention=6, global_attn_every_n_layers=2, bos_token_id=1, eos_token_id=2,
        cls_token_id=1, sep_token_id=2,
    ),
}  # fmt: skip


def tiny(family: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A model with weights large enough that attention is far from uniform, in eval mode."""
    if family in ENCODERS:
        model = AutoModelForMaskedLM.from_config(ENCODERS[family]())
    else:
        model = AutoModelForSeq2SeqLM.from_config(ENCODER_DECODERS[family]())
    model = model.to(dtype).eval()
    for name, module in model.named_modules():
        if not list(module.children()) and "embed_positions" not in name:  # some are not saved
            stir(module, 0.4)
    return model


@torch.no_grad()
def logits(
    model: PreTrainedModel, source: Tensor, target: Tensor, mask: Tensor | None = None, **options
) -> Tensor:
    """Of every token of the target, without a cache."""
    options |= {"decoder_input_ids": target, "use_cache": False}
    return model(input_ids=source, attention_mask=mask, **options).logits


def exactly(family: str) -> tuple[torch.dtype, float]:
    """The precision in which a family can be compared, and how closely.

    T5Gemma's own attention takes its softmax in fp32, where the masks of an fp64 model overflow.
    """
    return (torch.float32, 1e-4) if family == "t5gemma" else (torch.float64, 1e-11)
