"""The model that a training run begins with, its tokenizer and its teacher."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from heedful.checks import UserError
from heedful.data import ByteTokenizer, pieces
from heedful.eviction import Eviction
from heedful.files import writing_to
from heedful.hf import conversion_of
from heedful.hf.adapter_folders import base_of, has_low_rank, is_adapter
from heedful.hf.adapters import converted_inside, with_low_rank
from heedful.hf.after_eviction import AfterEviction
from heedful.hf.budgets import NAME, read_budgets
from heedful.hf.converted_model import ConvertedModel
from heedful.hf.stock import stock_model, stock_tokenizer
from heedful_lab.commands.models import (
    configuration_of,
    is_converted,
    longest,
    mechanisms_named,
    open_tokenizer,
    opening,
)
from heedful_lab.commands.train.options import SIZES, Origin, TrainingRecipe
from heedful_lab.rivals.models import convert, load
from heedful_lab.tasks.vocabulary import BYTES, byte_pairs, bytes_alone

_BOS, _EOS = "<bos>", "<eos>"
_READ_FOR_VOCABULARY = 1 << 26  # characters that byte pairs are learned from
_BPE, _BYTES = "bpe", "bytes"


class Start(NamedTuple):
    """Objects that a run begins with.

    model: converted; with LoRA, PEFT's wrapper of it.
    tokenizer: its own, or one that is trained here.
    teacher: the base without a mechanism, of the same weights, where it says what to predict.
    base: its name, where it is frozen.
    eviction: what the caches evict under which it is trained.
    name: of the model, as on the command line.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast | ByteTokenizer
    teacher: PreTrainedModel | None = None
    base: str | None = None
    eviction: Eviction | None = None
    name: str | None = None


def starting_point(
    origin: Origin, recipe: TrainingRecipe, tokenizer_folder: Path, half: bool = False
) -> Start:
    """The model that is trained, with what belongs to it.

    Arguments:
        origin: what to train.
        recipe: how.
        tokenizer_folder: of a tokenizer that is trained here; one that is there already is used.
        half: whether the computation is in bfloat16, as a frozen base then is; what is trained has
            float32.

    Raises:
        ValueError: there is no such model or tokenizer, or it does not fit the mechanism, the
            length or the other.
    """
    transformers.logging.set_verbosity_error()
    torch.manual_seed(origin.seed)
    name = origin.model
    if origin.has_weights:
        if origin.tokenizer == _BPE or origin.vocabulary is not None:
            raise UserError(
                f"model {name!r} has weights for the vocabulary that it was trained with; "
                "leave out --vocabulary and --tokenizer bpe"
            )
        model = _with_weights(name)
        tokenizer = open_tokenizer(origin.tokenizer, name, model)
    else:
        config = _config(name)
        if origin.vocabulary is not None and name in SIZES:
            config.vocab_size = origin.vocabulary
        room = origin.vocabulary or config.vocab_size
        tokenizer = _new_tokenizer(origin.tokenizer or _BPE, origin.texts, room, tokenizer_folder)
        if name in SIZES:
            config.max_position_embeddings = max(config.max_position_embeddings, recipe.length)
        model = _from_scratch(config, tokenizer)
    if not model.can_generate() or model.config.is_encoder_decoder:
        raise UserError(
            f"model {name!r} is a {type(model).__name__}, and heedful train trains models "
            "that predict the next token"
        )
    room = longest(model)
    if room is not None and recipe.length > room:
        raise UserError(
            f"length must be at most {room}, the model's positions, got {recipe.length}"
        )
    if recipe.train == "all":
        if is_adapter(name):
            raise UserError(
                f"model {name!r} is an adapter, whose base stays what it is: add --train "
                "mechanism, or write it with its base first, heedful convert ADAPTER OUT"
            )
        _give_mechanism(model, origin)
        return Start(model.float().train(), tokenizer)
    if half and not getattr(model, "is_quantized", False):
        model = model.bfloat16()
    return _beside_frozen(model, tokenizer, origin, recipe)


def _beside_frozen(
    model: PreTrainedModel, tokenizer, origin: Origin, recipe: TrainingRecipe
) -> Start:
    """The mechanism, with LoRA or without, beside a base that stays what it is."""
    if origin.under_budgets:
        _check_budgets(origin.model)
    if isinstance(model, ConvertedModel):
        raise UserError(
            f"model {origin.model!r} is converted, and --train {recipe.train} goes beside a model "
            "without a mechanism: take it out first, heedful convert MODEL OUT --revert"
        )
    model.requires_grad_(False)
    teacher = None
    if recipe.targets == "base":  # it shares the weights
        teacher = copy.deepcopy(model, {id(p): p for p in model.parameters()}).eval()
    if is_adapter(origin.model):
        if origin.mechanism or has_low_rank(origin.model):
            raise UserError(
                f"model {origin.model!r} is an adapter: leave out --mechanism, which it has"
                if origin.mechanism
                else f"model {origin.model!r} has LoRA, which training does not "
                "resume; train from its base again"
            )
        load(model, adapter=origin.model, budgets=False, convert=True)
    else:
        _give_mechanism(model, origin)
    own = conversion_of(model).parameters().values()
    if not own and recipe.train == "mechanism":
        raise UserError(
            "train='mechanism' needs a mechanism with parameters; name one, such as --mechanism "
            "selective:selector=extra or --mechanism mta"
        )
    # In the order of these budgets nothing changes any more.
    path = Path(origin.model) / NAME
    eviction = read_budgets(path, model) if origin.under_budgets else None
    for parameter in own:
        parameter.data = parameter.data.float()
        parameter.requires_grad_()
    if recipe.train == "lora":
        model = with_low_rank(model, origin.rank)
    if eviction is not None:
        conversion = conversion_of(converted_inside(model))
        conversion.after_eviction = AfterEviction(conversion.model)
        for parameter in conversion.parameters().values():
            parameter.requires_grad_(False)
    return Start(model.train(), tokenizer, teacher, base_of(origin.model), eviction, origin.model)


