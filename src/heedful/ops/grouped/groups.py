"""Membership of tokens in groups: one weighted sparse matrix for every way of grouping.

Groups never cross documents, take no padding, and are counted from the first real token of each
document. They are numbered along the row in the order in which they end.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful.checks import UserError
from heedful.ops.common.checks import check_dense, shown
from heedful.ops.visibility import Visibility, is_whole_number

NEVER = 2**40  # the last token of a group that is not there
NOBODY = -1  # the group of a token that is padding


@dataclass(frozen=True, eq=False)
class Groups:
    r"""Memberships of tokens in groups, and where the groups lie.

    $A_{ij}$, the share of token i in group j, is `weight[i, s]` where `index[i, s] = j`; the shares
    of a real token sum to one, so that no token counts twice. `fixed_groups`, `sliding_groups`,
    `sentence_groups` and `cif_groups` make them.

    index: the groups of every token, `[B or 1, T, S]`; below zero for none of these.
    weight: the token's share in them, fp64 where it is not learned; zero for none.
    start, end: the first and last token of every group, `[B or 1, M]`, ascending; a number beyond
        every row for a group that only other rows have.
    complete: whether a group ended by its own rule, and not with its document.
    longest: the most tokens that a group can span.
    mass: the sum of the shares in every group, `[B or 1, M]`; default: of these tokens.
    first: where the first of these tokens stands, for a cache that holds only the newest.
    hard: whether every token belongs wholly to one group.
    even: whether these are runs of `longest` tokens from the first on, the last perhaps shorter.
    """

    index: Int[Tensor, "#B T S"]
    weight: Float[Tensor, "#B T S"]
    start: Int[Tensor, "#B M"]
    end: Int[Tensor, "#B M"]
    complete: Bool[Tensor, "#B M"]
    longest: int
    mass: Float[Tensor, "#B M"] | None = None
    first: int = 0
    hard: bool = False
    even: bool = False
    _members: "Members | None" = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.mass is None:
            object.__setattr__(self, "mass", self._mass())

    def _mass(self) -> Float[Tensor, "#B M"]:
        rows = max(len(self.weight), len(self.index))
        # Shares in groups that began before these tokens are none of these groups'.
        share = self.weight.where(self.index >= 0, 0).expand(rows, -1, -1).flatten(1)
        at = self.index.clamp(min=0).expand(rows, -1, -1).flatten(1)
        return share.new_zeros(rows, self.start.shape[1]).scatter_add(1, at, share)

    @property
    def count(self) -> int:
        """Number of groups of the sequence with the most."""
        return self.start.shape[1]

    @property
    def there(self) -> Bool[Tensor, "#B M"]:
        """True for the groups that a sequence has."""
        return self.end < NEVER

    @property
    def members(self) -> "Members":
        """The tokens of every group, for pooling; computed once."""
        if torch.compiler.is_compiling():
            return self._find_members()
        if self._members is None:
            object.__setattr__(self, "_members", self._find_members())
        return self._members

    def _find_members(self) -> "Members":
        tokens = self.index.shape[1]
        place = torch.arange(self.longest, device=self.start.device)
        at = self.start[..., None] - self.first + place
        inside = (at < tokens) & (at <= self.end[..., None] - self.first) & (at >= 0)
        at = at.where(inside, 0)
        rows = max(len(at), len(self.index), len(self.weight))
        at, inside = at.expand(rows, -1, -1), inside.expand(rows, -1, -1)
        flat = at.flatten(1)[..., None].expand(-1, -1, self.index.shape[2])
        index = self.index.expand(rows, -1, -1).gather(1, flat).unflatten(1, at.shape[1:])
        weight = self.weight.expand(rows, -1, -1).gather(1, flat).unflatten(1, at.shape[1:])
        number = torch.arange(at.shape[1], device=at.device)[:, None, None]
        share = weight.where((index == number) & inside[..., None], 0).sum(-1)
        return Members(at, share)

    def check(self, batch: int, tokens: int, name: str = "groups") -> None:
        """Raise unless these groups fit `batch` rows of `tokens` keys."""
        if self.index.shape[0] not in (1, batch) or self.index.shape[1] != tokens:
            raise UserError(
                f"{name} must be of [{batch} or 1, {tokens}] tokens, got those of "
                f"{tuple(self.index.shape[:2])}; make them for the same row"
            )
        if self.count and self.start.device.type == "cpu" and not torch.compiler.is_compiling():
            span = (self.end - self.start + 1).where(self.there, 0).max().item()
            if span > self.longest:
                raise UserError(
                    f"groups have one of {span} tokens, and longest={self.longest}: its summary "
                    "would leave the others out"
                )

    def check_places(self, visibility: Visibility) -> None:
        """Raise unless these groups hold no padding and cross no documents."""
        segments = visibility.segments()
        if segments is None or self.first or torch.compiler.is_compiling():
            return
        if self.start.device.type != "cpu":
            return
        inside = (self.index >= 0).any(-1)
        start, end = (_at_tokens(segments, x) for x in (self.start, self.end))
        apart = (start != end) & self.there
        if bool((inside & (segments < 0)).any()) or bool(apart.any()):
            raise UserError(
                "groups hold padding or cross documents, which their summaries would mix in; make "
                "them with the same visibility=, as in fixed_groups(16, tokens, "
                "visibility=visibility)"
            )


def _at_tokens(segments: Int[Tensor, "#B T"], tokens: Int[Tensor, "#B M"]) -> Int[Tensor, "#B M"]:
    rows = max(len(segments), len(tokens))
    at = tokens.clamp(0, segments.shape[1] - 1).expand(rows, -1)
    return segments.expand(rows, -1).gather(1, at)


class Members(NamedTuple):
    """The tokens of every group.

    at: which, `[B or 1, M, L]`, counted from the first that is there; 0 where there is none.
    share: how much of each, zero for none.
    """

    at: Int[Tensor, "#B M L"]
    share: Float[Tensor, "#B M L"]


class Places(NamedTuple):
    """Places of a sequence's tokens in their documents.

    real: which are not padding, `[B or 1, T]`.
    start: the first token of each one's document.
    stop: the token after its last.
    plain: whether there is one document without padding.
    """

    real: Bool[Tensor, "#B T"]
    start: Int[Tensor, "#B T"]
    stop: Int[Tensor, "#B T"]
    plain: bool

    @property
    def position(self) -> Int[Tensor, "#B T"]:
        """Counted from the first token of the document."""
        return torch.arange(self.start.shape[1], device=self.start.device) - self.start


def places_of(
    tokens: int, visibility: Visibility | None, device: torch.device | str | None
) -> Places:
    """Documents and padding of a row of so many tokens."""
    segments = None if visibility is None else visibility.segments()
    if visibility is not None and visibility.mutual is not None:
        raise UserError("visibility.mutual (images) is not defined beside groups; leave it out")
    if segments is None:
        token = torch.arange(tokens, device=device)[None]
        zero = torch.zeros_like(token)
        return Places(zero == 0, zero, zero + tokens, True)
    if segments.shape[1] != tokens:
        raise UserError(f"visibility must be of the same {tokens} tokens, got {segments.shape[1]}")
    token = torch.arange(tokens, device=segments.device).expand(segments.shape)
    edge = segments.diff(dim=1) != 0
    start = torch.nn.functional.pad(token[:, 1:] * edge, (1, 0)).cummax(1).values
    stop = torch.nn.functional.pad(token[:, 1:].where(edge, tokens), (0, 1), value=tokens)
    stop = stop.flip(1).cummin(1).values.flip(1)
    return Places(segments >= 0, start, stop, False)


def fixed_groups(
    size: int,
    tokens: int,
    *,
    visibility: Visibility | None = None,
    device: torch.device | str | None = None,
) -> Groups:
    """Groups of `size` tokens each, the last of a document shorter.

    Arguments:
        size: tokens of a group.
        tokens: T, tokens of a row.
        visibility: documents and padding.
        device: where the result lies, if the visibility does not say.

    Returns:
        The memberships, for `grouped_attention`.

    Raises:
        ValueError: a size is not a whole number of at least 1, or the visibility is of another
            length.
    """
    check_length("size", size)
    places = places_of(tokens, visibility, device)
    return fixed_from(places, size)


def fixed_from(places: Places, size: int) -> Groups:
    """As `fixed_groups`, where the tokens' places are known."""
    starts = places.real & (places.position % size == 0)
    groups = contiguous(starts, places, size, count_of(places, size))
    complete = groups.end - groups.start == size - 1
    return replace(groups, complete=complete, even=places.plain)


