"""Models that train with attention dropout."""

import itertools

import pytest
import torch

import heedful
from heedful.nn import Grouped, MultiToken, Selective
from helpers.crosses import usually
from helpers.encoder_families import logits as pair_logits
from helpers.encoder_families import tiny as tiny_pair
from helpers.families import checkpoint_layers, exactly, logits, tiny, tokens, twin, varied

MECHANISMS = {
    "standard": "standard",
    "standard with a window": heedful.Standard(window=5),
    "mta": MultiToken(conv_every=1),
    "talking-heads": "talking-heads",
    "selective": Selective(),
    "differential": "differential",
}
each = pytest.mark.parametrize("name", MECHANISMS)


def converted(name: str, p: float = 0.3, family: str = "llama"):
    field = "attn_pdrop" if family == "gpt2" else "attention_dropout"
    return varied(tiny(family, **{field: p}), MECHANISMS[name], 0.1)


@pytest.mark.parametrize(
    ("name", "family"),
    usually(
        itertools.product(MECHANISMS, ("llama", "gpt2", "gemma2", "gpt_oss")), ("mta",), ("llama",)
    ),
)
def test_training_drops_and_eval_does_not(name, family):
    model, ids = converted(name, family=family), tokens()
    plain = twin(model)
    for module in plain.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
        if hasattr(module, "attn_dropout"):
            module.attn_dropout.p = 0.0
    assert torch.equal(logits(model, ids), logits(plain, ids))
    model.train(), plain.train()
    torch.manual_seed(3)
    actual = [logits(model, ids) for _ in range(2)]
    torch.manual_seed(3)
    again = logits(model, ids)
    assert torch.equal(actual[0], again) and not torch.equal(*actual)
    assert (actual[0] - logits(plain, ids)).abs().max() > 1e-3
    model.eval()
    assert torch.equal(logits(model, ids), logits(plain.eval(), ids))


@each
def test_a_step_of_training_by_finite_differences(name):
    """The mask of the backward pass is that of the forward pass, in a whole model."""
    model = converted(name, family="gpt2").double().train()  # its norms are in fp64
    ids = tokens()

    def loss() -> torch.Tensor:
        torch.manual_seed(5)
        with exactly():
            return model(input_ids=ids, use_cache=False).logits.log_softmax(-1)[..., 3].mean()

    loss().backward()
    weights = {n: p for n, p in model.named_parameters() if "c_attn" in n or ".heedful." in n}
    direction = {n: torch.randn_like(p) for n, p in weights.items()}
    slope = sum((p.grad * direction[n]).sum() for n, p in weights.items() if p.grad is not None)
    step, ends = 1e-6, []
    with torch.no_grad():
        for factor in (step, -2 * step):
            for n, p in weights.items():
                p.add_(direction[n], alpha=factor)
            ends.append(loss())
    difference = (ends[0] - ends[1]) / (2 * step)
    torch.testing.assert_close(difference, slope, rtol=1e-6, atol=1e-9)


@each
def test_gradient_checkpointing_drops_the_same(name):
    model, ids = converted(name).train(), tokens()
    actual = []
    for _ in range(2):
        torch.manual_seed(5)
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        actual.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        checkpoint_layers(model)
    for x, y in zip(*actual, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["standard", "mta", "talking-heads", "differential"])
def test_every_attention_of_an_encoder_decoder_drops(name):
    """T5 has one number for every dropout; only its attention keeps it here."""
    model, source, target = tiny_pair("t5"), tokens(2, 11), tokens(2, 7)
    conversion = heedful.convert(model, MECHANISMS[name])
    attention = [m for m in model.modules() if hasattr(m, "heedful")]
    before = pair_logits(model, source, target)
    model.train()
    for module in attention:  # one at a time: encoder, decoder, cross-attention
        module.dropout = 0.3
        assert (pair_logits(model, source, target) - before).abs().max() > 1e-3
        module.dropout = 0.0
    assert torch.equal(pair_logits(model, source, target), before)
    assert set(*conversion.where.values()) == {"decoder", "encoder", "cross"}


def test_as_the_family_on_average():
    """The mean of the logits of one layer over seeds, against the family's own eager attention."""
    model = tiny(num_hidden_layers=1, attention_dropout=0.3, attn_implementation="eager").train()
    ids = tokens(1, 6)
    sums = []
    for _ in range(2):
        torch.manual_seed(0)
        runs = logits(model, ids.expand(1500, -1))  # no two rows of a batch drop the same
        sums.append((runs.mean(0), runs.var(0) / len(runs), runs.std(0)))
        if model.config._attn_implementation == "eager":
            heedful.convert(model, "standard")
    (first, error, spread), (second, other, spread_here) = sums
    off = (first - second).abs() / (error + other + 1e-24).sqrt()
    assert off.max() < 5.5 and (off > 3).double().mean() < 0.02
    moved = spread > 1e-6
    assert ((spread / spread_here)[moved] - 1).abs().max() < 0.2


def test_grouped_attention_refuses_it_by_name():
    model = tiny(attention_dropout=0.1)
    heedful.convert(model, Grouped(size=3, window=4))
    logits(model, tokens())
    model.train()
    message = r"attention dropout must be 0 with GroupedAttention, got 0.1; set config"
    with pytest.raises(ValueError, match=message):
        logits(model, tokens())
