"""Report of versions, devices and optional parts on this machine, or of what fits a model."""

import platform
import sys
from collections.abc import Callable
from typing import NamedTuple

from heedful.compatibility import TESTED, release
from heedful_lab.records.environment import installed, machine

_OPTIONAL = {
    "triton": ("impl=fused", "triton"),
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
    """Print one line per part; returns 0 if everything that heedful needs is there, else 1."""
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
    return 0


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
