"""Try `convert` on every causal model type of transformers; writes or checks `docs/models.md`.

Every type is built with random weights from a small configuration, with short windows and chunks
where its configuration knows them. Converted to `standard`, its logits must be those of the
unconverted model in every way of calling it; packed documents must be those of separate sequences,
also where the unconverted model mixes them. Converted to `mta` or to selective attention with an
extra selector, which start as the identity, the logits must be unchanged too.

A type that is not supported says why. A logit that differs, or a traceback, makes a type wrong,
and the exit status 1.

    python docs/models.py [--check] [TYPE ...]
"""

import argparse
import copy
import inspect
import math
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from difflib import unified_diff
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import heedful
from heedful.hf.converted_model import caches
from heedful.hf.versions import cache_argument, cache_of

PAGE = Path(__file__).with_suffix(".md")
LARGEST = 50_000_000  # parameters: above, the small configuration did not reach the whole model
# Some families compute parts in fp32 also in fp64; a token too many moves these logits by 0.1.
EXACT = {torch.float64: 1e-5, torch.float32: 1e-3}
IDENTITIES = {"selective": heedful.Selective(selector="extra")}  # the published form is none
TOKENS = 17
LAYERS = 3

OUTCOMES = ("supported", "not supported", "not tried", "wrong")
WHOLE = "Supported without a note: "
INTRODUCTION = """# Model types

The results of `heedful.convert` for the {types} causal model types of transformers {version}: {counts}. Every type is built with random weights from a small configuration and gets only text, also where it takes images.

- **Supported**: converted to `standard`, the model has the same logits as before without a mask, with an all-ones mask, with padding on either side, in training mode, in cached steps and in `generate`. Packed documents have the logits of separate sequences, with and without a cache or a mask. Converted to `mta` and to `Selective(selector="extra")`, which start as the identity, the logits are unchanged too. A note names what is left out.
- **Not supported**: `convert` (or the first call) raises a `ValueError` with the reason in the note.
- **Not tried**: no small configuration builds the model.

```sh
python docs/models.py --check
python docs/models.py llama qwen3_next
```

The first command tries all types again and compares (about half an hour of one core); without `--check` it writes this page.
"""  # noqa: E501

SMALL = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "emb_dim"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "intermediate_size_mlp", "ffn_hidden_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth"), LAYERS),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_sequence_length"), 64),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "n_words"), 64),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 2),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "n_group", "topk_group"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "chunk_size"), 6),
    "mamba_chunk_size": 6,
    **dict.fromkeys(("attention_dropout", "attn_pdrop", "hidden_dropout", "resid_pdrop"), 0.0),
    **dict.fromkeys(("embd_pdrop", "dropout", "activation_dropout", "layerdrop"), 0.0),
    **dict.fromkeys(("residual_dropout", "embedding_dropout", "classifier_dropout"), 0.0),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    "num_key_value_heads": 2,
    "image_size": 28,
    "out_hidden_size": 32,
    "rotary_dim": 8,
    "expert_ffn_hidden_size": 16,
    "encoder_hash_byte_group_vocab": 64,
    "max_window_layers": 1,
    "use_sliding_window": True,
    "is_decoder": True,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}

# What a type needs beside that.
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
_INDEXER = {
    **{"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16},
    **{"indexer_budget": 8, "indexer_compress_ratio": 2},
}
FIXES: dict[str, dict] = {
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    "bailing_hybrid": {"num_expert_group": 1},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "dots3_note": {
        "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "dots1": {"n_shared_experts": 1},
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]], "window_size": 6},
    "granitemoehybrid": _MAMBA | {"layer_types": ["mamba", "attention", "mamba"]},
    "helium": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "jetmoe": {"num_experts_per_tok": 2, "kv_channels": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "mamba2": {"n_groups": 1},
    "mpt": {"attn_config": {"attn_pdrop": 0}},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "reformer": {"axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
        "num_mem_blocks": 1,
    },
}
# Whose code does not run in fp64, or takes its softmax in fp32, where the masks of fp64 overflow.
FP32 = ("gemma2", "granite_swa", "granitemoe_swa", "inkling2_text", "vaultgemma", "xglm")


class Differs(Exception):
    """A converted model's logits are not those that they must be."""


def small(kind_of: type[PreTrainedConfig], **fixes: object) -> PreTrainedConfig:
    """A configuration with everything small, also in the configurations inside.

    Where layers differ, those that remain are of each kind in turn.
    """
    default = kind_of()
    values = {name: value for name, value in SMALL.items() if name in default.to_dict()}
    for name in kind_of.sub_configs:
        inside = getattr(default, name)
        if isinstance(inside, PreTrainedConfig):
            values[name] = small(type(inside), **fixes.pop(name, {}))
    if "kv_lora_rank" in values:
        values["num_key_value_heads"] = values["num_attention_heads"]
    for name in ("layer_types", "mlp_layer_types"):
        kinds = list(dict.fromkeys(default.to_dict().get(name) or []))
        if len(kinds) > 1:
            values[name] = (kinds * LAYERS)[:LAYERS]
    return kind_of(**values | fixes)


