"""A wrong argument is answered by its name, by what it was, and by a way out."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError

from heedful.ops import (
    Visibility,
    differential_attention,
    grouped_attention,
    impl,
    multi_token_attention,
    selective_attention,
)
from heedful.ops.common.precision import product
from heedful.ops.grouped import fixed_groups

OPERATORS = {
    "multi_token_attention": multi_token_attention,
    "selective_attention": selective_attention,
    "differential_attention": lambda q, k, v, **options: differential_attention(
        q, k, v[:, ::2], lam=torch.tensor(0.5), **options
    ),
}
every = pytest.mark.parametrize("operator", OPERATORS)


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


Q = x(2, 4, 5, 8)
QKV = {
    r"q must be \[B, H, T, D\], got shape \(4, 5, 8\)": (x(4, 5, 8), Q, Q),
    r"k must be \[B, H, T, D\], got shape \(2, 4, 5\)": (Q, x(2, 4, 5), Q),
    "q must be a floating-point tensor, got torch.int64; cast it first": (Q.long(), Q, Q),
    r"k must have q's dtype and device \(torch.float32, cpu\), got torch.bfloat16, cpu": (
        Q,
        Q.bfloat16(),
        Q,
    ),
    r"v must have q's dtype and device \(torch.float32, cpu\), got torch.float64": (
        Q,
        Q,
        Q.double(),
    ),
    r"k must have q's dtype and device \(torch.float32, cpu\), got torch.float32, meta": (
        Q,
        Q.to("meta"),
        Q,
    ),
    r"q must not be empty, got shape \(2, 4, 0, 8\)": (x(2, 4, 0, 8), Q, Q),
    "k and v must have q's batch size 2, got 1 and 2": (Q, x(1, 4, 5, 8), Q),
    "k must have q's head dim 8, got 6": (Q, x(2, 4, 5, 6), Q),
    "v must have k's 5 tokens, got 6": (Q, Q, x(2, 4, 6, 8)),
    "q has 5 tokens but k only 3: .* k must be at least as long": (Q, x(2, 4, 3, 8), x(2, 4, 3, 8)),
}


@every
def test_queries_keys_and_values(operator):
    for message, tensors in QKV.items():
        with pytest.raises(ValueError, match=message):
            OPERATORS[operator](*tensors)


# Sparse and nested tensors are made where they are used: torch warns about each.
NO_TENSORS = {
    "None": lambda: None,
    r"\[\[1.0\]\]": lambda: [[1.0]],
    "'q'": lambda: "q",
    "1.5": lambda: 1.5,
    r"a sparse_coo one; use its to_dense\(\)": lambda: Q.to_sparse(),
    r"a nested one; use its to_padded_tensor\(0.0\), with Visibility\(padding=": (
        lambda: torch.nested.nested_tensor([x(4, 5, 8), x(4, 3, 8)])
    ),
}


@every
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_is_no_dense_tensor(operator):
    function = {"differential_attention": _differential}.get(operator, OPERATORS[operator])
    for value, make in NO_TENSORS.items():
        for place, name in enumerate("qkv"):
            inputs = [Q, Q, Q]
            inputs[place] = make()
            with pytest.raises(ValueError, match=rf"^{name} must be .* got {value}"):
                function(*inputs)


def _differential(q, k, v):
    return differential_attention(q, k, v, lam=torch.tensor(0.5))


NO_DENSE_PARAMETERS = {
    "conv": (multi_token_attention, {"conv": x(4, 3, 5).to_sparse()}),
    "post_mix": (multi_token_attention, {"post_mix": "identity"}),
    "selector_q": (selective_attention, {"selector_q": [1], "selector_k": Q}),
    "selector_k": (selective_attention, {"selector_q": Q, "selector_k": Q.to_sparse()}),
    "state": (selective_attention, {"state": 0.0}),
    "lam": (differential_attention, {"lam": torch.rand(2).to_sparse()}),
}


@pytest.mark.parametrize("name", NO_DENSE_PARAMETERS)
def test_parameters_that_are_no_dense_tensors(name):
    operator, options = NO_DENSE_PARAMETERS[name]
    v = x(2, 2, 5, 8) if name == "lam" else Q
    with pytest.raises(ValueError, match=rf"^{name} must be a (dense )?tensor"):
        operator(Q, Q, v, **options)


def test_a_state_is_not_the_whole_output():
    out = selective_attention(Q, Q, Q)
    with pytest.raises(ValueError, match=r"state must be .* got a whole .*; pass its \.state"):
        selective_attention(Q, Q, Q, state=out)


NO_NUMBERS = {
    "nan": float("nan"),
    "inf": float("inf"),
    r"\[1\]": [1],
    r"1j": 1j,
    "True": True,
    "'x'": "x",
    r"1000000+\.\.\.0+": 10**400,
}


@every
def test_numbers_that_are_not_finite(operator):
    for value, number in NO_NUMBERS.items():
        with pytest.raises(ValueError, match=f"^scale must be a finite number, got .*{value}"):
            OPERATORS[operator](Q, Q, Q, scale=number)
        with pytest.raises(ValueError, match=f"^tau must be a finite number, got .*{value}"):
            selective_attention(Q, Q, Q, tau=number)


@every
def test_a_learned_scale_would_get_no_gradient(operator):
    for scale in (torch.tensor(0.5, requires_grad=True), torch.tensor(0.5)):
        with pytest.raises(ValueError, match=r"^scale must be a plain .* multiply q by it"):
            OPERATORS[operator](Q, Q, Q, scale=scale)
    with pytest.raises(ValueError, match=r"^tau must be a plain number, .* use its .item\(\)"):
        selective_attention(Q, Q, Q, tau=torch.tensor(1.0, requires_grad=True))


@every
def test_numbers_of_other_libraries(operator):
    expected, actual = (
        OPERATORS[operator](Q + 1, Q + 1, Q + 1, scale=scale) for scale in (2.0, np.float32(2))
    )
    torch.testing.assert_close(actual, expected)


@every
def test_visibility_on_another_device(operator):
    for name, dtype in (("documents", torch.int64), ("padding", torch.bool)):
        visibility = Visibility(**{name: torch.zeros(2, 5, dtype=dtype, device="meta")})
        for choice in ("auto", "reference"):
            expected = rf"^visibility.{name} must be on q's device cpu, got meta; move it with .to"
            with pytest.raises(ValueError, match=expected):
                OPERATORS[operator](Q, Q, Q, visibility=visibility, impl=choice)


def test_protection_is_a_flag():
    with pytest.raises(ValueError, match="protect_first must be True or False, got 'no'"):
        selective_attention(Q, Q, Q, protect_first="no")


@pytest.mark.parametrize("operator", ["multi_token_attention", "selective_attention"])
def test_heads(operator):
    k = x(2, 3, 5, 8)
    with pytest.raises(ValueError, match="k has 3 heads, which does not divide q's 4; grouped"):
        OPERATORS[operator](Q, k, k)
    with pytest.raises(ValueError, match="v must have k's 2 heads, got 4"):
        OPERATORS[operator](Q, x(2, 2, 5, 8), Q)


@every
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_visibility(operator):
    mask = torch.ones(5, 5, dtype=torch.bool)
    expected = r"visibility must be a heedful.Visibility .* got \(5, 5\); describe a"
    with pytest.raises(ValueError, match=expected):
        OPERATORS[operator](Q, Q, Q, visibility=mask)
    nested = torch.nested.nested_tensor([x(5), x(4)])
    with pytest.raises(ValueError, match=r"visibility must be .* a nested tensor; describe a"):
        OPERATORS[operator](Q, Q, Q, visibility=nested)
    with pytest.raises(ValueError, match=r"visibility must be .* got 'causal'; describe a mask"):
        OPERATORS[operator](Q, Q, Q, visibility="causal")
    padding = Visibility(padding=torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"visibility.padding must be \[2 or 1, 5\]"):
        OPERATORS[operator](Q, Q, Q, visibility=padding)


@every
def test_implementations(operator):
    none = operator == "differential_attention"
    reason = "it has no kernels of its own" if none else "its kernels need a GPU, and q is "
    expected = f"impl='fused' does not support this {operator} call: {reason}"
    with pytest.raises(ValueError, match=expected):
        OPERATORS[operator](Q, Q, Q, impl="fused")
    with pytest.raises(ValueError, match=r"impl must be one of auto, .*, fused, got 'flash'"):
        OPERATORS[operator](Q, Q, Q, impl="flash")


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({"q": x(2, 4, 5, 3).double()}, "float64 is not float32"),
        ({"conv": x(4, 9, 3)}, "c_q 9 is above 8"),
        ({"post_conv": x(4, 2, 17)}, "c_k 17 is above 15"),
    ],
)
def test_limits_of_the_fused_kernels(interpreted, changes, limit):
    options = dict(changes)
    q = options.pop("q", Q)
    with pytest.raises(ValueError, match=f"impl='fused' does not support .* call: .*({limit})"):
        multi_token_attention(q, q, q, **options, impl="fused")
    if not options:
        with pytest.raises(ValueError, match=f"impl='fused' does not support .* call: .*({limit})"):
            selective_attention(q, q, q, impl="fused")


def test_heads_that_are_too_wide_for_the_fused_kernels(interpreted):
    wide = x(2, 4, 5, 300)
    with pytest.raises(ValueError, match=r"impl=.fused. does not support .* q has head dim 300"):
        selective_attention(wide, wide, wide, impl="fused")


def test_triton_is_optional(monkeypatch):
    monkeypatch.setattr(impl, "_has_triton", lambda: False)
    with pytest.raises(ValueError, match="Triton is not installed"):
        multi_token_attention(Q, Q, Q, impl="fused")


def test_auto_says_once_what_it_runs(caplog, monkeypatch):
    monkeypatch.setattr(impl, "_logged", set())
    with caplog.at_level(logging.INFO, logger="heedful"):
        multi_token_attention(Q, Q, Q)
        multi_token_attention(Q, Q, Q)
        meta = Q.to("meta")  # which stands for a device other than a CPU
        multi_token_attention(meta, meta, meta)
        grouped_attention(meta, meta, meta, groups=fixed_groups(2, meta.shape[2], device="meta"))
    runs = ("multi_token_attention", "tiled"), ("multi_token_attention", "composed")
    runs += (("grouped_attention", "tiled"),)
    assert caplog.messages == [f"{name}: impl=auto runs {x}" for name, x in runs]


@pytest.mark.parametrize(
    ("device", "capability", "hip", "limit", "runs"),
    [
        ("cpu", None, None, None, "tiled"),
        ("meta", None, None, None, "composed"),
        ("cuda", (9, 0), None, None, "fused"),
        ("cuda", (8, 0), None, None, "fused"),
        ("cuda", (9, 0), None, "it is too wide", "composed"),
        ("cuda", (7, 5), None, None, "composed"),
        ("cuda", (9, 4), "6.4", None, "composed"),
    ],
)
def test_what_auto_takes(monkeypatch, device, capability, hip, limit, runs):
    """A GPU that the kernels are not known to fit is not tried."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    q = SimpleNamespace(device=torch.device(device))
    assert impl.choose("attention", "auto", lambda: limit, (q,)) == runs


