"""A fingerprint is of one model, in any precision and quantisation, and of no other."""

import copy
import functools
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

import heedful
from heedful.eviction import MostHidden
from heedful.hf.budgets import NAME, read_budgets, write_budgets
from heedful.hf.fingerprints import is_of
from heedful.hf.grids import steps
from heedful.hf.stock import stock_model, stock_tokenizer
from heedful.hf.versions import cache_argument
from helpers.families import logits, stir, tiny, tokens
from helpers.quantised import CASTS, QUANTISATIONS, quantised
from helpers.small_models import needs_smollm2

EXTRA = heedful.Selective(selector="extra")
SIZES = {"hidden_size": 64, "intermediate_size": 256, "head_dim": 16}
ADAPTERS = Path(__file__).parents[2] / "adapters"


def original(seed: int = 0):
    """A model as hubs have them: bfloat16 values, and norms of the size of SmolLM2's."""
    torch.manual_seed(seed)
    model = tiny(dtype=torch.float32, **SIZES)
    for name, p in model.named_parameters():
        if "norm" in name:
            p.data = 0.1 + 0.3 * torch.rand_like(p)
    return model.bfloat16().float()


def opened(base, folder, **options):
    return heedful.load(copy.deepcopy(base), adapter=folder, **options)


def trained_on(model, rate: float, length: int = 12, count: int = 100):
    """A copy, every weight trained for a hundred steps."""
    model = copy.deepcopy(model).float().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for step in range(count):
        torch.manual_seed(step)
        ids = tokens(2, length)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@pytest.fixture(params=["bf16", *QUANTISATIONS])
def base(request):
    """The base that an adapter was trained on: the original itself, or a quantisation of it."""
    return quantised(original(), request.param).float()


@pytest.fixture
def folder(base, tmp_path):
    model = copy.deepcopy(base)
    heedful.convert(model, EXTRA)
    stir(model, 0.5, ".heedful.")
    heedful.save_adapter(model, tmp_path / "a", base="somewhere")
    return tmp_path / "a"


def test_an_adapter_opens_on_other_quantisations_and_says_how_far_they_are(base, folder):
    for kind in QUANTISATIONS:
        other = quantised(original(), kind)
        if torch.equal(other.lm_head.weight, base.lm_head.weight):
            continue
        with pytest.warns(
            UserWarning, match=r"'somewhere' in another quantisation: .* differ"
        ) as w:
            model = opened(other, folder)
        assert len(w) == 1 and "\n" not in str(w[0].message)
        difference = float(str(w[0].message).split("differ by ")[1].split("%")[0])
        pairs = [*zip(other.parameters(), base.parameters(), strict=True)]
        own = [
            ((p - q).square().mean() / q.square().mean()).detach() for p, q in pairs if p.ndim > 1
        ]
        assert difference == pytest.approx(100 * float(torch.stack(own).mean().sqrt()), rel=0.4)
        ids = tokens()
        assert torch.equal(logits(heedful.revert(model), ids), logits(other, ids))


def test_the_same_weights_say_nothing_in_any_precision(base, folder):
    for kind in CASTS:
        assert opened(quantised(base, kind), folder)._heedful.mechanism == EXTRA
    assert opened(base, folder)._heedful.mechanism == EXTRA


@functools.cache
def trained_original():
    return trained_on(original(), 1e-5)


@pytest.mark.sampled(3)
def test_weights_that_were_trained_on_are_refused_in_any_quantisation(base, folder):
    change = trained_original()
    on_base = copy.deepcopy(base)
    for p, now, was in zip(*(x.parameters() for x in (on_base, change, original())), strict=True):
        p.data += now - was
    for model in (change, on_base):
        for other in (model, *(quantised(model, kind) for kind in (*CASTS, *QUANTISATIONS))):
            message = r"another base: .* differ by [\d.]+% .*, and [\d.]+% of its other weights"
            with pytest.raises(ValueError, match=message):
                opened(other, folder)
            assert type(other) is type(base)


def test_merged_matrices_are_seen_where_no_rounding_hides_them(base, folder):
    other = copy.deepcopy(base)
    torch.manual_seed(0)
    for name, p in other.named_parameters():
        if "q_proj" in name or "v_proj" in name:
            a, b = torch.randn(len(p), 2), torch.randn(2, p.shape[1])
            p.data += 0.01 * p.data.std() * a @ b
    with pytest.raises(ValueError, match="another base"):
        opened(other, folder)


