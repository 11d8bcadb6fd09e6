"""Averaged attention maps of multi-token attention, before and after its convolutions.

In every layer with kernels maps are averaged per head over the last `--queries` queries of a book:

    before              softmax of the raw logits
    pre-convolution     softmax of the convolved logits
    probabilities       the layer's own softmax, of convolved and mixed logits
    post-convolution    these probabilities convolved
    weights             the same mixed, which multiply the values

    python -m benchmarks.real.maps runs/lower-mta-0 runs/lower-mta-1 runs/lower-mta-2 \
        --books books-test --out runs/maps.jsonl

Of each: the weight on the first token, the entropy in nats (of absolute weights scaled to one, as
some may be negative), and the total variation, half the sum of absolute differences, from the map
before and from the former stage. Of three also the weight by distance of all keys but the first.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from benchmarks.parts import command_line
from benchmarks.real.run import rows
from heedful.files import write_lines
from heedful.hf.look import LayerLook, look_into
from heedful_lab.commands.models import open_model, open_tokenizer
from heedful_lab.records.environment import environment

STAGES = {
    "logits": "before",
    "convolved logits": "pre-convolution",
    "softmax": "probabilities",
    "convolved softmax": "post-convolution",
}
SPREAD = ("before", "probabilities", "weights")  # whose weight by distance is recorded
NEAR = 32  # distances of one token each; behind them every bin is twice as long


def main() -> None:
    parser = command_line(__doc__, new=True)
    parser.add_argument("models", nargs="+", help="an adapter's folder or a converted model")
    parser.add_argument("--books", type=Path, required=True, help="folder of books, one per file")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--queries", type=int, default=256, help="at the end of every text")
    parser.add_argument("--rows", type=int, default=10, help="books, at most")
    options = parser.parse_args()
    if not 0 < options.queries < options.length:
        parser.error(f"--queries must be 1 to {options.length - 1}, got {options.queries}")
    lines = []
    for name in options.models:
        try:
            lines += records(name, options)
        except ValueError as error:
            parser.error(str(error))
    write_lines(options.out, lines)


def records(name: str, options: argparse.Namespace) -> list[dict]:
    """Those of one model.

    Raises:
        ValueError: it cannot be opened or has no kernels, or the books are none or too short.
    """
    model = open_model(name, budgets=False)
    books = list(rows(open_tokenizer(None, name, model), options))
    if not books or min(x.shape[1] for x in books) < options.length:
        raise ValueError(f"--books {options.books}: no books of {options.length} tokens")
    about = {"model": name, "length": options.length, "queries": options.queries}
    about |= {"books": len(books), "environment": environment()}
    lines = list(averages(model, tqdm(books, desc=name), options.queries))
    if not lines:
        raise ValueError(f"{name} has no layer with kernels; name a model with --mechanism mta")
    return [about | line for line in lines]


def averages(
    model: PreTrainedModel, books: Sequence[Int[Tensor, "1 T"]], queries: int
) -> Iterator[dict]:
    """One record per layer with kernels: the means of each head over queries and books."""
    sums: dict[int, dict[tuple[str, str], Tensor]] = {}
    kernels: dict[int, dict[str, list[float]]] = {}
    for ids in books:
        for layer, seen in look_into(model, ids):
            if seen.conv is not None or seen.post_conv is not None:
                kernels[layer], total = learned(seen), sums.setdefault(layer, {})
                for key, values in measures(seen, queries).items():
                    total[key] = total.get(key, 0) + values
    for layer, total in sums.items():
        maps: dict[str, dict[str, list]] = {}
        for (stage, measure), values in total.items():
            maps.setdefault(stage, {})[measure] = _short(values / len(books))
        yield {"layer": layer, "maps": maps, "learned": kernels[layer]}


def measures(seen: LayerLook, queries: int) -> dict[tuple[str, str], Float[Tensor, "H ..."]]:
    """By stage and measure, of each head of a layer, the mean over the last queries of one text."""
    means, before, former = {}, None, None
    for stage, whole in stages(seen):
        weights = whole[:, -queries:].double()
        before, former = (weights if x is None else x for x in (before, former))
        shares = weights.abs() / weights.abs().sum(-1, keepdim=True)
        means[stage, "first"] = weights[..., 0].mean(1)
        means[stage, "entropy"] = torch.special.entr(shares).sum(-1).mean(1)
        means[stage, "from_before"] = (weights - before).abs().sum(-1).mean(1) / 2
        means[stage, "from_former"] = (weights - former).abs().sum(-1).mean(1) / 2
        if stage in SPREAD:
            means[stage, "by_distance"] = by_distance(weights)
        former = weights
    return means


def stages(seen: LayerLook) -> Iterator[tuple[str, Float[Tensor, "H T T"]]]:
    """The maps that a layer makes one after the other, logits as their softmax."""
    for name, x, logits in seen.steps:
        if name in STAGES:
            yield STAGES[name], x.softmax(-1) if logits else x
    yield "weights", seen.weights


def starts(length: int) -> list[int]:
    """The least distance of each bin: 0 to 31 one by one, then 32, 64, 128 and so on."""
    far = (NEAR << n for n in range(length.bit_length()))
    return [*range(min(NEAR, length)), *(start for start in far if start < length)]


def by_distance(weights: Float[Tensor, "H Q T"]) -> Float[Tensor, "H N"]:
    """The weight in each bin of distances, mean over the last queries; the first key left out."""
    heads, queries, length = weights.shape
    positions = torch.arange(length)
    distances = (positions[-queries:, None] - positions).clamp(min=0)  # later keys have no weight
    least = torch.tensor(starts(length))
    bins = torch.bucketize(distances, least, right=True)[:, 1:] - 1
    sums = weights.new_zeros(heads, len(least))
    sums.scatter_add_(1, bins.flatten().expand(heads, -1), weights[..., 1:].flatten(1))
    return sums / queries


def learned(seen: LayerLook) -> dict[str, list[float]]:
    """The largest absolute change from the identity, of each head's kernels, of all mixing."""
    largest = {}
    for name in ("conv", "post_conv", "mix", "post_mix"):
        change = getattr(seen, name)
        if change is None:
            continue
        identity = torch.zeros(change.shape[1:])
        if "mix" in name:
            identity.fill_diagonal_(1)
        else:
            identity[len(identity) // 2 if seen.two_sided else -1, identity.shape[1] // 2] = 1
        largest[name] = _short((change - identity).abs().flatten(1).amax(1))
    return largest


def _short(values: Tensor) -> list:
    """Numbers of three significant digits."""
    return [_short(x) for x in values] if values.ndim else float(f"{values.item():.3g}")


if __name__ == "__main__":
    main()