def test_grouped_attention_has_one_shape_for_all_devices():
    with pytest.raises(
        ValueError, match=r"impl='composed' does not support this grouped.* use auto,"
    ):
        grouped_attention(Q, Q, Q, groups=fixed_groups(2, Q.shape[2]), impl="composed")


STEPS = {
    r"conv must be \[4, c_q, c_k\] \(one kernel per query head\), got \(2, 3, 5\)": {
        "conv": x(2, 3, 5)
    },
    r"post_conv must be \[4, c_q, c_k\] .* got \(3, 5\)": {"post_conv": x(3, 5)},
    "conv must be .* got 3": {"conv": 3},
    "conv must have c_q >= 1 and an odd c_k .* c_k=4; add a zero column": {"conv": x(4, 3, 4)},
    "post_conv must have .* got c_q=0, c_k=3": {"post_conv": x(4, 0, 3)},
    r"mix must be \[H/g, g, g\] indexed \[group, out, in\], got \(4, 4\)": {"mix": x(4, 4)},
    "post_mix mixes groups of 3 heads, which does not divide the 4 heads; use a": {
        "post_mix": x(1, 3, 3)
    },
    r"mix must be \[2, 2, 2\], got \(1, 2, 2\)": {"mix": x(1, 2, 2)},
    r"post_mix must be \[1, 4, 4\], got \(1, 4, 3\)": {"post_mix": x(1, 4, 3)},
    "mix must be a floating-point tensor on cpu, got torch.int64": {"mix": x(1, 4, 4).long()},
    "conv must be a floating-point tensor on cpu, got torch.float32 on meta": {
        "conv": x(4, 3, 5).to("meta")
    },
}


