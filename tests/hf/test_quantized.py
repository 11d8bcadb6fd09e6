"""Models whose base is quantized: the mechanism beside it stays in fp32, and learns."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

import heedful
from heedful.nn import MultiToken, Selective
from helpers.families import logits, tiny, tokens, varied

MECHANISMS = {
    "mta": MultiToken(conv_every=1),
    "mta-published": MultiToken.published(),
    "selective": Selective("extra"),
}
each = pytest.mark.parametrize("name", MECHANISMS)


def torchao():
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


def four_bits():
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)


# By the package that they need; a kind is left out where it is not installed.
KINDS = {"torchao": torchao, "bitsandbytes": four_bits}
every = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            make,
            id=package,
            marks=pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not here"),
        )
        for package, make in KINDS.items()
    ],
)


def plain():
    return tiny(dtype=torch.float32, hidden_size=64, intermediate_size=64)


def quantized(model) -> list[torch.nn.Linear]:
    """The projections, which are quantized; no layer of the mechanism is among them."""
    actual = [m for n, m in model.named_modules() if n.endswith(("q_proj", "o_proj", "up_proj"))]
    for module in actual:
        weight = module.weight
        assert type(weight.data) is not torch.Tensor or weight.dtype != torch.float32
    return actual


def assert_fp32(model) -> None:
    own = model._heedful.parameters().values()
    assert own and all(type(p.data) is torch.Tensor and p.dtype == torch.float32 for p in own)


@every
@each
def test_a_quantized_base_is_converted(kind, name, tmp_path):
    """Unchanged where the mechanism starts so, and taken back."""
    plain().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=kind())
    ids = tokens()
    before = logits(model, ids)
    heedful.convert(model, MECHANISMS[name])
    assert len(quantized(model)) == 9
    assert_fp32(model)
    if name != "mta-published":
        torch.testing.assert_close(logits(model, ids), before, rtol=1e-5, atol=1e-5)
    heedful.revert(model)
    assert torch.equal(logits(model, ids), before)


@every
@each
def test_the_mechanism_learns_on_a_quantized_base(kind, name, tmp_path):
    plain().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=kind())
    heedful.convert(model, MECHANISMS[name])
    own, ids = model._heedful.parameters(), tokens()
    before = {n: p.detach().clone() for n, p in own.items()}
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for parameter in own.values():
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(own.values(), lr=1e-2)
    # No call in eval mode before: bitsandbytes packs its weights in one, and then has no gradients.
    model.train()
    for _ in range(2):  # the extra head's queries move once its keys, zero at first, have moved
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_fp32(model)
    assert all(not torch.equal(p, before[n]) for n, p in own.items())


@every
@each
def test_a_converted_folder_is_quantized_while_it_loads(kind, name, tmp_path):
    """But for the mechanism, bit for bit; and so it is saved and loaded again, and generates."""
    model, ids = plain(), tokens()
    varied(model, MECHANISMS[name], 0.1)
    model.save_pretrained(tmp_path / "whole")
    small = heedful.load(tmp_path / "whole", quantization_config=kind())
    assert len(quantized(small)) == 9
    assert_fp32(small)
    own = small._heedful.parameters()
    assert all(torch.equal(p, own[n]) for n, p in model._heedful.parameters().items())
    options = {"max_new_tokens": 5, "do_sample": False}
    actual = (small.generate(ids, use_cache=cache, **options) for cache in (True, False))
    assert torch.equal(*actual)
    small.save_pretrained(tmp_path / "small")
    again = heedful.load(tmp_path / "small")
    assert len(quantized(again)) == 9
    assert_fp32(again)
    assert torch.equal(logits(again, ids), logits(small, ids))


@every
def test_an_adapter_on_a_quantized_base(kind, tmp_path):
    peft = pytest.importorskip("peft")
    model, ids = plain(), tokens()
    heedful.convert(model, MECHANISMS["mta-published"])
    model.save_pretrained(tmp_path / "base")

    def base():
        return heedful.load(tmp_path / "base", quantization_config=kind())

    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted = heedful.get_peft_model(base(), lora).train()
    trained = {n: p for n, p in adapted.named_parameters() if p.requires_grad}
    assert {p.dtype for p in trained.values()} == {torch.float32}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    for _ in range(2):
        adapted(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        assert all(p.grad is not None for p in trained.values())
        optimizer.step()
        optimizer.zero_grad()
    adapted.eval().save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(base(), tmp_path / "adapter").eval()
    assert torch.equal(logits(again, ids), logits(adapted, ids))


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not here")
def test_a_filter_keeps_torchao_off_the_mechanism():
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    def not_ours(module: torch.nn.Module, name: str) -> bool:
        return isinstance(module, torch.nn.Linear) and ".heedful." not in name

    for skips, filtered in ((True, {"filter_fn": not_ours}), (False, {})):
        model = plain()
        heedful.convert(model, MECHANISMS["selective"])
        quantize_(model, Int8WeightOnlyConfig(), **filtered)
        assert len(quantized(model)) == 9
        own = model._heedful.parameters().values()
        assert all(type(p.data) is torch.Tensor for p in own) is skips


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torchao") is not None, reason="the tests above have run")
def test_torchao_where_it_is_not_installed(tmp_path):
    """The tests above with torchao beside the environment: in it, it slows every import."""
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", tmp_path]
    subprocess.run([*install, "torchao>=0.18"], check=True, capture_output=True)
    process = subprocess.run(
        [sys.executable, "-m", "pytest", __file__, "-k", "torchao and not installed"],
        env=os.environ
        | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0 and "skipped" not in process.stdout, process.stdout[-3000:]
