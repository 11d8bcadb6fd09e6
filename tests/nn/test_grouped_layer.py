"""Grouped attention as a layer: no token changes an earlier output, whatever is grouped how."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from heedful.nn import Grouped, HeadShape, LayerInputs
from heedful.nn.grouped import GroupedAttention
from heedful.ops import Visibility
from helpers.layers import SHAPE, stirred
from helpers.oracle import EXACT

TOKENS = 40

GROUPINGS: dict[str, dict] = {
    "fixed": {"size": 5},
    "sliding": {"size": 6, "stride": 2},
    "sentence": {"size": 4, "closing": (0, 3), "shortest": 2, "longest": 9},
    "cif": {"size": 3, "longest": 7},
}
REFINES = ("mean", "weighted", "attention")


def grid(test: Callable) -> Callable:
    """Every grouping, refinement and kind of queries: a cover of the cross."""
    for name, values in (
        ("queries", ("tokens", "groups")), ("refine", REFINES), ("name", GROUPINGS),
    ):  # fmt: skip
        test = pytest.mark.parametrize(name, values)(test)
    return pytest.mark.crossed(test)


class Turning:
    """A rotary embedding at any positions."""

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angle = positions[:, None, :, None].double() * 10.0 ** -torch.arange(half).double()
        a, b = x[..., :half], x[..., half:]
        turned = [a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()]
        return torch.cat(turned, -1)


def grouped_layer(config: Grouped) -> GroupedAttention:
    """A layer in fp64, away from its first values."""
    return stirred(config, 0.4)


class Whole:
    """From tokens to outputs, with everything in between made of them: groups included."""

    def __init__(self, layer: GroupedAttention, visibility: Visibility | None = None) -> None:
        self.layer, self.visibility, self.shape = layer, visibility, layer.shape
        draw = torch.Generator().manual_seed(5)
        width = self.shape.heads + 2 * self.shape.key_heads
        self.table = torch.randn(8, self.shape.hidden, generator=draw, dtype=torch.float64)
        size = (self.shape.hidden, width * self.shape.dim)
        self.into = torch.randn(size, generator=draw, dtype=torch.float64) / 4
        self.turn = Turning()

    def qkv(self, x: Tensor, positions: Tensor) -> list[Tensor]:
        heads = (x @ self.into).unflatten(-1, (-1, self.shape.dim)).transpose(1, 2)
        q, k, v = heads.split([self.shape.heads] + 2 * [self.shape.key_heads], dim=1)
        # As families that stretch their positions do, which lengthen what they rotate.
        return [1.5 * self.turn(q, positions), 1.5 * self.turn(k, positions), v]

    def __call__(self, ids: Tensor, visibility: Visibility | None = None, positions=None):
        visibility = self.visibility if visibility is None else visibility
        x = self.table[ids] * 1.0
        # Neighbours count too, as in a model: features depend on more than the token itself.
        x = x + torch.nn.functional.pad(x, (0, 0, 1, -1)) * 0.3 if visibility is None else x
        qkv, inputs = self.parts(ids, x, positions)
        return self.layer(*qkv, visibility=visibility, inputs=inputs).output.transpose(1, 2)

    def parts(self, ids: Tensor, x: Tensor | None = None, positions: Tensor | None = None):
        """Queries, keys and values, and what a layer is given beside them."""
        x = self.table[ids] if x is None else x
        positions = torch.arange(ids.shape[1])[None] if positions is None else positions
        inputs = LayerInputs(
            input=x, token_ids=ids, positions=positions, rotation=self.turn, shared={}
        )
        return self.qkv(x, positions), inputs


def ids(tokens: int = TOKENS, rows: int = 2) -> Tensor:
    return torch.randint(0, 8, (rows, tokens))


def assert_no_leak(whole: Callable[[Tensor], Tensor], tokens: Tensor) -> None:
    """Another token changes its own output and no earlier one.

    To rounding: another number of groups makes other products, which add up in another order.
    """
    before, (rows, length) = whole(tokens), tokens.shape
    every = tokens.repeat(length, 1, 1)
    at = torch.arange(length)
    every[at, :, at] = (every[at, :, at] + 1) % 8
    actual = whole(every.flatten(0, 1)).unflatten(0, (length, rows))
    for t, after in enumerate(actual):
        torch.testing.assert_close(after[:, :t], before[:, :t], **EXACT)
        assert bool(((after[:, t] - before[:, t]).abs().amax((1, 2)) > 1e-3).all()), t


@grid
@pytest.mark.parametrize("impl", ["reference", "tiled"])
def test_no_token_changes_an_earlier_output(name, refine, queries, impl):
    """Everything is computed anew: features, groups, summaries, outputs; for every position."""
    layer = grouped_layer(
        Grouped(name, window=3, refine=refine, queries=queries, **GROUPINGS[name])
    )
    layer.impl = impl
    assert_no_leak(Whole(layer), ids())


@grid
def test_no_output_has_a_derivative_in_a_later_token(name, refine, queries):
    """The same by the Jacobian, which sees leaks that one change of a token may miss."""
    layer = grouped_layer(
        Grouped(name, window=2, refine=refine, queries=queries, **GROUPINGS[name])
    )
    whole = Whole(layer)
    inputs = ids(14, rows=1)
    x = whole.table[inputs].requires_grad_()
    qkv, beside = whole.parts(inputs, x)
    out = layer(*qkv, inputs=beside).output
    for t in range(14):
        direction = torch.randn(out[:, :, t].shape, dtype=torch.float64)
        (slope,) = torch.autograd.grad((out[:, :, t] * direction).sum(), x, retain_graph=True)
        assert not bool(slope[:, t + 1 :].any()), t  # not by a bit
        assert bool(slope[:, t].any()), t


@grid
def test_a_row_is_the_start_of_a_longer_one(name, refine, queries):
    layer = grouped_layer(
        Grouped(name, window=3, refine=refine, queries=queries, **GROUPINGS[name])
    )
    whole, tokens = Whole(layer), ids(23)
    longest = whole(tokens)
    for n in range(1, 23):
        torch.testing.assert_close(whole(tokens[:, :n]), longest[:, :n], **EXACT)


@grid
def test_padding_and_packing_change_nothing(name, refine, queries):
    layer = grouped_layer(
        Grouped(name, window=3, refine=refine, queries=queries, **GROUPINGS[name])
    )
    whole = Whole(layer, Visibility())
    lengths = (11, 1, 17)
    parts = [ids(n, rows=1) for n in lengths]
    alone = [whole(part, Visibility()) for part in parts]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = whole(torch.cat(parts, dim=1), Visibility.packed(offsets), positions)
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), **EXACT)

    rows, real = torch.zeros(3, 20).long(), torch.zeros(3, 20, dtype=torch.bool)
    positions = torch.zeros(3, 20).long()
    places = [range(9, 20), range(4, 5), range(0, 17)]  # left, both ways, right
    for row, (place, part) in enumerate(zip(places, parts, strict=True)):
        rows[row, place.start : place.stop] = part[0]
        real[row, place.start : place.stop] = True
        positions[row, place.start : place.stop] = torch.arange(len(place))
    padded = whole(rows, Visibility(padding=real), positions)
    for row, (place, expected) in enumerate(zip(places, alone, strict=True)):
        torch.testing.assert_close(padded[row, place.start : place.stop], expected[0], **EXACT)
    assert not bool(padded[~real].any())


SINGLE = {
    "fixed": {"size": 1},
    "sliding": {"size": 1, "stride": 1},
    "sentence": {"size": 1, "longest": 1, "closing": (1,)},
}


@grid
@pytest.mark.parametrize("window", [1, 7, 99])
def test_groups_of_one_token_and_windows_over_all_are_standard_attention(
    name, refine, queries, window
):
    """Whatever the parameters are (I1, I5), and whatever the groups where none is far (I2)."""
    sizes = GROUPINGS[name] if window == 99 else SINGLE.get(name, SINGLE["fixed"])
    name = name if window == 99 or name in SINGLE else "fixed"  # cif knows none of one token
    layer = grouped_layer(Grouped(name, window=window, refine=refine, queries=queries, **sizes))
    qkv, inputs = Whole(layer).parts(ids())
    expected = scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(layer(*qkv, inputs=inputs).output, expected, **EXACT)


@grid
def test_every_parameter_learns(name, refine, queries):
    config = Grouped(
        name, window=2, refine=refine, queries=queries, size_bias="learned", **GROUPINGS[name]
    )
    layer = grouped_layer(config)
    qkv, inputs = Whole(layer).parts(ids(33))
    out = layer(*qkv, inputs=inputs)
    (out.output * torch.randn_like(out.output)).sum().backward()
    for part, p in layer.named_parameters():
        assert p.grad is not None and bool(p.grad.isfinite().all()), part
        assert bool(p.grad.any()), part


def test_what_makes_groups_learns_from_its_first_values_on():
    """Of the attention's own gradient: the loss that holds their size is nothing at first."""
    torch.manual_seed(0)
    layer = Grouped("cif", window=2, **GROUPINGS["cif"]).build(SHAPE).double()
    x = torch.randn(2, 64, SHAPE.hidden).double()
    q, k, v = (torch.randn(2, n, 64, 6).double() for n in (4, 2, 2))
    out = layer(q, k, v, inputs=LayerInputs(input=x)).output
    (out * torch.randn_like(out)).sum().backward()
    for part, p in layer.grouping.named_parameters():
        assert p.grad is not None and bool((p.grad.abs() > 1e-9).any()), part


