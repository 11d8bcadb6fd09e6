"""Try `convert` on every encoder-decoder and encoder type; writes or checks `docs/encoders.md`.

As models.py does for causal types: each is built with random weights from a small configuration,
converted to `standard`, `mta` and, in the decoder, to selective attention with an extra selector,
and its logits must be what they were.

    python docs/encoders.py [--check] [TYPE ...]
"""

import copy
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from models import EXACT, LARGEST, Differs, Row, clause, counts, listing, problem, run, small
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

import heedful

PAGE = Path(__file__).with_suffix(".md")
INTRODUCTION = """# Encoder-decoder and encoder types

The results of `heedful.convert` for the encoder-decoders (for `AutoModelForSeq2SeqLM`) and encoders (for `AutoModelForMaskedLM`) of transformers {version}: {counts}.

**Supported** means, as for [causal types](models.md): converted to `standard`, to `mta` and, if there is a decoder, to `Selective(selector="extra")`, the model has the same logits as before without a mask, with padding of the source on either side, with padding of the target, and in training mode; `generate` writes the same text with a cache and without. Where a note names part of a model's attention, the rest does not use transformers' interface and stays unchanged.

```sh
python docs/encoders.py --check
```

"""  # noqa: E501
FIXES: dict[str, dict] = {
    "data2vec-text": {"pad_token_id": 1},
    "reformer": {"axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
}
PAIRED = {"decoder_start_token_id": 1, "forced_eos_token_id": None, "forced_bos_token_id": None}


def tiny(kind: str) -> PreTrainedModel:
    """A small random model of a type, in eval mode; T5Gemma's own masks overflow in fp64."""
    paired = kind in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    auto = AutoModelForSeq2SeqLM if paired else AutoModelForMaskedLM
    fixes = copy.deepcopy(FIXES.get(kind, {})) | (PAIRED if paired else {"is_decoder": False})
    defaults = CONFIG_MAPPING[kind]().to_dict()
    fixes |= {name: 0.0 for name in defaults if "dropout" in name or name.endswith("layerdrop")}
    fixes |= {"attn_logit_softcapping": None} if "attn_logit_softcapping" in defaults else {}
    sub = CONFIG_MAPPING[kind].sub_configs
    fixes |= {name: {"attn_logit_softcapping": None, "dropout_rate": 0.0} for name in sub}
    config = small(CONFIG_MAPPING[kind], **fixes)
    with torch.device("meta"):
        size = sum(p.numel() for p in auto.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"its configuration has parts that stay large ({size / 1e6:,.0f} M)")
    model = auto.from_config(copy.deepcopy(config)).eval()
    model = model if kind.startswith("t5gemma") else model.double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model


def ways(model: PreTrainedModel, ids: Tensor, target: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Logits of the real tokens in each way of calling a model."""
    left, right, ended = torch.ones_like(ids), torch.ones_like(ids), torch.ones_like(target)
    left[1, :5], right[1, -5:], ended[1, -4:] = 0, 0, 0
    paired = model.config.is_encoder_decoder

    def logits_of(mask: Tensor | None, of_target: Tensor | None = None) -> Tensor:
        rows = {"decoder_input_ids": target, "decoder_attention_mask": of_target} if paired else {}
        rows |= {"use_cache": False} if paired else {}
        out = model(input_ids=ids, attention_mask=mask, **rows).logits
        real = of_target if paired else mask
        return out if real is None else out[real.bool()]

    def trained() -> Tensor:
        model.train()
        try:
            return logits_of(right)
        finally:
            model.eval()

    def generated(cache: bool) -> Tensor:
        options = {"max_new_tokens": 5, "do_sample": False, "use_cache": cache}
        return model.generate(ids, attention_mask=right, **options)

    calls = {
        "no mask": lambda: logits_of(None),
        "left padding": lambda: logits_of(left),
        "right padding": lambda: logits_of(right),
        "training": trained,
    }
    if paired:
        calls |= {
            "padding of the target": lambda: logits_of(right, ended),
            "generate": lambda: generated(True),
            "generate without a cache": lambda: generated(False),
        }
    return calls


@torch.no_grad()
def attempt(kind: str) -> Row:
    """What comes of a type."""
    torch.manual_seed(0)
    try:
        model = tiny(kind)
        ids, target = torch.randint(3, 64, (2, 17)), torch.randint(3, 64, (2, 13))
        every = ways(model, ids, target)
        every["no mask"]()
    except Exception as error:  # whatever keeps a stranger's model from being built
        return Row(kind, "not tried", clause(error))
    expected, cannot = {}, []
    for name, way in every.items():
        try:
            expected[name] = way()
        except Exception:  # what the model itself cannot do is not compared
            cannot.append(name)
    expected = {name: x for name, x in expected.items() if bool(x.isfinite().all())}
    selective = heedful.Selective(selector="extra")
    notes, where = [], ()
    for mechanism in ("standard", "mta", selective):
        try:
            conversion = heedful.convert(model, mechanism)
        except ValueError as error:
            if mechanism is selective and "decoder" not in where:
                continue
            return Row(kind, "not supported", clause(error))
        except Exception as error:
            return Row(kind, "wrong", f"convert: {problem(error)}")
        where = where or next(iter(conversion.where.values()))
        try:
            for name, before in expected.items():
                logits = every[name]()
                least = EXACT[model.dtype]
                if logits.shape != before.shape or not (logits - before).abs().max() < least:
                    raise Differs(f"{name}: other logits")
        except ValueError as error:
            return Row(kind, "not supported", clause(error))
        except Exception as error:  # a difference, or a traceback: both must be seen
            return Row(kind, "wrong", f"{mechanism}: {problem(error)}")
        finally:
            conversion.revert()
    if model.config.is_encoder_decoder and len(where) < 3:
        notes.append(f"but its {' and '.join(where)} attention only")
    missing = cannot + [name for name in every if name not in expected and name not in cannot]
    if missing:
        notes.append(f"the unconverted model cannot: {', '.join(missing)}")
    return Row(kind, "supported", "; ".join(notes))


def page(pairs: list[Row], encoders: list[Row]) -> str:
    """The text of `docs/encoders.md`."""
    introduction = INTRODUCTION.format(
        version=transformers.__version__, counts=counts([*pairs, *encoders])
    )
    lines = [introduction, "## Encoder-decoders", "", *listing(pairs)]
    lines += ["", "## Encoders", "", *listing(encoders)]
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


if __name__ == "__main__":
    pairs = sorted(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
    encoders = sorted(set(MODEL_FOR_MASKED_LM_MAPPING_NAMES) - set(pairs))
    sys.exit(
        run(
            PAGE, [*pairs, *encoders], attempt,
            lambda rows: page([rows[x] for x in pairs], [rows[x] for x in encoders]),
        )
    )  # fmt: skip
