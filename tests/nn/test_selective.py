"""An own selector's size: parameters, and what a cache holds."""

import torch

import heedful
from heedful.nn import Selective
from helpers.families import stir, tiny, tokens


def test_a_small_selector_has_few_parameters_and_few_bytes():
    """Beside K and V a cached token takes `dim` numbers and F; generation equals the whole pass."""
    sizes = {}
    for dim in (None, 3):
        torch.manual_seed(0)
        model = tiny("llama")
        heedful.convert(model, Selective("extra", dim=dim))
        stir(model, 0.3, only=".heedful.")
        layer = next(x for x in model.modules() if isinstance(x, heedful.nn.Layer))
        width = layer.shape.dim if dim is None else dim
        assert layer.key.weight.shape == (width, layer.shape.hidden)
        cache, ids = heedful.new_cache(model, False), tokens(1, 24)
        rows = [model(input_ids=x, cache=cache).logits for x in ids.split(1, 1)]
        torch.testing.assert_close(torch.cat(rows, 1), model(input_ids=ids, use_cache=False).logits)
        sizes[dim] = cache.nbytes
    layers = sum(isinstance(x, heedful.nn.Layer) for x in model.modules())
    saved = layers * 24 * (layer.shape.dim - 3) * 8  # fp64
    assert sizes[None] - sizes[3] == saved
