"""What works on this machine, what does not, and why."""

import platform
import sys
from collections.abc import Callable

from heedful.records.environment import installed, machine

TESTED = {"torch": "2.13.0", "transformers": "5.23.0"}  # what the test suite runs with


def examine(write: Callable[[str], None] = print) -> int:
    """Print one line per check; returns 0 if everything that heedful needs works, else 1."""
    sound = True
    write(f"heedful      {installed('heedful') or 'from source'}")
    write(f"python       {platform.python_version()} ({sys.executable})")
    for package, needed in (("torch", True), ("transformers", True), ("datasets", False)):
        version = installed(package)
        reason = f"pip install {package}" if needed else "only needed for --data hf:NAME"
        found = f"{version}{_untested(package, version)}" if version else f"missing: {reason}"
        write(f"{package:<12} {found}")
        sound &= version is not None or not needed
    if not sound:
        return 1
    write(f"machine      {machine()}")
    import torch

    if torch.cuda.is_available():
        write(f"device       cuda ({torch.cuda.get_device_name()}); compare uses it")
    else:
        write(f"device       cpu with {torch.get_num_threads()} threads: no CUDA device is seen")
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


def _untested(package: str, version: str) -> str:
    """What to know of a version other than the one that the tests run with."""
    tested = TESTED.get(package)
    if tested is None or version.partition("+")[0] == tested:
        return ""
    return f" (heedful is tested with {tested}; other versions are untested)"


def _triton() -> str:
    triton, numpy = installed("triton"), installed("numpy")
    if triton is None:
        return "not installed; only impl=fused needs it"
    if _release(triton) < (3, 7) and _release(numpy or "0.0") >= (2, 4):
        return (
            f"{triton}, whose interpreter (TRITON_INTERPRET=1) fails with NumPy {numpy}: take "
            "Triton 3.7 or NumPy below 2.4; kernels on a GPU are not affected"
        )
    return triton


def _release(version: str) -> tuple[int, ...]:
    """Major and minor number."""
    return tuple(map(int, version.split(".")[:2]))


def _operators() -> str:
    """Tiled against reference, forward and backward, on this machine's device."""
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
        made = []
        for impl in ("reference", "tiled"):
            out = call(impl)
            made.append((out, *torch.autograd.grad(out.square().sum(), q)))
        worst = max(worst, *((a - b).abs().max().item() for a, b in zip(*made, strict=True)))
    if not worst < 1e-8:
        raise RuntimeError(f"tiled differs from reference by {worst:.2g} in fp64")
    return f"tiled equals reference in fp64 (largest difference {worst:.1g})"


def _fused() -> str:
    """Whether the Triton kernels can be asked for here, and what runs otherwise."""
    import torch

    from heedful.ops.impl import UNTRIED, no_triton

    device = "cuda" if torch.cuda.is_available() else "cpu"
    reason = no_triton(torch.empty(0, device=device))
    if reason is not None:
        return f"no: {reason.split(', and q')[0]}; impl='auto' runs tiled"
    return f"can be asked for, impl='auto' runs tiled: {UNTRIED}"


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
