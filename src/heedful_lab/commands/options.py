"""Options that several commands have; imports nothing heavy."""

import math
import re
from typing import Annotated, Literal

import tyro

from heedful.checks import UserError, check_choice

EVICTIONS = (
    "auto", "most-hidden", "lowest-gate", "streaming-llm", "h2o", "tova", "snap-kv", "window",
    "random", "knorm", "keydiff", "none",
)  # fmt: skip
EvictionName = Annotated[str, tyro.conf.arg(metavar=f"{{{','.join(EVICTIONS)},MODULE:CLASS}}")]
CacheDtype = Literal["auto", "int8"]
RoleName = Literal["decoder", "encoder", "cross"]
Device = Literal["auto", "cpu", "cuda"]
"""Of training, whose processes have a GPU each."""
ModelDevice = Annotated[
    str,
    tyro.conf.arg(
        metavar="{auto,cpu,cuda,cuda:N}",
        help="Where the model runs; auto is the GPU where there is one.",
    ),
]
ModelDtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    tyro.conf.arg(help="Of the model's weights and its computation; auto is that of the files."),
]
TokenizerName = Annotated[
    str | None,
    tyro.conf.arg(
        help="A tokenizer's folder or name, by default the model's own; \"bytes\" for models of "
        "bytes."
    ),
]
AdapterName = Annotated[
    str | None,
    tyro.conf.arg(
        metavar="FOLDER",
        help="An adapter to open MODEL with, which is then its base. An adapter's folder as MODEL "
        "opens the base that it names.",
    ),
]
RECALL = "recall"
"""In place of a file of --data: generated facts in its texts, and questions about them."""


def check_device(device: str) -> None:
    """Raise unless this may be the name of a device; whether it is there, is not asked."""
    if re.fullmatch(r"cuda:\d+", str(device)) is None:
        check_choice("device", device, ("auto", "cpu", "cuda"))


def check_eviction_name(eviction: str) -> None:
    """Raise unless it names a policy: one of heedful's, or MODULE:CLASS."""
    if not is_users_policy(eviction):
        check_choice("eviction", eviction, (*EVICTIONS, "MODULE:CLASS"))


def is_users_policy(eviction: str) -> bool:
    """Tell a policy of a user's file, MODULE:CLASS, from one of heedful's names."""
    return re.fullmatch(r"[\w./\\-]+:[A-Za-z_]\w*", str(eviction)) is not None


def check_eviction(eviction: str, budget: str | None) -> None:
    """Raise unless a policy is named with its budget."""
    check_eviction_name(eviction)
    if eviction not in ("auto", "none") and budget is None:
        raise UserError(f"eviction={eviction!r} needs a budget: add --budget N")
    if eviction == "none" and budget is not None:
        raise UserError("eviction='none' keeps everything: leave the budget out")


def check_memory_loss(factor: float) -> None:
    """Raise unless the memory loss can have this factor."""
    number = isinstance(factor, int | float) and not isinstance(factor, bool)
    if not number or not 0 <= factor < math.inf:
        raise UserError(f"memory_loss must be a number of at least 0 (none), got {factor!r}")
