"""Who may see whom: causal order, window, documents and padding, one object for every mechanism."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from heedful.ops.common.checks import check_dense, check_flag, shown

_WIDEST = 2**62  # a window and any position add up to an int64
_INTEGERS = (
    torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64,
    torch.int64,
)  # fmt: skip


_PER_TOKEN = ("documents", "padding", "mutual")


@dataclass(frozen=True)
class Visibility:
    """Which key each query may see; queries are the *last* `Tq` of the `Tk` tokens.

    ```text
    Tq = 2, Tk = 5, causal:          k0 k1 k2 k3 k4
                                 q0   x  x  x  x  .      query i stands at token i + Tk - Tq
                                 q1   x  x  x  x  x
    ```

    A query sees a key when every given condition holds: the key is not later (`causal`), is less
    than `window` tokens back, belongs to the same document, and neither token is padding. A query
    that sees nothing (a padded one) gets the output zero. Hidden tokens must hold finite numbers
    all the same: as in SDPA their weight is zero, and zero times NaN is NaN.

    Arguments:
        causal: hide later keys. Selective attention requires it.
        window: how many tokens a query sees, itself included; `None` is no limit.
        documents: document number of every token, `[B or 1, Tk]`; documents are contiguous runs. A
            negative number is padding.
        padding: `True` for a real token, `False` for padding, `[B or 1, Tk]`; left, right or both.
        mutual: tokens of the same number, zero or more, see each other later ones included (those
            of one image, say); -1 for a token that is causal, `[B or 1, Tk]`; each a run of tokens.
    """

    causal: bool = True
    window: int | None = None
    documents: Int[Tensor, "B Tk"] | None = None
    padding: Bool[Tensor, "B Tk"] | None = None
    mutual: Int[Tensor, "B Tk"] | None = None

    def __post_init__(self) -> None:
        check_flag("causal", self.causal)
        if self.window is not None and not (_whole(self.window) and 1 <= self.window <= _WIDEST):
            raise ValueError(
                "window must be a whole number of at least 1 (the token itself) and at most 2**62, "
                f"got {shown(self.window)}; use None for no limit"
            )
        if self.window is not None and not self.causal:
            raise ValueError("window needs causal=True: a two-sided window is not defined here")
        if self.mutual is not None and not self.causal:
            raise ValueError("mutual needs causal=True: without it all tokens see each other")
        for name in _PER_TOKEN:
            ids = getattr(self, name)
            if ids is not None:
                check_dense(name, ids, "[B, Tk]")
                if ids.ndim != 2:
                    raise ValueError(f"{name} must be a tensor [B, Tk], got {shown(ids)}")
        if self.padding is not None and self.padding.dtype != torch.bool:
            raise ValueError(
                f"padding must be boolean with True for real tokens, got {self.padding.dtype}; "
                "convert a 0/1 mask with mask.bool()"
            )
        for name in ("documents", "mutual"):
            ids = getattr(self, name)
            if ids is not None and ids.dtype not in _INTEGERS:
                raise ValueError(
                    f"{name} must hold whole numbers, got {ids.dtype}; a mask belongs in padding"
                )

    @classmethod
    def packed(
        cls, cu_seqlens: Int[Tensor, " n"], *, length: int | None = None, window: int | None = None
    ) -> "Visibility":
        """Documents packed in one row, from their cumulative lengths `[0, n1, n1+n2, ...]`.

        Arguments:
            cu_seqlens: offsets of the documents, in tokens, starting at 0.
            length: row length; tokens after the last offset are padding. Default: the last offset.
            window: as for the class.
        """
        check_dense("cu_seqlens", cu_seqlens, "of offsets [n]")
        if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2 or cu_seqlens.dtype not in _INTEGERS:
            raise ValueError(
                "cu_seqlens must be a vector of at least two whole offsets, got "
                f"{shown(cu_seqlens)} of {cu_seqlens.dtype}"
            )
        if cu_seqlens.device.type == "meta":
            raise ValueError("cu_seqlens must hold numbers, got a tensor on meta, which has none")
        if length is not None and not _whole(length):
            raise ValueError(
                f"length must be a whole number of tokens or None, got {shown(length)}"
            )
        cu_seqlens = cu_seqlens.to(torch.int64)
        total = int(cu_seqlens[-1])
        length = total if length is None else length
        if int(cu_seqlens[0]) != 0 or bool((cu_seqlens.diff() < 0).any()):
            raise ValueError(f"cu_seqlens must start at 0 and not fall, got {cu_seqlens.tolist()}")
        if length < total:
            raise ValueError(f"length must be at least the last offset {total}, got {length}")
        tokens = torch.arange(length, device=cu_seqlens.device)
        documents = torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True)[None]
        padding = None if length == total else (tokens < total)[None]
        return cls(window=window, documents=documents, padding=padding)

    @property
    def plain(self) -> bool:
        """Nothing but causal order (or nothing at all): what SDPA's `is_causal` can express."""
        return self.window is None and all(getattr(self, name) is None for name in _PER_TOKEN)

    def check(self, batch: int, queries: int, keys: int) -> None:
        """Raise unless these tokens fit `batch` rows of `queries` last tokens out of `keys`."""
        if queries > keys:
            raise ValueError(
                f"q has {queries} tokens but k only {keys}: queries are the last tokens of the "
                "keys, so k must be at least as long"
            )
        for name in _PER_TOKEN:
            ids = getattr(self, name)
            if ids is not None and (ids.shape[0] not in (1, batch) or ids.shape[1] != keys):
                raise ValueError(
                    f"visibility.{name} must be [{batch} or 1, {keys}] (one entry per key), got "
                    f"{tuple(ids.shape)}"
                )

    def segments(self) -> Int[Tensor, "B Tk"] | None:
        """Document number per token with -1 for padding; `None` if there is neither."""
        # In a narrow or unsigned type -1 would be some document's number.
        documents = None if self.documents is None else self.documents.to(torch.int64)
        if self.padding is None:
            return documents
        if documents is None:
            return self.padding.to(torch.int64) - 1
        return torch.where(self.padding, documents, -1)

    def first_tokens(self, keys: int, device: torch.device) -> Bool[Tensor, "B Tk"]:
        """The first real token of every document and of every padded row."""
        segments = self.segments()
        if segments is None:
            return (torch.arange(keys, device=device) == 0)[None]
        before = torch.nn.functional.pad(segments, (1, -1), value=-1)
        return (segments >= 0) & (segments != before)

    def dense(
        self, queries: int, keys: int, device: torch.device
    ) -> Bool[Tensor, "B_or_1 {queries} {keys}"]:
        """The whole map at once, `True` where query i sees key j."""
        token = torch.arange(keys, device=device)  # a range would fix a symbolic length
        return self.at(token[keys - queries :], token)

    def at(self, i: Int[Tensor, " R"], j: Int[Tensor, " K"]) -> Bool[Tensor, "B R K"]:
        """The part of the map with these query tokens and key tokens, in any order."""
        return see_at(self.segments(), self.causal, self.window, i, j, self.mutual)

    def tile(self, rows: range, columns: range, device: torch.device) -> Bool[Tensor, "B R K"]:
        """The part of the map with these query tokens and key tokens (positions among the keys)."""
        return see(self.segments(), self.causal, self.window, rows, columns, device, self.mutual)


