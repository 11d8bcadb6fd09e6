"""Names of this study's models and policies in its tables."""

from pathlib import Path

from benchmarks.parts import read

RESULTS = Path(__file__).parent / "results"
STOCK, HIDE, EVICT = "smollm2", "adapters/smollm2-135m-hide", "adapters/smollm2-135m-evict"
ALWAYS = "runs/evict-r6"  # matrices that always act
AT_ONCE = "runs/after"  # those of the adapter that is kept, in full from the first eviction on
MODELS = {
    STOCK: "base",
    "gemma/gemma-3-270m.gguf": "base",
    "runs/gate": "gates trained",
    "runs/lora-only": "LoRA alone, from text",
    "runs/gate-window": "the same with gates and the memory loss",
    HIDE: "selectors",
    "runs/gemma-hide": "selectors",
    "runs/hide-s1": "selectors of seed 1",
    EVICT: "selectors + LoRA",
    AT_ONCE: "the same, in full from the first eviction on",
    "runs/evict-seed-1": "the same, seed 1",
    "runs/evict-seed-2": "the same, seed 2",
    "runs/hide-heads": "selectors",
    "runs/evict-heads-0": "selectors + LoRA",
    "runs/evict-heads-1": "the same, seed 1",
    "runs/evict-heads-2": "the same, seed 2",
    "runs/evict-heads-400-0": "selectors + LoRA",
    "runs/evict-heads-400-1": "the same, seed 1",
    "runs/evict-heads-400-2": "the same, seed 2",
    ALWAYS: "the same, LoRA that always acts",
    "runs/evict-r4": "the same, never without eviction, rank 4",
    "runs/evict-0": "the same, never without eviction, rank 8",
}
BY_LAYER = {
    "runs/hide-heads": HIDE,
    "runs/evict-heads-0": EVICT,
    "runs/evict-heads-1": "runs/evict-seed-1",
    "runs/evict-heads-2": "runs/evict-seed-2",
    "runs/evict-heads-400-0": EVICT,
    "runs/evict-heads-400-1": "runs/evict-seed-1",
    "runs/evict-heads-400-2": "runs/evict-seed-2",
}
"""The adapters whose copies have budgets of key heads; with 400, searched for so many tokens."""
FORMER = {"2026-11-26T12:40": "runs/evict-r4", "2026-11-26T21:03": ALWAYS}
"""What the folder of the last adapter had until when."""
GRADUAL = "2026-11-27T10:00"
"""When its matrices began to act by how much is evicted."""
POLICIES = {
    "own": "all tokens, transformers' own cache",
    "whole": "all tokens",
    "streaming-llm": "StreamingLLM",
    "tova": "TOVA",
    "snap-kv": "SnapKV",
    "h2o": "H2O",
    "random": "random",
    "window": "window",
    "triattention": "TriAttention",
    "lowest-gate": "LowestGate",
    "lowest-gate-recent": "LowestGate, half of them the newest",
    "most-hidden": "MostHidden",
    "by-layer": "MostHidden, per-layer budgets",
    "by-head": "MostHidden, per-head budgets",
    "tova-by-layer": "TOVA, the same budgets",
}


BF16_NBYTES = {
    "smollm2": lambda tokens: 2 * 30 * 2 * 3 * 64 * tokens,
    "gemma": lambda tokens: 2 * 2 * 256 * (3 * tokens + 15 * min(tokens, 511)),
}
"""Bytes of a full cache in bfloat16 without reserve: layers, keys and values, heads, channels. Of
Gemma's 18 layers 15 have a window of 512."""


def bf16_nbytes(record: dict) -> int:
    """Bytes of the base's full cache of the same tokens in bfloat16, without reserve."""
    family = "gemma" if "gemma" in record["model"] else "smollm2"
    return BF16_NBYTES[family](record["length"])


def read_study(name: str) -> list[dict]:
    """The records of a file, with the adapters that their models were."""
    records = read(RESULTS / f"{name}-cpu.jsonl")
    return [r | {"model": adapter_of(r)} if "model" in r else r for r in records]


def adapter_of(record: dict) -> str:
    """The adapter of a record, whatever folder it lay in at that time."""
    model, date = record["model"], record["environment"]["date"]
    if model == EVICT:
        model = next((x for until, x in FORMER.items() if date < until), EVICT)
    if model not in (EVICT, AT_ONCE):
        return model
    evicts = record.get("policy", record.get("cache") or "whole") != "whole"
    return AT_ONCE if evicts and date < GRADUAL else EVICT
