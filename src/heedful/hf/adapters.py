"""Adapters of PEFT on converted models: the mechanism is trained and saved with them."""

import copy
import importlib.util
import warnings
from typing import TYPE_CHECKING

from torch import nn
from transformers import PreTrainedModel

from heedful.checks import UserError
from heedful.hf.attention import NAME

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel


def get_peft_model(model: PreTrainedModel, config: "PeftConfig", **options) -> "PeftModel":
    """PEFT's `get_peft_model` for a converted model, whose mechanism the adapter trains and saves.

    The mechanism's parameters are trained in full, in fp32, beside the LoRA of the other
    layers; `save_pretrained` of what is returned writes both. To go on from there, convert or
    `heedful.load` the same base and call `peft.PeftModel.from_pretrained(base, folder)`;
    `merge_and_unload()` then gives a converted model without an adapter.

    Arguments:
        model: a converted model.
        config: PEFT's configuration, such as `LoraConfig(target_modules="all-linear")`; it is not
            changed.
        options: for PEFT's function, such as `adapter_name`.

    Returns:
        PEFT's model around `model`, whose adapter is to be trained.

    Raises:
        ValueError: the model is not converted, or holds an adapter already, or this kind of adapter
            saves no modules of the model.
    """
    import peft

    if holds_adapter(model) or isinstance(model, peft.PeftModel):
        raise UserError(
            "model holds an adapter of PEFT already; merge_and_unload() it first, or add another "
            "one with its add_adapter"
        )
    if not any(hasattr(module, NAME) for module in model.modules()):
        raise UserError(
            f"model is not converted: {type(model).__name__}; call heedful.convert first, or "
            "peft.get_peft_model for a model without a mechanism"
        )
    if not hasattr(config, "modules_to_save"):
        raise UserError(
            f"config must be of an adapter that can save modules of the model (modules_to_save), "
            f"such as LoraConfig, got {type(config).__name__}, which would leave the mechanism "
            "behind; save the converted model itself beside the adapter, and call "
            "peft.get_peft_model"
        )
    config = copy.deepcopy(config)
    saved = list(config.modules_to_save or ())
    config.modules_to_save = saved if NAME in saved else [*saved, NAME]
    return peft.get_peft_model(model, config, **options)


def check_peft() -> None:
    """Raise a `ValueError` without the package that LoRA needs."""
    if importlib.util.find_spec("peft") is None:
        raise UserError("LoRA needs the package peft: pip install 'heedful[lora]'")


def with_low_rank(model: PreTrainedModel, rank: int) -> "PeftModel":
    """A converted model with LoRA beside all linear layers of its base.

    Their sum with a weight counts twice the product of the matrices (`lora_alpha` is 2 x rank).

    Raises:
        ValueError: the package peft is missing, or the model is not converted.
    """
    check_peft()
    from peft import LoraConfig

    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules="all-linear",
        exclude_modules=rf".*\.{NAME}(\..*)?",
    )
    return get_peft_model(model, config)


def converted_inside(model: "PreTrainedModel | PeftModel") -> PreTrainedModel:
    """The converted model itself, which PEFT may have wrapped."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def holds_adapter(model: nn.Module) -> bool:
    """Test whether PEFT has put its layers into the model."""
    return any(type(module).__module__.split(".")[0] == "peft" for module in model.modules())


def warn_if_left_behind(model: PreTrainedModel, own: list[nn.Parameter]) -> None:
    """Say so where an adapter neither trains nor saves the mechanism's `own` parameters."""
    saved = {id(p) for name, p in model.named_parameters() if ".modules_to_save." in name}
    is_trained = any(p.requires_grad or id(p) in saved for p in own)
    if own and not is_trained and holds_adapter(model):
        warnings.warn(
            "this adapter neither trains nor saves the mechanism's parameters: make it by "
            "heedful.get_peft_model, or give LoraConfig modules_to_save=['heedful'], or save the "
            "converted model itself as well",
            stacklevel=3,
        )
