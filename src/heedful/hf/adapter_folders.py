"""Adapter folders: a few MB trained beside a frozen base, which open on that base alone.

`adapter.json` names the mechanisms and the base, with a fingerprint of its weights. The mechanism's
parameters lie in `adapter.safetensors`; with LoRA, in PEFT's own files instead, which
PEFT opens too. LoRA is merged into the weights, unless it acts after an eviction only. A
`budgets.json` may lie beside them.
"""

import json
import os
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from heedful.checks import UserError
from heedful.files import writing_to
from heedful.hf import budgets as saved_budgets
from heedful.hf.adapters import check_peft, converted_inside, holds_adapter
from heedful.hf.after_eviction import AfterEviction, replace_layers_of_peft
from heedful.hf.attention import NAME
from heedful.hf.convert import conversion_of, revert
from heedful.hf.converted_model import ConvertedModel
from heedful.hf.fingerprints import distance_of, fingerprint_of, without_matrices
from heedful.hf.identity import matrices_digest
from heedful.hf.restore import read_parameters, restore
from heedful.hf.save import carry_budgets, mechanisms_to_json
from heedful.hf.stock import stock_model
from heedful.nn import MechanismConfig
from heedful.ops.impl import Impl

if TYPE_CHECKING:
    from peft import PeftModel

FORMATS = (1, 2)  # the second has matrices that act after an eviction
ABOUT, WEIGHTS = "adapter.json", "adapter.safetensors"
_PEFT = ("adapter_config.json", "adapter_model.safetensors")


