"""How often a forward pass waits for the device: to read a tensor's value is to wait for a GPU."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import heedful
from heedful.hf.versions import cache_argument
from helpers.families import chunked, tiny, tokens, windowed

# Of a tensor: what hands its values to Python.
READING = (
    *("__bool__", "__int__", "__float__", "__index__", "item", "tolist", "numpy", "nonzero"),
    *("cpu", "equal", "unique", "masked_select", "__contains__"),
)


def reader() -> str | None:
    """The place in the integration or the layers that reads; `None` where somebody else does.

    transformers reads for itself, and the operators of a CPU look at what costs nothing there.
    """
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(("heedful.hf", "heedful.nn")):
            return f"{name}:{frame.f_lineno}"
        if name.startswith(("transformers.", "heedful.ops")):
            return None
        frame = frame.f_back
    return None


@contextmanager
def recorded_reads() -> Iterator[list[str]]:
    """The places that read values of tensors meanwhile."""
    places: list[str] = []

    def noting(method):
        def noted(x, *args, **options):
            if (place := reader()) is not None:
                places.append(place)
            return method(x, *args, **options)

        return noted

    with pytest.MonkeyPatch.context() as patch:
        for name in READING:
            patch.setattr(torch.Tensor, name, noting(getattr(torch.Tensor, name)))
        yield places


MODELS = {
    "causal": tiny,
    "windows": lambda: tiny("mistral", sliding_window=3),
    "windows in some layers": lambda: tiny("gemma3_text"),
    "a window told in the mask alone": windowed,
    "chunks": chunked,
}


@pytest.mark.parametrize("mechanism", ["standard", "mta", "selective"])
@pytest.mark.parametrize("model", MODELS)
def test_reads_of_a_forward_pass(model, mechanism):
    """None without a mask, one with a 2-D mask, positions and a cache included."""
    model, ids = MODELS[model](), tokens(2, 9)
    heedful.convert(model, mechanism)
    left = torch.ones_like(ids)
    left[1, :2] = 0
    positions = (left.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        for mask in (torch.ones_like(ids), left):  # what is sampled once is sampled here
            model(input_ids=ids, attention_mask=mask)
        model(input_ids=ids)
        for options, most in (
            ({}, 0),
            ({"attention_mask": torch.ones_like(ids)}, 1),
            ({"attention_mask": left}, 1),
            ({"attention_mask": left, "position_ids": positions}, 1),
        ):
            with recorded_reads() as places:
                model(input_ids=ids, use_cache=False, **options)
            assert len(places) == most, (options, places)
        cache = heedful.new_cache(model)
        for start, stop in ((0, 7), (7, 8), (8, 9)):
            options = cache_argument(model, cache) | {
                "attention_mask": left[:, :stop],
                "position_ids": positions[:, start:stop],
            }
            with recorded_reads() as places:
                model(input_ids=ids[:, start:stop], **options)
            assert len(places) == 1, places


def test_the_count_sees_every_way_of_reading():
    """A count that cannot count would prove nothing."""
    from heedful.hf.family.call import _values, require

    yes = torch.tensor(True)
    with recorded_reads() as places:
        require(yes, "never")
        assert _values([yes, yes]) == [True, True]
    assert len(places) == 2