def test_the_first_values_are_the_mean():
    x = torch.randn(2, TOKENS, 20).double()
    inputs = LayerInputs(input=x, positions=torch.arange(TOKENS)[None])
    q, k, v = (torch.randn(2, n, TOKENS, 6).double() for n in (4, 2, 2))
    expected = (
        Grouped(size=4, window=3, refine="mean").build(SHAPE).double()(q, k, v, inputs=inputs)
    )
    for refine in REFINES[1:]:
        layer = Grouped(size=4, window=3, refine=refine, size_bias="learned").build(SHAPE).double()
        actual = layer(q, k, v, inputs=inputs)
        torch.testing.assert_close(actual.output, expected.output, **EXACT)


@grid
def test_maps_are_what_the_values_are_weighted_by(name, refine, queries):
    if refine == "attention":
        refine = "weighted"  # moves values between the members, which no map shows
    layer = grouped_layer(
        Grouped(name, window=3, refine=refine, queries=queries, **GROUPINGS[name])
    )
    (q, k, v), inputs = Whole(layer).parts(ids(19))
    weights = layer.maps(q, k, inputs=inputs).weights
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 19).double(), **EXACT)
    expected = layer(q, k, v, inputs=inputs).output
    torch.testing.assert_close(weights @ v.repeat_interleave(2, dim=1), expected, **EXACT)


