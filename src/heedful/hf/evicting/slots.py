"""The slot of each token, for all layers of a cache that evict the same ones.

A policy that reads positions alone evicts the same tokens in every layer with the same budget, so
one map serves them all: what the first layer of a call decides, the others repeat. A policy that
reads keys, values or attention has a map for each layer.

A decoded token takes the slot of the one that was evicted after the call before it. So the order of
the tokens in the slots means nothing, and their positions are stored beside them.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful.checks import UserError
from heedful.eviction import CachedTokens, selection
from heedful.eviction.policy import Budget
from heedful.eviction.selection import KeepRules, Moves, Padding
from heedful.hf.cache.counters import Counters
from heedful.hf.cache.slots import Slots
from heedful.hf.cache.streams import POSITIONS, Streams
from heedful.hf.evicting.hiding import SELECTOR_KEYS, F, Hiding, SelectorRows
from heedful.hf.evicting.scores import Scores
from heedful.hf.evicting.step import Reader, Step, in_order, interrupted

_NEVER = 2**62  # position of the first real token of a sequence that has none yet


class SlotMap:
    """The tokens in the slots of layers that evict the same ones.

    Each layer calls every method in turn; the first call of a turn acts, and the others get its
    result (`once`).

    Arguments:
        budget: what is evicted when; `None` keeps all that the window shows.
        window: how far back the family's queries see; `None` for all tokens.
        slack: how many tokens more than the budget's may be cached between two evictions.
        hiding: what adds up F, for a map of one layer whose policy reads it.

    Attributes:
        reader: the layer whose keys and values the policy reads, for a map of one layer; `None`
            for a map of several.
        length: how many slots are in use.
        holes: slots whose tokens are evicted already, `[B or 1, m]`, or `None`.
        grown: whether the newest call has changed the sizes of the tensors here.
        record_past: whether nothing is evicted until `crop`.
        needs: those of the policy.
        observes: whether it reads attention.
    """

    parts = (
        "counters", "length", "holes", "record_past", "hiding", "_fresh", "_late", "_cropped",
        "_calls", "_streams", "_start", "scores",
    )  # fmt: skip

    def __init__(
        self, budget: Budget | None, window: int | None, slack: int, hiding: Hiding | None = None
    ) -> None:
        self.budget, self.window, self.slack, self.hiding = budget, window, slack, hiding
        self.reader: Reader | None = None
        self.needs = () if budget is None else budget.policy.needs
        self.observes = budget is not None and budget.policy.observes != 0
        self.limit = None  # for how many tokens slots are made
        self._most = math.inf  # tokens that may be cached between two calls
        if budget is not None:
            self.limit = budget.tokens + slack
            self._most = self.limit - 1
        elif window is not None:
            self.limit = window + max(8, window // 8)
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self._turn, self._result = 0, None
        self.counters = Counters()
        self.length, self._fresh, self.grown = 0, 0, False
        self._late = 0  # newest tokens whose positions are not written yet
        self.holes: Int[Tensor, "#B m"] | None = None
        self.record_past, self._cropped, self._calls = False, False, 0
        self._streams = Streams({POSITIONS: Slots()})
        self._start: Int[Tensor, "#B 1"] | None = None
        self._joined: Streams | None = None  # what the newest call reads, while it does
        self.scores = Scores()  # of a policy that reads attention
        if self.hiding is not None:
            self.hiding.reset()
            self._streams |= {F: Slots(), SELECTOR_KEYS: Slots()}

    @property
    def tensors(self) -> list[Tensor | None]:
        own = [] if self.hiding is None else self.hiding.tensors
        return [*self._streams.tensors, *own, self._start, *self.scores.tensors]

    @property
    def tokens(self) -> int:
        """Number of cached tokens."""
        if self.budget is None:
            window = self.length if self.window is None or self.record_past else self.window - 1
            return min(self.length, window)
        return self.length - (0 if self.holes is None else self.holes.shape[1])

    @property
    def at(self) -> Int[Tensor, "#B n"]:
        """The positions of the tokens that the newest call reads, in the order of their slots."""
        return self._read(POSITIONS)[:, 0, :, 0]

    def _read(self, name: str) -> Tensor:
        """A stream of the tokens that the newest call reads."""
        self._write_late()
        return (self._streams if self._joined is None else self._joined)[name].contents

    def once(self, turn: int, act: Callable, *arguments: object) -> object:
        """The result of the method of this turn, which the first of the layers calls.

        Raises:
            ValueError: the layers were not all called, as after an interrupted call.
        """
        if turn == self._turn:
            self._result = act(*arguments)
            self._turn += 1
        elif turn != self._turn - 1:
            raise interrupted()
        return self._result

    def check_turn(self, turn: int) -> None:
        """Raise unless a layer's turn is the next one, as between two calls."""
        if turn != self._turn:
            raise interrupted()

    def before(self, turn: int) -> int:
        """Number of tokens before a layer's turn, which may have begun."""
        if turn == self._turn:
            return self.counters.total
        if turn != self._turn - 1 or not isinstance(self._result, Step):
            raise interrupted()
        return self._result.before

    # A call.

    def begin(
        self,
        new: int,
        real: Bool[Tensor, "B m"] | None,
        device: torch.device,
        rows: SelectorRows | None = None,
    ) -> Step:
        """Plan a call of so many new tokens.

        Arguments:
            new: how many tokens come.
            real: which of them are no padding; `None` where all tokens so far are real.
            device: of the keys.
            rows: the selector's, where F is added up.
        """
        steps = new == 1 and real is None and self._start is None and not self.record_past
        if steps and self.holes is None and 0 < self.length < self._most and self.budget:
            # Nothing happens but that a token is added.
            self._count(rows)
            return Step(1, self.counters.total - 1, self.length)
        self.grown = False
        self._write_late()
        if self.record_past and self._cropped:
            # Assisted decoding crops after every call: a second call without it is a plain one.
            self._calls += 1
            if self._calls == 2:
                self.end_past_recording()
        before = self.counters.total
        self.counters.add(new)
        self.counters.pending = 0
        if self.budget is None:
            window = None if self.record_past else self.window
            step, self.length = in_order(window, self.length, new, before, device)
            return step
        evicted = self.holes
        if evicted is None and not self.record_past and self.length > self._most:
            evicted = self._lowest(before)  # of tokens that could have been taken back
        count = 0 if evicted is None else evicted.shape[1]
        read = self.length - count + new
        over = not self.record_past and read > self._most
        hole = moves = None
        if count == new == 1 and not self.record_past:
            hole = evicted
        elif evicted is not None:
            moves = selection.moves(evicted, self.length)
        step = Step(new, before, read, moves, 0, hole, over and new > 1, over)
        self._place(step, real, device, rows)
        if not over or self.reader is not None:
            return step  # the layer's keys, values or attention decide
        keep = self.evict(step)
        return step if keep is None else step._replace(keep=keep)

    def _count(self, rows: SelectorRows | None) -> None:
        """Add one token, whose position is written when it is read."""
        self.counters.add(1)
        self.counters.pending = 0
        self.length += 1
        self._fresh += 1
        self._late += 1
        self._joined, self.grown = None, False
        if rows is not None:
            keys = self._streams[SELECTOR_KEYS].append(rows.keys[:, None], self.limit)
            self.grown = self.hiding.add(rows.queries, 1 + self.slack) or keys

    def _write_late(self) -> None:
        """Write what is known of tokens that were only counted: their positions, and F of zero."""
        count, self._late = self._late, 0
        if not count:
            return
        at, total = self._streams[POSITIONS], self.counters.total
        new = torch.arange(total - count, total, device=at.buffer.device)
        new = new.expand(self._rows, 1, -1)[..., None]
        self.grown = at.append(new.contiguous(), self.limit) or self.grown
        if self.hiding is not None:
            f = self._streams[F]
            new = f.buffer.new_zeros(len(f.buffer), 1, count, 1)
            self.grown = f.append(new, self.limit) or self.grown

    def evict(
        self,
        step: Step,
        keys: Float[Tensor, "B Hk n D"] | None = None,
        values: Float[Tensor, "B Hk n Dv"] | None = None,
    ) -> Int[Tensor, "#B m"] | None:
        """Choose what leaves once a call is read.

        Arguments:
            step: the call's.
            keys, values: of all tokens that it reads.

        Returns:
            Which of the tokens that the call reads stay, where they are joined; else `None`, and
            the next call uses their slots.
        """
        return self._evict(step, self._lowest(self.counters.total, keys, values))

    def observe(
        self,
        step: Step,
        attention: Float[Tensor, "B n"],
        queries: int,
        keys: Float[Tensor, "B Hk n D"],
        values: Float[Tensor, "B Hk n Dv"],
    ) -> Int[Tensor, "#B m"] | None:
        """Score all tokens by the attention of a call, and choose what leaves, if any.

        Arguments:
            step: the call's.
            attention: what its newest queries give each token that it reads.
            queries: how many of them.
            keys, values: of all tokens that it reads.

        Returns:
            As of `evict`.
        """
        cached, padding = self._cached(self.counters.total, keys, values)
        score = self.scores.add(self.budget.policy, cached, padding, attention, queries)
        if not step.evicts:
            return None
        keep = self._evict(step, self._to_evict(score, cached, padding))
        if keep is not None:
            self.scores.last = score.gather(1, keep)
        return keep

    def settle(self, count: int = 0) -> None:
        """Score recorded calls, after the newest tokens have been taken back."""
        evicted = self.counters.total - self.length
        policy = None if self.budget is None else self.budget.policy
        for attention, queries in self.scores.take_back(count, policy):
            size = attention.shape[1]
            cached, padding = self._cached(evicted + size, None, None, size)
            self.scores.add(policy, cached, padding, attention, queries)

    def _evict(self, step: Step, slots: Int[Tensor, "#B m"]) -> Int[Tensor, "#B k"] | None:
        """Let the tokens in these slots leave; returns as `evict`."""
        self._fresh = 0
        self._spread(slots.shape[0])
        if not step.joined:
            self.holes = slots
            return None
        keep = selection.moves(slots, self.length).keep
        for name, joined in self._joined.items():
            self._streams[name].take(joined, keep, self.limit)
        self.length = keep.shape[1]
        return keep

    def _place(
        self,
        step: Step,
        real: Bool[Tensor, "B m"] | None,
        device: torch.device,
        rows: SelectorRows | None,
    ) -> None:
        """Note the positions of new tokens, which of them are padding, and the selector's rows."""
        self._joined, self.grown = None, self.grown or step.moves is not None
        if real is not None and self._start is None and step.new > 1 and bool(real.all()):
            real = None  # the mask of a chunk, not of padding
        self._note_padding(step, real)
        if step.moves is not None:
            self._streams.move(step.moves, self.limit)
            self.length, self._fresh = step.moves.keep.shape[1], 0
        if self.scores.last is not None:
            self.scores.forget(step)
        at = torch.arange(step.before, step.before + step.new, device=device)
        batch = self._rows if real is None else max(self._rows, len(real))
        new = {}
        if rows is not None:
            queries, keys = rows
            own = queries if real is None else queries * real[..., None]
            grown = self.hiding.add(own, 1 + self.slack)
            self.grown = self.grown or (grown and not step.evicts)  # else dropped in this call
            batch, wide = len(keys), torch.promote_types(keys.dtype, torch.float32)
            f = keys.new_zeros(batch, 1, step.new, 1, dtype=wide)
            new = {F: f, SELECTOR_KEYS: keys[:, None]}
        new[POSITIONS] = at.expand(batch, 1, -1)[..., None]
        if real is not None:
            new["real"] = real[:, None, :, None].expand(batch, 1, -1, 1)
        if step.joined:
            each = {name: self._streams[name].extended(x) for name, x in new.items()}
            self._joined = Streams(each)
        elif step.hole is not None:
            for name, x in new.items():
                self._streams[name].put(step.hole, x)
        else:
            for name, x in new.items():
                slots = self._streams[name]
                self.grown = slots.append(x.contiguous(), self.limit) or self.grown
        self.holes = None
        if step.hole is None:
            self.length += step.new
            self._fresh += step.new

    def _note_padding(self, step: Step, real: Bool[Tensor, "B m"] | None) -> None:
        """Begin to store which tokens are padding, or end it."""
        if real is None:
            if self._start is not None:
                del self._streams["real"]
                self._start, self.grown = None, True
            return
        self.grown = self.grown or self._start is None
        self._spread(len(real))
        first = step.before + real.int().argmax(1, keepdim=True)
        first = first.where(real.any(1, keepdim=True), _NEVER)
        if self._start is not None:
            self._start = torch.minimum(self._start, first)
            return
        self._start = torch.zeros_like(first) if step.before else first
        self._streams["real"] = Slots()
        if self.length:
            at = self._streams[POSITIONS].contents
            self._streams["real"].append(torch.ones_like(at, dtype=torch.bool), self.limit)

    def _spread(self, rows: int) -> None:
        """Store positions for so many sequences, if it was for one that stood for all."""
        if rows > self._rows == 1:
            for streams in (self._streams, self._joined or Streams()):
                streams.map_batch(lambda x: x.expand(rows, -1, -1, -1).contiguous())

    @property
    def _rows(self) -> int:
        """For how many sequences positions are stored; one stands for all."""
        buffer = self._streams[POSITIONS].buffer
        return 1 if buffer is None else buffer.shape[0]

    def _lowest(
        self, total: int, keys: Tensor | None = None, values: Tensor | None = None
    ) -> Int[Tensor, "#B m"]:
        """The slots of the tokens to evict, of those that the newest call has read.

        Arguments:
            total: how many tokens have come.
            keys, values: of the tokens; by default what the layer has cached.
        """
        cached, padding = self._cached(total, keys, values)
        score = self.scores.last
        if score is None:
            score = selection.scores(self.budget.policy, cached, padding)
        return self._to_evict(score, cached, padding)

    def _cached(
        self, total: int, keys: Tensor | None, values: Tensor | None, size: int | None = None
    ) -> tuple[CachedTokens, Padding | None]:
        """The tokens that a call has read, of so many slots if not all, and the padding."""
        at, padding = self.at if size is None else self.at[:, :size], None
        if self._start is not None:
            padding = Padding(self._read("real")[:, 0, :size, 0], self._start, by_slot=True)
        cached = CachedTokens(at, total)
        if self.hiding is not None:
            f = (self._streams if self._joined is None else self._joined)[F]
            dropped = self.hiding.fold(f, self._read(SELECTOR_KEYS), at, total)
            self.grown = self.grown or dropped
            cached = cached._replace(number=f.contents[:, 0, :, 0])
        if self.reader is not None:
            if keys is None:
                stop, cached_rows = size or self.length, (self.reader.keys, self.reader.values)
                keys, values = (x[:, :, :stop] for x in cached_rows)
            at = at.expand(len(keys), -1)
            cached = cached._replace(
                positions=at, keys=keys if "keys" in self.needs else None,
                values=values if "values" in self.needs else None,
                layer=self.reader.index, real=None if padding is None else padding.real,
            )  # fmt: skip
        return cached, padding

    def _to_evict(
        self, score: Float[Tensor, "B n"], cached: CachedTokens, padding: Padding | None
    ) -> Int[Tensor, "#B m"]:
        """The slots of the tokens to evict, by the policy's scores."""
        windows = () if self.window is None else (self.window,)
        first = self.hiding is not None and self.hiding.keeps_first
        policy, at = self.budget.policy, cached.positions
        prompt = self.counters.prompt if policy.keep_prompt else 0
        rules = KeepRules(cached.total, prompt, first, windows, padding)
        return selection.slots_to_evict(score, at, policy, self.budget.tokens, rules)

    # Between calls.

    @property
    def fresh(self) -> int:
        """Number of the newest tokens that can be taken back: what they evicted is still there."""
        if self.observes:
            return self.scores.fresh
        if self.budget is not None or self.length == self.counters.total:
            return self._fresh if self.budget is not None else self.length
        return max(0, self.length - (self.window - 1))

    def take_back(self, count: int) -> Moves | None:
        """Take back the newest tokens; what fills the slots of those that are evicted then.

        Raises:
            ValueError: there are not so many that can be taken back.
        """
        self._write_late()
        fresh = self.fresh
        if count > fresh:
            advice = ": call activate_past_recording() before the calls that may be undone"
            advice = "" if self.record_past else advice
            raise UserError(f"crop can take back {fresh} tokens here, asked for {count}{advice}")
        self._cropped, self._calls = True, 0
        self.length -= count
        self._fresh -= count
        self.counters.take_back(count)
        if self.budget is None:
            return None
        self._joined = None
        if count:
            self._streams.drop_last(count)
        if self.hiding is not None:
            self.hiding.drop_last(count)
        self.settle(count)
        if self.holes is not None or self.length <= self._most:
            return None
        slots = self._lowest(self.counters.total)
        self._spread(slots.shape[0])
        moves = selection.moves(slots, self.length)
        self._streams.move(moves, self.limit)
        self.scores.move(moves)
        self.length, self._fresh = moves.keep.shape[1], 0
        return moves

    def activate_past_recording(self) -> None:
        """Evict nothing before `take_back`."""
        self.record_past, self._cropped, self._calls = True, False, 0

    def end_past_recording(self) -> None:
        """Evict again; the recorded calls are final."""
        self.record_past = False
        self.settle()

    def map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Choose sequences, where each has positions of its own."""
        self._joined = None
        self._write_late()
        self.scores.map_batch(change)
        if self._rows == 1 and self.hiding is None:
            return
        self._streams.map_batch(change)
        if self.hiding is not None:
            self.hiding.map_batch(change)
        if self._start is not None:
            self._start = change(self._start)
        if self.holes is not None and len(self.holes) > 1:
            self.holes = change(self.holes)

    def positions(self) -> Int[Tensor, "#B n"]:
        """The positions of the cached tokens, ascending."""
        self._write_late()
        at, total = self._streams.positions, self.counters.total
        if self.budget is None or at is None:
            return torch.arange(total - self.tokens, total)[None]
        if self.holes is not None:
            at = at.gather(1, selection.moves(self.holes, self.length).keep.expand(len(at), -1))
        return at.sort(1).values
