"""Who sees whom: the whole map against loops, tiles against the whole map, packing, messages."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.ops import Queries, Visibility
from helpers.loops import cases, sight

CPU = torch.device("cpu")


@st.composite
def visibilities(draw) -> tuple[Visibility, int]:
    """Any combination of conditions over two rows, and the number of keys."""
    keys = draw(st.integers(1, 12))
    documents = padding = None
    if draw(st.booleans()):
        starts = st.lists(st.booleans(), min_size=keys, max_size=keys)
        rows = draw(st.lists(starts, min_size=1, max_size=2))
        documents = torch.tensor(rows).long().cumsum(1)
    if draw(st.booleans()):
        sides = st.tuples(st.integers(0, keys), st.integers(0, keys))
        ends = draw(st.lists(sides, min_size=1, max_size=2))
        tokens = torch.arange(keys)
        padding = torch.stack([(tokens >= a) & (tokens < keys - b) for a, b in ends])
    causal = draw(st.booleans())
    window = draw(st.none() | st.integers(1, keys + 1)) if causal else None
    mutual = None
    if causal and draw(st.booleans()):
        joined = draw(st.lists(st.booleans(), min_size=keys, max_size=keys))
        runs = torch.tensor(joined).logical_not().long().cumsum(0)
        mutual = runs.where(torch.tensor(draw(st.sampled_from([joined, [False] * keys]))), -1)[None]
    rule = Visibility(causal, window, documents, padding, mutual)
    return rule, keys


def whole(visibility: Visibility, queries: int, keys: int) -> torch.Tensor:
    return visibility.dense(queries, keys, CPU).expand(2, -1, -1)


@given(visibilities(), st.data())
@settings(max_examples=150, deadline=None)
def test_the_whole_map_is_what_the_conditions_say(rule, data):
    visibility, keys = rule
    queries = data.draw(st.integers(1, keys))
    sees = sight(visibility, queries, keys)
    expected = [
        [[sees(row, i, j) for j in range(keys)] for i in range(queries)] for row in range(2)
    ]
    assert whole(visibility, queries, keys).tolist() == expected


@given(visibilities(), st.data())
@settings(max_examples=150, deadline=None)
def test_positions_and_queries_of_their_own(rule, data):
    """Keys that stand anywhere, and queries that are none of them."""
    visibility, keys = rule
    queries = data.draw(st.integers(1, 9))
    at = torch.tensor(data.draw(st.permutations(range(3 * keys))))[None, :keys]
    visibility = replace(visibility, positions=at, mutual=None)
    if data.draw(st.booleans()) or queries > keys:
        other, _ = data.draw(visibilities().filter(lambda other: other[1] >= queries))
        documents = None
        if visibility.documents is not None:
            documents = torch.arange(queries)[None] // 2
        padding = None if other.padding is None else other.padding[:, :queries]
        starts = torch.arange(queries)[None] + data.draw(st.integers(0, 2 * keys))
        visibility = replace(visibility, queries=Queries(documents, padding, starts))
    visibility.check(2, queries, keys)
    sees = sight(visibility, queries, keys)
    expected = [
        [[sees(row, i, j) for j in range(keys)] for i in range(queries)] for row in range(2)
    ]
    assert whole(visibility, queries, keys).tolist() == expected


def test_moving_to_another_device_moves_every_tensor():
    ones = torch.ones(1, 3, dtype=torch.long)
    queries = Queries(documents=ones, padding=ones.bool(), positions=ones)
    moved = Visibility(documents=ones, padding=ones.bool(), positions=ones, queries=queries)
    moved = moved.to("meta", non_blocking=True)
    tensors = (moved.documents, moved.padding, moved.positions, *moved.queries)
    assert all(x.device.type == "meta" for x in tensors)
    assert moved.causal and moved.window is None and moved.mutual is None


@given(visibilities(), st.data())
@settings(max_examples=150, deadline=None)
def test_a_tile_is_a_part_of_the_whole_map(rule, data):
    visibility, keys = rule
    cut = st.tuples(st.integers(0, keys), st.integers(0, keys)).map(sorted)
    rows, columns = (range(*data.draw(cut)) for _ in range(2))
    i, j = (torch.arange(x.start, x.stop) for x in (rows, columns))
    tile = visibility.at(i, j).expand(2, -1, -1)
    part = whole(visibility, keys, keys)[:, rows.start : rows.stop, columns.start : columns.stop]
    assert torch.equal(tile, part)


@given(visibilities())
@settings(max_examples=100, deadline=None)
def test_first_tokens_begin_a_document_or_a_padded_row(rule):
    visibility, keys = rule
    first = visibility.first_tokens(keys, CPU).expand(2, -1).tolist()
    for row in range(2):
        documents = [0] * keys
        if visibility.documents is not None:
            documents = visibility.documents[row % len(visibility.documents)].tolist()
        real = [True] * keys
        if visibility.padding is not None:
            real = visibility.padding[row % len(visibility.padding)].tolist()
        numbers, expected = set(), []
        for document, is_real in zip(documents, real, strict=True):
            expected.append(is_real and document not in numbers)
            if is_real:
                numbers.add(document)
        assert first[row] == expected


def test_documents_may_be_integers_of_any_type_and_negative_ones_are_padding():
    """Numbers up to the largest of the narrowest types, beside padding."""
    padding = torch.ones(2, 30, dtype=torch.bool)
    padding[0, :7], padding[1, 24:] = False, False
    documents = (torch.arange(30) >= 15).long()[None].repeat(2, 1)
    narrow = (torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64)
    for largest, types in ((127, narrow), (255, (torch.uint8,))):
        wide = Visibility(documents=documents * (largest - 3) + 3, padding=padding)
        for dtype in types:
            rule = replace(wide, documents=wide.documents.to(dtype))
            assert torch.equal(rule.segments(), wide.segments()), dtype
            assert torch.equal(rule.query_segments(9), wide.query_segments(9))
            assert torch.equal(rule.first_tokens(30, CPU), wide.first_tokens(30, CPU))
    negative = Visibility(documents=documents.where(padding, -1 - documents))
    expected = Visibility(documents=documents, padding=padding)
    assert torch.equal(negative.dense(30, 30, CPU), expected.dense(30, 30, CPU))
    assert torch.equal(negative.first_tokens(30, CPU), expected.first_tokens(30, CPU))


def test_packed_numbers_the_documents_and_pads_the_rest():
    rule = Visibility.packed(torch.tensor([0, 2, 3, 6]), length=8, window=2)
    assert rule.documents[:, :6].tolist() == [[0, 0, 1, 2, 2, 2]]
    assert rule.padding.tolist() == [[True] * 6 + [False] * 2]
    assert rule.window == 2 and rule.causal
    exact = Visibility.packed(torch.tensor([0, 2, 3]))
    assert exact.documents.tolist() == [[0, 0, 1]] and exact.padding is None
    empty = Visibility.packed(torch.tensor([0, 2, 2, 3]))
    assert empty.dense(3, 3, CPU).tolist() == exact.dense(3, 3, CPU).tolist()


def test_plain_means_that_causal_order_is_all():
    assert Visibility().plain and Visibility(causal=False).plain
    for visibility in list(cases(9).values())[1:]:
        assert not visibility.plain


WRONG = {
    "window must be a whole number of at least 1": lambda: Visibility(window=0),
    r"got 2\.5; use None for no limit": lambda: Visibility(window=2.5),
    r"documents must be a tensor \[B, Tk\], got \(3,\)": lambda: Visibility(
        documents=torch.zeros(3, dtype=torch.long)
    ),
    "mutual must hold whole numbers, got torch.bool": lambda: Visibility(
        mutual=torch.ones(1, 3, dtype=torch.bool)
    ),
    "mutual is not defined beside positions or queries": lambda: Visibility(
        mutual=torch.zeros(1, 3).long(), positions=torch.arange(3)[None]
    ),
    "queries must be a Queries or None, got 3": lambda: Visibility(queries=3),
    r"queries.padding must be a tensor \[B, Tk\], got \(3,\)": lambda: Visibility(
        queries=Queries(padding=torch.ones(3, dtype=torch.bool))
    ),
    "documents must be given for keys and queries, or for neither": lambda: Visibility(
        causal=False, queries=Queries(documents=torch.zeros(1, 3).long())
    ),
    "queries.positions must be given where causal order or a window": lambda: Visibility(
        queries=Queries()
    ),
    r"visibility.queries.positions must be \[2 or 1, 4\] \(one entry per query\), got \(1, 3\)": (
        lambda: Visibility(queries=Queries(positions=torch.arange(3)[None])).check(2, 4, 2)
    ),
    "mutual needs causal=True": lambda: Visibility(causal=False, mutual=torch.zeros(1, 3).long()),
    r"padding must be a tensor \[B, Tk\], got \[\[True\]\]": lambda: Visibility(padding=[[True]]),
    "padding must be a dense tensor .*, got a sparse_coo one; use its to_dense": lambda: Visibility(
        padding=torch.ones(1, 3, dtype=torch.bool).to_sparse()
    ),
    "window must be .* got True": lambda: Visibility(window=True),
    r"window must be .* at most 2\*\*62, got 1180591620717411303424": lambda: Visibility(
        window=2**70
    ),
    "causal must be True or False, got 'yes'": lambda: Visibility(causal="yes"),
    "documents must hold whole numbers, got torch.complex64": lambda: Visibility(
        documents=torch.ones(1, 3, dtype=torch.complex64)
    ),
    r"padding must be boolean .* got torch.int64; convert a 0/1 mask with mask.bool\(\)": (
        lambda: Visibility(padding=torch.ones(1, 3, dtype=torch.long))
    ),
    "documents must hold whole numbers, got torch.bool; a mask belongs in padding": (
        lambda: Visibility(documents=torch.ones(1, 3, dtype=torch.bool))
    ),
    "documents must hold whole numbers, got torch.float32": lambda: Visibility(
        documents=torch.ones(1, 3)
    ),
    r"cu_seqlens must be a tensor of offsets \[n\], got \[0, 12\]": lambda: Visibility.packed(
        [0, 12]
    ),
    "cu_seqlens must be .* whole offsets, got .2,. of torch.float32": lambda: Visibility.packed(
        torch.tensor([0.0, 12.0])
    ),
    "cu_seqlens must hold numbers, got a tensor on meta": lambda: Visibility.packed(
        torch.tensor([0, 12], device="meta")
    ),
    "length must be a whole number of tokens or None, got '12'": lambda: Visibility.packed(
        torch.tensor([0, 12]), length="12"
    ),
    "length must be a whole number of tokens or None, got 12.0": lambda: Visibility.packed(
        torch.tensor([0, 12]), length=12.0
    ),
    r"cu_seqlens must be a vector of at least two whole offsets, got \(1,\)": lambda: (
        Visibility.packed(torch.tensor([0]))
    ),
    r"cu_seqlens must start at 0 and not fall, got \[1, 2\]": lambda: Visibility.packed(
        torch.tensor([1, 2])
    ),
    r"cu_seqlens must start at 0 and not fall, got \[0, 3, 2\]": lambda: Visibility.packed(
        torch.tensor([0, 3, 2])
    ),
    "length must be at least the last offset 5, got 4": lambda: Visibility.packed(
        torch.tensor([0, 5]), length=4
    ),
    "q has 4 tokens but k only 3: .* k must be at least as long": lambda: Visibility().check(
        1, 4, 3
    ),
    r"visibility.padding must be \[3 or 1, 4\] \(one entry per key\), got \(2, 4\)": (
        lambda: Visibility(padding=torch.ones(2, 4, dtype=torch.bool)).check(3, 4, 4)
    ),
    r"visibility.documents must be \[2 or 1, 5\] \(one entry per key\), got \(2, 4\)": (
        lambda: Visibility(documents=torch.ones(2, 4).long()).check(2, 4, 5)
    ),
}


@pytest.mark.usefixtures("no_shape_checks")
def test_wrong_arguments_are_named():
    for message, make in WRONG.items():
        with pytest.raises(ValueError, match=message):
            make()
