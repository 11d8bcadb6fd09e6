"""The memory of the tiled forms grows linearly with the number of tokens."""

import pytest
import torch

from heedful.testing import peak_memory_mib
from helpers.mechanisms import LOW_RANK, MECHANISMS, Shape

PROGRAM = """
import torch
from heedful.ops import *
from heedful.ops.grouped import fixed_groups
torch.manual_seed(0)
T = {tokens}
q, k, v = (torch.randn(1, {heads}, T, {dim}, requires_grad={train}) for _ in range(3))
c = torch.randn({heads}, 6, 11, requires_grad={train})
m = torch.randn(1, {heads}, {heads}, requires_grad={train})
def attend(q, k, v):
    out = {call}
    if {train}:
        out.sum().backward()
attend(*(x[:, :, :70].detach().requires_grad_({train}) for x in (q, k, v)))  # imports and pools
def run():
    attend(q, k, v)
"""
CALLS = {
    "mta-pre": "multi_token_attention(q, k, v, conv=c, impl='{impl}')",
    "mta": "multi_token_attention(q, k, v, conv=c, post_conv=c, mix=m, post_mix=m, impl='{impl}')",
    "low-rank": "multi_token_attention(q, k, v, conv=LowRank(c[:, :2], c[:, 2:4]), impl='{impl}')",
    "selective": "selective_attention(q, k, v, tau=1.0, impl='{impl}').output",
    "dropout": "multi_token_attention(q, k, v, post_conv=c, dropout_p=0.1, impl='{impl}')",
    "differential": "differential_attention(q, k, torch.cat([v[:, ::2], v[:, 1::2]], -1), "
    "lam=torch.tensor(0.5), impl='{impl}')",
    "grouped": "grouped_attention(q, k, v, groups=fixed_groups(16, q.shape[2]), impl='{impl}')",
}


def peak(name: str, impl: str, tokens: int, train: bool, heads: int = 8, dim: int = 64) -> float:
    sizes = {"tokens": tokens, "heads": heads, "dim": dim}
    call = CALLS[name].format(impl=impl)
    return peak_memory_mib(PROGRAM.format(call=call, train=train, **sizes))


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("train", [False, True], ids=["forward", "backward"])
def test_peak_memory_grows_linearly(name, train):
    short, long = (peak(name, "tiled", tokens, train) for tokens in (1024, 4096))
    assert long < 5 * short, (short, long)


@pytest.mark.slow
@pytest.mark.parametrize("train", [False, True], ids=["forward", "backward"])
def test_a_map_in_memory_shows_up_in_this_measure(train):
    tiled, dense = (peak("mta-pre", impl, 2048, train) for impl in ("tiled", "reference"))
    assert dense > 4 * tiled, (dense, tiled)


@pytest.mark.slow
@pytest.mark.parametrize("train", [False, True], ids=["forward", "backward"])
def test_long_rows_of_selective_attention(train):
    """Few and narrow heads: beside them anything kept per block of queries would show."""
    short, long = (
        peak("selective", "tiled", tokens, train, heads=2, dim=32) for tokens in (8192, 32768)
    )
    assert long < 4.5 * short, (short, long)


@pytest.mark.parametrize("mechanism", [*MECHANISMS, *LOW_RANK], ids=str)
def test_what_is_kept_for_the_backward_grows_linearly(mechanism):
    def size(tokens: int) -> int:
        sizes = []
        tensors = mechanism.draw(Shape(batch=1).long(tokens))
        leaves = {name: x.requires_grad_() for name, x in tensors.items()}
        pack = torch.autograd.graph.saved_tensors_hooks(
            lambda x: sizes.append(x.numel()) or x, lambda x: x
        )
        with pack:
            mechanism.run(leaves, "tiled")
        return sum(sizes)

    one, two, three = (size(tokens) for tokens in (128, 256, 384))
    assert three - two == two - one
