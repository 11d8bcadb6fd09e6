"""Every family: unchanged outputs after conversion, and a checkpoint that comes back bit-equal."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import heedful
from heedful.hf.versions import implementation_of
from heedful.nn import (
    Differential,
    LocalGlobal,
    MultiToken,
    Selective,
    Standard,
    TalkingHeads,
)
from heedful.testing import assert_causal, assert_matches_oracle
from helpers.crosses import usually
from helpers.families import EAGER, FAMILIES, fits, logits, ragged_mask, tiny, tokens, twin, varied

every = pytest.mark.parametrize("family", FAMILIES)
UNCHANGING = {
    "standard": Standard(),
    "mta": MultiToken(conv_every=1, mix=2),
    "selective with an extra head": Selective(selector="extra"),
}
MECHANISMS = {
    "standard": Standard(),
    "mta": MultiToken(conv=(3, 5), post_conv=(2, 3), conv_every=2),
    "mta-published": MultiToken(conv_every=1, norm="plain", gate="scalar"),
    "mta-v1": MultiToken.v1(),
    "talking-heads": TalkingHeads(),
    "selective": Selective(),
    "selective-bilinear": Selective("bilinear"),
    "selective-extra": Selective(selector="extra"),
    "differential": Differential(),
    # Parts of these act before the rotation, where families differ.
    "local-global": LocalGlobal(window=3, every=2),
}
CASES = [(x, y) for x in MECHANISMS for y in FAMILIES if fits(x, y)]
# Every family with what reads its maps and its input, every mechanism in one with all there is.
FEW = ("mta", "selective-bilinear"), ("gemma2",)
pairs = pytest.mark.parametrize(("name", "family"), usually(CASES, *FEW))
MASKS = {"whole": None, "left": ragged_mask(left=True), "right": ragged_mask(left=False)}


@pytest.mark.crossed
@every
@pytest.mark.parametrize("mechanism", UNCHANGING)
@pytest.mark.parametrize("side", MASKS)
def test_outputs_are_unchanged_in_fp64(family, mechanism, side):
    model, ids, mask = tiny(family), tokens(), MASKS[side]
    before = logits(model, ids, attention_mask=mask)
    heedful.convert(model, UNCHANGING[mechanism])
    real = torch.ones_like(ids).bool() if mask is None else mask.bool()
    after = logits(model, ids, attention_mask=mask)
    torch.testing.assert_close(after[real], before[real], rtol=0, atol=1e-12)


@pytest.mark.crossed
@pytest.mark.parametrize("family", [x for x in FAMILIES if x not in EAGER])
@pytest.mark.parametrize("mechanism", UNCHANGING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_outputs_of_whole_rows_are_unchanged_to_the_last_bit(family, mechanism, dtype):
    # A window that cuts something takes our own tiles: unchanged, but only up to rounding.
    wide = {"sliding_window": 30} if "sliding_window" in FAMILIES[family] else {}
    model = tiny(family, dtype, **wide)
    ids = tokens()
    before = logits(model, ids)
    heedful.convert(model, UNCHANGING[mechanism])
    assert torch.equal(logits(model, ids), before)


@every
def test_outputs_in_fp32_err_no_more_than_the_unconverted_model(family):
    model = tiny(family, torch.float32)
    ids = tokens()
    plain, oracle = logits(model, ids), logits(twin(model).double(), ids)
    heedful.convert(model, UNCHANGING["mta"])
    assert_matches_oracle(family, logits(model, ids), plain, oracle, terms=32)


@every
def test_from_the_auto_class_to_a_text_and_to_a_step_of_training(family, tmp_path):
    """Two mechanisms and a standard layer; the cache, and gradients down to their parameters."""
    model = varied(
        tiny(family, torch.float32), {MultiToken(conv_every=1): [0], Selective("extra"): [1]}, 0.1
    )
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = tokens()
    assert torch.equal(logits(again, ids), logits(model, ids))
    padded = {"input_ids": ids, "attention_mask": ragged_mask()}
    options = {"max_new_tokens": 8, "do_sample": False}
    actual = (again.generate(**padded, use_cache=cache, **options) for cache in (True, False))
    assert torch.equal(*actual)
    again.train()
    own = again._heedful.parameters()
    before = {name: p.detach().clone() for name, p in own.items()}
    optimizer = torch.optim.SGD(again.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        losses.append(again(**padded, labels=ids).loss)
        losses[-1].backward()
        assert all(bool((p.grad != 0).any()) for p in own.values())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[1] < losses[0]
    assert all(not torch.equal(p, before[name]) for name, p in own.items())


def converted(name: str, family: str, dtype: torch.dtype = torch.float64):
    return varied(tiny(family, dtype), MECHANISMS[name])


@pairs
def test_no_token_changes_an_earlier_logit(name, family):
    model = converted(name, family)
    assert_causal(lambda ids: logits(model, ids), tokens(1, 6), dim=1)


def padded(left: bool) -> tuple:
    ids, mask = tokens(3), ragged_mask(3, left=left)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    options = {"attention_mask": mask, "position_ids": positions}
    return ids, options, list(enumerate(mask.bool()))


def packed() -> tuple:
    lengths = [5, 1, 7]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    places = torch.arange(sum(lengths)).split(lengths)
    return tokens(1, sum(lengths)), {"position_ids": positions}, [(0, part) for part in places]


# Token ids, the options of the call, and by rows and places what stands there alone.
TOGETHER = {"left": lambda: padded(True), "right": lambda: padded(False), "packed": packed}


@pytest.mark.crossed
@pairs
@pytest.mark.parametrize("how", TOGETHER)
def test_padded_and_packed_rows_are_rows_alone(name, family, how):
    model, (ids, options, parts) = converted(name, family), TOGETHER[how]()
    together = logits(model, ids, **options)
    for row, part in parts:
        alone = logits(model, ids[row : row + 1, part])
        torch.testing.assert_close(together[row, part], alone[0], rtol=0, atol=1e-11)


@pytest.mark.crossed
@pairs
@pytest.mark.parametrize("side", MASKS)
def test_a_checkpoint_comes_back_bit_for_bit_and_reverts(name, family, side, tmp_path):
    model, ids = converted(name, family, torch.float32), tokens()
    model.save_pretrained(tmp_path)
    again = heedful.load(tmp_path)
    assert type(again) is type(model) and not again.training
    own, saved = model.state_dict(), again.state_dict()
    assert own.keys() == saved.keys()
    assert all(torch.equal(own[key], saved[key]) for key in own)
    actual, expected = (logits(x, ids, attention_mask=MASKS[side]) for x in (again, model))
    assert torch.equal(actual, expected)
    plain = logits(heedful.revert(model), ids)
    heedful.revert(again).set_attn_implementation(implementation_of(model.config))  # not saved
    assert torch.equal(logits(again, ids), plain)
    assert not any(module._forward_hooks for module in model.modules())


@every
def test_revert_restores_everything(family, tmp_path):
    model = tiny(family, torch.float32)
    ids = tokens()
    model.config.dtype = "float32"  # as saving sets it

    def state() -> dict:
        return {
            "classes": [type(m) for m in model.modules()],
            "keys": list(model.state_dict()),
            "config": model.config.to_dict(),
            "implementation": model.config._attn_implementation,
            "generation": model.generation_config.to_dict(),
        }

    before, at_first = state(), logits(model, ids)
    varied(model, MultiToken(conv_every=1))
    assert not torch.equal(logits(model, ids), at_first)
    model.save_pretrained(tmp_path)
    assert heedful.revert(model) is model
    for what, value in state().items():
        assert value == before[what], what
    assert torch.equal(logits(model, ids), at_first)
