"""The part of a cache of a layer that keeps summaries: near tokens, far groups, and what is open.

Of far tokens nothing is left but their groups' summaries. Kept beside these are the keys and values
of the tokens that some summary does not cover yet, and, of groups that may still grow, what their
summary will be made of. Who is in which group is told by the ledger.
"""

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from heedful.eviction import Eviction
from heedful.hf.cache.layer import LayerCache
from heedful.hf.cache.ledger import Entry, Ledger, entered
from heedful.hf.cache.slots import LEAST, SLACK, Meter, nbytes_of
from heedful.nn import Given, Layer
from heedful.ops import Groups, Summaries, Visibility
from heedful.ops.grouped.groups import Places, places_of


class Arrived(NamedTuple):
    """Tokens, and what their groups and summaries are made of; `None` for what takes nothing.

    keys, values, queries: rotated, `[B, H, n, D]`; queries where groups ask.
    grouping, pooling: features, `[B, n, F]`.
    positions: of the model, `[B, n]`.
    """

    keys: Float[Tensor, "B Hk n D"]
    values: Float[Tensor, "B Hk n D"]
    queries: Float[Tensor, "B H n D"] | None
    grouping: Float[Tensor, "B n F"] | None
    pooling: Float[Tensor, "B n P"] | None
    positions: Int[Tensor, "B n"] | None

    def cut(self, start: int, stop: int | None = None) -> "Arrived":
        """Some of the tokens."""
        return Arrived(*(None if x is None else x.narrow(self._dim(name), start,
                         (self.tokens if stop is None else stop) - start)
                         for name, x in self._asdict().items()))  # fmt: skip

    def followed_by(self, more: "Arrived") -> "Arrived":
        """These tokens and later ones."""
        pairs = zip(self._asdict().items(), more, strict=True)
        return Arrived(*(None if x is None else torch.cat([x, y], dim=self._dim(name))
                         for (name, x), y in pairs))  # fmt: skip

    def changed(self, change: Callable[[Tensor], Tensor]) -> "Arrived":
        """The same with its rows changed."""
        return Arrived(*(None if x is None else change(x) for x in self))

    @property
    def tokens(self) -> int:
        return self.keys.shape[2]

    @staticmethod
    def _dim(name: str) -> int:
        return 2 if name in ("keys", "values", "queries") else 1


class State(NamedTuple):
    """What is kept between calls; every tensor is of all rows.

    ledger: which groups there are, and who is in which.
    keys, values: of the near tokens, those from `ledger.first` on.
    open: the features of those from `ledger.opened` on, and their keys and values, as views.
    group_keys, group_values: summaries, with room for more.
    asking: the query of the newest complete group of each row, `[B, H, 1, D]`, where groups ask.
    """

    ledger: Ledger
    keys: Float[Tensor, "B Hk n D"]
    values: Float[Tensor, "B Hk n D"]
    open: Arrived
    group_keys: Float[Tensor, "B Hk room D"]
    group_values: Float[Tensor, "B Hk room D"]
    asking: Float[Tensor, "B H 1 D"] | None

    @classmethod
    def before(cls, new: Arrived) -> "State":
        """Before the first token."""
        asking = None if new.queries is None else torch.zeros_like(new.queries[:, :, :1])
        none = new.cut(0, 0)
        ledger = Ledger.empty(len(new.keys), new.keys.device)
        return cls(ledger, none.keys, none.values, none, none.keys, none.values, asking)

    def tensors(self) -> list[Tensor]:
        """All of them; several may look at one storage."""
        parts = (*self, *self.ledger, *self.open)
        return [x for x in parts if isinstance(x, Tensor)]

    def changed(self, change: Callable[[Tensor], Tensor]) -> "State":
        """The same with its rows changed."""
        moved = State(*(change(x) if isinstance(x, Tensor) else x for x in self))
        ledger = Ledger(*(change(x) if isinstance(x, Tensor) else x for x in self.ledger))
        near = self.open.changed(change)
        return moved._replace(ledger=ledger, open=near)._with_views()

    def moved(self, device: torch.device) -> "State":
        """With keys and values, of groups and of tokens, on another device."""
        names = ("keys", "values", "group_keys", "group_values")
        there = {x: getattr(self, x).to(device, non_blocking=True) for x in names}
        return self._replace(**there)._with_views()

    def _with_views(self) -> "State":
        """The open tokens' keys and values as views of the near ones'."""
        start = self.ledger.opened - self.ledger.first
        near = {x: getattr(self, x)[:, :, start:] for x in ("keys", "values")}
        return self._replace(open=self.open._replace(**near))


