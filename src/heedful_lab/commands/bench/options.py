"""The options of `heedful bench`; imports nothing heavy."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from heedful.checks import UserError, check_literals, check_whole

CaseName = Literal[
    "mta-pre", "mta-identity", "mta-flash", "mta-post", "mta", "talking-heads", "selective",
    "differential",
]  # fmt: skip
ImplName = Literal[
    "reference", "tiled", "composed", "fused", "x-transformers", "flex", "liger",
]  # fmt: skip
PassName = Literal["forward", "forward+backward", "decode"]
Dtype = Literal["float32", "bfloat16", "float16"]
Layout = Literal["contiguous", "transposed"]


@dataclass(frozen=True)
class Bench:
    """Time and peak memory of the operators beside SDPA; refuses to time what is wrong."""

    mechanisms: tuple[CaseName, ...] = (
        "mta-pre", "mta", "talking-heads", "selective", "differential",
    )  # fmt: skip
    """mta-pre: random 6x11 kernels before the softmax, mta-identity the identity, mta-flash of rank
    two with pairs mixed after it; mta-post: after it; mta: on both sides, with full head mixing."""
    impls: tuple[ImplName, ...] = (
        "reference", "tiled", "composed", "fused", "x-transformers", "flex", "liger",
    )  # fmt: skip
    """By which implementation; what cannot run here is left out, with the reason."""
    lengths: tuple[int, ...] = (1024,)
    """Tokens, one number or several."""
    passes: tuple[PassName, ...] = ("forward", "forward+backward")
    """decode: one new token with T keys."""
    batch: int = 1
    """Sequences."""
    heads: int = 8
    """Heads of q, k and v; even."""
    dim: int = 64
    """Head dim."""
    dtype: Dtype = "float32"
    """Of q, k and v."""
    layout: Layout = "contiguous"
    """transposed: q, k and v as models hand them over, [B, T, H, D] viewed as [B, H, T, D]."""
    rounds: int = 5
    """Timed calls of each case, taken in turn."""
    memory: bool = True
    """Also measure peak memory, each case in a process of its own."""
    out: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the records here as JSON lines. A file that is there already is never replaced."""

    def __post_init__(self) -> None:
        check_literals(self)
        for name in ("batch", "heads", "dim", "rounds"):
            check_whole(name, getattr(self, name), 1)
        if self.heads % 2:
            raise UserError(f"heads must be even (differential pairs them), got {self.heads}")
        if not self.lengths:
            raise UserError("lengths must name at least one number of tokens, got none")
        for length in self.lengths:
            check_whole("lengths", length, 1)


def sizes(config: dict) -> str:
    """In words, the sizes of a record's `config`; older records know no layout but contiguous."""
    heads = f"{config['heads']} heads of {config['dim']}"
    layout = config.get("layout", "contiguous")
    return f"batch {config['batch']}, {heads}, {config['dtype']}, {layout} q, k and v"