def sliding_groups(
    span: int,
    stride: int,
    tokens: int,
    *,
    visibility: Visibility | None = None,
    device: torch.device | str | None = None,
) -> Groups:
    """Groups of `span` tokens, one starting every `stride` tokens; a token is shared by several.

    A token's share in each of its groups is one over their number, counted as if the row went on
    for ever: so it does not depend on how long the row is.

    Arguments:
        span: tokens of a group.
        stride: from the start of one to that of the next; at most `span`.
        tokens: T, tokens of a row.
        visibility: documents and padding.
        device: where the result lies, if the visibility does not say.

    Returns:
        The memberships, for `grouped_attention`.

    Raises:
        ValueError: a size is not a whole number of at least 1, `stride` is above `span` (tokens
            between two groups would be in none), or the visibility is of another length.
    """
    check_length("span", span)
    check_length("stride", stride)
    if stride > span:
        raise UserError(
            f"stride must be at most the span {span}, or tokens between two groups would be in "
            f"none, got {stride}"
        )
    places = places_of(tokens, visibility, device)
    return sliding_from(places, span, stride)


def sliding_from(
    places: Places, span: int, stride: int, begun: Int[Tensor, "#B T"] | int = 0
) -> Groups:
    """As `sliding_groups`; `begun` is how many groups of a token's document came before these."""
    position = places.position + begun * stride
    starts = places.real & (position % stride == 0)
    back = torch.arange(-(-span // stride), device=position.device)
    older = (position // stride)[..., None] - back
    inside = places.real[..., None] & (older >= 0) & (position[..., None] < older * stride + span)
    weight = inside.double() / inside.sum(-1, keepdim=True).clamp(min=1)
    index = ((starts.cumsum(1) - 1)[..., None] - back).where(inside, NOBODY)
    tokens = starts.shape[1]
    start, last = begin_and_last(starts, places, count_of(places, stride))
    end = torch.minimum(start + span - 1, last).where(start < NEVER, NEVER)
    complete = end - start == span - 1
    return Groups(index, weight, start, end, complete, min(span, tokens), hard=span == stride)


def sentence_groups(
    token_ids: Int[Tensor, "#B T"],
    closing: tuple[int, ...],
    *,
    shortest: int = 1,
    longest: int = 64,
    visibility: Visibility | None = None,
) -> Groups:
    """Groups that end at the tokens that close a sentence, a line, a clause.

    A token ends its group if it is one of `closing` and the group has `shortest` tokens with it, or
    if the group has `longest` tokens. Only tokens up to it decide, so nothing later matters.

    Arguments:
        token_ids: `[B, T]`.
        closing: ids of the tokens that close a group; with none of them in the text, groups of
            `longest` tokens are left.
        shortest, longest: tokens of a group.
        visibility: documents and padding.

    Returns:
        The memberships, for `grouped_attention`.

    Raises:
        ValueError: `closing` is empty or no token ids, a length does not fit.
    """
    check_dense("token_ids", token_ids, "[B, T]")
    if token_ids.ndim != 2:
        raise UserError(f"token_ids must be [B, T], got {shown(token_ids)}")
    check_closing(closing)
    check_lengths(shortest, longest)
    places = places_of(token_ids.shape[1], visibility, token_ids.device)
    closes = torch.isin(token_ids, torch.tensor(closing, device=token_ids.device))
    return closed_groups(closes, places, shortest, longest)


def closed_groups(
    closes: Bool[Tensor, "#B T"], places: Places, shortest: int, longest: int
) -> Groups:
    """Groups that end where `closes` says, none shorter or longer than these lengths.

    Where a group starts decides where the next one does, so every start points to the next; the
    ones that are reached from a document's first token are found by doubling the reach.
    """
    rows = max(len(closes), len(places.real))
    closes = closes.expand(rows, -1)
    real, first, stop = (x.expand(rows, -1) for x in places[:3])
    tokens, device = closes.shape[1], closes.device
    token = torch.arange(tokens, device=device).expand(rows, -1)
    close = token.where(closes, tokens).flip(1).cummin(1).values.flip(1)  # the next that closes
    earliest = torch.nn.functional.pad(close, (0, shortest), value=tokens)[:, shortest - 1 : -1]
    last = torch.minimum(earliest, token + longest - 1).minimum(stop - 1)
    to = torch.nn.functional.pad(last + 1, (0, 1), value=tokens)
    reached = torch.nn.functional.pad(real & (token == first), (0, 1))
    for _ in range(max(1, tokens.bit_length())):
        reached = reached | torch.zeros_like(reached).scatter(1, to.where(reached, tokens), True)
        to = to.gather(1, to)
    groups = contiguous(reached[:, :-1] & real, places, longest)
    length = groups.end - groups.start + 1
    closing = closes.gather(1, groups.end.clamp(max=tokens - 1)) & (length >= shortest)
    return replace(groups, complete=groups.complete | closing | (length == longest))


def contiguous(
    starts: Bool[Tensor, "#B T"], places: Places, longest: int, count: int | None = None
) -> Groups:
    """Hard groups of neighbours, from the tokens that start one; so many, if that is known."""
    start, last = begin_and_last(starts, places, count)
    follows = torch.nn.functional.pad(start[:, 1:], (0, 1), value=NEVER)
    end = (torch.minimum(follows - 1, last)).where(start < NEVER, NEVER)
    index = (starts.cumsum(1) - 1).where(places.real, NOBODY)[..., None]
    weight = places.real.double()[..., None]
    longest = min(longest, starts.shape[1])
    return Groups(index, weight, start, end, end < last, longest, hard=True)


def begin_and_last(
    starts: Bool[Tensor, "#B T"], places: Places, count: int | None = None
) -> tuple[Int[Tensor, "#B M"], Int[Tensor, "#B M"]]:
    """Start of each group, and last token of its document; `NEVER` for one not there."""
    rows, tokens = starts.shape
    count = max(1, int(starts.sum(1).max())) if count is None else count
    token = torch.arange(tokens, device=starts.device).expand(rows, -1)
    start = torch.full((rows, count + 1), NEVER, device=starts.device)
    start = start.scatter(1, (starts.cumsum(1) - 1).where(starts, count), token)[:, :count]
    stop = places.stop.expand(rows, -1)
    return start, stop.gather(1, start.clamp(max=tokens - 1)) - 1


def count_of(places: Places, size: int) -> int | None:
    """Number of groups, one every `size` tokens, where it needs no look at the sequence."""
    return -(-places.real.shape[1] // size) if places.plain else None


def check_length(name: str, x: object) -> None:
    """Raise unless `x` is a whole number of tokens."""
    if not (is_whole_number(x) and x >= 1):
        raise UserError(f"{name} must be a whole number of tokens of at least 1, got {x!r}")


def check_lengths(shortest: object, longest: object) -> None:
    """Raise unless groups may have these lengths."""
    check_length("shortest", shortest)
    check_length("longest", longest)
    if shortest > longest:
        raise UserError(f"shortest must be at most longest ({longest}), got {shortest}")


def check_closing(closing: object) -> None:
    """Raise unless these are token ids, at least one."""
    if (
        not isinstance(closing, tuple)
        or not closing
        or not all(is_whole_number(x) and x >= 0 for x in closing)
    ):
        raise UserError(
            "closing must be a tuple of token ids, those of '.', '!', '?' and line ends say, got "
            f"{closing!r}; a tokenizer tells them: tokenizer.convert_tokens_to_ids('.')"
        )