class Recent(NamedTuple):
    """What undoing the newest calls takes: what was held before, and what came since."""

    before: State | None
    arrived: Arrived
    visibility: Visibility
    given: Given


class SummaryCache(LayerCache):
    """One attention layer's part of the cache, where the layer sums up groups of tokens."""

    def __init__(
        self,
        layer: Layer,
        sliding: int | None = None,
        policy: Eviction | None = None,
        tokens: int | None = None,
        meter: Meter | None = None,
    ) -> None:
        super().__init__(layer, sliding, policy, tokens, meter)
        self.window = None  # the operator sees to it; summaries within are kept

    def _clear(self) -> None:
        super()._clear()
        self._held: State | None = None
        self._recent: Recent | None = None
        self._grouping = None
        self._leaves = False

    @property
    def keys(self) -> Tensor | None:
        return None if self._held is None else self._held.keys

    @property
    def values(self) -> Tensor | None:
        return None if self._held is None else self._held.values

    @property
    def is_initialized(self) -> bool:
        return self._held is not None

    @property
    def length(self) -> int:
        """How many tokens it holds one by one."""
        return 0 if self._held is None else self._held.keys.shape[2]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Take the keys and values of new tokens; returns these."""
        if self._held is not None and len(self._held.keys) != len(key_states):
            raise ValueError(
                f"the cache holds a batch of {len(self._held.keys)} rows and the call has "
                f"{len(key_states)}; use batch_select_indices or batch_repeat_interleave, or a new "
                "cache"
            )
        if not self.is_initialized:
            self.dtype, self.device = key_states.dtype, key_states.device
        self.arrived = key_states.shape[2]
        self.seen += self.arrived
        return key_states, value_states

    def positions(self) -> Int[Tensor, "B n"]:
        """Where the tokens that are held one by one stand in their rows, ascending."""
        if self._held is None:
            return torch.empty(0, 0, dtype=torch.int64)
        at = torch.arange(self._held.ledger.first, self.seen, device=self.device)
        return at.expand(len(self._held.keys), -1)

    @property
    def whole_nbytes(self) -> int:
        """Bytes of keys and values, if every token were kept."""
        if self._held is None:
            return 0
        per_token = sum(x[:, :, :1].numel() * x.element_size() for x in self._held[1:3])
        return per_token * self.seen

    # Attention over what is held.

    def attend(
        self,
        layer: Layer,
        q: Float[Tensor, "B H Tq D"],
        k: Float[Tensor, "B Hk Tq D"],
        v: Float[Tensor, "B Hk Tq D"],
        *,
        visibility: Visibility,
        scale: float | None,
        given: Given,
    ) -> Float[Tensor, "B H Tq D"]:
        """The layer's output for the tokens that came with the last `update`."""
        if visibility.documents is not None:
            # The call that would go on from packed documents is refused by the model.
            self.arrived = 0
            return layer(q, k, v, visibility=visibility, scale=scale, given=given).output
        before = self._held
        new = self._arrived(layer, q, k, v, visibility, given)
        grown, groups, summaries = self._grown(layer, before, new, visibility, given)
        if before is None and layer.learns_groups and layer.training:
            # Whole rows in training, with transformers' default cache: losses hear of them.
            out = layer(q, k, v, visibility=visibility, scale=scale, given=given).output
        else:
            out = layer.attend(
                q, grown.keys, grown.values, groups, summaries,
                visibility=visibility.part(groups.first, self.seen), scale=scale,
            )  # fmt: skip
        if self.record_past:
            old = self._recent
            recent = new if old is None else old.arrived.followed_by(new)
            start = before if old is None else old.before
            self._recent = Recent(start, recent, visibility, Given(rotation=given.rotation))
        self._held = _without_far(grown, groups.first)
        self.arrived = 0
        self._measure(copied=nbytes_of([grown.keys, grown.values]))
        if self._leaves:
            self.offload()
        return out

    def _arrived(
        self, layer: Layer, q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, given: Given
    ) -> Arrived:
        """The new tokens and their features; of shared groups, the first layer makes those."""

        def make():
            return layer.grouping, layer.grouping.features(given)

        grouping, features = layer.shared(given, f"features on {k.device}", make)
        self._grouping = weakref.ref(grouping)
        positions = given.positions
        return Arrived(
            k, v, q if layer.config.queries == "groups" else None, features,
            layer.pooling_features(given.input),
            None if positions is None else positions.expand(len(k), -1),
        )  # fmt: skip

    def _grown(
        self, layer: Layer, held: State | None, new: Arrived, visibility: Visibility, given: Given
    ) -> tuple[State, Groups, Summaries]:
        """What is held with new tokens, none let go yet; its groups and summaries."""
        held = State.before(new) if held is None else held
        ledger, region = held.ledger, held.open.followed_by(new)
        stop, config = ledger.opened + region.tokens, layer.config

        def make() -> Entry:
            places = _places(visibility, ledger.opened, stop, new.keys, ledger.begins)
            starts = _whole(visibility, stop, new.keys).start.expand(len(new.keys), -1)
            document = starts.gather(1, ledger.begins[:, None])
            return entered(
                ledger, region.tokens, region.grouping, places, document, self._grouping(),
                config.window,
            )  # fmt: skip

        if given.shared is None:  # undoing, of one layer alone
            entry = make()
        else:
            device = new.keys.device
            what = f"groups of {ledger.opened} to {stop} on {device} in a window of {config.window}"
            entry = layer.shared(given, what, make)
        sums = layer.summaries(
            region.queries, region.keys, region.values, entry.made, region.pooling,
            given._replace(positions=region.positions),
        )  # fmt: skip
        at, count = entry.to[:, None, :, None], entry.groups.count
        group_keys = _placed(held.group_keys, sums.k, at, count)
        group_values = _placed(held.group_values, sums.v, at, count)
        asking = queries = None
        if sums.q is not None:
            queries = sums.q.new_zeros(*sums.q.shape[:2], count + 1, sums.q.shape[3])
            newest = _newest_complete(ledger).expand_as(held.asking)
            queries = queries.scatter(2, newest, held.asking)
            queries = queries.scatter(2, at.expand_as(sums.q), sums.q)
            asking = queries.gather(2, _newest_complete(entry.after).expand_as(held.asking))
            queries = queries[:, :, :count]
        state = State(
            entry.after,
            torch.cat([held.keys, new.keys], dim=2),
            torch.cat([held.values, new.values], dim=2),
            region.cut(entry.after.opened - ledger.opened),
            group_keys,
            group_values,
            asking,
        )
        shown = Summaries(group_keys[:, :, :count], group_values[:, :, :count], queries)
        return state, entry.groups, shown

    # Undoing, and rows.

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest `-tokens_to_remove` tokens."""
        count, recent = -tokens_to_remove, self._recent
        if count < 0:
            raise ValueError(
                f"crop takes minus the number of tokens to remove, got {tokens_to_remove}"
            )
        known = 0 if recent is None else recent.arrived.tokens
        if count > known:
            raise ValueError(
                f"crop can take back {known} tokens here, asked for {count}: call "
                "activate_past_recording() before the calls that may be undone"
            )
        layer = None if self._owner is None else self._owner()
        if 0 < count < known and (layer is None or self._grouping is None):
            raise ValueError(
                "crop cannot make groups anew in a cache that comes from a file: call the model "
                f"with it first, or take back all {known} tokens"
            )
        self._recent = None
        if count:
            self.seen -= count
            self._held = recent.before
            if known > count:
                visibility = recent.visibility.part(0, self.seen)
                left = recent.arrived.cut(0, known - count)
                grown, groups, _ = self._grown(layer, recent.before, left, visibility, recent.given)
                self._held = _without_far(grown, groups.first)
        self._measure()

    def _on_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        if self._held is not None:
            self._held = self._held.changed(change)
        if self._recent is not None:
            before = self._recent.before
            self._recent = self._recent._replace(
                before=None if before is None else before.changed(change),
                arrived=self._recent.arrived.changed(change),
            )
        self._measure()

    def offload(self) -> None:
        """Keys and values go to the CPU, of groups and of tokens; the rest is small and stays.

        Not before tokens that have arrived are attended to, which takes what is held.
        """
        self._leaves = self.arrived > 0
        if not self._leaves:
            self._move(torch.device("cpu"))

    def prefetch(self) -> None:
        if self._held is not None:  # transformers asks before the first tokens too
            self._move(self.device)

    def _move(self, device: torch.device) -> None:
        if self._held is not None:
            self._held = self._held.moved(device)

    def __getstate__(self) -> dict:
        return super().__getstate__() | {"_grouping": None}

    def _measure(self, *, most: int = 0, copied: int = 0) -> None:
        tensors: list[Tensor | None] = []
        for state in (self._held, self._recent and self._recent.before):
            if state is not None:
                tensors += state.tensors()
        if self._recent is not None:
            tensors += list(self._recent.arrived)
        now = nbytes_of(tensors)
        self.meter.change(now - self._bytes, max(copied, most - now))
        self._bytes = now


def _places(
    visibility: Visibility, start: int, stop: int, like: Tensor, begins: Tensor | None = None
) -> Places:
    """Where the tokens `start .. stop - 1` stand; padding parts documents, as in whole rows.

    With `begins`, tokens before these are none of any open group's, as if they were padding.
    """
    whole = _whole(visibility, stop, like)
    real, first, last = (x[:, start:].expand(len(like), -1) for x in whole[:3])
    first, last = first - start, last - start
    if begins is not None:
        first = torch.maximum(first, begins[:, None] - start)
        real = real & (torch.arange(stop - start, device=real.device) >= begins[:, None] - start)
    plain = bool(real.all()) and not bool(first.any())
    return Places(real, first, last, plain)


def _whole(visibility: Visibility, stop: int, like: Tensor) -> Places:
    """Where all tokens before `stop` stand in their rows."""
    padding = visibility.padding
    seen = None if padding is None else Visibility(padding=padding[:, :stop])
    return places_of(stop, seen, like.device)


def _newest_complete(ledger: Ledger) -> Int[Tensor, "B 1 1 1"]:
    """The newest of the groups that are complete and do not change any more; 0 for none."""
    number = torch.arange(ledger.start.shape[1], device=ledger.start.device)
    known = ledger.complete & (number < ledger.count[:, None])
    newest = pad(number.where(known, 0), (1, 0)).amax(1)
    return newest[:, None, None, None]


def _without_far(grown: State, first: int) -> State:
    """Without the tokens, `first` and on, that the next query sees in summaries alone."""
    drop = grown.ledger.first - first
    keys, values = (x if not drop else _only(x[:, :, drop:]) for x in grown[1:3])
    features = {
        name: _only(x)
        for name in ("queries", "grouping", "pooling", "positions")
        if (x := getattr(grown.open, name)) is not None
    }
    near = grown.open._replace(**features)
    return grown._replace(keys=keys, values=values, open=near)._with_views()


def _placed(
    store: Float[Tensor, "B Hk room D"], new: Float[Tensor, "B Hk m D"], at: Tensor, count: int
) -> Float[Tensor, "B Hk room D"]:
    """The summaries with new ones in their places; the last slot takes what no row has."""
    learns = torch.is_grad_enabled() and (new.requires_grad or store.requires_grad)
    frozen = store.is_inference() and not torch.is_inference_mode_enabled()
    if store.shape[2] < count + 1 or store.requires_grad or learns or frozen:
        room = count + 1 if learns else count + 1 + max(LEAST, count // SLACK)
        store = pad(store, (0, 0, 0, max(0, room - store.shape[2])))
    at = at.where(at < count, store.shape[2] - 1).expand(-1, new.shape[1], -1, new.shape[3])
    return store.scatter(2, at, new) if learns else store.scatter_(2, at, new)


def _only(x: Tensor) -> Tensor:
    """A view without what lies around it, where that is much."""
    whole = x.untyped_storage().nbytes()
    return x.clone() if whole > 2 * x.numel() * x.element_size() else x
