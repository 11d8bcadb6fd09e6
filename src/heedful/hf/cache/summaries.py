"""The cache of a layer that keeps summaries: near tokens, far groups, and groups that are open.

Of far tokens nothing is left but their groups' summaries. Cached beside these are the keys and
values of the tokens that some summary does not cover yet, and, of groups that may still grow, what
their summary will be made of. The ledger says who is in which group.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from heedful.checks import UserError
from heedful.eviction import selection
from heedful.eviction.policy import Budget
from heedful.hf.cache.base import AttentionCache
from heedful.hf.cache.counters import Meter, nbytes_of
from heedful.hf.cache.ledger import Entry, entry_of, newest_complete
from heedful.hf.cache.owner import Reference
from heedful.hf.cache.slots import LEAST, SLACK
from heedful.hf.cache.summary_state import GroupTokens, SummaryState, SummaryUndo
from heedful.hf.intercept import run_layer
from heedful.nn import Layer, LayerInputs
from heedful.ops import Groups, Summaries, Visibility
from heedful.ops.grouped.groups import Places, places_of


class SummaryCache(AttentionCache):
    """The near tokens and the groups' summaries of one attention layer.

    Arguments:
        layer: the layer that it belongs to; its operator sees to windows.
        sliding: how far back the family's queries see; not needed.
        budget: refused, as summaries stand in place of far tokens already.
        meter: counts the whole cache's bytes; `None` makes one.
        int8: refused, as a summary is made anew with each of its tokens.
    """

    def __init__(
        self,
        layer: Layer,
        sliding: int | None = None,
        budget: Budget | None = None,
        meter: Meter | None = None,
        int8: bool = False,
    ) -> None:
        if budget is not None:
            selection.check_policy(budget.policy, layer, budget.tokens)
        if int8:
            raise UserError(
                f"dtype: {type(layer).__name__} keeps summaries of groups, which are not "
                "quantized; leave dtype out"
            )
        super().__init__(layer, meter)

    def _clear(self) -> None:
        super()._clear()
        self._state: SummaryState | None = None
        self._grouping = Reference(None)
        self._leaves = False  # whether keys and values go to the CPU after `attend`

    @property
    def keys(self) -> Float[Tensor, "B Hk n D"] | None:
        return None if self._state is None else self._state.keys

    @property
    def values(self) -> Float[Tensor, "B Hk n D"] | None:
        return None if self._state is None else self._state.values

    @property
    def batch(self) -> int | None:
        return None if self._state is None else len(self._state.keys)

    @property
    def length(self) -> int:
        """Number of tokens cached one by one."""
        return 0 if self._state is None else self._state.keys.shape[2]

    @property
    def whole_nbytes(self) -> int:
        """Bytes of keys and values, if every token were kept."""
        if self._state is None:
            return 0
        per_token = sum(x[:, :, :1].numel() * x.element_size() for x in self._state[1:3])
        return per_token * self.counters.total

    @property
    def bf16_nbytes(self) -> int:
        """Bytes of keys and values in bfloat16, if every token were kept."""
        if self._state is None:
            return 0
        return 2 * sum(x[:, :, :1].numel() for x in self._state[1:3]) * self.counters.total

    # A call: new tokens, then attention.

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Take the keys and values of new tokens, `[B, Hk, T, D]`; returns these."""
        self._begin_update(key_states, kwargs)
        self.counters.add(key_states.shape[2])
        return key_states, value_states

    def attend(
        self,
        layer: Layer,
        q: Float[Tensor, "B H Tq D"],
        k: Float[Tensor, "B Hk Tq D"],
        v: Float[Tensor, "B Hk Tq D"],
        *,
        visibility: Visibility,
        scale: float | None,
        inputs: LayerInputs,
    ) -> Float[Tensor, "B H Tq D"]:
        """The layer's output for the tokens that came with the last `update`."""
        if visibility.documents is not None:
            # The call that would go on from packed documents is refused by the model.
            self.counters.pending = 0
            options = {"visibility": visibility, "scale": scale, "inputs": inputs}
            return run_layer(layer, q, k, v, **options).output
        before = self._state
        new = self._group_tokens(layer, q, k, v, visibility, inputs)
        after, groups, summaries = self._appended(layer, before, new, visibility, inputs)
        if before is None and layer.learns_groups and layer.training:
            # Whole sequences in training, with transformers' default cache: losses read them.
            options = {"visibility": visibility, "scale": scale, "inputs": inputs}
            out = run_layer(layer, q, k, v, **options).output
        else:
            out = layer.attend(
                q, after.keys, after.values, groups, summaries, scale=scale,
                visibility=visibility.part(groups.first, self.counters.total),
            )  # fmt: skip
        if self.record_past:
            self._record(before, new, visibility, inputs)
        self._state = after.without_far(groups.first)
        self.counters.pending = 0
        self._measure(copied=nbytes_of([after.keys, after.values]))
        if self._leaves:
            self.offload()
        return out

    def _group_tokens(
        self,
        layer: Layer,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visibility: Visibility,
        inputs: LayerInputs,
    ) -> GroupTokens:
        """The new tokens and their features; of shared groups, the first layer makes those."""

        def make():
            return layer.grouping, layer.grouping.features(inputs)

        grouping, features = layer.shared(inputs, f"features on {k.device}", make)
        self._grouping = Reference(grouping)
        positions = inputs.positions
        return GroupTokens(
            k, v, q if layer.config.queries == "groups" else None, features,
            layer.pooling_features(inputs.input),
            None if positions is None else positions.expand(len(k), -1),
        )  # fmt: skip

    def _appended(
        self,
        layer: Layer,
        state: SummaryState | None,
        new: GroupTokens,
        visibility: Visibility,
        inputs: LayerInputs,
    ) -> tuple[SummaryState, Groups, Summaries]:
        """The state with new tokens, none dropped yet; its groups and summaries."""
        state = SummaryState.before(new) if state is None else state
        region = state.open.followed_by(new)
        entry = self._entry(layer, state, region, visibility, inputs)
        sums = layer.summaries(
            region.queries, region.keys, region.values, entry.open, region.pooling,
            inputs._replace(positions=region.positions),
        )  # fmt: skip
        at, count = entry.to[:, None, :, None], entry.groups.count
        group_keys = _placed(state.group_keys, sums.k, at, count)
        group_values = _placed(state.group_values, sums.v, at, count)
        queries = newest = None
        if sums.q is not None:
            queries, newest = _queries(state, sums.q, entry)
        after = SummaryState(
            entry.after,
            torch.cat([state.keys, new.keys], dim=2),
            torch.cat([state.values, new.values], dim=2),
            region.part(entry.after.opened - state.ledger.opened),
            group_keys,
            group_values,
            newest,
        )
        summaries = Summaries(group_keys[:, :, :count], group_values[:, :, :count], queries)
        return after, entry.groups, summaries

    def _entry(
        self,
        layer: Layer,
        state: SummaryState,
        region: GroupTokens,
        visibility: Visibility,
        inputs: LayerInputs,
    ) -> Entry:
        """The groups with new tokens; of shared groups, the first layer makes them."""
        ledger, config, like = state.ledger, layer.config, region.keys
        stop = ledger.opened + region.count

        def make() -> Entry:
            places = _places(visibility, ledger.opened, stop, like, ledger.begins)
            starts = _whole(visibility, stop, like).start.expand(len(like), -1)
            document = starts.gather(1, ledger.begins[:, None])
            grouping = self._grouping()
            return entry_of(
                ledger, region.count, region.grouping, places, document, grouping, config.window
            )

        if inputs.shared is None:  # undoing, of one layer alone
            return make()
        span = f"groups of {ledger.opened} to {stop} on {like.device}"
        return layer.shared(inputs, f"{span} in a window of {config.window}", make)

    # Taking calls back.

    def _record(
        self,
        before: SummaryState | None,
        new: GroupTokens,
        visibility: Visibility,
        inputs: LayerInputs,
    ) -> None:
        """Note what taking back this call needs, and those before it."""
        if self._undo is not None:
            before, new = self._undo.state, self._undo.tokens.followed_by(new)
        self._undo = SummaryUndo(before, new, visibility, LayerInputs(rotation=inputs.rotation))

    def _undoable(self) -> int:
        return 0 if self._undo is None else self._undo.tokens.count

    def _take_back(self, count: int) -> None:
        undo = self._undo
        anew = undo is not None and 0 < count < undo.tokens.count
        layer = self._owner.for_undo(undo.tokens.count) if anew else None
        self._undo = None
        if not count:
            return
        self.counters.take_back(count)
        self._state = undo.state
        if anew:
            visibility = undo.visibility.part(0, self.counters.total)
            remaining = undo.tokens.part(0, undo.tokens.count - count)
            after, groups, _ = self._appended(layer, undo.state, remaining, visibility, undo.inputs)
            self._state = after.without_far(groups.first)

    # Batches, devices, bytes.

    def _map_tensors(self, change: Callable[[Tensor], Tensor]) -> None:
        super()._map_tensors(change)
        if self._state is not None:
            self._state = self._state.map(change)

    def offload(self) -> None:
        """Keys and values go to the CPU, of groups and of tokens; the rest is small and stays.

        Not before the pending tokens are attended to, which takes the state.
        """
        self._leaves = self.counters.pending > 0
        if not self._leaves:
            self._move(torch.device("cpu"))

    def prefetch(self) -> None:
        if self._state is not None:  # transformers asks before the first tokens too
            self._move(self.device)

    def _move(self, device: torch.device) -> None:
        if self._state is not None:
            self._state = self._state.on(device)

    def _tensors(self) -> list[Tensor | None]:
        state = [] if self._state is None else self._state.tensors()
        return state if self._undo is None else [*state, *self._undo.tensors()]


