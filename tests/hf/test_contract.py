"""The door serves what layers declare: input, ids, positions; mechanisms of one's own; hybrids."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import heedful
from heedful.hf.versions import cache_of
from heedful.nn import (
    Differential,
    HeadShape,
    LayerInputs,
    LayerOutput,
    MultiToken,
    Selective,
    Standard,
    StandardAttention,
    TalkingHeads,
    from_json,
)
from helpers.families import logits, ragged_mask, stir, tiny, tokens, varied


class Noting(StandardAttention):
    """Standard attention that notes what it is given."""

    needs = frozenset({"input", "token_ids", "positions"})

    def forward(self, q, k, v, *, inputs: LayerInputs, **options) -> LayerOutput:
        self.noted = inputs
        return super().forward(q, k, v, inputs=inputs, **options)


def with_layers(monkeypatch, kind: type, family: str = "llama", **options):
    """A model converted to layers of this kind, as if a configuration built them."""
    monkeypatch.setattr(Standard, "build", lambda self, shape: kind(self, shape))
    model = tiny(family, **options)
    heedful.convert(model, "standard")
    return model


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "qwen3", "mixtral"])
def test_a_layer_is_given_what_it_declares(family, monkeypatch):
    model = with_layers(monkeypatch, Noting, family)
    actual, inputs = [], []
    for module in model.modules():
        if isinstance(getattr(module, "heedful", None), nn.Module):
            actual.append(module.heedful)
            module.register_forward_pre_hook(
                lambda _, args, kwargs: inputs.append(args[0] if args else kwargs["hidden_states"]),
                with_kwargs=True,
            )
    ids = tokens(2, 7)
    with torch.no_grad():
        cache = cache_of(model(input_ids=ids[:, :5], attention_mask=ragged_mask(2, 5)))
    for layer, hidden in zip(actual, inputs, strict=True):
        assert torch.equal(layer.noted.input, hidden)
        assert torch.equal(layer.noted.token_ids, ids[:, :5])
        assert torch.equal(layer.noted.positions.expand(2, -1), torch.arange(5).expand(2, -1))
    with torch.no_grad():
        model(input_ids=ids[:, 5:], cache=cache)
    assert torch.equal(actual[0].noted.positions, torch.tensor([[5, 6]]))
    assert torch.equal(actual[2].noted.token_ids, ids[:, 5:])


def test_what_cannot_be_given_is_refused(monkeypatch):
    model = with_layers(monkeypatch, Noting)
    embedded = model.get_input_embeddings()(tokens())
    with pytest.raises(ValueError, match="needs token_ids, and LlamaAttention was called w"):
        model(inputs_embeds=embedded)


@dataclass(frozen=True)
class Louder:
    """A mechanism of one's own: standard attention times a learned factor per head."""

    start: float = 1.0
    tags: tuple[str, ...] = ()

    def build(self, shape: HeadShape) -> "LouderAttention":
        return LouderAttention(self, shape)


class LouderAttention(StandardAttention):
    def __init__(self, config: Louder, shape: HeadShape) -> None:
        super().__init__(Standard(), shape)
        self.factor = nn.Parameter(torch.full((shape.heads, 1, 1), config.start))

    def forward(self, *qkv, **options) -> LayerOutput:
        result = super().forward(*qkv, **options)
        return result._replace(output=(result.output * self.factor).to(result.output.dtype))


def test_a_mechanism_of_ones_own(tmp_path):
    """Converted, trained, saved, loaded and reverted as heedful's are."""
    model, ids = tiny(dtype=torch.float32), tokens()
    before = logits(model, ids)
    conversion = heedful.convert(model, {Louder(tags=("a", "b")): [0, 2], "selective": [1]})
    optimizer = torch.optim.AdamW(conversion.parameters().values(), lr=0.1)
    model.train()(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    changed = logits(model.eval(), ids)
    assert not torch.allclose(changed, before, atol=1e-3)
    model.save_pretrained(tmp_path / "whole")
    again = heedful.load(tmp_path / "whole", mechanisms=[Louder])
    assert again._heedful.mechanisms == conversion.mechanisms
    assert torch.equal(logits(again, ids), changed)
    with pytest.raises(ValueError, match=r"got 'Louder': .* heedful.load\(..., mechanisms="):
        heedful.load(tmp_path / "whole")
    plain = heedful.revert(model)
    assert torch.equal(logits(plain, ids), before)
    heedful.save_adapter(again, tmp_path / "adapter", base="base")
    heedful.load(plain, adapter=tmp_path / "adapter", mechanisms=[Louder])
    assert torch.equal(logits(plain, ids), changed)


@dataclass(frozen=True)
class Unsaved:
    """Fields that no file would give back."""

    factor: object = 1.0

    def build(self, shape: HeadShape) -> StandardAttention:
        return StandardAttention(Standard(), shape)


Impostor = type("Gated", (Louder,), {})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (3, "a name or a configuration such as .* got 3"),
        (Louder, "a frozen dataclass with build"),
        (Unsaved([1.0]), "must have fields that JSON can hold"),
        (Unsaved(torch.ones(2)), "must have fields that JSON can hold"),
        (Impostor(), r"has the name of heedful\.Gated, .* call the class otherwise"),
    ],
    ids=["no configuration", "a class", "a list", "a tensor", "a name that is taken"],
)
def test_configurations_that_no_file_could_hold_are_refused(config, message):
    model = tiny()
    with pytest.raises(ValueError, match=message):
        heedful.convert(model, config)
    assert not isinstance(getattr(model, "_heedful", None), heedful.Conversion)


