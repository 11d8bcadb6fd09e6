"""Report of what works on this machine or with a model, what does not, and why."""

import platform
import sys
from collections.abc import Callable
from typing import NamedTuple

from heedful.compatibility import TESTED, release
from heedful_lab.records.environment import installed, machine

_OPTIONAL = {
    "datasets": ("--data hf:NAME", "'heedful[data]'"),
    "peft": ("LoRA", "'heedful[lora]'"),
    "gguf": ("GGUF files", "'heedful[gguf]'"),
    "lm_eval": ("heedful eval's tasks of lm-evaluation-harness", "lm-eval"),
    "torchao": ("quantized models", "'heedful[quantized]'"),
}
# By default on the GPU where there is one; what only rewrites weights stays on the CPU.
_COMPUTING = "generate, eval, budget, inspect, train, compare, bench"
_REWRITING = "convert"


def examine(write: Callable[[str], None] = print) -> int:
    """Print one line per check; returns 0 if everything that heedful needs works, else 1."""
    sound = True
    write(f"heedful      {installed('heedful') or 'from source'}")
    write(f"python       {platform.python_version()} ({sys.executable})")
    for package in ("torch", "transformers"):
        version = installed(package)
        known = f"{version}{_tested(package, version)}" if version else None
        write(f"{package:<12} {known or f'missing: pip install {package}'}")
        sound &= version is not None and not _too_old(package, version)
    for package, (purpose, install) in _OPTIONAL.items():
        missing = f"missing, for {purpose}: pip install {install}"
        write(f"{package:<12} {installed(package) or missing}")
    if not sound:
        return 1
    write(f"machine      {machine()}")
    import torch

    if torch.cuda.is_available():
        write(f"device       cuda ({torch.cuda.get_device_name()})")
        write(f"commands     cuda: {_COMPUTING}; cpu: {_REWRITING}")
    else:
        write(f"device       cpu with {torch.get_num_threads()} threads: no CUDA device is visible")
        write(f"commands     cpu: {_COMPUTING}, {_REWRITING}")
    write(f"triton       {_triton()}")
    for name, check in (("operators", _operators), ("conversion", _conversion)):
        try:
            write(f"{name:<12} {check()}")
        except Exception as error:  # a doctor reports what is broken, whatever it is
            write(f"{name:<12} BROKEN: {type(error).__name__}: {error}")
            sound = False
    write(f"fused        {_fused()}")
    write("all works" if sound else "something is broken: see above")
    return 0 if sound else 1


def _tested(package: str, version: str) -> str:
    """With which versions of a package the tests run, and what that means for this one."""
    tested = TESTED.get(package)
    if tested is None:
        return ""
    status = f"heedful is tested with {', '.join(tested)}"
    if _too_old(package, version):
        return f" (too old: {status}; pip install '{package}>={tested[0]}')"
    if version.partition("+")[0] in tested:
        return f" ({status})"
    if package == "transformers" and release(version) > release(tested[-1]):
        return f" (untested: {status}; convert() proves of every model that it computes the same)"
    return f" (untested: {status})"


def _too_old(package: str, version: str) -> bool:
    """Test whether this version is too old for the integration."""
    oldest = TESTED[package][0] if package == "transformers" else version
    return release(version) < release(oldest)


def _triton() -> str:
    triton, numpy = installed("triton"), installed("numpy")
    if triton is None:
        return "not installed; only impl=fused needs it: pip install triton"
    if release(triton) < (3, 7) and release(numpy or "0.0") >= (2, 4):
        return (
            f"{triton}, whose interpreter (TRITON_INTERPRET=1) fails with NumPy {numpy}: take "
            "Triton 3.7 or NumPy below 2.4; kernels on a GPU are not affected"
        )
    return triton


def _operators() -> str:
    """The memory-linear forms against the reference, forward and backward, on this device."""
    import torch

    from heedful.ops import multi_token_attention, selective_attention

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, 100, 16, dtype=torch.float64, device=device) for _ in range(3))
    q.requires_grad_()
    conv = torch.randn(4, 6, 11, dtype=torch.float64, device=device)
    worst = 0.0
    for call in (
        lambda impl: multi_token_attention(q, k, v, conv=conv, post_conv=conv, impl=impl),
        lambda impl: selective_attention(q, k, v, impl=impl).output,
    ):
        results = []
        for impl in ("reference", "tiled", "composed"):
            out = call(impl)
            results.append((out, *torch.autograd.grad(out.square().sum(), q)))
        exact, *others = results
        errors = ((a - b).abs().max() for x in others for a, b in zip(x, exact, strict=True))
        worst = max(worst, *(error.item() for error in errors))
    if not worst < 1e-8:
        raise RuntimeError(f"tiled or composed differs from reference by {worst:.2g} in fp64")
    return f"tiled and composed equal reference in fp64 (largest difference {worst:.1g})"