@pytest.mark.sampled(2)
def test_another_model_is_refused_whatever_its_quantisation(folder):
    for kind in ("bf16", *QUANTISATIONS):
        with pytest.raises(ValueError, match=r"another base: .* differ"):
            opened(quantised(original(seed=1), kind), folder)
    smaller = tiny(dtype=torch.float32, **SIZES | {"num_hidden_layers": 1})
    with pytest.raises(ValueError, match=r"another base: .* a model of other shapes"):
        opened(smaller, folder)


def test_budgets_open_on_another_quantisation_too(tmp_path):
    model = original()
    heedful.convert(model, EXTRA)
    write_budgets(tmp_path / NAME, MostHidden(tokens=16), model, {})
    for change, opens in (
        (lambda x: quantised(x, "Q4_0"), True),
        (lambda x: copy.deepcopy(trained_original()), False),
    ):
        other = change(original())
        heedful.convert(other, EXTRA)
        for own, theirs in zip(model._heedful.parameters().values(),
                               other._heedful.parameters().values(), strict=True):  # fmt: skip
            theirs.data = own.data.clone()
        if opens:
            assert read_budgets(tmp_path / NAME, other) == MostHidden(tokens=16)
        else:
            with pytest.raises(ValueError, match="belongs to another model"):
                read_budgets(tmp_path / NAME, other)


def test_a_damaged_fingerprint_is_of_no_model():
    model = tiny(dtype=torch.float32)
    heedful.convert(model, "selective")
    own = heedful.hf.fingerprints.fingerprint(model)
    assert is_of(own, model)
    for key, value in (("samples", "@"), ("samples", None), ("samples", own["samples"][:80]),
                       ("steps", own["steps"][:80]), ("steps", 3), ("steps", "abc")):  # fmt: skip
        assert not is_of(own | {key: value}, model), (key, value)


@pytest.mark.parametrize(
    ("kind", "levels"), [("Q8_0", 254), ("Q4_0", 16), ("Q5_0", 32), ("Q4_1", 15), ("Q4_K", 15)]
)
def test_steps_are_those_of_the_blocks(kind, levels):
    weights = torch.randn(8, 256)
    model = torch.nn.Linear(256, 8, bias=False)
    model.weight = torch.nn.Parameter(weights, requires_grad=False)
    values = quantised(model, kind).weight
    places = torch.arange(0, 8 * 256, 37)
    found = steps(values, places)
    block = values.reshape(-1, 32)[places // 32].double()
    symmetric = kind in ("Q8_0", "Q4_0", "Q5_0")
    span = 2 * block.abs().amax(1) if symmetric else block.amax(1) - block.amin(1)
    near = torch.isclose(found, span / levels, rtol=1e-3)
    assert near.float().mean() > 0.9  # a run that has no neighbouring levels shows a wider step
    assert not steps(weights, places).any()
    assert not steps(weights.bfloat16(), places).any()


@pytest.mark.slow
@needs_smollm2
def test_the_kept_adapter_on_other_quantisations_of_smollm2():
    """Perplexity with the adapter under its budgets stays near that of the base it was made for."""
    tokenizer, base = stock_tokenizer("smollm2"), stock_model("smollm2")
    text = (ADAPTERS.parent / "examples" / "letter.txt").read_text()
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :400]

    def nats(model, eviction=None):
        model.eval()
        cache = heedful.new_cache(model, eviction)
        with torch.no_grad():
            own = cache_argument(model, cache)
            parts = [model(input_ids=x, **own).logits for x in ids.split(50, 1)]
        return float(cross_entropy(torch.cat(parts, 1)[0, :-1].float(), ids[0, 1:]))

    def rise(model):
        whole, small = nats(model, False), nats(model)
        return small - whole

    own = rise(opened(base, ADAPTERS / "smollm2-135m-hide"))
    for kind in (*CASTS, *QUANTISATIONS):
        other = quantised(base, kind)
        if kind in CASTS or kind == "Q4_1":  # the base is on that grid already
            model = opened(other, ADAPTERS / "smollm2-135m-hide")
        else:
            with pytest.warns(UserWarning, match="in another quantisation") as caught:
                model = opened(other, ADAPTERS / "smollm2-135m-hide")
            print(kind, caught[0].message)
        print(kind, "rise of the loss:", own, loss := rise(model))
        assert abs(loss - own) < 0.05, kind


@pytest.mark.slow
@needs_smollm2
def test_smollm2_trained_on_is_refused():
    model = trained_on(stock_model("smollm2"), 1e-5, length=64, count=100)
    for kind in (None, "bf16", "Q8_0", "Q4_0"):
        other = model if kind is None else quantised(model, kind)
        with pytest.raises(ValueError, match="another base") as error:
            opened(other, ADAPTERS / "smollm2-135m-hide")
        print(kind, error.value)
