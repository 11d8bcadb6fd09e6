"""GGUF files of small Llamas, as llama.cpp lays them out."""

import json
import re
from pathlib import Path

import gguf
import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerFast

_OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_INSIDE = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NORMAL, _CONTROL = 1, 3
BLOCK = 32  # numbers of a row that one scale of Q8_0 serves


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    architecture: str = "llama",
) -> None:
    """Write a Llama and its tokenizer of byte pairs, which must have some.

    Arguments:
        kind: what matrices of whole blocks are stored as; all else as float32.
        architecture: what the file says that it holds.
    """
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    writer.add_name("small")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    words = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    special = set(tokenizer.all_special_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([_CONTROL if word in special else _NORMAL for word in words])
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.bos_token_id)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)
    for name, tensor in model.state_dict().items():
        values = in_gguf_order(name, tensor.numpy(), model)
        if values.ndim == 1 or values.shape[1] % BLOCK:
            writer.add_tensor(_name(name), values)
        else:
            data = gguf.quants.quantize(values, kind)
            writer.add_tensor(_name(name), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def in_gguf_order(name: str, values: np.ndarray, model: PreTrainedModel) -> np.ndarray:
    """A tensor as the file has it: rows of queries and keys turn in pairs beside each other."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for part, count in heads.items():
        if part in name:
            halves = values.reshape(getattr(model.config, count), 2, -1, values.shape[-1])
            return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
    return values


def _name(name: str) -> str:
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    layer, part = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name).groups()
    return f"blk.{layer}.{_INSIDE[part]}.weight"
