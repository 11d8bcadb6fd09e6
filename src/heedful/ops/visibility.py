"""Visibility of tokens: causal order, window, documents and padding, for every mechanism."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int, Integer
from torch import Tensor

from heedful.checks import UserError
from heedful.ops.common.checks import check_dense, check_flag, shown

_WIDEST = 2**62  # a window and any position add up to an int64
_INTEGERS = (
    torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64,
    torch.int64,
)  # fmt: skip


_PER_TOKEN = ("documents", "padding", "mutual", "positions")


class Queries(NamedTuple):
    """Data that a `Visibility` needs of queries that are not the last of the keys' tokens.

    So in cross-attention. What is `None` holds for all of them: one document, no padding.

    documents: document number of every query, `[B or 1, Tq]`, to be compared with the keys'.
    padding: `True` for a real query, `[B or 1, Tq]`.
    positions: of every query, `[B or 1, Tq]`; causal order and a window need them.
    """

    documents: Integer[Tensor, "#B Tq"] | None = None
    padding: Bool[Tensor, "#B Tq"] | None = None
    positions: Int[Tensor, "#B Tq"] | None = None


@dataclass(frozen=True)
class Visibility:
    """Keys that each query may see; queries are the *last* `Tq` of the `Tk` tokens.

    ```text
    Tq = 2, Tk = 5, causal:          k0 k1 k2 k3 k4
                                 q0   x  x  x  x  .      query i stands at token i + Tk - Tq
                                 q1   x  x  x  x  x
    ```

    A query sees a key when every given condition holds: the key is not later (`causal`), is less
    than `window` tokens away, belongs to the same document, and neither token is padding. A query
    that sees nothing (a padded one) gets the output zero. Masked tokens must hold finite numbers
    all the same: as in SDPA their weight is zero, and zero times NaN is NaN.

    Arguments:
        causal: mask later keys. Selective attention requires it.
        window: how many tokens a query sees, itself included; `None` is no limit. Without causal
            order it counts to either side: a query sees the keys less than `window` tokens away.
        documents: document number of every token, `[B or 1, Tk]`; documents are contiguous runs. A
            negative number is padding.
        padding: `True` for a real token, `False` for padding, `[B or 1, Tk]`; left, right or both.
        mutual: tokens of the same number, zero or more, see each other later ones included (those
            of one image, say); -1 for a token that is causal, `[B or 1, Tk]`; each a run of tokens.
        positions: the position of every key, `[B or 1, Tk]`, in any order: for keys that are not
            all of a sequence's tokens, as in a cache that has evicted some. Causal order and the
            window count by them. `None` is 0 to Tk - 1.
        queries: of queries that are not the last `Tq` of the keys' tokens, see `Queries`.
    """

    causal: bool = True
    window: int | None = None
    documents: Integer[Tensor, "#B Tk"] | None = None
    padding: Bool[Tensor, "#B Tk"] | None = None
    mutual: Int[Tensor, "#B Tk"] | None = None
    positions: Int[Tensor, "#B Tk"] | None = None
    queries: Queries | None = None

    def __post_init__(self) -> None:
        check_flag("causal", self.causal)
        if self.window is not None and not (
            is_whole_number(self.window) and 1 <= self.window <= _WIDEST
        ):
            raise UserError(
                "window must be a whole number of at least 1 (the token itself) and at most 2**62, "
                f"got {shown(self.window)}; use None for no limit"
            )
        if self.mutual is not None and not self.causal:
            raise UserError("mutual needs causal=True: without it all tokens see each other")
        for name, ids in self._tensors().items():
            check_dense(name, ids, "[B, Tk]")
            if ids.ndim != 2:
                raise UserError(f"{name} must be a tensor [B, Tk], got {shown(ids)}")
            if name.endswith("padding"):
                if ids.dtype != torch.bool:
                    raise UserError(
                        f"{name} must be boolean with True for real tokens, got {ids.dtype}; "
                        "convert a 0/1 mask with mask.bool()"
                    )
            elif ids.dtype not in _INTEGERS:
                raise UserError(
                    f"{name} must hold whole numbers, got {ids.dtype}; a mask belongs in padding"
                )
        self._check_places()

    def _tensors(self) -> dict[str, Tensor]:
        """The tensors that are given, by name."""
        tensors = {name: getattr(self, name) for name in _PER_TOKEN}
        if self.queries is not None:
            if not isinstance(self.queries, Queries):
                raise UserError(f"queries must be a Queries or None, got {shown(self.queries)}")
            tensors |= {f"queries.{name}": x for name, x in self.queries._asdict().items()}
        return {name: x for name, x in tensors.items() if x is not None}

    def _check_places(self) -> None:
        """Raise where positions or queries leave open which keys a query sees."""
        if self.mutual is not None and not self.in_place:
            raise UserError("mutual is not defined beside positions or queries; leave it out")
        if self.queries is None:
            return
        if (self.documents is None) != (self.queries.documents is None):
            raise UserError("documents must be given for keys and queries, or for neither")
        ordered = self.causal or self.window is not None
        if ordered and self.queries.positions is None:
            raise UserError(
                "queries.positions must be given where causal order or a window counts by them; "
                "cross-attention is Visibility(causal=False, queries=...)"
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
            raise UserError(
                "cu_seqlens must be a vector of at least two whole offsets, got "
                f"{shown(cu_seqlens)} of {cu_seqlens.dtype}"
            )
        if cu_seqlens.device.type == "meta":
            raise UserError("cu_seqlens must hold numbers, got a tensor on meta, which has none")
        if length is not None and not is_whole_number(length):
            raise UserError(f"length must be a whole number of tokens or None, got {shown(length)}")
        cu_seqlens = cu_seqlens.to(torch.int64)
        total = int(cu_seqlens[-1])
        length = total if length is None else length
        if int(cu_seqlens[0]) != 0 or bool((cu_seqlens.diff() < 0).any()):
            raise UserError(f"cu_seqlens must start at 0 and not fall, got {cu_seqlens.tolist()}")
        if length < total:
            raise UserError(f"length must be at least the last offset {total}, got {length}")
        tokens = torch.arange(length, device=cu_seqlens.device)
        documents = torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True)[None]
        padding = None if length == total else (tokens < total)[None]
        return cls(window=window, documents=documents, padding=padding)

    @property
    def plain(self) -> bool:
        """True if nothing but causal order limits attention, or nothing at all, as in SDPA."""
        limited = self.window is not None or self.documents is not None or self.padding is not None
        placed = self.positions is not None or self.queries is not None
        return not (limited or placed) and self.mutual is None

    @property
    def in_place(self) -> bool:
        """True if queries are the last of the keys' tokens, and these are at 0 to Tk - 1."""
        return self.positions is None and self.queries is None

    def to(self, device: torch.device | str, **options: object) -> "Visibility":
        """The same with its tensors on another device."""
        moved = {name: x.to(device, **options) for name, x in self._tensors().items()}
        queries = self.queries
        if queries is not None:
            own = {name: moved.pop(f"queries.{name}", None) for name in queries._fields}
            queries = Queries(**own)
        return replace(self, **moved, queries=queries)

    def part(self, start: int, stop: int) -> "Visibility":
        """The same among the tokens from `start` to before `stop` alone."""
        if self.queries is not None:
            raise UserError("part needs queries that are the last of the keys' tokens")
        tensors = self._tensors()
        if all(x.shape[1] == stop - start for x in tensors.values()):
            return self
        return replace(self, **{name: x[:, start:stop] for name, x in tensors.items()})

    def last(self, keys: int) -> "Visibility":
        """The same among the last `keys` tokens."""
        if self.plain:
            return self
        tokens = next((x.shape[1] for x in self._tensors().values()), keys)
        return self.part(tokens - keys, tokens)

    def check(self, batch: int, queries: int, keys: int) -> None:
        """Raise unless these tokens fit `batch` rows of `queries` last tokens out of `keys`."""
        anywhere = self.plain and not self.causal  # all see all: nothing counts places
        if queries > keys and self.queries is None and not anywhere:
            raise UserError(
                f"q has {queries} tokens but k only {keys}: queries are the last tokens of the "
                "keys, so k must be at least as long"
            )
        for name, ids in self._tensors().items():
            of, tokens = ("query", queries) if name.startswith("queries") else ("key", keys)
            if ids.shape[0] not in (1, batch) or ids.shape[1] != tokens:
                raise UserError(
                    f"visibility.{name} must be [{batch} or 1, {tokens}] (one entry per {of}), got "
                    f"{tuple(ids.shape)}"
                )

    def segments(self) -> Int[Tensor, "#B Tk"] | None:
        """Document number per key with -1 for padding; `None` if there is neither."""
        return _segments(self.documents, self.padding)

    def query_segments(self, queries: int) -> Int[Tensor, "#B Tq"] | None:
        """The same for the queries; `None` if these have neither."""
        if self.queries is not None:
            return _segments(self.queries.documents, self.queries.padding)
        segments = self.segments()
        return None if segments is None else segments[:, segments.shape[1] - queries :]

    def tensors(
        self, queries: int, keys: int, device: torch.device
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Segments and mutual of keys in place, or the places of all: the rest is `None`."""
        places = self.places(queries, keys, device)
        return (self.segments(), self.mutual, None) if places is None else (None, None, places)

    def places(
        self, queries: int, keys: int, device: torch.device
    ) -> Int[Tensor, "#B 2 {queries+keys}"] | None:
        """Segment and position of every query, then of every key; `None` if all are in place."""
        if self.in_place:
            return None
        own, other = self.query_segments(queries), self.segments()
        zero = torch.zeros(1, max(queries, keys), dtype=torch.int64, device=device)
        segments = (
            zero[:, :queries] if own is None else own,
            zero[:, :keys] if other is None else other,
        )
        at = self.positions
        at = torch.arange(keys, device=device)[None] if at is None else at.to(torch.int64)
        if self.queries is None:
            positions = (at[:, keys - queries :], at)
        elif self.queries.positions is None:
            positions = (zero[:, :queries], at)
        else:
            positions = (self.queries.positions.to(torch.int64), at)
        rows = max(len(x) for x in (*segments, *positions))
        both = [torch.cat([x.expand(rows, -1) for x in pair], 1) for pair in (segments, positions)]
        return torch.stack(both, dim=1)

    def first_tokens(self, keys: int, device: torch.device) -> Bool[Tensor, "#B Tk"]:
        """The first real token of every document and of every padded row."""
        segments = self.segments()
        if self.positions is not None:
            return _first_by_position(segments, self.positions)
        if segments is None:
            return (torch.arange(keys, device=device) == 0)[None]
        # The real token before each, which padding may part from it.
        token = torch.arange(keys, device=segments.device).expand(segments.shape)
        newest = token.where(segments >= 0, -1).cummax(1).values
        before = torch.nn.functional.pad(newest, (1, -1), value=-1)
        same = segments.gather(1, before.clamp(min=0)) == segments
        return (segments >= 0) & ~(same & (before >= 0))

    def dense(
        self, queries: int, keys: int, device: torch.device
    ) -> Bool[Tensor, "B_or_1 {queries} {keys}"]:
        """The whole map at once, `True` where query i sees key j."""
        places = self.places(queries, keys, device)
        if places is not None:
            return see_placed(places, queries, self.causal, self.window)
        token = torch.arange(keys, device=device)  # a range would fix a symbolic length
        return self.at(torch.arange(queries, device=device) + (keys - queries), token)

    def earlier(
        self, queries: int, keys: int, device: torch.device
    ) -> Bool[Tensor, "B_or_1 {queries} {keys}"]:
        """`True` where a key comes before a query, seen or not."""
        places = self.places(queries, keys, device)
        if places is None:
            token = torch.arange(keys, device=device)
            return (token < token[keys - queries :, None])[None]
        return places[:, 1, None, queries:] < places[:, 1, :queries, None]

    def at(self, i: Int[Tensor, " R"], j: Int[Tensor, " K"]) -> Bool[Tensor, "#B R K"]:
        """The part of the map with these query tokens and key tokens, in any order."""
        return see_at(self.segments(), self.causal, self.window, i, j, self.mutual)


def check_visibility(visibility: Visibility | None, q: Tensor, keys: int) -> Visibility:
    """The visibility to use for these queries and so many keys; a mask in its place raises."""
    visibility = Visibility() if visibility is None else visibility
    if not isinstance(visibility, Visibility):
        raise UserError(
            f"visibility must be a heedful.Visibility or None (causal), got {shown(visibility)}; "
            "describe a mask with Visibility(window=..., documents=..., padding=...)"
        )
    for name, ids in visibility._tensors().items():
        if ids.device != q.device:
            raise UserError(
                f"visibility.{name} must be on q's device {q.device}, got {ids.device}; move it "
                f"with .to({str(q.device)!r})"
            )
    visibility.check(q.shape[0], q.shape[2], keys)
    return visibility


def _segments(
    documents: Integer[Tensor, "#B T"] | None, padding: Bool[Tensor, "#B T"] | None
) -> Int[Tensor, "#B T"] | None:
    # In a narrow or unsigned type -1 would be some document's number.
    documents = None if documents is None else documents.to(torch.int64)
    if padding is None:
        return documents
    if documents is None:
        return padding.to(torch.int64) - 1
    return torch.where(padding, documents, -1)


def _first_by_position(
    segments: Int[Tensor, "#B Tk"] | None, positions: Int[Tensor, "#B Tk"]
) -> Bool[Tensor, "#B Tk"]:
    """The real token of every document that stands first, wherever it lies."""
    if segments is None:
        return positions == positions.amin(1, keepdim=True)
    segments, positions = torch.broadcast_tensors(segments, positions.to(torch.int64))
    number = torch.unique(segments, return_inverse=True)[1]
    size = (len(segments), int(number.max()) + 1)
    first = positions.new_full(size, _WIDEST).scatter_reduce(1, number, positions, "amin")
    return (segments >= 0) & (positions == first.gather(1, number))


def is_whole_number(x: object) -> bool:
    """`True` and `False` are not whole numbers."""
    return isinstance(x, int) and not isinstance(x, bool)


def see(
    segments: Int[Tensor, "#B Tk"] | None,
    causal: bool,
    window: int | None,
    rows: range,
    columns: range,
    device: torch.device,
    mutual: Int[Tensor, "#B Tk"] | None = None,
) -> Bool[Tensor, "#B R K"]:
    """Visibility of key tokens `columns` from query tokens `rows`, in place."""
    i = torch.arange(rows.start, rows.stop, device=device)
    j = torch.arange(columns.start, columns.stop, device=device)
    return see_at(segments, causal, window, i, j, mutual)


def see_at(
    segments: Int[Tensor, "#B Tk"] | None,
    causal: bool,
    window: int | None,
    i: Int[Tensor, " R"],
    j: Int[Tensor, " K"],
    mutual: Int[Tensor, "#B Tk"] | None = None,
) -> Bool[Tensor, "#B R K"]:
    """Visibility of tokens `j` from tokens `i`, in any order."""
    back = i[:, None] - j
    far = back if causal else back.abs()
    visible = ((back >= 0) if causal else torch.ones_like(back, dtype=torch.bool))[None]
    if mutual is not None:
        of_query, of_key = mutual[:, i, None], mutual[:, None, j]
        visible = visible | ((of_query == of_key) & (of_query >= 0))
    if window is not None:
        visible = visible & (far < window)
    if segments is not None:
        of_query, of_key = segments[:, i, None], segments[:, None, j]
        visible = visible & (of_query == of_key) & (of_query >= 0)
    return visible


def see_placed(
    places: Int[Tensor, "#B 2 P"],
    queries: int,
    causal: bool,
    window: int | None,
    rows: range | None = None,
) -> Bool[Tensor, "#B R Tk"]:
    """Visibility of all keys from these queries, or from all, by their segments and positions."""
    of_queries, of_keys = places[..., :queries], places[..., queries:]
    if rows is not None:
        of_queries = of_queries[..., rows.start : rows.stop]
    of_queries, of_keys = of_queries[..., None], of_keys[:, :, None]
    visible = (of_queries[:, 0] == of_keys[:, 0]) & (of_queries[:, 0] >= 0)
    back = of_queries[:, 1] - of_keys[:, 1]
    if causal:
        visible = visible & (back >= 0)
    if window is not None:
        visible = visible & ((back if causal else back.abs()) < window)
    return visible