def save_adapter(
    model: "PreTrainedModel | PeftModel",
    folder: str | os.PathLike,
    *,
    base: str,
    dtype: torch.dtype | None = None,
) -> None:
    """Save what a converted model adds to its base, for `heedful.load(base, adapter=folder)`.

    Arguments:
        model: converted, or what `heedful.get_peft_model` returned.
        folder: made if absent; its earlier adapter is replaced.
        base: the name under which `heedful.load` finds the base: of a folder, on the hub, a GGUF
            file, or `smollm2`.
        dtype: of the parameters in the file, such as `torch.bfloat16`; by default as they are.

    Raises:
        ValueError: the model is not converted, or there is nothing to save: neither parameters of
            its mechanism nor LoRA; or LoRA acts after an eviction, and the model has been opened
            with it.
    """
    converted = converted_inside(model)
    conversion = conversion_of(converted)
    own = conversion.parameters()
    has_budgets = conversion.eviction is not None
    if not own and not holds_adapter(model) and not has_budgets:
        names = ", ".join(map(str, conversion.mechanisms))
        raise UserError(
            f"model has no parameters beside its base: {names}; there is nothing to save, convert "
            "the base again instead"
        )
    if conversion.after_eviction is not None and converted is model:
        raise UserError(
            "model was opened from an adapter whose matrices act after an eviction, which is saved "
            "as it was trained only: copy the adapter's folder"
        )
    about = {
        "format": FORMATS[conversion.after_eviction is not None],
        "base": {"name": os.fspath(base), **fingerprint_of_base(model)},
        "mechanisms": mechanisms_to_json(conversion.mechanisms, conversion.where),
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with writing_to(folder), tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as staging:
        if holds_adapter(model):
            model.save_pretrained(staging)
            (Path(staging) / "README.md").unlink(missing_ok=True)  # PEFT's empty form
            if dtype is not None:
                path = Path(staging) / _PEFT[1]
                save_file({k: x.to(dtype) for k, x in load_file(path).items()}, path)
            (folder / saved_budgets.NAME).unlink(missing_ok=True)
        elif own:
            tensors = {k: p.detach().cpu().to(dtype or p.dtype) for k, p in own.items()}
            save_file({k: p.contiguous() for k, p in tensors.items()}, Path(staging) / WEIGHTS)
            carry_budgets(model, folder, Path(staging), changed=False)
        (Path(staging) / ABOUT).write_text(json.dumps(about, indent=2) + "\n")
        for name in (ABOUT, WEIGHTS, *_PEFT):  # none of an earlier one stays
            (folder / name).unlink(missing_ok=True)
        # What makes it an adapter comes last.
        for path in sorted(Path(staging).iterdir(), key=lambda path: path.name == ABOUT):
            os.replace(path, folder / path.name)


def is_adapter(folder: str | os.PathLike) -> bool:
    """Test whether a folder holds an adapter of `save_adapter`."""
    return (Path(folder) / ABOUT).is_file()


def has_low_rank(folder: str | os.PathLike) -> bool:
    """Test whether an adapter has LoRA beside the mechanism."""
    return (Path(folder) / _PEFT[0]).is_file()


def base_of(name: str | os.PathLike) -> str:
    """Name of the base of an adapter's folder; any other name is returned as it is.

    Raises:
        ValueError: the adapter is damaged.
    """
    return read_about(Path(name))["base"]["name"] if is_adapter(name) else os.fspath(name)


def load_adapter(
    base: str | os.PathLike | PreTrainedModel,
    folder: str | os.PathLike,
    *,
    impl: Impl = "auto",
    budgets: bool = True,
    convert: bool = False,
    verify: bool | None = None,
    mechanisms: Iterable[type[MechanismConfig]] = (),
    **options,
) -> PreTrainedModel:
    """Open a base with an adapter.

    LoRA is merged into its weights, unless it acts after an eviction only.

    Arguments:
        base: its name, or the model itself, which is converted in place.
        folder: of `save_adapter`.
        impl, budgets, convert, verify, mechanisms: as for `heedful.load`.
        options: for transformers' `from_pretrained`.

    Raises:
        ValueError: there is no such base or adapter, the adapter is damaged, or belongs to another
            base, or has LoRA, which needs the package peft; a model that was passed in
            is left as it was.

    Warns:
        UserWarning: the base is in another quantisation than that which the adapter was trained on;
            the message has the distance.
    """
    folder = Path(folder)
    about = read_about(folder)
    if has_low_rank(folder):
        check_peft()
    model = base if isinstance(base, PreTrainedModel) else stock_model(base, **options).eval()
    if isinstance(model, ConvertedModel):
        raise UserError(
            "base must be a model without a mechanism, and this one is converted; heedful.revert it"
        )
    name, distance = about["base"]["name"], distance_of(about["base"], fingerprint_of_base(model))
    if distance is None or not distance.near:
        weights = "a model of other shapes" if distance is None else f"and {distance}"
        raise UserError(
            f"adapter {folder} belongs to another base: it was trained on {name!r}, {weights}; "
            "open it on that one, or train an adapter for this one"
        )
    if not distance.same:
        warnings.warn(
            f"adapter {folder} was trained on {name!r} in another quantisation: {distance}",
            stacklevel=3,
        )
    tensors = {
        name.removeprefix("base_model.model."): tensor.float()
        for name, tensor in read_parameters(folder).items()
    }
    try:
        bare = not tensors and not has_low_rank(folder)  # budgets alone
        attends = True if convert else False if bare else None
        restore(model, about["mechanisms"], tensors, impl, verify, attends, mechanisms)
        if has_low_rank(folder):
            conversion_of(model).matrices = _matrices_in(folder)
        if about["format"] == 2:
            _put_beside(model, folder)
        elif has_low_rank(folder):
            model = _merged(model, folder)
        if budgets:
            saved_budgets.take_budgets(folder, model)
    except ValueError:
        if isinstance(model, ConvertedModel):
            revert(model)
        raise
    return model


def _matrices_in(folder: Path) -> str | None:
    """A digest of the LoRA weights in PEFT's file; `None` where it cannot be read."""
    try:
        return matrices_digest(load_file(folder / _PEFT[1]).items())
    except (OSError, SafetensorError):
        return None  # PEFT says so by name


def _merged(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The model with PEFT's LoRA merged into its weights."""
    import peft

    try:
        return peft.PeftModel.from_pretrained(model, folder).merge_and_unload()
    except Exception as error:  # whatever PEFT raises for a damaged file
        raise UserError(f"adapter {folder} cannot be read by PEFT: {error}") from error


def _put_beside(model: PreTrainedModel, folder: Path) -> None:
    """Add PEFT's LoRA beside the weights, to act after an eviction."""
    import peft

    try:
        config = peft.PeftConfig.from_pretrained(folder)
        config.modules_to_save, config.inference_mode = (
            None,
            True,
        )  # the mechanism has been restored
        peft.inject_adapter_in_model(config, model)
        named = load_file(folder / _PEFT[1]).items()
        matrices = {k.removeprefix("base_model.model."): x for k, x in named if ".lora_" in k}
        peft.set_peft_model_state_dict(model, matrices)
        replace_layers_of_peft(model)
    except Exception as error:  # whatever PEFT raises for a damaged file
        raise UserError(f"adapter {folder} cannot be read by PEFT: {error}") from error
    finally:
        conversion_of(model).after_eviction = AfterEviction(model)  # takes out what is there


def fingerprint_of_base(model: nn.Module) -> dict:
    """Fingerprint of a base, whatever is added to its weights."""
    added = (f".{NAME}.", ".modules_to_save.")
    return fingerprint_of(
        {
            name.replace(".original_module", ""): p
            for name, p in without_matrices(model).items()
            if not any(mark in name for mark in added)
        }
    )


def read_about(folder: Path) -> dict:
    """Read and check `adapter.json`: `mechanisms`, and `base` with its name."""
    path = folder / ABOUT
    if not path.is_file():
        raise UserError(
            f"adapter {str(folder)!r} has no {ABOUT}; name a folder of heedful.save_adapter, or of "
            "heedful train --train mechanism"
        )
    try:
        about = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); the adapter is damaged") from None
    if not isinstance(about, dict) or about.get("format") not in FORMATS:
        formats = " or ".join(map(str, FORMATS))
        raise UserError(f"{path} must be of format {formats}; open it with the version of its own")
    base, parts = about.get("base"), about.get("mechanisms")
    whole = isinstance(base, dict) and isinstance(base.get("name"), str)
    fields = (("mechanism", dict), ("layers", list))
    if (
        not whole
        or not isinstance(parts, list)
        or not all(
            isinstance(part, dict) and isinstance(part.get(field), kind)
            for part in parts
            for field, kind in fields
        )
    ):
        raise UserError(f"{path} lacks its base or its mechanisms; the adapter is damaged")
    weights = [name for name in (WEIGHTS, _PEFT[1]) if (folder / name).is_file()]
    plain = all(part["mechanism"].get("kind") == "Standard" for part in parts)
    if len(weights) != 1 and not (plain and not weights):
        raise UserError(f"adapter {folder} must hold {WEIGHTS} or {_PEFT[1]}; it is cut short")
    if about["format"] == 2 or _learned_an_order(folder):
        for part in parts:  # written before there was a choice
            if part["mechanism"].get("kind") == "Selective":
                part["mechanism"].setdefault("masks", False)
    return about


def _learned_an_order(folder: Path) -> bool:
    """Test whether `heedful train` trained an adapter's selectors to rank a cache's tokens."""
    try:
        return json.loads((folder / "training.json").read_text())["recipe"]["targets"] == "maps"
    except (OSError, ValueError, KeyError, TypeError):
        return False