def _check_budgets(name: str) -> None:
    """Raise unless a name is that of an adapter with budgets."""
    if not is_adapter(name) or not (Path(name) / NAME).is_file():
        raise UserError(
            f"recipe='evict' trains under the budgets of an adapter, and {name!r} is not one "
            f"with a {NAME}; make an adapter with --recipe hide and its budgets with heedful budget"
        )


def _give_mechanism(model: PreTrainedModel, origin: Origin) -> None:
    """Convert it; one that is converted already keeps what it has."""
    mechanisms = mechanisms_named(origin.mechanism or origin.default_mechanism)
    if isinstance(model, ConvertedModel):
        own = conversion_of(model).mechanisms
        if any(
            own.get(x) is None or layers not in (None, own[x]) for x, layers in mechanisms.items()
        ):
            raise UserError(
                f"model {origin.model!r} is converted already, to {', '.join(map(str, own))}; "
                "leave --mechanism out, or take it out first: heedful convert MODEL OUT --revert"
            )
    elif None in mechanisms.values():  # alone: in all layers
        convert(model, next(iter(mechanisms)), where=origin.where or None)
    else:
        convert(model, mechanisms or "standard", where=origin.where or None)


def _new_tokenizer(
    name: str, texts: tuple[str, ...], room: int, folder: Path
) -> PreTrainedTokenizerFast:
    """The tokenizer of a model from scratch, of at most `room` tokens."""
    if folder.is_dir():
        return stock_tokenizer(folder)
    if name == _BPE and room <= BYTES + 2:
        raise UserError(
            f"vocabulary must be more than {BYTES + 2} (the bytes, BOS and EOS) for byte pairs, "
            f"got {room}; use --tokenizer bytes"
        )
    if name == _BPE:
        tokenizer = _with_ends(byte_pairs(_first(texts, _READ_FOR_VOCABULARY), room - 2))
    else:
        tokenizer = _with_ends(bytes_alone()) if name == _BYTES else _opened_tokenizer(name)
    if len(tokenizer) > room:
        raise UserError(
            f"tokenizer {name!r} has {len(tokenizer)} tokens and the model room for {room}; set "
            f"vocab_size in the configuration, or --vocabulary {len(tokenizer)} with a size"
        )
    with writing_to(folder):
        tokenizer.save_pretrained(folder)
    return tokenizer


def _opened_tokenizer(name: str):
    try:
        return stock_tokenizer(name)
    except Exception as error:  # whatever tokenizers raise for a file that is none of theirs
        problem = " ".join(str(error).split())[:200]
        raise UserError(f"tokenizer {name!r} cannot be read ({problem})") from None


def _first(data: tuple[str, ...], characters: int) -> Iterator[str]:
    read = 0
    for piece in pieces(data):
        yield piece.text
        read += len(piece.text)
        if read >= characters:
            return


def _with_ends(tokenizer) -> PreTrainedTokenizerFast:
    """A tokenizer with BOS, which it puts before a text, and EOS."""
    from tokenizers import processors

    tokenizer.add_special_tokens([_BOS, _EOS])
    bos = tokenizer.token_to_id(_BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{_BOS} $A", special_tokens=[(_BOS, bos)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=_BOS, eos_token=_EOS, pad_token=_EOS
    )


def _config(name: str) -> PreTrainedConfig:
    if name in SIZES:
        size = SIZES[name]
        return LlamaConfig(
            vocab_size=size.vocabulary,
            hidden_size=size.hidden,
            intermediate_size=size.inner,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            tie_word_embeddings=size.tied,
            rope_parameters={"rope_type": "default", "rope_theta": size.theta},
        )
    config = configuration_of(name)[0]
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(
            f"model {name!r} is of type {config.model_type!r}, which has no model that predicts "
            "the next token"
        )
    return config


def _from_scratch(config: PreTrainedConfig, tokenizer) -> PreTrainedModel:
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _with_weights(name: str) -> PreTrainedModel:
    """A converted model as it is saved, or a stock one; of an adapter, the base."""
    name = base_of(name)
    folder = Path(name)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise UserError(f"model {name!r} is a folder without a config.json; name a model's folder")
    with opening("model", name):
        if is_converted(folder):
            return load(folder, budgets=False, convert=True, dtype=torch.float32)
        return stock_model(name, dtype=torch.float32)
