"""What transformers hands to attention, turned into a `Visibility` without a T x T mask.

A model whose attention function has no mask function gets no mask at all from transformers and
silently drops padding. So `compact_mask` is registered beside the function: it returns one entry
per key (padding, or document numbers), and the operators are causal by themselves.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function
from transformers.utils import is_tracing

from heedful.ops import Visibility


def compact_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | None = None,
    **_: object,
) -> Tensor | None:
    """Padding `[B, kv]` (bool), document numbers `[B, kv]` (integer), or `None` for neither.

    Called by transformers once per forward pass, with its own keywords.
    """
    if use_vmap:
        raise ValueError(
            "this model adds its own function to the attention mask, which a Visibility (causal, "
            "window, documents, padding) cannot express; it cannot be converted"
        )
    if kv_offset + kv_length != q_offset + q_length:
        raise ValueError(
            "the cache holds keys after the newest token, as static caches do; a converted model "
            "needs a dynamic cache or use_cache=False"
        )
    if attention_mask is not None:
        padding = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
        return padding if is_tracing(padding) or not bool(padding.all()) else None
    if mask_function is causal_mask_function or q_length != kv_length or q_length < 2:
        return None
    return _documents(mask_function, batch_size, q_length, device)


def _documents(mask_function: Callable, batch: int, tokens: int, device) -> Tensor | None:
    """Numbers of the runs in which each token sees the one before it."""
    rows = torch.arange(batch, device=device)[:, None]
    token = torch.arange(1, tokens, device=device)[None, :]
    later = mask_function(rows, 0, token - 1, token)
    joined = mask_function(rows, 0, token, token - 1).expand(batch, tokens - 1)
    if not is_tracing(joined):
        if bool(later.any()):
            raise ValueError(
                "this model lets tokens see later ones, which its converted attention cannot"
            )
        if bool(joined.all()):
            return None
    documents = (~joined).cumsum(1)
    return torch.nn.functional.pad(documents, (1, 0))


def visibility_of(mask: Tensor | None, keys: int, window: int | None, kwargs: dict) -> Visibility:
    """The visibility behind an attention call's mask, sliding window and packing offsets."""
    if window is not None and window >= keys:
        window = None
    if mask is None:
        offsets = kwargs.get("cu_seq_lens_q")
        if offsets is not None:
            return Visibility.packed(offsets, length=keys, window=window)
        return Visibility(window=window)
    if mask.ndim != 2 or mask.shape[1] != keys:
        raise ValueError(
            f"attention_mask must be 2-D [B, tokens] with 1 for real tokens, got a mask of shape "
            f"{tuple(mask.shape)}; for packed documents pass position_ids that restart at 0"
        )
    if mask.dtype == torch.bool:
        return Visibility(window=window, padding=mask)
    return Visibility(window=window, documents=mask)