def _places(
    visibility: Visibility, start: int, stop: int, like: Tensor, begins: Tensor | None = None
) -> Places:
    """Places of the tokens `start .. stop - 1`; padding parts documents, as in whole sequences.

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
    """Places of all tokens before `stop` in their sequences."""
    padding = visibility.padding
    padded = None if padding is None else Visibility(padding=padding[:, :stop])
    return places_of(stop, padded, like.device)


def _placed(
    store: Float[Tensor, "B Hk room D"],
    new: Float[Tensor, "B Hk m D"],
    at: Int[Tensor, "B 1 m 1"],
    count: int,
) -> Float[Tensor, "B Hk more D"]:
    """The summaries with new ones in their places; the last slot takes what no sequence has."""
    learns = torch.is_grad_enabled() and (new.requires_grad or store.requires_grad)
    frozen = store.is_inference() and not torch.is_inference_mode_enabled()
    if store.shape[2] < count + 1 or store.requires_grad or learns or frozen:
        room = count + 1 if learns else count + 1 + max(LEAST, count // SLACK)
        store = pad(store, (0, 0, 0, max(0, room - store.shape[2])))
    at = at.where(at < count, store.shape[2] - 1).expand(-1, new.shape[1], -1, new.shape[3])
    return store.scatter(2, at, new) if learns else store.scatter_(2, at, new)


def _queries(
    state: SummaryState, new: Float[Tensor, "B H m D"], entry: Entry
) -> tuple[Float[Tensor, "B H M D"], Float[Tensor, "B H 1 D"]]:
    """The groups' queries, of complete groups the newest one's alone; and the next such one."""
    at, count, last = entry.to[:, None, :, None], entry.groups.count, state.newest_query
    queries = new.new_zeros(*new.shape[:2], count + 1, new.shape[3])
    queries = queries.scatter(2, newest_complete(state.ledger).expand_as(last), last)
    queries = queries.scatter(2, at.expand_as(new), new)
    newest = queries.gather(2, newest_complete(entry.after).expand_as(last))
    return queries[:, :, :count], newest
