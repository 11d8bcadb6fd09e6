"""The requests of a step, read once for all layers."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec


class Request(NamedTuple):
    """One request of a step.

    new: where its new tokens are among the step's.
    before: how many tokens it had before these.
    page: its first page, by which it goes.
    slots: where keys and values of all its tokens are, in their order, counted through all pages.
    """

    new: slice
    before: int
    page: int
    slots: Int[Tensor, " n"]


@dataclass
class Batch(AttentionMetadata):
    """A step.

    requests: those with new tokens, in the order of these.
    slots: of all new tokens.
    """

    requests: list[Request]
    slots: Int[Tensor, " tokens"]


class BatchBuilder(AttentionMetadataBuilder[Batch]):
    """Reads a step's requests from what vLLM has for every backend."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.within = torch.arange(kv_cache_spec.block_size, device=device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Batch:
        """The step's requests; their lengths and first pages are read on the host."""
        common = common_attn_metadata
        size, pages = len(self.within), common.block_table_tensor
        ends = common.query_start_loc_cpu[1 : common.num_reqs + 1].tolist()
        lengths = common.seq_lens[: common.num_reqs].tolist()
        first = pages[: common.num_reqs, 0].tolist()
        requests, start = [], 0
        for row, (end, length, page) in enumerate(zip(ends, lengths, first, strict=True)):
            if end > start:
                own = pages[row, : -(-length // size), None].long()
                slots = (own * size + self.within).flatten()[:length]
                requests.append(Request(slice(start, end), length - (end - start), page, slots))
            start = end
        return Batch(requests, common.slot_mapping[: common.num_actual_tokens])
