"""Checks of torch.compile and of the custom operators, run by test_compile.py.

They run, by name, in a process of their own: the shape checks that the other tests install cannot
be compiled. Each check prints one line of JSON.
"""

import json
import sys
import traceback
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from heedful.ops import Groups, Visibility, grouped_attention, summarise
from heedful.ops.common import softmax
from heedful.ops.common.dropout import dropout_of
from heedful.ops.grouped import cif_groups, fixed_groups
from heedful.ops.grouped import tiled as grouped
from heedful.ops.selective import tiled as selective
from heedful.testing import assert_matches_oracle
from helpers.mechanisms import LOW_RANK, MECHANISMS, Mechanism, Shape, ragged

SHAPE = Shape(batch=2, heads=4, key_heads=2, queries=9, keys=11, dim=4)
BY_NAME = {str(m): m for m in [*MECHANISMS, *LOW_RANK]}


def leaves(tensors: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: x.to(dtype).requires_grad_() for name, x in tensors.items()}


def results(function, x: dict[str, Tensor], visibility) -> list[Tensor]:
    """Outputs and every gradient."""
    outputs = function(x, visibility)
    weighted = (out.double() * torch.linspace(-1, 1, out.numel()).view_as(out) for out in outputs)
    grads = torch.autograd.grad(sum(x.sum() for x in weighted), list(x.values()))
    return [*(out.detach() for out in outputs), *grads]


def counting() -> tuple[list, Callable]:
    """A backend of torch.compile that runs graphs as they are, and the graphs that it was given."""
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    return graphs, count


