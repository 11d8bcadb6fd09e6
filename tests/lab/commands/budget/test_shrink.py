"""How budgets are searched, on costs that are known."""

import math

import pytest
import torch

from heedful_lab.commands.budget.shrink import (
    greedy,
    level,
    raised,
    share_out,
    shrink,
    spread,
    total,
)
from helpers.budget_searches import plain_greedy


class Costs:
    """A perplexity by tables of what each layer loses with n tokens; counts different trials."""

    def __init__(self, tables: torch.Tensor) -> None:
        self.tables, self.trials = tables, {}

    def __call__(self, budgets: tuple[int | None, ...]) -> float:
        if budgets not in self.trials:
            whole = self.tables.shape[1]
            losses = [float(self.tables[i, whole - n]) for i, n in enumerate(budgets) if n]
            self.trials[budgets] = math.exp(sum(losses))
        return self.trials[budgets]


def tables(kind: str, layers: int, length: int) -> torch.Tensor:
    """What layers lose that keep `length`, `length - 1`, ... 1 tokens."""
    if kind == "steps":
        return torch.rand(layers, length).square().sort().values.cumsum(1) / length**2
    factors = torch.exp(torch.randn(layers, 1) * 2) * 2e-4
    sizes = torch.arange(length, 0, -1)
    rough = 1 + 0.3 * torch.randn(layers, length).cumsum(1) / length
    return factors * ((length / sizes) ** (0.5 + torch.rand(layers, 1)) - 1) * rough


def test_greedy_on_costs_that_add_up():
    """Against the plain rule, on many tables of costs, and in fewer trials."""
    trials = {"plain": 0, "lazy": 0}  # different ones
    for seed in range(40):
        torch.manual_seed(seed)
        costs = torch.rand(6, 40).square().sort().values.cumsum(1)  # of keeping 40, 39, ... tokens

        tried = set()

        def cost(budgets, kind, costs=costs, tried=tried) -> float:
            trials[kind] += (kind, budgets) not in tried
            tried.add((kind, budgets))
            return 1 + sum(float(costs[i, 40 - n]) if n < 40 else 0 for i, n in enumerate(budgets))

        limit = 1 + 20 * float(torch.rand(()))
        budgets = greedy((40,) * 6, 3, 5, limit, lambda x, cost=cost: cost(x, "lazy"))
        expected = plain_greedy((40,) * 6, 3, 5, limit, lambda x, cost=cost: cost(x, "plain"))
        assert budgets == expected
        assert cost(budgets, "lazy") <= limit
    assert trials["lazy"] < trials["plain"]


def test_layers_without_a_budget_take_no_part():
    budgets = greedy((20, None, 20), 5, 4, 100, lambda x: sum(20 - (n or 20) for n in x))
    assert budgets == (5, None, 5)