def _fused() -> str:
    """Report whether the Triton kernels can be requested here, and what runs otherwise."""
    import torch

    from heedful.ops.impl import no_triton, runs_kernels

    x = torch.empty(0, device="cuda" if torch.cuda.is_available() else "cpu")
    reason, runs = no_triton(x), f"impl='auto' runs {'composed' if x.is_cuda else 'tiled'}"
    if reason is not None:
        return f"no: {reason.split(', and q')[0]}; {runs}"
    return "impl='auto' runs them" if runs_kernels(x.device) else f"can be requested; {runs}"


def _conversion() -> str:
    """A tiny model is converted, unchanged, and reverted."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from heedful.hf import convert

    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).double().eval()
    ids = torch.arange(20)[None]
    with torch.no_grad():
        before = model(ids).logits
        conversion = convert(model, "mta")
        change = (model(ids).logits - before).abs().max().item()
        conversion.revert()
        same = torch.equal(model(ids).logits, before)
    if not change < 1e-10 or not same:
        raise RuntimeError(f"a converted model's logits moved by {change:.2g}; reverted: {same}")
    return "a converted Llama keeps its logits, and reverts"


def examine_model(name: str, write: Callable[[str], None] = print) -> int:
    """Print a model's facts and which mechanisms fit it; no weights are read.

    Arguments:
        name: a folder, a name on the Hugging Face hub, or a configuration (FILE.json).
        write: gets each line.

    Returns:
        0 if any mechanism fits, else 1.

    Raises:
        ValueError: there is no such model.
    """
    import torch
    from transformers.utils import logging

    from heedful.hf.stock import stock_class
    from heedful_lab.commands.models import configuration_of
    from heedful_lab.rivals.table import TABLE

    logging.set_verbosity_error()
    config, mechanisms = configuration_of(name)

    def new_model():
        with torch.device("meta"):
            return stock_class(config).from_config(config, dtype=torch.float32)

    model = new_model()
    write(f"model        {name}: {config.model_type} ({type(model).__name__})")
    if mechanisms:
        write(f"converted    to {', '.join(mechanisms)}")
    text = config.get_text_config(decoder=True)
    write(f"parameters   {sum(p.numel() for p in model.parameters()):,}")
    write(f"vocabulary   {text.vocab_size:,} tokens")
    longest = getattr(text, "max_position_embeddings", None)
    write(f"positions    {f'{longest:,}' if longest else 'any number'}")
    rows = [(row.name, *_fit(new_model(), row.config)) for row in TABLE]
    if heads := next((facts.heads for _, facts, _ in rows if facts), None):
        write(f"attention    {heads}")
    if numbers := next((facts.cache for _, facts, _ in rows if facts), 0):
        write(f"KV cache     {numbers:,} numbers per token, so {2 * numbers:,} bytes in bfloat16")
    width = max(len(name) for name, *_ in rows) + 1
    for mechanism, facts, reason in rows:
        write(f"{mechanism:<{width}}{reason if facts is None else facts.about}")
    return 0 if any(facts for _, facts, _ in rows) else 1


class _Fit(NamedTuple):
    """Description of a mechanism in a model."""

    about: str
    heads: str
    cache: int


def _fit(model, config) -> tuple[_Fit | None, str]:
    """Describe a mechanism in a model on `meta`, or why it does not fit."""
    from heedful.hf.cache.places import kept_beside
    from heedful.nn import Layer
    from heedful_lab.rivals.models import convert

    try:
        conversion = convert(model, config, verify=False)  # on meta
    except ValueError as error:
        return None, f"does not fit: {error}"
    layers = [x for x in model.modules() if isinstance(x, Layer) and x.shape.role == "decoder"]
    layers = layers or [x for x in model.modules() if isinstance(x, Layer)]
    shapes = [layer.shape for layer in layers]
    own = sum(p.numel() for p in conversion.parameters().values())
    contents = ["keys and values", *dict.fromkeys(x for x in map(kept_beside, layers) if x)]
    cached = f"caches hold {', '.join(contents)}" if all(x.caches for x in layers) else "no cache"
    where = "" if conversion.where[config] == ("decoder",) else f" in {conversion.where[config]}"
    first = shapes[0]
    return _Fit(
        about=f"fits{where}: {own:,} parameters more; {cached}",
        heads=f"{len(layers)} layers of {first.heads} heads of {first.dim}, "
        f"{first.key_heads} key heads",
        cache=sum(2 * shape.key_heads * shape.dim for shape in shapes),
    ), ""
