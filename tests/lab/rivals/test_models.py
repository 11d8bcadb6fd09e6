"""Models with baselines: the promises of `convert`, `load` and `revert`, and the table."""

import copy
import json

import pytest
import torch
from transformers import DynamicCache

import heedful
from heedful.eviction import StreamingLLM
from heedful.nn import to_json
from heedful.testing import assert_causal
from heedful_lab.rivals.canon import Canon
from heedful_lab.rivals.dex import Dex
from heedful_lab.rivals.differential_v2 import DifferentialV2
from heedful_lab.rivals.edits import edit
from heedful_lab.rivals.exclusive import Exclusive
from heedful_lab.rivals.knocking import KnockingHeads
from heedful_lab.rivals.models import convert, load
from heedful_lab.rivals.papers import cite_rival
from heedful_lab.rivals.parallax import Parallax
from heedful_lab.rivals.retention import RetentionGate
from heedful_lab.rivals.simplicial import Simplicial
from heedful_lab.rivals.table import MECHANISMS, RIVALS, TABLE, from_json, mechanism
from helpers.families import logits, ragged_mask, stir, tiny, tokens

CONFIGS = {
    "canon": Canon(),
    "canon-a": Canon("A", kernel=3),
    "canon-wide": Canon("B", kernel=9),
    "knocking-heads": KnockingHeads(("q", "k", "v")),
    "knocking-heads-mlp": KnockingHeads(form="mlp"),
    "simplicial": Simplicial(5, 3, every=2),
    "retention-gate": RetentionGate(),
    "self-pruned": RetentionGate(window=3),
    "differential-v2": DifferentialV2(),
    "exclusive": Exclusive(),
    "parallax": Parallax(),
    "dex": Dex((0, 3)),
}
UNCHANGING = {x: CONFIGS[x] for x in CONFIGS if x not in ("differential-v2", "exclusive")} | {
    "simplicial": Simplicial(64, 8, 1, "identity")
}
NO_CACHE = ("canon", "canon-a", "canon-wide", "simplicial", "self-pruned")
FAMILIES = ["llama", "qwen3", "mistral"]
every = pytest.mark.parametrize("name", CONFIGS)


def converted(name: str, family: str = "llama", by: float = 0.2, **options):
    """The model with parameters away from where they start."""
    model = tiny(family, **options)
    convert(model, CONFIGS[name])
    stir(model, by, only=".heedful.")
    return model


def same(actual, expected) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", UNCHANGING)
@pytest.mark.parametrize("family", [*FAMILIES, "olmo2", "mixtral"])
def test_a_new_mechanism_changes_nothing(name, family):
    model, ids = tiny(family), tokens()
    before = logits(model, ids)
    convert(model, UNCHANGING[name])
    same(logits(model, ids), before)
    assert torch.equal(logits(heedful.revert(model), ids), before)


@every
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_are_separate_ones(name, family):
    model, ids = converted(name, family), tokens(1, 17)
    parts = ids.split([7, 2, 8], dim=1)
    places = torch.cat([torch.arange(x.shape[1]) for x in parts])[None]
    expected = torch.cat([logits(model, x) for x in parts], 1)
    same(logits(model, ids, position_ids=places), expected)


@every
@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_sequence_is_the_sequence_alone(name, family):
    model, ids = converted(name, family), tokens(3, 13)
    for left in (True, False):
        mask = ragged_mask(3, 13, left=left)
        places = (mask.cumsum(1) - 1).clamp(min=0)  # rotated alike, to the last bit
        actual = logits(model, ids, attention_mask=mask, position_ids=places)
        for row, real in enumerate(mask.bool()):
            same(actual[row, real], logits(model, ids[row, real][None])[0])


@every
def test_no_later_token_changes_a_bit(name):
    model = converted(name, dtype=torch.float32, vocab_size=40)
    table = model.get_input_embeddings().weight.detach()
    x = table[tokens(1, 20)]
    assert_causal(lambda x: model(inputs_embeds=x, use_cache=False).logits, x, dim=1)


@every
def test_a_step_of_training_reaches_every_parameter(name):
    model, ids = converted(name, dtype=torch.float32).train(), tokens()
    own = model._heedful.parameters()
    before = {x: p.detach().clone() for x, p in own.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    moved = all(not torch.equal(p, before[x]) for x, p in own.items())
    assert moved == (name != "retention-gate")  # in no output: attention maps train it
    assert bool(own) == (name != "exclusive")


@every
def test_a_model_comes_back_from_its_folder_and_reverts(name, tmp_path):
    plain, ids = tiny(dtype=torch.float32), tokens()
    model = copy.deepcopy(plain)
    convert(model, CONFIGS[name])
    stir(model, 0.2, only=".heedful.")
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert again._heedful.mechanism == CONFIGS[name]
    expected = logits(model, ids)
    assert torch.equal(expected, logits(plain, ids)) == (name == "retention-gate")
    for other in (again, copy.deepcopy(model)):
        assert torch.equal(logits(other, ids), expected)
        heedful.revert(other)
        assert torch.equal(logits(other, ids), logits(plain, ids))
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in other.modules())
    kind = type(CONFIGS[name]).__name__
    with pytest.raises(ValueError, match=rf"got '{kind}': .* mechanisms="):
        heedful.load(tmp_path)
    again = edit(heedful.load(tmp_path, mechanisms=MECHANISMS)._heedful).model
    assert torch.equal(logits(again, ids), expected)


@every
def test_generation_is_what_the_whole_sequence_says(name):
    model, ids = converted(name), tokens(1, 9)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False}
    actual = model.generate(ids, **options)
    assert torch.equal(actual[:, 9:], logits(model, actual).argmax(-1)[:, 8:-1])


@pytest.mark.parametrize("name", NO_CACHE)
def test_what_has_no_cache_says_so(name):
    model, ids = converted(name), tokens(1, 9)
    assert model.config.use_cache is False
    assert model(input_ids=ids).logits.shape[1] == 9
    for call in (
        lambda: model(input_ids=ids, use_cache=True),
        lambda: model(input_ids=ids, past_key_values=DynamicCache(config=model.config)),
        lambda: heedful.new_cache(model),
        lambda: heedful.new_cache(model, StreamingLLM(20)),
    ):
        with pytest.raises(ValueError, match=r"Attention does not support one; .* use_cache=False"):
            call()
    with pytest.warns(UserWarning, match="cache is not enough for this mechanism"):
        model.generate(ids, max_new_tokens=2, use_cache=True)
    assert heedful.revert(model).config.use_cache is True


def test_the_table():
    names = [row.name for row in TABLE]
    assert len({*names}) == len(names) == len(heedful.nn.NAMES) + len(RIVALS)
    for row in RIVALS:
        assert mechanism(row.name) == row.config and row.about
        assert from_json(json.loads(json.dumps(to_json(row.config)))) == row.config
        assert cite_rival(row.name).count("@article") == 1
    assert mechanism("mta") == heedful.MultiToken()
    assert cite_rival("mta") == heedful.cite("mta")
    with pytest.raises(ValueError, match="did you mean 'parallax'"):
        mechanism("paralax")
    with pytest.raises(ValueError, match=r"one of heedful's mechanisms .* got Dex"):
        heedful.cite(Dex())