@pytest.mark.parametrize("kind", ["steps", "powers"])
@pytest.mark.parametrize(("layers", "length"), [(4, 256), (8, 256), (30, 512)])
def test_it_holds_no_more_than_greedy_steps_and_takes_a_fraction_of_the_trials(
    kind, layers, length
):
    """Over several searches together; of one it may hold one percent more."""
    sums, trials = {"greedy": 0, "shrink": 0}, {"greedy": 0, "shrink": 0}
    for seed in range(3 if layers == 30 else 8):
        torch.manual_seed(seed)
        costs, start, limit = tables(kind, layers, length), (length,) * layers, 1.005
        values = {}
        for name in sums:
            cost = Costs(costs)
            if name == "greedy":
                values[name] = greedy(start, 13, length // 8, limit, cost)
            else:
                values[name] = shrink(start, 13, length, limit, cost)
            assert cost(values[name]) <= limit and min(values[name]) >= 13
            sums[name] += total(values[name])
            trials[name] += len(cost.trials)
        assert total(values["shrink"]) <= 1.01 * total(values["greedy"])
        for i, tokens in enumerate(values["shrink"]):  # no layer can give up one more
            less = (*values["shrink"][:i], tokens - 1, *values["shrink"][i + 1 :])
            assert tokens == 13 or Costs(costs)(less) > limit
    assert sums["shrink"] <= sums["greedy"]
    assert trials["shrink"] < trials["greedy"] / (8 if layers == 30 else 2)


def test_the_level_is_the_smallest_that_fits():
    def cost(budgets):
        return 1.0 if budgets[0] >= 100 else 2.0

    budgets = level((1024, None, 64), 13, 1.5, cost)
    assert budgets[1:] == (None, 64) and 100 <= budgets[0] <= 100 * 17 / 16
    assert level((1024, 1024), 13, 1.5, lambda x: 1.0) == (13, 13)
    assert level((1024, 1024), 13, 0.5, lambda x: 1.0) == (1024, 1024)


def test_tokens_go_where_they_are_missed():
    """Costs a / n with a in 1, 4, 16: budgets are as 1, 2, 4, the best of that sum."""

    def cost(budgets):
        return math.exp(sum(a / n for a, n in zip((0.1, 0.4, 1.6), budgets, strict=True)))

    start = (1000,) * 3
    budgets = share_out((400,) * 3, start, 5, cost((400,) * 3), cost)
    for less, more in ((0, 1), (1, 2)):
        assert budgets[more] / budgets[less] == pytest.approx(2, rel=0.02)
    assert cost(budgets) <= cost((400,) * 3) and total(budgets) < 1200 * 0.85
    assert share_out((5, 5, 5), start, 5, 100.0, cost) == (5, 5, 5)
    assert share_out((400,) * 3, start, 5, 2.0, lambda x: 1.0) == (400,) * 3  # nothing is missed


def test_budgets_are_raised_until_they_fit():
    start, budgets = (1000, None, 24), (100, None, 24)
    assert raised(budgets, start, 2.0, lambda x: 1.0) == budgets
    higher = raised(budgets, start, 2.0, lambda x: 3.0 if x[0] < 200 else 1.0)
    assert 200 <= higher[0] <= 330 and higher[1:] == (None, 24)
    assert raised(budgets, start, 2.0, lambda x: 1.0 if x == start else 3.0) == start


def test_tokens_are_spread_by_what_layers_cost():
    """Costs of a / n are least where n is proportional to the root of a."""
    costs = (1.0, 4.0, 16.0, 64.0, 0.0, None)

    def perplexity(budgets) -> float:
        assert budgets[-1] is None
        return math.exp(sum(a / n for a, n in zip(costs[:-1], budgets[:-1], strict=True)) / 10)

    begin, start = (*[96] * 5, None), (*[1024] * 5, None)
    rounds = list(spread(begin, start, 6, perplexity))
    values = [perplexity(x) for x in (begin, *rounds)]
    assert values == sorted(values, reverse=True) and len(rounds) > 1
    assert all(total(begin) - 6 <= total(x) <= total(begin) for x in rounds)
    assert rounds[0][4] == 48  # a round at most halves a layer
    one, two, three, four, none, _ = rounds[-1]
    assert two / one == pytest.approx(2, rel=0.1) and three / one == pytest.approx(4, rel=0.1)
    assert four / one == pytest.approx(8, rel=0.1) and none <= 24


@pytest.mark.parametrize("kind", ["steps", "smooth"])
def test_spread_tokens_lose_less_than_a_level(kind):
    """On many tables of costs; where no layer gains from more tokens, nothing is changed."""
    better = 0
    for seed in range(20):
        torch.manual_seed(seed)
        costs = Costs(tables(kind, 8, 128))
        begin, start = (32,) * 8, (128,) * 8
        rounds = list(spread(begin, start, 5, costs))
        assert all(total(x) <= total(begin) and min(x) >= 5 for x in rounds)
        better += bool(rounds) and costs(rounds[-1]) < costs(begin)
        assert len(costs.trials) <= 1 + 11 * (len(rounds) + 1)
    assert better >= 18
    assert not list(spread((32,) * 8, (128,) * 8, 5, lambda budgets: 7.0))
