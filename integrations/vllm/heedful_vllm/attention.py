"""Multi-token attention over vLLM's pages: heedful's own layer, request by request."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import KVCacheSpec

from heedful.nn import Layer


class QueryRows:
    """The newest query rows of every request that runs, for one layer: what its convolutions read.

    A request goes by its first page: no other running one has it (prefix caching is off), and one
    that takes it over later begins at its first token, as does one that was preempted.

    Arguments:
        count: how many rows the newest output depends on.
        requests: how many run at once, at most.
    """

    def __init__(self, count: int, requests: int) -> None:
        # A request that runs is in the next step or soon after it, so what has not been in use for
        # longer than as many others again has ended.
        self.count, self.room = count, 2 * requests
        self._rows: OrderedDict[int, Float[Tensor, "H r D"]] = OrderedDict()

    def join(self, page: int, before: int, new: Float[Tensor, "H T D"]) -> Float[Tensor, "H r+T D"]:
        """The request's kept rows, followed by new ones, of which the newest are kept.

        Arguments:
            page: the request's first page.
            before: how many tokens it had before these.
            new: the queries of its new tokens.
        """
        if not self.count:
            return new
        known = self._rows.pop(page, None)  # also of one that has ended: the new one is the newest
        known = known if before else None
        if (0 if known is None else known.shape[1]) != min(before, self.count):
            raise RuntimeError(
                f"the query rows of a request with {before} tokens are gone; please report this, "
                "with the options of vLLM"
            )
        joined = new if known is None else torch.cat([known, new], dim=1)
        self._rows[page] = joined[:, -self.count :].clone()  # at the end, as the newest
        while len(self._rows) > self.room:
            self._rows.popitem(last=False)
        return joined


@dataclass
class Batch(AttentionMetadata):
    """The requests of a step, in their order.

    ends: where the new tokens of each end in the step's tokens.
    lengths: how many tokens each has, the new ones included.
    pages: the pages of each, in the order of its tokens.
    slots: where the new tokens' keys and values go, counted through all pages.
    """

    ends: list[int]
    lengths: list[int]
    pages: Int[Tensor, "requests most"]
    slots: Int[Tensor, " tokens"]


class BatchBuilder(AttentionMetadataBuilder[Batch]):
    """Reads a step's requests from what vLLM has for every backend."""

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Batch:
        """The step's requests; their lengths are read on the host, once for all layers."""
        common = common_attn_metadata
        requests = common.num_reqs
        return Batch(
            common.query_start_loc_cpu[1 : requests + 1].tolist(),
            common.seq_lens[:requests].tolist(),
            common.block_table_tensor[:requests],
            common.slot_mapping[: common.num_actual_tokens],
        )


class MultiTokenImpl(AttentionImpl[Batch]):
    """One layer's attention: keys and values in vLLM's pages, query rows beside them."""

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
                f"heedful-vllm does not serve {layer.config} in attention with "
                f"{' and '.join(extras)}; serve it with transformers serve"
            )
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        self.head_size, self.scale = head_size, scale
        self.kv_cache_dtype = kv_cache_dtype
        self.layer = layer
        requests = get_current_vllm_config().scheduler_config.max_num_seqs
        self.rows = QueryRows(layer.past_queries, requests)

    def forward(
        self,
        layer: torch.nn.Module,
        query: Float[Tensor, "tokens H D"],
        key: Float[Tensor, "tokens Hk D"],
        value: Float[Tensor, "tokens Hk D"],
        kv_cache: Float[Tensor, "pages Hk size 2*D"],
        attn_metadata: Batch | None,
        output: Float[Tensor, "tokens H D"],
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the new keys and values into their pages, then attend, request by request."""
        if output_scale is not None or output_block_scale is not None:
            raise ValueError("heedful-vllm does not quantise the outputs of attention")
        if attn_metadata is None:  # vLLM measures what a step takes
            return output.zero_()
        size, slots = kv_cache.shape[2], attn_metadata.slots
        both = torch.cat([key, value], dim=-1)[: len(slots)].to(kv_cache.dtype)
        kv_cache[slots // size, :, slots % size] = both
        start = 0
        requests = zip(attn_metadata.ends, attn_metadata.lengths, strict=True)
        for row, (end, length) in enumerate(requests):
            if end > start:
                pages = attn_metadata.pages[row, : -(-length // size)]
                q = query[start:end].transpose(0, 1)
                q = self.rows.join(int(pages[0]), length - (end - start), q)
                kv = kv_cache[pages].transpose(0, 1).flatten(1, 2)[:, :length]
                k, v = kv.to(q.dtype).chunk(2, dim=-1)
                heads = self.layer(q[None], k[None], v[None], scale=self.scale).output[0]
                output[start:end] = heads[:, start - end :].transpose(0, 1)
            start = end
        return output


class MultiTokenBackend(AttentionBackend):
    """Ordinary pages of keys and values, read by heedful's layer."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto"]

    @staticmethod
    def get_name() -> str:
        """vLLM's own name for a backend that is none of its own."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[MultiTokenImpl]:
        """What attends."""
        return MultiTokenImpl

    @staticmethod
    def get_builder_cls() -> type[BatchBuilder]:
        """What reads a step's requests."""
        return BatchBuilder
