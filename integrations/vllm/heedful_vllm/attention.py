"""Attention over vLLM's pages: heedful's own layers, request by request."""

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionType

from heedful.nn import Layer, LayerInputs
from heedful_vllm.batch import Batch, BatchBuilder, Request
from heedful_vllm.state import Rows, Slots


class LayerImpl(AttentionImpl[Batch]):
    """One layer's attention: keys and values in vLLM's pages, what else it keeps beside them.

    input: the attention module's input for the step's tokens, where the layer needs it.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        *,
        layer: Layer,
    ) -> None:
        others = {
            "alibi_slopes": alibi_slopes,
            "a sliding window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
            "a cache shared with another layer": kv_sharing_target_layer_name,
        }
        if extras := [name for name, value in others.items() if value is not None]:
            raise ValueError(
                f"heedful-vllm does not serve {type(layer).__name__} in attention with "
                f"{' and '.join(extras)}; serve it with transformers serve"
            )
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        self.head_size, self.scale = head_size, scale
        self.kv_cache_dtype = kv_cache_dtype
        self.layer = layer
        requests = get_current_vllm_config().scheduler_config.max_num_seqs
        self.rows = Rows(layer.tails.get("queries", 0), requests)
        self.state, self.extra = Slots(), Slots()
        self.input: Float[Tensor, "tokens E"] | None = None

    def forward(
        self,
        layer: torch.nn.Module,
        query: Float[Tensor, "tokens heads D"],
        key: Float[Tensor, "tokens Hk D"],
        value: Float[Tensor, "tokens Hk D"],
        kv_cache: Float[Tensor, "pages Hk size 2*D"],
        attn_metadata: Batch | None,
        output: Float[Tensor, "tokens heads D"],
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the new keys and values into their pages, then attend, request by request.

        Of a layer with several queries per head the output has fewer heads: the first ones.
        """
        if output_scale is not None or output_block_scale is not None:
            raise ValueError("heedful-vllm does not quantise the outputs of attention")
        if attn_metadata is None:  # vLLM measures what a step takes
            return output.zero_()
        size, slots = kv_cache.shape[2], attn_metadata.slots
        both = torch.cat([key, value], dim=-1)[: len(slots)].to(kv_cache.dtype)
        kv_cache[slots // size, :, slots % size] = both
        for request in attn_metadata.requests:
            heads = self._attend(request, query[request.new], kv_cache)
            output[request.new, : heads.shape[1]] = heads
        return output

    def _attend(
        self,
        request: Request,
        q: Float[Tensor, "T heads D"],
        kv_cache: Float[Tensor, "pages Hk size 2*D"],
    ) -> Float[Tensor, "T H D"]:
        """One request's new tokens; its state is kept for the next ones."""
        layer, page, new, size = self.layer, request.page, len(q), kv_cache.shape[2]
        room, cached = kv_cache.shape[0] * size, request.slots[: request.before]
        inputs = LayerInputs(input=None if self.input is None else self.input[None, request.new])
        for name, rows in layer.rows(inputs).items():  # one stream at most
            own, earlier = rows[0].transpose(0, 1).to(kv_cache.dtype), self.extra.read(page, cached)
            self.extra.write(page, request.slots, own, room)
            every = own if earlier is None else torch.cat([earlier, own])
            inputs = inputs._replace(rows={name: every.transpose(0, 1)[None]})
        state = self.state.read(page, cached) if layer.running else None
        inputs = inputs._replace(state=None if state is None else state.T[None])
        q = self.rows.join(page, request.before, q)
        kv = kv_cache[request.slots // size, :, request.slots % size].to(q.dtype)
        parts = (x.transpose(0, 1)[None] for x in (q, *kv.chunk(2, dim=-1)))
        result = layer(*parts, scale=self.scale, inputs=inputs)
        if result.state is not None:
            self.state.write(page, request.slots, result.state[0].T, room)
        return result.output[0, :, -new:].transpose(0, 1)


class LayerBackend(AttentionBackend):
    """Ordinary pages of keys and values, read by heedful's layers."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto"]

    @staticmethod
    def get_name() -> str:
        """vLLM's own name for a backend that is none of its own."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[LayerImpl]:
        """What attends."""
        return LayerImpl

    @staticmethod
    def get_builder_cls() -> type[BatchBuilder]:
        """What reads a step's requests."""
        return BatchBuilder