def check_equal(compiled: list[Tensor], eager: list[Tensor]) -> None:
    for x, y in zip(compiled, eager, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def transposed(x: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors in the layout in which models hand them over, [B, T, H, D] transposed."""
    return {
        name: t.transpose(1, 2).contiguous().transpose(1, 2).detach().requires_grad_()
        if t.ndim == 4
        else t
        for name, t in x.items()
    }


def places() -> Tensor:
    """As evicted keys have them."""
    at = 2 * torch.arange(SHAPE.keys)[None]
    return Visibility(positions=at).places(SHAPE.queries, SHAPE.keys, torch.device("cpu"))


def bias(heads: int) -> Tensor:
    size = (1, heads, SHAPE.queries, SHAPE.keys)
    return torch.randn(size, dtype=torch.float64, requires_grad=True)


def operator_mta() -> None:
    """opcheck, forward and backward, with every optional tensor and with none."""
    x = transposed(leaves(BY_NAME["mta-full"].draw(SHAPE), torch.float64))
    segments = ragged(SHAPE.keys)[0].segments()
    two_sided = torch.randn(4, 5, 3, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    drop = dropout_of(0.2, 1, x["q"]).heads
    steps = (x["conv"], x["post_conv"], x["mix"], x["post_mix"])
    qkv = (x["q"], x["k"], x["v"])
    operator = torch.ops.heedful.multi_token_attention_tiled.default
    backward = torch.ops.heedful.multi_token_attention_tiled_backward.default
    for arguments in (
        (*qkv, *steps, bias(4), sinks, drop, segments, segments, None, True, True, 7, 0.5, 3.0,
         0.2, False, "tiled", False),
        (*qkv, None, None, *steps[2:], *[None] * 5, places(), False, True, 7, 0.5, None,
         0.0, False, "composed", False),
        (*qkv, *[None] * 10, False, False, None, 0.5, None, 0.0, False, "tiled", True),
        (*qkv, two_sided, None, *[None] * 8, False, False, 9, 0.5, None, 0.0, True, "tiled",
         False),
    ):  # fmt: skip
        torch.library.opcheck(operator, arguments)
        fixed = [t.detach() if isinstance(t, Tensor) else t for t in arguments]
        grad = torch.randn_like(operator(*fixed))
        torch.library.opcheck(backward, (grad, *fixed))


def operator_selective() -> None:
    """opcheck, forward and backward, with every optional tensor and with none."""
    x = transposed(leaves(BY_NAME["selective-own"].draw(SHAPE), torch.float64))
    visibility = ragged(SHAPE.keys)[0]
    inputs = (x["q"], x["k"], x["v"], x["selector_q"], x["selector_k"])
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    drop = dropout_of(0.2, 1, x["q"]).heads
    state = torch.rand(2, 1, SHAPE.keys, dtype=torch.float64, requires_grad=True)
    segments, first = visibility.segments(), visibility.first_tokens(SHAPE.keys, x["q"].device)
    cases = (
        (*inputs, state, bias(1), sinks, drop, segments, segments, None, first, 7, 0.3, 0.5, 3.0,
         0.2),
        (*inputs, state, *[None] * 5, places(), None, 7, 0.3, 0.5, None, 0.0),
        (*inputs, *[None] * 10, 0.5, None, 0.0),
    )  # fmt: skip
    for case, composed in (*((x, False) for x in cases), (cases[1], True)):
        arguments = (*case, composed)
        torch.library.opcheck(selective._tiled, arguments)
        fixed = [t.detach() if isinstance(t, Tensor) else t for t in arguments]
        *outputs, pair = selective._tiled(*fixed)
        grads = [torch.randn_like(t) for t in outputs]
        torch.library.opcheck(selective._tiled_backward, (*grads, pair, *fixed))


def tile_cases(dtype: torch.dtype = torch.bfloat16) -> list[tuple]:
    """Gradient, logits, mask, sinks and dtype of tiles of several sizes, masks of one or of all."""
    cases = []
    for rows, columns, masked, batch in ((16, 40, 15, 1), (9, 130, 9, 3), (33, 33, 33, 1)):
        grad, logits = 4 * torch.randn(2, 3, 4, rows, columns)
        mask = torch.rand(batch, 1, rows, masked) < 0.5
        mask[:, :, 1:2] = True  # with as many columns, a row that sees nothing
        cases += [(grad, logits, mask, sinks, dtype) for sinks in (None, torch.randn(4, 1, 1))]
    return cases


def operator_softmax() -> None:
    """opcheck of both directions, which have no derivative of their own."""
    for grad, logits, mask, sinks, dtype in tile_cases():
        tests = ("test_schema", "test_faketensor")
        torch.library.opcheck(softmax.tile_softmax, (logits, mask, sinks, dtype), test_utils=tests)
        _, log_sum = softmax.tile_softmax(logits, mask, sinks, dtype)
        arguments = (grad, logits, log_sum, mask, dtype)
        torch.library.opcheck(softmax.tile_softmax_backward, arguments, test_utils=tests)


def softmax_steps(backend: object) -> None:
    """What a GPU gets, by this backend: whole graphs, and what the steps give as written."""
    forward, backward = (
        torch.compile(step, dynamic=True, fullgraph=True, backend=backend)
        for step in (softmax._softmax, softmax._softmax_backward)
    )
    for grad, logits, mask, sinks, dtype in [*tile_cases(), *tile_cases(torch.float32)]:
        arguments = (logits, mask, sinks, dtype)
        written = softmax._softmax(*arguments)
        check_steps(forward(*arguments), written, softmax._softmax, arguments)
        arguments = (grad, logits, written[1], mask, dtype)
        written = softmax._softmax_backward(*arguments)
        check_steps(backward(*arguments), written, softmax._softmax_backward, arguments)


def check_steps(compiled, written, step, arguments: tuple) -> None:
    """The tolerance rule, with the written step in place of a reference."""
    wide = (x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments)
    exact = step(*(torch.float64 if isinstance(x, torch.dtype) else x for x in wide))
    for part, *results in zip(("tile", "sums"), compiled, written, exact, strict=True):
        assert_matches_oracle(part, *results, terms=arguments[0].shape[-1])


def softmax_graphs() -> None:
    """One graph for every size, with and without sinks, for one mask and for a batch of them."""
    graphs, count = counting()

    softmax_steps(count)
    # Two dtypes each; forward with and without sinks, and in both a mask alone or of a batch.
    assert len(graphs) == 2 * (2 * 2 + 2), len(graphs)


def grouped_call(x: dict[str, Tensor], groups: Groups, asking: bool = False, **options) -> Tensor:
    """Summaries by learned weights, as a layer makes them."""
    queries = summarise(x["q"], x["q"], groups).k if asking else None
    sums = summarise(x["k"], x["v"], groups, logits=x["logits"])._replace(q=queries)
    return grouped_attention(x["q"], x["k"], x["v"], groups=groups, summaries=sums, **options)


def grouped_tensors() -> dict[str, Tensor]:
    x = {name: torch.randn(2, h, 40, 4) for name, h in (("q", 4), ("k", 2), ("v", 2))}
    return transposed(leaves(x | {"logits": torch.randn(2, 2, 40)}, torch.float64))


def operator_grouped() -> None:
    """opcheck, forward and backward: hard and soft groups, with a bias, asked by groups."""
    checked = []

    def noting(function):
        def noted(*arguments):
            checked.append(arguments)
            return function(*arguments)

        return noted

    operator = grouped._tiled
    x = grouped_tensors()
    bias = torch.randn(1, 4, 40, 40, dtype=torch.float64, requires_grad=True)
    alpha = (0.3 + 0.4 * torch.rand(2, 40, dtype=torch.float64)).requires_grad_()
    grouped._tiled = noting(operator)
    try:
        grouped_call(x, fixed_groups(4, 40), window=3)
        grouped_call(x, cif_groups(alpha, longest=6), window=3, bias=bias)
        grouped_call(x, fixed_groups(4, 40), asking=True, window=3)
    finally:
        grouped._tiled = operator
    for arguments in checked:
        fixed = [t.detach().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t
                 for t in arguments]  # fmt: skip
        torch.library.opcheck(operator, fixed)
        plain = [t.detach() if isinstance(t, Tensor) else t for t in arguments]
        out, lse = operator(*plain)
        torch.library.opcheck(grouped._tiled_backward, (torch.randn_like(out), out, lse, *plain))


def grouped_graph() -> None:
    """Groups by counting are one graph with their making; outputs and gradients as they are."""

    def function(x, visibility):
        return (grouped_call(x, fixed_groups(4, 40), window=3),)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    x = grouped_tensors()
    check_equal(results(compiled, x, None), results(function, x, None))


def whole_graph(mechanism: Mechanism) -> None:
    """No graph break, outputs and gradients as in eager mode; with every kind of visibility."""

    def function(x, visibility):
        return mechanism.run(x, "auto", visibility)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for visibility in (None, ragged(SHAPE.keys)[0]):
        x = transposed(leaves(mechanism.draw(SHAPE), torch.float64))
        check_equal(results(compiled, x, visibility), results(function, x, visibility))


def dropout(mechanism: Mechanism) -> None:
    """One graph for all seeds that are tensors, drawn ones among them; the same mask as eager."""
    graphs, count = counting()

    def function(x, seed):
        return mechanism.run(x | {"dropout_p": 0.3, "seed": seed}, "auto", None)

    compiled = torch.compile(function, fullgraph=True, backend=count)
    for seed in (1, 2, 3):
        x = leaves(mechanism.draw(SHAPE), torch.float64)
        seed = torch.tensor(seed)
        check_equal(results(compiled, x, seed), results(function, x, seed))
    assert len(graphs) == 1, f"{len(graphs)} graphs for three seeds"
    without_seed = torch.compile(lambda x: function(x, None), fullgraph=True, backend="aot_eager")
    first, second = (without_seed(x)[0] for _ in range(2))
    assert not torch.equal(first, second)


def dynamic(mechanism: Mechanism) -> None:
    """Six lengths, one graph; a graph for each of them would recompile in every training step."""
    graphs, count = counting()

    def function(x, visibility):
        return mechanism.run(x, "auto", visibility)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=count)
    # The first is unlike any other size, which torch would take to be the same for ever.
    for tokens in (7, 17, 63, 64, 65, 130):
        x = transposed(leaves(mechanism.draw(SHAPE.long(tokens)), torch.float64))
        check_equal(results(compiled, x, None), results(function, x, None))
    assert len(graphs) == 1, f"{len(graphs)} graphs for six lengths"


def dynamic_fused(mechanism: Mechanism) -> None:
    """The same of the kernels that a GPU runs, in the interpreter."""
    graphs, count = counting()

    def function(x):
        return mechanism.run(x, "fused")[0]

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=count)
    for tokens in (7, 17, 65):
        x = leaves(mechanism.draw(SHAPE.long(tokens)))
        torch.testing.assert_close(compiled(x), function(x), rtol=0, atol=0)
    assert len(graphs) == 1, f"{len(graphs)} graphs for three lengths"


def export(mechanism: Mechanism) -> None:
    """One exported program for every length, with padding, from a short and from a long example."""

    class Model(torch.nn.Module):
        def forward(self, x, padding):
            return mechanism.run(x, "auto", Visibility(padding=padding))

    def inputs(tokens: int) -> tuple[dict[str, Tensor], Tensor]:
        x = {name: t.detach() for name, t in leaves(mechanism.draw(SHAPE.long(tokens))).items()}
        return x, torch.arange(tokens)[None] >= tokens // 3

    tokens = torch.export.Dim("tokens", min=2, max=4096)
    for example in (9, 130):
        x, padding = inputs(example)
        shapes = {name: {2: tokens} if name in mechanism.per_token else None for name in x}
        program = torch.export.export(Model(), (x, padding), dynamic_shapes=(shapes, {1: tokens}))
        for length in (2, 17, 64, 65, 257):
            arguments = inputs(length)
            check_equal(list(program.module()(*arguments)), list(Model()(*arguments)))


def forward_mode() -> None:
    """Refused here too, be it inside or around what is compiled."""
    mechanism = BY_NAME["differential"]
    tensors = leaves(mechanism.draw(SHAPE))
    q = tensors["q"].detach()

    def function(x):
        return mechanism.run(tensors | {"q": x}, "auto")[0]

    def inside():
        torch.compile(lambda x: torch.func.jvp(function, (x,), (x,)), backend="aot_eager")(q)

    def around():
        compiled = torch.compile(function, backend="aot_eager")
        compiled(q)
        with forward_ad.dual_level():
            compiled(forward_ad.make_dual(q, q))

    for call in (inside, around):
        try:
            call()
        except ValueError as error:
            assert "impl='reference' has them all" in str(error), error
        else:
            raise AssertionError(f"{call.__name__}: not refused")


def inductor() -> None:
    """The default backend, once."""
    mechanism = BY_NAME["mta-full"]

    def function(x, visibility):
        return mechanism.run(x, "auto", visibility)

    x = transposed(leaves(mechanism.draw(SHAPE), torch.float64))
    compiled = torch.compile(function, fullgraph=True)
    check_equal(
        results(compiled, x, Visibility(window=5)), results(function, x, Visibility(window=5))
    )


def llama(mechanism) -> None:
    """A converted model compiles without a graph break, for training as well."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import heedful

    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=32,
    )  # fmt: skip
    model = LlamaForCausalLM(config).double()
    heedful.convert(model, mechanism)
    ids = torch.randint(32, (2, 9))

    def loss_and_grads(forward):
        model.zero_grad()
        out = forward(input_ids=ids, labels=ids, use_cache=False)
        out.loss.backward()
        return [out.logits.detach(), *(p.grad.clone() for p in model.parameters())]

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    check_equal(loss_and_grads(compiled), loss_and_grads(model))


LENGTHS = ("mta-full", "low-rank", "selective-own", "differential")


def operator_low_rank() -> None:
    """As of mta: all that there is, documents in a window, and keys anywhere."""
    x = transposed(leaves(BY_NAME["low-rank"].draw(SHAPE), torch.float64))
    segments = ragged(SHAPE.keys)[0].segments()
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    qkv, factors, mixing = (x["q"], x["k"], x["v"]), (x["u"], x["w"]), (x["mix"], x["post_mix"])
    operator = torch.ops.heedful.multi_token_attention_flash.default
    backward = torch.ops.heedful.multi_token_attention_flash_backward.default
    for arguments in (
        (*qkv, *factors, *mixing, sinks, segments, None, True, 7, 0.5, True, False, False,
         "tiled"),
        (*qkv, None, None, *mixing, None, None, None, True, None, 0.5, True, False, True,
         "tiled"),
        (*qkv, *factors, None, None, None, None, places(), False, None, 0.5, False, False, False,
         "composed"),
    ):  # fmt: skip
        torch.library.opcheck(operator, (*arguments, True))
        fixed = [t.detach() if isinstance(t, Tensor) else t for t in arguments]
        torch.library.opcheck(operator, (*fixed, False))
        out, *rest = operator(*fixed, True)
        torch.library.opcheck(backward, (torch.randn_like(out), *rest, *fixed))


CHECKS = {
    "operator mta": operator_mta,
    "operator low rank": operator_low_rank,
    "operator selective": operator_selective,
    "operator grouped": operator_grouped,
    "operator softmax": operator_softmax,
    "whole graph grouped": grouped_graph,
    "whole graph softmax": softmax_graphs,
    "inductor": inductor,
    "inductor softmax": lambda: softmax_steps("inductor"),
    "forward mode": forward_mode,
    **{f"whole graph {m}": lambda m=m: whole_graph(m) for m in [*MECHANISMS, *LOW_RANK]},
    **{
        f"{kind} {name}": lambda check=check, name=name: check(BY_NAME[name])
        for kind, check in (("dropout", dropout), ("dynamic", dynamic), ("export", export))
        for name in LENGTHS
        if (kind, name) != ("dropout", "low-rank")  # which refuses dropout
    },
    **{
        f"fused {name}": lambda name=name: dynamic_fused(BY_NAME[name])
        for name in ("mta-full", "selective-own")
    },
    **{
        f"llama {name}": lambda name=name: llama(name)
        for name in ("mta-published", "selective", "differential", "grouped")
    },
}

if __name__ == "__main__":
    for name in sys.argv[1:]:
        torch.manual_seed(0)
        torch.compiler.reset()
        try:
            CHECKS[name]()
            problem = None
        except Exception:
            problem = traceback.format_exc()
        print(json.dumps({"check": name, "problem": problem}))
        sys.stdout.flush()
