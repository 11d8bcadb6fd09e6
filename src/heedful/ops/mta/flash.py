"""Multi-token attention by torch's own kernels: kernels of low rank, and heads mixed in groups.

Filtered queries and keys (low_rank.py) make logits of wider heads. So does mixing before the
softmax: W_n0 Q_0 K_0 + W_n1 Q_1 K_1 + ... are the keys of a group side by side, met by its weighted
queries. After it the values stand side by side: P_m [V_0 V_1 ...] is all that the mixing needs of
head m. What is left is attention with wide heads, but for the band of near keys whose logits are
computed apart (join.py).
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.ops.common.precision import widen, without_autocast
from heedful.ops.common.standard import with_positive_scale
from heedful.ops.common.terms import Terms
from heedful.ops.common.tiles import Sight, gather_heads, spread_heads
from heedful.ops.impl import refuse_second_derivative
from heedful.ops.mta.convolution import Parameters
from heedful.ops.mta.join import Joined, joined, joined_backward
from heedful.ops.mta.low_rank import (
    Band,
    Filter,
    LowRank,
    factor_gradients,
    key_filter,
    query_filter,
)
from heedful.ops.mta.reference import mix_heads
from heedful.ops.mta.tiled import identity_attention


def multi_token_attention_flash(
    q: Float[Tensor, "B H Tq D"],
    k: Float[Tensor, "B Hk Tk D"],
    v: Float[Tensor, "B Hk Tk Dv"],
    parameters: Parameters,
    terms: Terms,
    *,
    two_sided: bool,
    across_keys: bool,
    impl: str,
) -> Float[Tensor, "B H Tq Dv"]:
    """The operator of `multi_token_attention` with these parts, in memory linear in the tokens."""
    u, w, centred = (None, None, True) if parameters.conv is None else parameters.conv
    visibility = terms.visibility
    inputs = (q, k, v, u, w, parameters.mix, parameters.post_mix, terms.sinks)
    train = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    segments, _, places = visibility.tensors(q.shape[2], k.shape[2], q.device)
    return _flash(
        *inputs, segments, places, visibility.causal, visibility.window, terms.scale, centred,
        two_sided, across_keys, impl, train,
    )[0]  # fmt: skip


class HeadGroups(NamedTuple):
    """Groups of heads that are mixed, and whose values they attend to.

    parts: how many groups of key heads there are; a group of heads belongs to one of these.
    keys: how many key heads are in it, whose values stand side by side.
    repeats: how often each key head is repeated first, as groups cut through its heads.
    across: whether a group has one head of each of these key heads, and not all of them.
    """

    parts: int
    keys: int
    repeats: int
    across: bool

    @classmethod
    def of(cls, heads: int, key_heads: int, weights: Tensor, across: bool) -> "HeadGroups":
        """Those that these weights mix."""
        size, per_key = weights.shape[1], heads // key_heads
        if across:
            return cls(key_heads // size, size, 1, True)
        if per_key % size == 0:
            return cls(heads // size, 1, per_key // size, False)
        if size % per_key == 0:
            return cls(heads // size, size // per_key, 1, False)
        return cls(heads // size, size, per_key, False)

    def side_by_side(self, v: Float[Tensor, "B Hk T Dv"]) -> Float[Tensor, "B parts T W"]:
        """The values, or the keys, of each group side by side."""
        if self.repeats > 1:
            v = v.repeat_interleave(self.repeats, dim=1)
        return v.unflatten(1, (self.parts, self.keys)).transpose(2, 3).flatten(3)

    def apart(self, grad: Float[Tensor, "B parts T W"], dim: int) -> Float[Tensor, "B Hk T Dv"]:
        """Gradient of what stands side by side."""
        grad = grad.unflatten(3, (self.keys, dim)).transpose(2, 3).flatten(1, 2)
        return grad if self.repeats == 1 else grad.unflatten(1, (-1, self.repeats)).sum(2)

    def queries(
        self, q: Float[Tensor, "B H T W"], weights: Float[Tensor, "n g g"]
    ) -> Float[Tensor, "B H T kW"]:
        """Queries that meet keys side by side in logits that are mixed, sum_m weights[n, m] S_m."""
        one, members, wide = _MIXED[self.across]
        q, weights = widen(q), self._of_members(weights)
        out = torch.einsum(f"{one},{members}->{wide}", weights.to(q.dtype), self._members(q))
        return out.flatten(-2).flatten(1, -3)

    def queries_backward(
        self, grad: Float[Tensor, "B H T kW"], q: Float[Tensor, "B H T W"],
        weights: Float[Tensor, "n g g"],
    ) -> tuple[Float[Tensor, "B H T W"], Float[Tensor, "n g g"]]:  # fmt: skip
        """Gradients of q and the weights."""
        one, members, wide = _MIXED[self.across]
        grad = self._members(grad) if self.across else grad.unflatten(1, (self.parts, -1))
        grad, own = grad.unflatten(-1, (self.keys, -1)), self._of_members(weights)
        dq = torch.einsum(f"{one},{wide}->{members}", own.to(grad.dtype), grad)
        q = self._members(q.to(grad.dtype))
        dweights = torch.einsum(f"{wide},{members}->{one}", grad, q)
        return dq.flatten(1, 3), dweights.reshape(weights.shape)

    def weights_gradient(
        self, grad: Float[Tensor, "B H T m"], x: Float[Tensor, "B H T m"],
        weights: Float[Tensor, "n g g"],
    ) -> Float[Tensor, "n g g"]:  # fmt: skip
        """Gradient of the weights that mix the rows of these heads."""
        if self.across:
            grad, x = self._members(grad), self._members(x)
            return torch.einsum("bpaitm,bpcitm->piac", grad, x).reshape(weights.shape)
        grad, x = (y.unflatten(1, (self.parts, -1)) for y in (grad, x))
        return torch.einsum("bgntm,bgctm->gnc", grad, x)

    def mixed(
        self, out: Float[Tensor, "B H T W"], weights: Float[Tensor, "n g g"], dim: int
    ) -> Float[Tensor, "B H T Dv"]:
        """O_n = sum_m weights[n, m] P_m V_n, of P_m times the values side by side."""
        out, weights = self._terms(out, dim), self._spread(weights)
        return (weights[..., None, None] * out).sum(3).flatten(1, 3)

    def mixed_few(
        self, maps: Float[Tensor, "B H T Tk"], v: Float[Tensor, "B Hk Tk Dv"],
        weights: Float[Tensor, "n g g"],
    ) -> Float[Tensor, "B H T Dv"]:  # fmt: skip
        """The same of maps of few rows and of values where they lie, widened."""
        heads, rows = maps.shape[1:3]
        if self.repeats > 1:
            v = v.repeat_interleave(self.repeats, dim=1)
        v, per_key = v.unflatten(1, (self.parts, self.keys)), heads // self.parts
        maps = maps.unflatten(1, (self.parts, -1)).flatten(2, 3)[:, :, None]
        out = widen(maps.to(v.dtype) @ v).unflatten(3, (per_key, rows))  # b part n m t d
        out = out.unflatten(3, (self.keys, -1)) if self.across else out[:, :, :, :, None]
        weights = self._spread(weights).to(out.dtype)
        return (weights[..., None, None] * out).sum(3).flatten(1, 3)

    def mixed_backward(
        self, grad: Float[Tensor, "B H T Dv"], out: Float[Tensor, "B H T W"],
        weights: Float[Tensor, "n g g"],
    ) -> tuple[Float[Tensor, "B H T W"], Float[Tensor, "n g g"]]:  # fmt: skip
        """Gradients of `out` and the weights."""
        dim, terms = grad.shape[3], self._terms(out, grad.shape[3])
        grad = grad.unflatten(1, (self.parts, self.keys, -1))[:, :, :, None]  # b part n 1 place t d
        dweights = (grad * terms).sum((0, 5, 6))
        dout = self._spread(weights)[..., None, None] * grad
        if self.across:
            dout, dweights = dout.movedim(2, 5), dweights.permute(0, 3, 1, 2).flatten(0, 1)
        else:  # every place of the heads of a key head has terms of its own
            dout, dweights = dout.sum(4).movedim(2, 4), dweights.transpose(2, 3).flatten(1, 2)
        return dout.reshape(*out.shape[:2], -1, self.keys * dim), dweights

    def _terms(self, out: Tensor, dim: int) -> Float[Tensor, "B parts keys m places T Dv"]:
        """P_m V_n, n being a key head: of the place of m among its heads, or of all places."""
        out = out.unflatten(3, (self.keys, dim)).unflatten(1, (self.parts, -1))
        if self.across:
            return out.unflatten(2, (self.keys, -1)).movedim(5, 2)
        return out[:, :, :, None].movedim(5, 2)

    def _members(self, x: Float[Tensor, "B H T n"]) -> Float[Tensor, "B parts keys m T n"]:
        return x.unflatten(1, (self.parts, self.keys, -1))

    def _of_members(self, weights: Float[Tensor, "n g g"]) -> Float[Tensor, "parts x y z"]:
        if self.across:
            return weights.unflatten(0, (self.parts, -1))
        return weights.unflatten(2, (self.keys, -1))

    def _spread(self, weights: Float[Tensor, "n g g"]) -> Float[Tensor, "parts keys m places"]:
        if self.across:
            return weights.unflatten(0, (self.parts, -1)).permute(0, 2, 3, 1)
        return weights.unflatten(1, (self.keys, -1)).transpose(2, 3)


# Mixing before the softmax as products over the groups of heads: the weights, the heads' queries,
# and the group's. Across key heads the weights are of part, place, out, in; else of group, out, in.
_MIXED = {True: ("piac", "bpcitr", "bpaitcr"), False: ("gnjm", "bgjmtr", "bgntjr")}


class _Call(NamedTuple):
    """Conversion of a call's tensors to those of attention, and of their gradients back.

    filters: of queries and keys; `None` where these are as they are.
    band: of near keys, whose logits are computed apart; `None` without.
    mix, before: the mixing before the softmax, and its heads; `None` without.
    after: the heads of the mixing after it; `None` without.
    """

    conv: LowRank | None
    filters: tuple[Filter, Filter] | None
    band: Band | None
    mix: Tensor | None
    before: HeadGroups | None
    after: HeadGroups | None
    scale: float
    across: int | None

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, conv: LowRank | None, mix: Tensor | None,
        post_mix: Tensor | None, sight: Sight, scale: float, two_sided: bool, across: bool,
    ) -> "_Call":  # fmt: skip
        """That of these arguments."""
        heads, queries, key_heads = q.shape[1], q.shape[2], k.shape[1]
        after = None if post_mix is None else HeadGroups.of(heads, key_heads, post_mix, across)
        shared = key_heads if conv is None else conv.w.shape[0]  # heads of filtered keys
        before = None if mix is None else HeadGroups.of(heads, shared, mix, across)
        mixing = (mix, before, after, scale, key_heads if across else None)
        if conv is None:
            return cls(None, None, None, *mixing)
        others = sight.segments
        own = None if others is None else others[:, -queries:]
        if sight.places is not None:
            own, others = sight.places[:, 0, :queries], sight.places[:, 0, queries:]
        filters = (query_filter(conv, own, two_sided=two_sided), key_filter(conv, others))
        width = conv.band(sight.causal)
        band = Band(conv, width, scale, others) if width else None
        return cls(conv, filters, band, *mixing)

    def inputs(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor | None, ...]:
        """Wide queries, keys and values of every head, near logits, and the scale, above zero."""
        heads, near = q.shape[1], None
        if self.band is not None:
            near = self.band.logits(q, k)
        if self.filters is not None:
            q, k = (f.of(x) for f, x in zip(self.filters, (q, k), strict=True))
        if self.before is not None:
            q, k = self.before.queries(q, self.mix).to(q.dtype), self.before.side_by_side(k)
            near = None if near is None else mix_heads(near, self.mix, self.across)
        if self.after is not None:
            v = self.after.side_by_side(v)
        q, scale = with_positive_scale(q, self.scale)
        return q, spread_heads(k, heads), spread_heads(v, heads), near, scale

    def logits_backward(
        self, dq: Tensor, dk: Tensor, dnear: Tensor | None, q: Tensor, k: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Gradients of q, k, u, w and mix, from those of wide queries and keys and near logits."""
        du = dw = dmix = None
        shared = k.shape[1] if self.conv is None else self.conv.w.shape[0]
        if self.before is None:
            dk = gather_heads(dk, shared)
        else:
            queries = q if self.filters is None else self.filters[0].of(q)
            dq, dmix = self.before.queries_backward(dq, queries, self.mix)
            width = dk.shape[3] // self.before.keys
            dk = self.before.apart(gather_heads(dk, self.before.parts), width)
        if self.filters is not None:
            (dq, du), (dk, dw) = (
                f.backward(d, x) for f, d, x in zip(self.filters, (dq, dk), (q, k), strict=True)
            )
        if self.band is not None:
            if self.mix is not None:
                dmix = dmix + self.before.weights_gradient(dnear, self.band.logits(q, k), self.mix)
                dnear = mix_heads(dnear, self.mix.mT, self.across)
            near_dq, near_dk, dtheta = self.band.backward(dnear, q, k)
            near_du, near_dw = factor_gradients(self.conv, dtheta)
            dq, dk, du, dw = dq + near_dq, dk + near_dk, du + near_du, dw + near_dw
        return dq, dk, du, dw, dmix


