"""The sizes of the session on a GPU, and small ones for a try on any machine."""

from dataclasses import dataclass

from heedful_lab.commands.bench.options import Bench

MECHANISMS = ("mta-pre", "mta", "talking-heads", "selective", "differential")
FUSED = MECHANISMS[:-1]  # differential attention has no kernels of its own


@dataclass(frozen=True)
class Sizes:
    """Of all stages.

    bench: batch, heads, head dim, precision and layout of the operators' inputs.
    lengths, profiled, long, decode: tokens in stages 2, 3, 4 and 6; checked: in the check that
        comes before a measurement.
    sdpa: torch's kernels by name, since its own choice between them varies.
    milliseconds: what the calls of one case may take together, about.
    copies, square, calls: bytes, rows of a product and small calls of stage 1, with the arguments
        of pytest, `tests`.
    step: of the model of stage 5, where it is not the 880M model.
    serving: of the model of stage 7, where it is not as `serving.Serving` has it.
    """

    bench: Bench
    lengths: tuple[int, ...] = (2048, 4096)
    profiled: tuple[int, ...] = (2048,)
    long: tuple[int, ...] = (16384,)
    decode: tuple[int, ...] = (512, 8192, 32768)
    checked: int = 150
    sdpa: tuple[str, ...] = ("FLASH_ATTENTION", "CUDNN_ATTENTION")
    milliseconds: float = 200.0
    copies: tuple[int, ...] = (2**23, 2**25, 2**27, 2**32)
    square: int = 8192
    calls: int = 1000
    tests: tuple[str, ...] = ("tests/ops",)
    step: tuple[tuple[str, int], ...] = ()
    serving: tuple[tuple[str, object], ...] = ()


def forms(mechanism: str) -> tuple[str, ...]:
    """The implementations for a GPU."""
    return ("fused", "composed") if mechanism in FUSED else ("composed",)


FULL = Sizes(Bench(batch=4, heads=16, dim=128, dtype="bfloat16", layout="transposed"))
SMALL = Sizes(
    Bench(heads=2, dim=16, layout="transposed"),  # the interpreter has no products of bfloat16
    lengths=(24,),
    profiled=(20,),
    long=(70,),
    decode=(33,),
    checked=20,
    sdpa=("FLASH_ATTENTION",),
    milliseconds=0.0,
    copies=(2**20,),
    square=64,
    calls=3,
    tests=("tests/ops/test_visibility.py", "-k", "window"),
    step=(("layers", 1), ("hidden", 32), ("heads", 2), ("feed_forward", 48), ("vocabulary", 50),
          ("batch", 1), ("tokens", 20), ("steps", 1), ("autocast", False)),
    serving=(("layers", 1), ("hidden", 32), ("heads", 4), ("key_heads", 2), ("feed_forward", 48),
             ("vocabulary", 50), ("context", 40), ("budget", 16), ("chunk", 8), ("decoded", 2),
             ("batches", (1, 2))),
)  # fmt: skip