def check_visibility(visibility: Visibility | None, q: Tensor, keys: int) -> Visibility:
    """The visibility to use for these queries and so many keys; a mask in its place is refused."""
    visibility = Visibility() if visibility is None else visibility
    if not isinstance(visibility, Visibility):
        raise ValueError(
            f"visibility must be a heedful.Visibility or None (causal), got {shown(visibility)}; "
            "describe a mask with Visibility(window=..., documents=..., padding=...)"
        )
    for name in _PER_TOKEN:
        ids = getattr(visibility, name)
        if ids is not None and ids.device != q.device:
            raise ValueError(
                f"visibility.{name} must be on q's device {q.device}, got {ids.device}; move it "
                f"with .to({str(q.device)!r})"
            )
    visibility.check(q.shape[0], q.shape[2], keys)
    return visibility


def _whole(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def see(
    segments: Int[Tensor, "B Tk"] | None,
    causal: bool,
    window: int | None,
    rows: range,
    columns: range,
    device: torch.device,
    mutual: Int[Tensor, "B Tk"] | None = None,
) -> Bool[Tensor, "B R K"]:
    """Visibility of key tokens `columns` from query tokens `rows`, as `Visibility.tile`."""
    i = torch.arange(rows.start, rows.stop, device=device)
    j = torch.arange(columns.start, columns.stop, device=device)
    return see_at(segments, causal, window, i, j, mutual)


def see_at(
    segments: Int[Tensor, "B Tk"] | None,
    causal: bool,
    window: int | None,
    i: Int[Tensor, " R"],
    j: Int[Tensor, " K"],
    mutual: Int[Tensor, "B Tk"] | None = None,
) -> Bool[Tensor, "B R K"]:
    """Visibility of tokens `j` from tokens `i`, in any order."""
    back = i[:, None] - j
    visible = ((back >= 0) if causal else torch.ones_like(back, dtype=torch.bool))[None]
    if mutual is not None:
        of_query, of_key = mutual[:, i, None], mutual[:, None, j]
        visible = visible | ((of_query == of_key) & (of_query >= 0))
    if window is not None:
        visible = visible & (back < window)
    if segments is not None:
        of_query, of_key = segments[:, i, None], segments[:, None, j]
        visible = visible & (of_query == of_key) & (of_query >= 0)
    return visible
