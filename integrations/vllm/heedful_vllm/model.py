"""vLLM's own models with heedful's layers where a converted model has them."""

from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.utils import extract_layer_index

from heedful.nn import HeadShape, Layer, Standard, from_json
from heedful_vllm.attention import LayerBackend
from heedful_vllm.checks import check_served_with
from heedful_vllm.config import ABOUT
from heedful_vllm.inputs import hand_over_input


class Converted(nn.Module):
    """Mixed into a model of vLLM: puts the mechanism's layers where heedful put them.

    Their parameters are called as in the folder, so that vLLM loads them with the others.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        check_served_with(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = vllm_config.model_config.hf_config
        mechanisms = {
            index: from_json(part["mechanism"])
            for part in getattr(config, ABOUT)
            for index in part["layers"]
        }
        for module in list(self.modules()):
            if not isinstance(stock := getattr(module, "attn", None), Attention):
                continue
            index = extract_layer_index(stock.layer_name)
            mechanism = mechanisms.get(index, Standard())
            if mechanism == Standard():
                continue  # which vLLM has
            shape = HeadShape(
                heads=stock.num_heads,
                key_heads=stock.num_kv_heads,
                dim=stock.head_size,
                hidden=config.hidden_size,
                layer=index,
            )
            layer = mechanism.build(shape)
            module.heedful = layer
            module.attn = _with_layer(stock, layer, vllm_config)
            if "input" in layer.needs:
                hand_over_input(module)


def _with_layer(stock: Attention, layer: Layer, vllm_config: VllmConfig) -> Attention:
    """vLLM's attention of the same keys and pages, whose arithmetic is this layer's."""
    # vLLM knows attention by its name, under which there is one only.
    del vllm_config.compilation_config.static_forward_context[stock.layer_name]
    return Attention(
        stock.num_heads,
        stock.head_size,
        stock.impl.scale,
        num_kv_heads=stock.num_kv_heads,
        cache_config=vllm_config.cache_config,
        quant_config=vllm_config.quant_config,
        per_layer_sliding_window=stock.sliding_window,
        prefix=stock.layer_name,
        attn_backend=LayerBackend,
        layer=layer,
    )


class HeedfulLlamaForCausalLM(Converted, LlamaForCausalLM):
    """A converted Llama."""


class HeedfulMistralForCausalLM(Converted, MistralForCausalLM):
    """A converted Mistral."""


class HeedfulQwen2ForCausalLM(Converted, Qwen2ForCausalLM):
    """A converted Qwen2."""


class HeedfulQwen3ForCausalLM(Converted, Qwen3ForCausalLM):
    """A converted Qwen3."""