def test_the_classes_that_load_is_given_are_checked():
    for wrong, message in {
        (Louder(),): "must be classes of configurations",
        (Impostor,): "has the name of heedful.Gated",
        (Louder, type("Louder", (Louder,), {})): "two classes of the name Louder",
    }.items():
        with pytest.raises(ValueError, match=message):
            from_json({"kind": "Louder"}, wrong)


HYBRID = {
    MultiToken(conv=(2, 3), post_conv=None, conv_every=1): [0],
    Selective(selector="bilinear"): [2],
    Standard(window=4): [1],
}


def test_layers_may_have_different_mechanisms(tmp_path):
    model, ids = tiny(num_hidden_layers=4), tokens()
    before = logits(model, ids)
    conversion = heedful.convert(model, HYBRID)
    assert conversion.mechanisms == {config: tuple(those) for config, those in HYBRID.items()}
    assert conversion.layers == (0, 1, 2)
    kinds = [type(layer.self_attn.heedful).__name__ for layer in model.model.layers]
    assert kinds == [
        "MultiTokenAttention",
        "StandardAttention",
        "SelectiveAttention",
        "StandardAttention",
    ]
    with pytest.raises(ValueError, match=r"several mechanisms: see conversion.mechanisms"):
        _ = conversion.mechanism
    stir(model, 0.1, only=".heedful.")
    changed = logits(model, ids)
    assert not torch.allclose(changed, before, atol=1e-3)
    model.save_pretrained(tmp_path)
    again = heedful.load(tmp_path)
    assert again._heedful.mechanisms == conversion.mechanisms
    assert torch.equal(logits(again, ids), changed)
    conversion.revert()
    assert torch.equal(logits(model, ids), before)


def test_local_layers_beside_global_ones_generate_with_a_cache():
    model, ids = tiny(num_hidden_layers=4), tokens(2, 9)
    varied(model, {Standard(window=3): [0, 1, 3], "talking-heads": [2]})
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False}
    cached = model.generate(ids, **options)
    assert torch.equal(cached, model.generate(ids, use_cache=False, **options))
    whole = tiny(num_hidden_layers=4)
    assert not torch.allclose(logits(model, ids), logits(whole, ids), atol=1e-3)


WRONG = {
    "layers must have one mechanism each, got several for .1.": {"mta": [0, 1], "standard": [1]},
    "mechanism must name at least one mechanism with its layers": {},
    "mechanism must name each mechanism once": {"mta": [0], MultiToken(): [1]},
    r"layers must be among 0 to 2, got \[5\]": {"mta": [5]},
    "mechanism must be one of .* did you mean 'selective'": {"selectiv": [0]},
    "key heads must be even, got 1": {Differential(): [1]},
    "layers must name at least one layer": {TalkingHeads(): []},
}


def test_wrong_plans_leave_the_model_alone():
    model, ids = tiny(num_key_value_heads=1), tokens()
    before = logits(model, ids)
    for message, plan in WRONG.items():
        with pytest.raises(ValueError, match=message):
            heedful.convert(model, plan)
    assert torch.equal(logits(model, ids), before)
    with pytest.raises(ValueError, match="layers must be None where mechanism names the layers"):
        heedful.convert(model, {"mta": [0]}, layers=[0])


def test_layers_stand_alone_too():
    """The contract is all that a layer knows of a model."""
    module = Standard(window=2).build(HeadShape(4, 2, 8, 32, 0))
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    assert module(q, k, k).output.shape == q.shape
    assert module.maps(q, k).weights.shape == (1, 4, 5, 5)


@pytest.mark.parametrize(
    ("config", "shared"),
    [(MultiToken(conv_every=2), 1), (TalkingHeads(), 1), (Selective(), 1), (Differential(), 2)],
    ids=lambda x: type(x).__name__,
)
def test_a_look_shows_the_maps_that_made_the_output_and_what_was_learned(config, shared):
    model = tiny()
    heedful.convert(model, config)
    stir(model, 0.2)
    layers = {m.layer_idx: m.heedful for m in model.modules() if hasattr(m, "heedful")}
    values, outputs = {}, {}
    for index, layer in layers.items():

        def note(_, inputs, result, index=index):
            values[index], outputs[index] = inputs[2][0].float(), result.output[0].float()

        layer.register_forward_hook(note)
    for index, look in heedful.look(model, tokens(1, 9)).items():
        assert look.heads_per_map == shared
        assert len(look.weights) * shared == len(outputs[index])
        if shared == 1:  # differential attention norms its heads behind the map
            spread = values[index].repeat_interleave(len(look.weights) // len(values[index]), dim=0)
            torch.testing.assert_close(look.weights @ spread, outputs[index], rtol=1e-4, atol=1e-4)
        for name in ("conv", "post_conv", "mix", "post_mix"):
            own, reported = getattr(layers[index], name, None), getattr(look, name)
            assert (reported is None) == (own is None), name
            if own is not None:
                assert torch.equal(reported, own) and not reported.requires_grad
                assert reported.data_ptr() != own.data_ptr()
