"""Converted models under torch.compile and torch.export, run by test_compile_models.py.

In a process of its own: the shape checks that the other tests install cannot be compiled. Each
check prints one line of JSON.
"""

import json
import sys
import traceback

import torch
from torch._dynamo.utils import counters

import heedful
from heedful.hf.versions import cache_of
from heedful.nn import MultiToken, Selective
from helpers import encoder_families
from helpers.families import tiny, tokens, varied

MECHANISMS = {
    "standard": "standard",
    "mta": MultiToken(conv_every=1),
    "selective": Selective(),
    "differential": "differential",
}
LENGTHS = (11, 17, 9)


def converted(name: str, family: str = "mistral"):
    kinds = {"layer_types": ["sliding_attention", "full_attention"]} if family == "gemma2" else {}
    return varied(tiny(family, num_hidden_layers=2, **kinds), MECHANISMS[name], 0.1)


def calls(ids: torch.Tensor) -> dict[str, dict]:
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    tokens = ids.shape[1]
    packed = torch.cat([torch.arange(5), torch.arange(tokens - 5)])[None].expand(2, -1)
    return {
        "plain": {},
        "padded": {"attention_mask": mask},
        "packed": {"position_ids": packed},
        "packed with a mask": {"position_ids": packed, "attention_mask": torch.ones_like(ids)},
    }


@torch.no_grad()
def check(name: str, way: str, use_cache: bool, family: str = "mistral") -> None:
    """The eager logits at every length, from two graphs: one fixed, one for all lengths."""
    torch._dynamo.reset()
    counters.clear()
    model = converted(name, family)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for length in LENGTHS:
        ids = tokens(2, length)
        options = calls(ids)[way]
        actual = compiled(input_ids=ids, use_cache=use_cache, **options).logits
        expected = model(input_ids=ids, use_cache=use_cache, **options).logits
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-11)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs == 2, f"{graphs} graphs for {len(LENGTHS)} lengths"


@torch.no_grad()
def two_rows(family: str) -> None:
    """One graph for the logits of an encoder-decoder, or of an encoder."""
    torch._dynamo.reset()
    model = varied(encoder_families.tiny(family), MECHANISMS["mta"], 0.1)
    ids, target = tokens(2, 11), {}
    if model.config.is_encoder_decoder:
        target = {"decoder_input_ids": tokens(2, 7), "use_cache": False}
    mask = calls(ids)["padded"]
    expected = model(input_ids=ids, **mask, **target).logits
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    actual = compiled(input_ids=ids, **mask, **target).logits
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-11)


def refused_when_it_runs() -> None:
    """What eager mode refuses for its values, a compiled model refuses when it runs."""
    torch._dynamo.reset()
    model = converted("standard")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    cache = cache_of(compiled(input_ids=tokens(1, 4)))  # a stock one: ours breaks graphs
    again = torch.tensor([[0, 1]])
    try:
        compiled(input_ids=tokens(1, 2), position_ids=again, cache=cache)
    except RuntimeError as error:
        assert "position_ids start again" in str(error), error
    else:
        raise AssertionError("a restart in a filled cache was served")


def memory_loss() -> None:
    """The term and its gradients, put on before the first call or after it."""
    for after_a_call in (False, True):
        torch._dynamo.reset()
        model = converted("selective").train()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        if after_a_call:
            compiled(input_ids=tokens(), **calls(tokens())["padded"])
        memory, moved = heedful.MemoryLoss(model), 0.0
        for length in LENGTHS:
            ids, actual = tokens(2, length), []
            for run in (model, compiled):
                run(input_ids=ids, **calls(ids)["padded"])
                term = memory()
                gradient = torch.autograd.grad(term, model.get_input_embeddings().weight)[0]
                actual.append((term.detach(), gradient))
            torch.testing.assert_close(actual[1], actual[0], rtol=1e-11, atol=1e-11)
            moved += actual[1][1].abs().sum().item()
        assert moved > 0, "the term had no gradient at any length"


CHECKS = {
    "standard": (check, "standard", "plain", False),
    "standard with a cache": (check, "standard", "plain", True),
    "standard, packed with a mask and a cache": (check, "standard", "packed with a mask", True),
    "multi-token, packed": (check, "mta", "packed", False),
    "selective, padded": (check, "selective", "padded", False),
    "memory loss": (memory_loss,),
    "differential, padded with a cache": (check, "differential", "padded", True),
    "multi-token with a soft cap, padded": (check, "mta", "padded", False, "gemma2"),
    "T5, padded": (two_rows, "t5"),
    "BART, padded": (two_rows, "bart"),
    "windows to both sides, padded": (two_rows, "modernbert"),
    "refused when it runs": (refused_when_it_runs,),
}


def main() -> None:
    for name, (run, *arguments) in CHECKS.items():
        torch.manual_seed(0)
        try:
            run(*arguments)
            problem = None
        except Exception:  # every check is told, whatever became of the others
            problem = traceback.format_exc()
        print(json.dumps({"check": name, "problem": problem}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
