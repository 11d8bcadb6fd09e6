"""Other ways to compute the operators, to be timed beside what is there (stage 3 of the session).

An alternative replaces numbers or launches of the code for the time of one measurement, is held
against fp64 at a small size like everything else, and leaves no trace.
"""

import importlib
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple
from unittest import mock

import torch

from benchmarks.gpu.sizes import Sizes
from heedful.commands.bench.cases import call
from heedful.commands.bench.clock import steady
from heedful.commands.bench.measure import Case, check, runner

FUSED = ("mta-pre", "mta", "talking-heads", "selective")
FORMS = [*((name, "fused") for name in FUSED), *((name, "tiled") for name in FUSED)]
FORMS.append(("differential", "tiled"))
# Where the numbers and launches stand that an alternative replaces.
TILES = "heedful.ops.common.tiles"
BLOCKS = "heedful.ops.mta.fused.blocks"
SELECTIVE = "heedful.ops.selective.fused.flash"


class Alternative(NamedTuple):
    """A way to compute one mechanism: an implementation, and what is done differently.

    changes: replacements by the dotted name of what they replace, made from it.
    way: `"call"`, `"compile"` or `"graph"`.
    """

    mechanism: str
    impl: str
    about: str = ""
    changes: tuple[tuple[str, Callable], ...] = ()
    way: str = "call"


def launched(place: str, **fields: object) -> tuple[tuple[str, Callable]]:
    """The launch that the function at `place` answers, with other fields."""

    def change(original: Callable) -> Callable:
        return lambda *sizes: original(*sizes)._replace(**fields)

    return ((place, change),)


def every_launch(**fields: object) -> tuple[tuple[str, Callable]]:
    """The plan of selective attention with other fields in each of its launches."""

    def change(original: Callable) -> Callable:
        def plan(*inputs):
            launches = original(*inputs)
            return type(launches)(*(launch._replace(**fields) for launch in launches))

        return plan

    return ((f"{SELECTIVE}.plan", change),)


def constants(place: str, **values: int) -> tuple[tuple[str, Callable], ...]:
    """Other numbers in a module."""
    return tuple((f"{place}.{name}", lambda _, v=value: v) for name, value in values.items())


ALTERNATIVES = (
    *(Alternative(name, impl) for name, impl in FORMS),
    *(Alternative(name, impl, "CUDA graph", way="graph") for name, impl in FORMS),
    *(
        Alternative(name, "tiled", "blocks of 256 rows", constants(TILES, ROWS=256, TILE=2**26))
        for name in ("mta", "talking-heads")
    ),
    *(
        Alternative(name, "fused", f"blocks of {n} rows", constants(BLOCKS, LEAST=n, MOST=n))
        for name in ("mta", "talking-heads")
        for n in (128, 256)
    ),
    *(
        Alternative("mta", "fused", f"tiles {fields}", launched(f"{BLOCKS}.block_launch", **fields))
        for fields in ({"rows": 4, "columns": 256}, {"rows": 16}, {"warps": 8})
    ),
    *(
        Alternative("selective", "fused", f"launches {fields}", every_launch(**fields))
        for fields in ({"warps": 8}, {"stages": 1}, {"stages": 3})
    ),
    *(
        Alternative(name, impl, "torch.compile", way="compile")
        for impl in ("reference", "tiled")
        for name in ("mta", "talking-heads", "selective")
    ),
)


def brief(alternatives: tuple[Alternative, ...]) -> list[Alternative]:
    """One of each kind."""
    kinds = {}
    for x in alternatives:
        places = {place.rpartition(".")[0] for place, _ in x.changes}
        kinds.setdefault((x.impl, x.way, x.mechanism, *sorted(places)), x)
    return list(kinds.values())


def measure(sizes: Sizes, x: Alternative, tokens: int, left: float) -> dict:
    """Its times, after its results at a small size were compared with fp64."""
    if x.way == "graph" and not torch.cuda.is_available():
        raise RuntimeError("CUDA graphs need a GPU")
    function = call
    if x.way == "compile":
        torch.compiler.reset()
        function = torch.compile(call, backend=sizes.compiler, dynamic=False)
    case = Case(x.mechanism, x.impl, "forward+backward")
    with ExitStack() as changed:
        for place, change in x.changes:
            module, _, name = place.rpartition(".")
            original = getattr(importlib.import_module(module), name)
            changed.enter_context(mock.patch(place, change(original)))
        check(sizes.bench, [case], function, sizes.checked)
        run = runner(sizes.bench, case, tokens, function)
        run = replayed(run) if x.way == "graph" else run
        return steady(run, budget_ms=sizes.milliseconds)


def replayed(run: Callable[[], tuple]) -> Callable[[], None]:
    """The call as one CUDA graph; raises where its replay gives other bits."""
    expected = run()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    graph.replay()
    if not all(map(torch.equal, captured, expected)):
        raise RuntimeError("the replayed graph gives other numbers than the call")
    return graph.replay