def tiny(kind: str) -> PreTrainedModel:
    """A small random model of a type, in fp64 and eval mode."""
    config = small(CONFIG_MAPPING[kind], **copy.deepcopy(FIXES.get(kind, {})))
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"its configuration has parts that stay large ({size / 1e6:,.0f} M)")
    experts = {"experts_implementation": "eager"}  # fused ones know no fp64
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), **experts).eval()
    model = model if kind in FP32 else model.double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model


def ways(model: PreTrainedModel, ids: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Logits of the real tokens in each way of calling a model."""
    ones = torch.ones_like(ids)
    left, right = ones.clone(), ones.clone()
    left[1, :5], right[1, -5:] = 0, 0

    def logits_of(mask: Tensor | None, **options: object) -> Tensor:
        out = model(input_ids=ids, attention_mask=mask, **options).logits
        return out if mask is None else out[mask.bool()]

    def in_steps() -> Tensor:
        cache, position, parts = None, 0, []
        for piece in ids.split([5, 1, 3, 1, 7], dim=1):
            position += piece.shape[1]
            mask = left[:, :position]
            options = {"attention_mask": mask, "use_cache": True} | cache_argument(model, cache)
            if takes_positions(model):
                positions = (mask.cumsum(1) - 1).clamp(min=0)
                options["position_ids"] = positions[:, -piece.shape[1] :]
            out = model(input_ids=piece, **options)
            cache = cache_of(out)
            parts.append(out.logits)
        return torch.cat(parts, 1)[left.bool()]

    def generated(cache: bool) -> Tensor:
        masked = ids.where(left.bool(), 0)
        return model.generate(
            masked, attention_mask=left, max_new_tokens=4, do_sample=False, use_cache=cache
        )

    def trained() -> Tensor:
        model.train()
        try:
            return logits_of(left, use_cache=False)
        finally:
            model.eval()

    return {
        "no mask": lambda: logits_of(None),
        "all-ones mask": lambda: logits_of(ones),
        "left padding": lambda: logits_of(left),
        "right padding": lambda: logits_of(right),
        "training": trained,
        "cached steps": in_steps,
        "generate": lambda: generated(True),
        "generate without a cache": lambda: generated(False),
    }


def packed(model: PreTrainedModel, ids: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Logits of two documents of 7 and 10 tokens in one sequence, in each way of calling it."""
    positions = torch.cat([torch.arange(7), torch.arange(10)])[None]

    def logits_of(**options: object) -> Tensor:
        return model(input_ids=ids[:1], position_ids=positions, **options).logits

    return {
        f"packed, {'with' if cache else 'no'} cache, {'no' if mask is None else 'all-ones'} mask": (
            partial(logits_of, use_cache=cache, attention_mask=mask)
        )
        for cache in (False, True)
        for mask in (None, torch.ones_like(ids[:1]))
    }


def apart(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits of the same documents, each as a sequence of its own."""
    parts = []
    for document in ids[:1].split([7, 10], dim=1):
        positions = torch.arange(document.shape[1])[None]  # some families do not start at 0
        out = model(input_ids=document, position_ids=positions, use_cache=False)
        parts.append(out.logits)
    return torch.cat(parts, 1)


def takes_positions(model: PreTrainedModel) -> bool:
    return "position_ids" in inspect.signature(model.forward).parameters


class Row(NamedTuple):
    """Outcome of a type: supported, not supported, not tried or wrong; and why, or its limits."""

    kind: str
    outcome: str
    note: str


@torch.no_grad()
def attempt(kind: str) -> Row:
    torch.manual_seed(0)
    try:
        model = tiny(kind)
        ids = torch.randint(3, 64, (2, TOKENS))
        model(input_ids=ids)
    except Exception as error:  # whatever keeps a stranger's model from being built
        return Row(kind, "not tried", clause(error))
    expected, cannot = {}, []
    for name, way in ways(model, ids).items():
        try:
            expected[name] = way()
        except Exception:  # what the model itself cannot do is not compared
            cannot.append(name)
    if takes_positions(model):
        expected |= dict.fromkeys(packed(model, ids), apart(model, ids))
    else:
        cannot.append("packed documents (it takes no positions)")
    refusals, notes = {}, []
    for mechanism in ("standard", "mta", "selective"):
        try:
            conversion = heedful.convert(model, IDENTITIES.get(mechanism, mechanism))
        except ValueError as error:
            return Row(kind, "not supported", clause(error))
        except Exception as error:
            return Row(kind, "wrong", f"convert: {problem(error)}")
        try:
            refused = compare(model, ids, expected)
        except Exception as error:  # a difference, or a traceback: both must be seen
            return Row(kind, "wrong", f"{mechanism}: {problem(error)}")
        finally:
            conversion.revert()
        only = "" if mechanism == "standard" else f"{mechanism}: "
        if len(refused) == len(expected):
            return Row(kind, "not supported", only + next(iter(refused.values())))
        more = {name: why for name, why in refused.items() if refusals.get(name) != why}
        refusals |= refused
        notes += [only + note for note in partly(more)]
    if cannot:
        notes.append(f"the unconverted model cannot: {', '.join(cannot)}")
    return Row(kind, "supported", "; ".join(notes))


def compare(model: PreTrainedModel, ids: Tensor, expected: dict[str, Tensor]) -> dict[str, str]:
    """Reasons why ways of calling a converted model raise; raises where logits differ."""
    cache, refused = caches(model), {}
    for name, way in (ways(model, ids) | packed(model, ids)).items():
        if name not in expected:
            continue
        try:
            logits = way()
        except ValueError as error:
            refused[name] = clause(error)
            continue
        if name == "generate" and not cache:
            name = "generate without a cache"  # for some families that is not the same
        before = expected[name]
        largest = EXACT[model.dtype]
        error = (logits - before).abs().max() if logits.shape == before.shape else math.inf
        if not error < largest:
            raise Differs(f"{name}: the largest difference is {error:.2g}")
    return refused


def partly(refused: dict[str, str]) -> list[str]:
    """Limits of a supported type, in short, one text for each reason."""
    notes = []
    for why in dict.fromkeys(refused.values()):
        names = [name for name in refused if refused[name] == why]
        if sum(name.startswith("packed") for name in names) == 4:
            names = [name for name in names if not name.startswith("packed")]
            names.append("packed documents")
        notes.append(f"but {', '.join(names)} not supported: {why}")
    return notes


def clause(error: Exception) -> str:
    """The reason in a message, without what stands around it."""
    message = " ".join(str(error).split()) or type(error).__name__
    for before in (" does not fit because ", " cannot be converted: ", " start again, and "):
        message = message.partition(before)[2] or message
    return re.split(r"[;:] |\. ", message)[0][:160]


def problem(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]


def page(rows: list[Row]) -> str:
    """The text of `docs/models.md`."""
    introduction = INTRODUCTION.format(
        version=transformers.__version__, types=len(rows), counts=counts(rows)
    )
    return "\n".join([introduction, *listing(rows)]) + "\n"


def counts(rows: list[Row]) -> str:
    """How many types have each outcome."""
    count = Counter(row.outcome for row in rows)
    return ", ".join(f"{count[name]} {name}" for name in OUTCOMES if count[name])


def listing(rows: list[Row]) -> list[str]:
    """A paragraph of the types supported without a note, and a table with one row for each note."""
    together: dict[tuple[str, str], list[str]] = {}
    for row in sorted(rows, key=lambda row: (OUTCOMES.index(row.outcome), row.kind)):
        together.setdefault((row.outcome, row.note), []).append(f"`{row.kind}`")
    whole = together.pop(("supported", ""), [])
    lines = [f"{WHOLE}{', '.join(whole)}.", ""] if whole else []
    lines += ["| types | outcome | note |", "|---|---|---|"]
    for (outcome, note), kinds in together.items():
        note = note.replace("|", r"\|")
        lines.append(f"| {', '.join(kinds)} | {outcome} | {note} |")
    return lines


def rows_of(text: str) -> dict[str, Row]:
    """The rows of the page by type."""
    rows = []
    for line in text.splitlines():
        if line.startswith(WHOLE):
            rows += [Row(kind, "supported", "") for kind in re.findall("`([^`]+)`", line)]
        elif match := re.fullmatch(r"\| (`[^|]+`) \| ([a-z ]+) \| (.*) \|", line):
            rows += [Row(kind, match[2], match[3]) for kind in re.findall("`([^`]+)`", match[1])]
    return {row.kind: row for row in rows}


def run(
    path: Path,
    kinds: list[str],
    attempt: Callable[[str], Row],
    page: Callable[[dict[str, Row]], str],
) -> int:
    """The command of a page of model types: try them, print a line each, write or check it."""
    parser = argparse.ArgumentParser(description=f"Writes {path.name}: what becomes of model types")
    parser.add_argument("--check", action="store_true", help="compare with the page, write nothing")
    parser.add_argument("types", nargs="*", help="only these, printed and not written")
    options = parser.parse_args()
    if unknown := sorted(set(options.types) - set(kinds)):
        parser.error(f"no such types of transformers: {', '.join(unknown)}")
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    rows: dict[str, Row] = {}
    for kind in options.types or kinds:
        rows[kind] = attempt(kind)
        print(" | ".join(rows[kind]), flush=True)
    wrong = [kind for kind, row in rows.items() if row.outcome == "wrong"]
    if wrong:
        print(f"wrong: {', '.join(wrong)}", file=sys.stderr)
    if options.types:
        return 1 if wrong else 0
    text = page(rows)
    if not options.check:
        path.write_text(text)
    elif text != path.read_text():
        before = path.read_text().splitlines()
        print(*unified_diff(before, text.splitlines(), "page", "now", lineterm="", n=0), sep="\n")
        print(f"{path} is not what comes out now: write it anew", file=sys.stderr)
        return 1
    return 1 if wrong else 0


if __name__ == "__main__":
    kinds = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    sys.exit(run(PAGE, kinds, attempt, lambda rows: page([*rows.values()])))
