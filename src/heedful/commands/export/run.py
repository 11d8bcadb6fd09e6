"""Write a model's folder as a stock checkpoint."""

from contextlib import suppress
from pathlib import Path

from heedful.commands.export.options import Export
from heedful.commands.models import open_model
from heedful.hf import conversion_of
from heedful.hf.adapter_folders import base_of
from heedful.hf.export import export
from heedful.hf.stock import stock_tokenizer
from heedful.records.files import check_new_folder, whole_folder


def export_folder(options: Export) -> str:
    """Write a model as a stock checkpoint with its tokenizer; returns what it wrote.

    The folder appears whole or not at all.

    Raises:
        ValueError: there is no such model, no stock checkpoint computes it, or `out` is in use.
    """
    check_new_folder(options.out)  # before minutes of loading
    model = open_model(options.model, dtype=options.dtype, budgets=False)
    mechanisms = ", ".join(map(str, conversion_of(model).mechanisms))
    with whole_folder(options.out) as whole:
        export(model, whole)
        with suppress(Exception):  # a model without a tokenizer is a model
            stock_tokenizer(base_of(options.model)).save_pretrained(whole)
    return f"{mechanisms} as a stock checkpoint\nmodel: {Path(options.out)}"