def test_learned_groups_are_shared_by_layers_in_turn():
    config = Grouped("cif", size=3, window=2, share=2)
    lead, follow = (config.build(HeadShape(4, 2, 6, 20, layer)).double() for layer in (2, 3))
    assert lead.learns_groups and not follow.learns_groups
    assert follow.grouping is None
    x, positions = torch.randn(2, 12, 20).double(), torch.arange(12)[None]
    q, k, v = (torch.randn(2, n, 12, 6).double() for n in (4, 2, 2))
    shared: dict = {}
    inputs = LayerInputs(input=x, positions=positions, shared=shared)
    assert lead(q, k, v, inputs=inputs).grouping.target == 3
    (groups,) = shared.values()
    assert follow(q, k, v, inputs=inputs).grouping is None
    assert list(shared.values()) == [groups]
    with pytest.raises(ValueError, match=r"share=2: layer 3 takes the groups of layer 2"):
        follow(q, k, v, inputs=LayerInputs(input=x, positions=positions))


def test_groups_are_those_of_the_first_of_these_layers_and_of_no_other():
    """Layer 10 begins a run of five, in the middle of one of four that layer 8 began."""
    four, five = (Grouped("cif", size=3, window=2, share=share) for share in (4, 5))
    x, positions = torch.randn(1, 12, 20).double(), torch.arange(12)[None]
    q, k, v = (torch.randn(1, n, 12, 6).double() for n in (4, 2, 2))
    lead, other, follow = (
        config.build(HeadShape(4, 2, 6, 20, layer)).double()
        for config, layer in ((four, 8), (five, 10), (four, 11))
    )
    with torch.no_grad():
        other.grouping.outer.bias.add_(3)
    actual = []
    for layers in ((lead, follow), (lead, other, follow)):
        inputs = LayerInputs(input=x, positions=positions, shared={})
        actual.append([layer(q, k, v, inputs=inputs).output for layer in layers][-1])
    assert torch.equal(*actual)


def test_the_loss_of_the_size_by_hand():
    x, positions = torch.randn(2, 30, 20).double(), torch.arange(30)[None]
    q, k, v = (torch.randn(2, n, 30, 6).double() for n in (4, 2, 2))
    inputs = LayerInputs(input=x, positions=positions)
    layer = grouped_layer(Grouped("cif", size=4))
    report = layer(q, k, v, inputs=inputs).grouping
    raw = layer.grouping.outer(torch.nn.functional.gelu(layer.grouping.inner(x)))
    alpha = 1 / 16 + 15 / 16 * raw.sigmoid()
    torch.testing.assert_close(report.loss, (4 * alpha.mean() - 1).square(), **EXACT)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grouping": "words"}, r"grouping must be one of 'fixed', 'sliding', 'sentence', 'cif'"),
        ({"refine": "words"}, r"refine must be one of 'mean', 'weighted', 'attention', got"),
        ({"size": 0}, r"size must be a whole number of at least 1"),
        ({"grouping": "sentence"}, r"closing must be given with grouping='sentence'"),
        ({"closing": (3,)}, r"closing must be given with grouping='sentence' and only"),
        ({"grouping": "sentence", "closing": ("a",)}, r"closing must hold token ids"),
        ({"grouping": "sentence", "closing": 5}, r"closing must hold token ids, as in \(13, 30\)"),
        ({"grouping": "sentence", "closing": None}, r"closing must hold token ids"),
        (
            {"grouping": "sentence", "closing": (5,), "shortest": 65},
            r"shortest must be at most long",
        ),
        ({"grouping": "cif", "longest": 16}, r"longest must be above size \(16\) for cif groups"),
        ({"stride": 4}, r"stride is for sliding groups, got 4 with"),
        ({"grouping": "sliding", "stride": 40}, r"stride must be at most size"),
        ({"longest": 40}, r"shortest and longest bound"),
        ({"grouping": "cif", "longest": 8}, r"longest must be a whole number of at least 16"),
        ({"grouping": "cif", "size": 1}, r"cif groups must have size of at least 2"),
        ({"share": 2}, r"share is for learned groupings"),
        ({"window": 0}, r"window must be a whole number"),
    ],
)
def test_configurations_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        Grouped(**options)
