"""Write a model's folder anew, with a mechanism or without the one it has."""

from contextlib import suppress
from pathlib import Path

from transformers import PreTrainedModel

from heedful.checks import UserError
from heedful.files import check_new_folder, whole_folder
from heedful.hf import conversion_of, convert, revert
from heedful.hf.adapter_folders import base_of, is_adapter
from heedful.hf.stock import stock_model, stock_tokenizer
from heedful_lab.commands.convert.options import FolderConversion
from heedful_lab.commands.models import dtype_option, is_converted, mechanisms_named, opening
from heedful_lab.rivals.edits import edit
from heedful_lab.rivals.models import load


def convert_folder(options: FolderConversion) -> str:
    """Write a model's folder anew, with a mechanism or without its own; returns what it wrote.

    The folder appears whole or not at all.

    Raises:
        ValueError: there is no such model, it does not fit the mechanism, or `out` is in use.
    """
    check_new_folder(options.out)
    about, model = _rewritten(options)
    with whole_folder(options.out) as whole:
        model.save_pretrained(whole)
        with suppress(Exception):  # a model without a tokenizer is a model
            stock_tokenizer(base_of(options.source)).save_pretrained(whole)
    return f"{about}\nmodel: {Path(options.out)}"


def _rewritten(options: FolderConversion) -> tuple[str, PreTrainedModel]:
    """The model as it is to be saved, and what was done to it."""
    source = Path(options.source)
    converted, adapter = is_converted(source), is_adapter(source)
    if not (options.mechanism or options.revert or adapter):
        raise UserError("give either --mechanism, or --revert to take it out")
    if adapter and (options.mechanism or options.revert):
        raise UserError(
            f"source {options.source!r} is an adapter, which is written with its base: leave "
            "--mechanism and --revert out"
        )
    if converted != options.revert:
        state, way = "is not a converted model", "there is nothing to take out"
        if converted:
            state, way = "is converted already", "take its mechanism out first, with --revert"
        raise UserError(f"source {options.source!r} {state}; {way}")
    mechanisms = mechanisms_named(options.mechanism)
    with opening("source", options.source):
        if converted or adapter:
            model = load(source, budgets=adapter, **dtype_option(options.dtype))
        else:
            model = stock_model(options.source, **dtype_option(options.dtype))
    if adapter:
        mechanisms = ", ".join(map(str, conversion_of(model).mechanisms))
        about = f"{base_of(source)} with {mechanisms}"
    elif options.revert:
        about = f"{', '.join(map(str, conversion_of(model).mechanisms))} taken out"
        revert(model)
    else:
        plan = next(iter(mechanisms)) if None in mechanisms.values() else mechanisms
        conversion = edit(convert(model, plan, where=options.where or None))
        own = sum(p.numel() for p in conversion.parameters().values())
        parts = conversion.mechanisms.items()
        layers = ", ".join(f"{config} in {len(where)} layers" for config, where in parts)
        about = f"{layers}; {own:,} parameters of its own"
    return about, model
