"""Static caches that evict, under torch.compile, run by tests/hf/evicting/test_static.py.

In a process of its own: the shape checks that the other tests install cannot be compiled. Each
check prints one line of JSON. The argument names the backend.
"""

import json
import sys
import traceback

import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from transformers import CompileConfig

import heedful
from heedful.eviction import KeyDiff, Knorm, MostHidden, Random, StreamingLLM, Window
from heedful.hf.versions import cache_argument, generate_argument
from helpers.families import exactly, ragged_mask, tiny, tokens
from helpers.unconverted import beside

STEPS = 60
PROMPTS = (30, 12)  # one that fills a budget of 24 tokens, one that does not


def model_for(family: str, policy: type):
    model = tiny(family, max_position_embeddings=256)
    return beside(model) if policy is MostHidden else model


@torch.no_grad()
def decode(model, cache, ids, mask, prompt, step=None):
    """The logits, and what is cached after each call; a static cache knows the prompt's padding."""
    named, parts, kept = cache_argument(model, cache), [], []
    for first, last in [(0, prompt), *((t, t + 1) for t in range(prompt, prompt + STEPS))]:
        known = mask is None or (step is not None and first)
        own = None if known else mask[:, :last]
        call = model if step is None or not first else step
        with exactly():
            out = call(ids[:, first:last].contiguous(), attention_mask=own, use_cache=True, **named)
        parts.append(out.logits)
        kept.append([x.clone() for x in cache.positions()])
    return torch.cat(parts, dim=1), kept


def check_loop(
    backend, family, policy, slack=0, ragged=False, attention="sdpa", dtype=None
) -> None:
    """One graph for two lengths of a prompt and all steps, with the eager cache's tokens."""
    model = model_for(family, policy)
    model.set_attn_implementation(attention)
    count = CompileCounterWithBackend(backend)
    step = torch.compile(model, fullgraph=True, backend=count)
    for prompt in PROMPTS:
        ids = tokens(2, prompt + STEPS)
        mask = ragged_mask(*ids.shape) if ragged else None
        results = []
        for static in (False, True):
            cache = heedful.new_cache(
                model, policy(tokens=24), slack=slack, static=static, dtype=dtype
            )
            results.append(decode(model, cache, ids, mask, prompt, step if static else None))
        (expected, own), (actual, other) = results
        real = slice(None) if mask is None else mask.bool()
        # Norms and rotations are in fp32, which inductor rounds otherwise: without any cache the
        # logits of this model differ by 4e-6.
        tolerance = 2e-5 if backend == "inductor" else 1e-10
        torch.testing.assert_close(actual[real], expected[real], rtol=0, atol=tolerance)
        assert cache.get_seq_length() == prompt + STEPS
        for these, those in zip(own, other, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(these, those, strict=True))
    check_one_graph(backend, count)


@torch.no_grad()
def check_generate(backend, policy) -> None:
    """One graph for two prompts, one of them padded; tokens and positions of the eager cache."""
    model, count = model_for("llama", policy), CompileCounterWithBackend(backend)
    model.generation_config.compile_config = None
    how = CompileConfig(fullgraph=True, backend=Backend(count), mode=None)
    how._compile_all_devices = True  # generate compiles on GPUs alone by default
    for prompt in PROMPTS:
        ids, mask = tokens(2, prompt), ragged_mask(2, prompt)
        options = {"attention_mask": mask, "max_new_tokens": STEPS, "do_sample": False}
        caches = [heedful.new_cache(model, policy(tokens=24), static=x) for x in (False, True)]
        expected = model.generate(ids, **options, **generate_argument(caches[0]))
        actual = model.generate(ids, **options, compile_config=how, **generate_argument(caches[1]))
        assert torch.equal(actual, expected)
        for own, other in zip(*(x.positions() for x in caches), strict=True):
            assert torch.equal(own, other)
    check_one_graph(backend, count)


def check_one_graph(backend: str, count: CompileCounterWithBackend) -> None:
    """Raise unless one graph was made; it may be compiled twice.

    AOTAutograd puts the floats of Gemma's graph into tensors and begins again, with any cache.
    """
    graphs = counters["stats"]["unique_graphs"]
    assert graphs == 1, f"{graphs} graphs"
    assert backend != "eager" or count.frame_count == 1, f"{count.frame_count} frames"


class Backend:
    """A backend that stays one object where a configuration is copied, and equals itself alone."""

    def __init__(self, backend) -> None:
        self.backend = backend

    def __call__(self, *arguments):
        return self.backend(*arguments)

    def __deepcopy__(self, memo: dict) -> "Backend":
        return self


CHECKS = {
    "StreamingLLM": (check_loop, "llama", StreamingLLM),
    "StreamingLLM with slack, padded": (check_loop, "llama", StreamingLLM, 8, True),
    "Window with slack": (check_loop, "llama", Window, 8),
    "Random, padded": (check_loop, "llama", Random, 0, True),
    "KeyDiff, padded": (check_loop, "llama", KeyDiff, 0, True),
    "KeyDiff with slack": (check_loop, "llama", KeyDiff, 8),
    "Knorm with slack, padded": (check_loop, "llama", Knorm, 8, True),
    "MostHidden": (check_loop, "llama", MostHidden),
    "MostHidden with slack, padded": (check_loop, "llama", MostHidden, 8, True),
    "windows": (check_loop, "gemma3_text", StreamingLLM, 0, True),
    "windows, KeyDiff with slack, eager attention": (
        check_loop, "gemma3_text", KeyDiff, 8, True, "eager",
    ),
    "KeyDiff, int8": (check_loop, "llama", KeyDiff, 0, False, "sdpa", torch.int8),
    "generate, StreamingLLM": (check_generate, StreamingLLM),
    "generate, MostHidden": (check_generate, MostHidden),
}  # fmt: skip
INDUCTOR = ("StreamingLLM", "MostHidden with slack, padded", "windows", "KeyDiff, int8",
            "generate, StreamingLLM")  # fmt: skip


def main() -> None:
    torch._dynamo.config.error_on_recompile = True
    backend = sys.argv[1]
    for name, (run, *arguments) in CHECKS.items():
        if backend == "inductor" and name not in INDUCTOR:
            continue
        if len(sys.argv) > 2 and name not in sys.argv[2:]:
            continue
        torch.manual_seed(0)
        torch._dynamo.reset()
        counters.clear()
        try:
            run(backend, *arguments)
            problem = None
        except Exception:  # every check is told, whatever became of the others
            problem = traceback.format_exc()
        print(json.dumps({"check": name, "problem": problem}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