def test_kernels_and_mixing():
    for message, parameters in STEPS.items():
        with pytest.raises(ValueError, match=message):
            multi_token_attention(Q, Q, Q, **parameters)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_parameters_that_are_not_finite(value):
    shapes = {"conv": (4, 2, 3), "post_conv": (4, 2, 3), "mix": (1, 4, 4), "post_mix": (2, 2, 2)}
    for name, shape in shapes.items():
        damaged = x(*shape)
        damaged[0, 1, 1] = value
        with pytest.raises(ValueError, match=f"^{name} must be finite, got .* load an earlier one"):
            multi_token_attention(Q, Q, Q, **{name: damaged})
    with pytest.raises(ValueError, match=r"^lam must be finite, got NaN or infinity"):
        differential_attention(Q, Q, x(2, 2, 5, 16), lam=torch.tensor(value))


SELECTION = {
    "selector_q and selector_k must be given together, or neither": {"selector_q": Q},
    r"selector_q must be \[2, 1 or 4, 5, Ds\], got \(1, 1, 5, 3\)": {
        "selector_q": x(1, 1, 5, 3),
        "selector_k": x(2, 1, 5, 3),
    },
    "selector_k must have 1 selector or one per head .4., got 2; concatenate heads along Ds": {
        "selector_q": x(2, 1, 5, 3),
        "selector_k": x(2, 2, 5, 3),
    },
    "selector_k must have q's dtype and device .* got torch.float64": {
        "selector_q": x(2, 1, 5, 3),
        "selector_k": x(2, 1, 5, 3).double(),
    },
    r"selector_k must match selector_q in selectors and Ds \(1, 3\), got \(1, 2\)": {
        "selector_q": x(2, 1, 5, 3),
        "selector_k": x(2, 1, 5, 2),
    },
    "tau must be positive, got 0; None computes no memory": {"tau": 0},
    r"state must be \[2, 1, at most 5\] \(one F per key\), got \(2, 1, 6\)": {"state": x(2, 1, 6)},
    r"state must be torch.float32 on cpu \(half precision loses the sum\), got torch.float16": {
        "state": x(2, 1, 5).half()
    },
    "visibility must be causal for selective attention": {"visibility": Visibility(causal=False)},
}


