"""Small caches under FlexAttention, whose masks are functions; here without its compiled kernel."""

import pytest
import torch

import heedful
from heedful.eviction import Random, StreamingLLM
from helpers.cached import in_steps
from helpers.families import ragged_mask, tiny, tokens


@pytest.fixture(autouse=True)
def eager():
    """The definition of FlexAttention in place of the kernel that torch compiles for it."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask")
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("slack", [0, 5])
def test_flex_attention_reads_the_columns_that_sdpa_reads(family, padded, slack):
    ids, sizes = tokens(2, 40), [25, 7, 1, 1, 1, 5]
    mask = {"attention_mask": ragged_mask(2, 40)} if padded else {}
    model, results = tiny(family), []
    for implementation in ("sdpa", "flex_attention"):
        model.set_attn_implementation(implementation)
        layers = model.config.num_hidden_layers
        for policy in (StreamingLLM(tokens=20), Random(tokens=(24, *[18] * (layers - 1)), seed=3)):
            cache = heedful.new_cache(model, policy, slack=slack)
            logits = in_steps(model, ids, sizes, cache, **mask)
            results.append((logits, cache.positions()))
    half = len(results) // 2
    for (own, cached), (expected, others) in zip(results[:half], results[half:], strict=True):
        real = mask.get("attention_mask", torch.ones_like(ids)).bool()
        torch.testing.assert_close(own[real], expected[real], rtol=0, atol=1e-10)
        assert all(map(torch.equal, cached, others))
