"""A sequence in pieces is the sequence at once: what a cached decoder has to keep."""

import pytest
import torch
from torch import Tensor

from heedful.ops import Visibility, multi_token_attention, selective_attention
from helpers.mechanisms import ragged
from helpers.oracle import EXACT, draw

each_impl = pytest.mark.parametrize("impl", ["reference", "tiled"])
TOKENS = 12
VISIBILITIES = {
    "causal": None,
    "window": Visibility(window=4),
    "ragged documents": ragged(TOKENS)[0],
}


def upto(visibility: Visibility | None, keys: int) -> Visibility | None:
    """The same visibility while only the first `keys` tokens are known."""
    if visibility is None:
        return None
    documents, padding = (
        None if x is None else x[:, :keys] for x in (visibility.documents, visibility.padding)
    )
    return Visibility(window=visibility.window, documents=documents, padding=padding)


def in_pieces(lengths: list[int], x: dict[str, Tensor], impl: str, visibility: Visibility | None):
    """Selective attention piece by piece, the state handed on."""
    outputs, memories, state, position = [], [], None, 0
    for length in lengths:
        old, position = position, position + length
        piece = {
            name: t[:, :, old:position] if name in ("q", "selector_q") else t[:, :, :position]
            for name, t in x.items()
        }
        actual = selective_attention(
            **piece, state=state, tau=0.5, visibility=upto(visibility, position), impl=impl
        )
        state = actual.state
        outputs.append(actual.output)
        memories.append(actual.memory)
    return torch.cat(outputs, 2), state, torch.cat(memories, 1)


PIECES = [[n, TOKENS - n] for n in range(1, TOKENS)] + [[1] * TOKENS, [5, 1, 1, 3, 2]]


@each_impl
@pytest.mark.parametrize("kind", VISIBILITIES)
@pytest.mark.parametrize("selectors", [1, 4])
def test_selective_segments_with_state_are_the_whole(impl, kind, selectors):
    x = {
        "q": draw(2, 4, TOKENS, 3),
        "k": draw(2, 2, TOKENS, 3),
        "v": draw(2, 2, TOKENS, 3),
        "selector_q": draw(2, selectors, TOKENS, 2),
        "selector_k": draw(2, selectors, TOKENS, 2),
    }
    leaves = [t.requires_grad_() for t in x.values()]

    def with_grads(lengths: list[int]):
        actual = in_pieces(lengths, x, impl, VISIBILITIES[kind])
        generator = torch.Generator().manual_seed(1)
        loss = sum(
            (t * torch.randn(t.shape, generator=generator, dtype=t.dtype)).sum() for t in actual
        )
        return *actual, *torch.autograd.grad(loss, leaves)

    whole = with_grads([TOKENS])
    for lengths in PIECES:
        for name, piecewise, at_once in zip(
            ("output", "state", "memory", *x), with_grads(lengths), whole, strict=True
        ):
            torch.testing.assert_close(piecewise, at_once, **EXACT, msg=f"{name} in {lengths}")


KERNELS = {
    "pre": ({"conv": (4, 3, 5)}, 2),
    "post": ({"post_conv": (4, 3, 5)}, 2),
    "pre and post": ({"conv": (4, 3, 5), "post_conv": (4, 3, 5)}, 4),
    "published": ({"conv": (4, 6, 11), "post_conv": (4, 6, 11)}, 10),
}


@pytest.mark.crossed
@each_impl
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", ["causal", "window", "documents"])
@pytest.mark.parametrize("last", [1, 4])
def test_multi_token_rows_need_only_the_queries_within_their_kernels(impl, kernels, kind, last):
    """`c_q - 1` earlier queries for one convolution, `2 c_q - 2` for one on each side."""
    tokens = 20
    sizes, halo = KERNELS[kernels]
    q, k, v = draw(2, 4, tokens, 3), draw(2, 2, tokens, 3), draw(2, 2, tokens, 3)
    steps = {name: draw(*size) for name, size in sizes.items()}
    steps |= {"mix": draw(1, 4, 4), "post_mix": draw(2, 2, 2)}
    visibility = {
        "causal": None,
        "window": Visibility(window=6),
        "documents": Visibility(documents=(torch.arange(tokens) >= 13).long()[None]),
    }[kind]
    options = {"visibility": visibility, "impl": impl}
    whole = multi_token_attention(q, k, v, **steps, **options)[:, :, -last:]

    def rows(before: int) -> Tensor:
        return multi_token_attention(q[:, :, -last - before :], k, v, **steps, **options)[
            :, :, -last:
        ]

    torch.testing.assert_close(rows(halo), whole, **EXACT)
    if kind != "documents":
        assert (rows(halo - 1) - whole).abs().max() > 1e-6, "one query fewer must not be enough"