def test_selection():
    for message, options in SELECTION.items():
        with pytest.raises(ValueError, match=message):
            selective_attention(Q, Q, Q, **options)


PAIRS = {
    r"q must have an even number of heads \(pairs\), got 3": (x(2, 3, 5, 8), x(2, 3, 5, 8), Q),
    "v must have 2 heads .* got 4; join the values of two heads": (Q, Q, Q),
}


@pytest.mark.parametrize("message", PAIRS)
def test_pairs(message):
    with pytest.raises(ValueError, match=message):
        differential_attention(*PAIRS[message], lam=torch.tensor(0.5))


@pytest.mark.parametrize(
    ("lam", "message"), [(0.5, "0.5"), (x(3), r"\(3,\)"), (x(2, 1), r"\(2, 1\)")], ids=str
)
def test_lambda(lam, message):
    with pytest.raises(
        ValueError, match=rf"lam must be a tensor \[\] or \[[2P]\] .* got {message}"
    ):
        differential_attention(Q, Q, x(2, 2, 5, 16), lam=lam)


def test_parameters_may_be_wider_than_the_input():
    """Kernels stay in fp32 beside bfloat16 activations."""
    q = torch.randn(1, 2, 6, 8).bfloat16()
    kernel = torch.randn(2, 2, 3)
    for name in ("reference", "tiled"):
        out = multi_token_attention(q, q, q, conv=kernel, mix=torch.eye(2)[None], impl=name)
        assert out.dtype == torch.bfloat16


def test_shapes_inside_the_operators_are_checked_in_these_tests():
    with pytest.raises(TypeCheckError, match="product"):
        product(torch.zeros(2, 3), torch.zeros(4, 5))