@torch.library.custom_op("heedful::multi_token_attention_flash", mutates_args=())
def _flash(
    q: Tensor, k: Tensor, v: Tensor, u: Tensor | None, w: Tensor | None, mix: Tensor | None,
    post_mix: Tensor | None, sinks: Tensor | None, segments: Tensor | None,
    places: Tensor | None, causal: bool, window: int | None, scale: float, centred: bool,
    two_sided: bool, across: bool, impl: str, train: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The output; if `train`, also that of the wide heads, and the logarithms of their sums."""
    conv = None if u is None else LowRank(u, w, centred)
    sight, same = Sight(segments, False, causal, window, places=places), None
    if impl == "tiled" and sinks is None:
        kernel = None if conv is None else conv.kernel()
        parameters = Parameters(kernel, mix=mix, post_mix=post_mix)
        same = identity_attention(q, k, v, parameters, sight, scale, None, two_sided)
        if same is not None and not train:
            return same, q.new_empty(0), q.new_empty(0)
    call = _Call.of(q, k, conv, mix, post_mix, sight, scale, two_sided, across)
    *inputs, positive = call.inputs(q, k, v)
    wide = joined(*inputs, sinks, sight, positive, impl)
    out = same
    if out is None:
        out = wide.out
        if call.after is not None:
            out = call.after.mixed(out, post_mix, v.shape[3]).to(q.dtype)
        elif train:
            out = out.clone()
    if not train:
        return out.contiguous(), q.new_empty(0), q.new_empty(0)
    return out.contiguous(), *wide


@_flash.register_fake
def _(q, k, v, u, w, mix, post_mix, *options):
    out = q.new_empty(*q.shape[:3], v.shape[3])
    if not options[-1]:
        return out, q.new_empty(0), q.new_empty(0)
    width = v.shape[3]
    if post_mix is not None:
        width *= HeadGroups.of(q.shape[1], k.shape[1], post_mix, options[-3]).keys
    total = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    return out, q.new_empty(*q.shape[:3], width), total


@torch.library.custom_op("heedful::multi_token_attention_flash_backward", mutates_args=())
def _flash_backward(
    grad: Tensor, wide: Tensor, total: Tensor, q: Tensor, k: Tensor, v: Tensor, u: Tensor | None,
    w: Tensor | None, mix: Tensor | None, post_mix: Tensor | None, sinks: Tensor | None,
    segments: Tensor | None, places: Tensor | None, causal: bool, window: int | None,
    scale: float, centred: bool, two_sided: bool, across: bool, impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, u, w, mix, post_mix and sinks; empty for those that are not given."""
    conv = None if u is None else LowRank(u, w, centred)
    sight = Sight(segments, False, causal, window, places=places)
    call = _Call.of(q, k, conv, mix, post_mix, sight, scale, two_sided, across)
    *inputs, positive = call.inputs(q, k, v)
    dpost_mix = None
    if call.after is not None:
        grad, dpost_mix = call.after.mixed_backward(grad, wide, post_mix)
    grad = grad.to(q.dtype)
    result = Joined(wide, total)
    dq, dk, dv, dnear, dsinks = joined_backward(
        grad, result, *inputs, sinks, sight, positive, impl
    )  # fmt: skip
    if scale <= 0:
        dq = -dq if scale < 0 else dq * 0.0
    if call.after is None:
        dv = gather_heads(dv, v.shape[1])
    else:
        dv = call.after.apart(gather_heads(dv, call.after.parts), v.shape[3])
    dq, dk, du, dw, dmix = call.logits_backward(dq, dk, dnear, q, k)
    inputs = (q, k, v, u, w, mix, post_mix, sinks)
    grads = (dq, dk, dv, du, dw, dmix, dpost_mix, dsinks)
    return tuple(
        q.new_empty(0) if x is None else g.to(x.dtype).contiguous()
        for x, g in zip(inputs, grads, strict=True)
    )


@_flash_backward.register_fake
def _(grad, wide, total, *inputs):
    q = inputs[0]
    return tuple(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs[:8])


refuse_second_derivative(_flash_backward, "multi_token_attention")


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*output[1:], *inputs[:10])
    ctx.options = inputs[10:-1]
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx, grad, *_):
    grads = without_autocast(_flash_backward)(grad, *ctx.saved_tensors, *ctx.options)
    given = (None if x is None else g for x, g in zip(ctx.saved_tensors[2:], grads, strict=False))
    return *given, *[None] * (3 + len(ctx.options))


_flash.register_autograd(_backward, setup_context=_save)
