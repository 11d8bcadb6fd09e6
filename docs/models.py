"""Try `convert` on every causal model type of transformers; writes or checks `docs/models.md`.

Every type is built with random weights from a small configuration, with short windows and chunks
where its configuration knows them. Converted to `standard`, its logits must be those of the
unconverted model in every way of calling it; packed documents must be those of separate rows,
also where the unconverted model mixes them. Converted to `mta`, which starts as the identity, the
logits must be unchanged too.

    python docs/models.py [--check] [TYPE ...]
"""

import argparse
import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import heedful

PAGE = Path(__file__).with_suffix(".md")
LARGEST = 50_000_000  # parameters: above, the small configuration did not reach the whole model
EXACT = 1e-5  # some families compute parts in fp32; a token too many moves these logits by 0.1
TOKENS = 17

SMALL = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 3),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_sequence_length"), 64),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "chunk_size"), 6),
    **dict.fromkeys(("attention_dropout", "attn_pdrop", "hidden_dropout", "resid_pdrop"), 0.0),
    **dict.fromkeys(("embd_pdrop", "dropout", "activation_dropout", "layerdrop"), 0.0),
    **dict.fromkeys(("residual_dropout", "embedding_dropout", "classifier_dropout"), 0.0),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    "vocab_size": 64,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "encoder_ffn_dim": 48,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 48,
    "max_window_layers": 1,
    "use_sliding_window": True,
    "is_decoder": True,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


class Differs(Exception):
    """A converted model's logits are not those that they must be."""


def tiny(kind: str) -> PreTrainedModel:
    """A small random model of a type, in fp64 and eval mode."""
    kind_of = CONFIG_MAPPING[kind]
    fields = set(kind_of().to_dict())
    config = kind_of(**{name: value for name, value in SMALL.items() if name in fields})
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"its configuration has parts that stay large ({size / 1e6:,.0f} M)")
    experts = {"experts_implementation": "eager"}  # fused ones know no fp64
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), **experts).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model


def ways(ids: Tensor) -> dict[str, Callable[[PreTrainedModel], Tensor]]:
    """Logits of the real tokens in each way of calling a model."""
    ones = torch.ones_like(ids)
    left, right = ones.clone(), ones.clone()
    left[1, :5], right[1, -5:] = 0, 0

    def called(mask: Tensor | None, **options: object) -> Callable[[PreTrainedModel], Tensor]:
        def call(model: PreTrainedModel) -> Tensor:
            out = model(input_ids=ids, attention_mask=mask, **options).logits
            return out if mask is None else out[mask.bool()]

        return call

    def in_steps(model: PreTrainedModel) -> Tensor:
        cache, done, parts = None, 0, []
        for piece in ids.split([5, 1, 3, 1, 7], dim=1):
            done += piece.shape[1]
            mask = left[:, :done]
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -piece.shape[1] :]
            out = model(
                input_ids=piece,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            )
            cache = out.past_key_values
            parts.append(out.logits)
        return torch.cat(parts, 1)[left.bool()]

    def generated(model: PreTrainedModel, cache: bool) -> Tensor:
        masked = ids.where(left.bool(), 0)
        return model.generate(
            masked, attention_mask=left, max_new_tokens=4, do_sample=False, use_cache=cache
        ).double()

    def trained(model: PreTrainedModel) -> Tensor:
        try:
            return called(left, use_cache=False)(model.train())
        finally:
            model.eval()

    return {
        "no mask": called(None),
        "all-ones mask": called(ones),
        "left padding": called(left),
        "right padding": called(right),
        "training": trained,
        "cached steps": in_steps,
        "generate": lambda model: generated(model, True),
        "generate without a cache": lambda model: generated(model, False),
    }


def packed_ways(ids: Tensor) -> Iterator[tuple[str, dict]]:
    for cache in (False, True):
        for mask in (None, torch.ones_like(ids)):
            yield (
                f"cache {cache}, mask {mask is not None}",
                {
                    "use_cache": cache,
                    "attention_mask": mask,
                },
            )


@torch.no_grad()
def attempt(kind: str) -> tuple[str, str]:
    """What came of a type: served, refused, not built or wrong; and why."""
    torch.manual_seed(0)
    try:
        model = tiny(kind)
        ids = torch.randint(3, 64, (2, TOKENS))
        model(input_ids=ids)
    except Exception as error:
        return "not built", first_line(error)
    before = {}
    for name, way in ways(ids).items():
        try:
            before[name] = way(model)
        except Exception:
            continue  # what the family itself cannot do is not compared
    separate = apart(model, ids)
    for mechanism in ("standard", "mta"):
        outcome = compared(model, mechanism, ids, before, separate)
        if outcome[0] != "served":
            return outcome
    return outcome


def apart(model: PreTrainedModel, ids: Tensor) -> Tensor | None:
    """Two documents of 7 and 10 tokens, each as a row of its own; `None` without positions."""
    try:
        parts = [
            model(input_ids=part, position_ids=torch.arange(part.shape[1])[None], use_cache=False)
            for part in ids[:1].split([7, 10], dim=1)
        ]
    except Exception:
        return None
    return torch.cat([part.logits for part in parts], 1)


def compared(model, mechanism, ids, before, separate) -> tuple[str, str]:
    try:
        conversion = heedful.convert(model, mechanism)
    except ValueError as error:
        return "refused", first_line(error)
    refused = []
    try:
        for name, way in ways(ids).items():
            cached = name in ("cached steps", "generate")
            if name not in before or (mechanism != "standard" and cached):
                continue
            try:
                found = way(model)
            except ValueError as error:
                refused.append(f"{name}: {first_line(error)}")
                continue
            check(f"{mechanism}, {name}", found, before[name])
        if separate is not None:
            positions = torch.cat([torch.arange(7), torch.arange(10)])[None]
            for name, options in packed_ways(ids[:1]):
                try:
                    found = model(input_ids=ids[:1], position_ids=positions, **options).logits
                except ValueError as error:
                    refused.append(f"packed, {name}: {first_line(error)}")
                    continue
                check(f"{mechanism}, packed, {name}", found, separate)
    except Differs as error:
        return "wrong", str(error)
    except Exception as error:
        return "wrong", f"{mechanism}: {type(error).__name__}: {first_line(error)}"
    finally:
        conversion.revert()
    if len(refused) >= len(before):
        return "refused", refused[0].partition(": ")[2]
    return "served", "; ".join(refused)


def check(name: str, found: Tensor, expected: Tensor) -> None:
    error = (found - expected).abs().max().item() if found.shape == expected.shape else "shape"
    if error == "shape" or not error < EXACT:
        raise Differs(f"{name}: largest difference {error}")


def first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the page")
    parser.add_argument("types", nargs="*", help="only these, printed and not written")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    rows = []
    for kind in options.types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        rows.append((kind, *attempt(kind)))
        print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
