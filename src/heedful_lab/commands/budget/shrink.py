"""Budgets of single layers, in few trials.

From budgets that hold everything to small ones: first a level that all layers share, by bisection.
Then every layer gives up half of it alone, and what that costs says how the tokens are shared out
anew, again by bisection. Then one layer at a time gives up tokens, the one that loses least.

Source of the last part: Leviathan et al., "Selective Attention Improves Transformer", arXiv
2410.02703, section 4, which has only that, in steps of one size. Here the steps grow finer: what no
layer can give up in steps of s tokens is tried in steps of s / 2.

Where the sum is given (`spread`), every layer gets twice its tokens alone, and what that saves says
how the tokens are shared out anew.
"""

import math
from collections.abc import Callable, Iterator, Sequence

Budgets = tuple[int | None, ...]
Measure = Callable[[Budgets], float]

_FINE = 16  # a bisection ends within 1 / 16 of the answer
_GAIN = 0.02  # what sharing out anew must save to be done once more
_LESS, _MORE = 2, 4  # the most by which a round divides and multiplies a layer's tokens
_PARTS = (1.0, 0.5, 0.25)  # of the way to the new budgets, the first that saves something
_PROGRESS = 1e-3  # of the logarithm of perplexity, which a round must save for another one
_LEAST_COST = 1e-4  # of the dearest layer's, for layers that lose nothing


def shrink(start: Budgets, least: int, length: int, limit: float, measure: Measure) -> Budgets:
    """Budgets at which no layer can give up one more token.

    Arguments:
        start: budgets that hold everything; layers with `None` take no part.
        least: no budget goes below it.
        length: tokens of a sequence.
        limit: perplexity that is not passed; the budgets at the start do not.
        measure: perplexity of budgets.
    """
    budgets, before = level(start, least, limit, measure), math.inf
    while total(budgets) < before * (1 - _GAIN):
        before = total(budgets)
        budgets = share_out(budgets, start, least, limit, measure)
    layers = sum(tokens is not None for tokens in start)
    return greedy(budgets, least, max(1, length // (2 * max(4, layers))), limit, measure)


def total(budgets: Budgets) -> int:
    """Tokens of all layers that have a budget."""
    return sum(tokens or 0 for tokens in budgets)


def common_level(start: Budgets, tokens: int) -> Budgets:
    """So many tokens for every layer that has as many."""
    return tuple(n if n is None else min(n, tokens) for n in start)


def level(start: Budgets, least: int, limit: float, measure: Measure) -> Budgets:
    """The smallest budget that all layers can share, within a sixteenth of it."""

    low, high = least - 1, max(n for n in start if n is not None)
    while high - low > max(1, high // _FINE):
        middle = min(high - 1, max(low + 1, math.isqrt(max(low, 1) * high)))
        if measure(common_level(start, middle)) <= limit:
            high = middle
        else:
            low = middle
    return common_level(start, high)


def share_out(
    budgets: Budgets, start: Budgets, least: int, limit: float, measure: Measure
) -> Budgets:
    """Fewer tokens, shared out by what each layer loses without half of its own; else the same.

    A layer with n tokens is taken to cost a / n, so that of all budgets with the same sum those
    proportional to the root of a cost least.
    """
    base, costs = math.log(measure(budgets)), []
    for i, tokens in enumerate(budgets):
        half = max(least, (tokens or 0) // 2)
        if tokens is None or half == tokens:
            costs.append(0.0)
            continue
        loss = math.log(measure(replaced(budgets, i, half))) - base
        costs.append(max(loss, 0.0) / (1 / half - 1 / tokens))
    if not any(costs):
        return budgets
    roots = [math.sqrt(max(cost, _LEAST_COST * max(costs))) for cost in costs]

    def scaled(scale: float) -> Budgets:
        return tuple(
            n if n is None else min(n, max(least, round(scale * root)))
            for n, root in zip(start, roots, strict=True)
        )

    # As many tokens as now or more are of no interest, whatever they cost.
    low, high, best = least / max(roots), max(n or 0 for n in start) / min(roots), budgets
    while high / low > 1 + 1 / (2 * _FINE) and scaled(low) != scaled(high):
        middle = math.sqrt(low * high)
        trial = scaled(middle)
        if total(trial) >= total(budgets):
            high = middle
        elif measure(trial) <= limit:
            high, best = middle, trial
        else:
            low = middle
    return best


def spread(budgets: Budgets, start: Budgets, least: int, measure: Measure) -> Iterator[Budgets]:
    """As many tokens in all, shared out by what each layer saves with twice its own.

    A layer that has all tokens is judged by what it loses with half of them. Layers cost a / n as
    in `share_out`. A round changes no layer by more than a half or four times: further away a / n
    says little. Where the new budgets are worse even so, half of the way to them is tried, then a
    quarter. Rounds follow until one of them saves next to nothing.

    Arguments:
        budgets: where it begins; layers with `None` take no part.
        start: budgets that hold everything.
        least: no budget goes below it.
        measure: perplexity of budgets.

    Yields:
        The result of each round, as long as it is better than the one before.
    """
    value = math.log(measure(budgets))
    while True:
        others = _others(budgets, start, least)
        trials = [replaced(budgets, i, n) for i, n in enumerate(others)]
        saved = [value - math.log(measure(x)) if x != budgets else 0.0 for x in trials]
        costs = [
            0.0 if n == other else max(x / (1 / n - 1 / other), 0.0)
            for x, n, other in zip(saved, budgets, others, strict=True)
        ]
        trial = _of_the_same_sum(budgets, start, least, costs)
        for part in _PARTS:
            nearer = _between(budgets, trial, part)
            saving = value - math.log(measure(nearer))
            if saving > 0:
                break
        else:
            return
        budgets, value = nearer, value - saving
        yield budgets
        if saving < _PROGRESS:
            return


def _others(budgets: Budgets, start: Budgets, least: int) -> Budgets:
    """Twice as many tokens, as far as there are so many; half of them where there are no more."""
    return tuple(
        n if n is None else min(most, 2 * n) if n < most else max(least, n // 2)
        for n, most in zip(budgets, start, strict=True)
    )


def _between(budgets: Budgets, others: Budgets, part: float) -> Budgets:
    """So far from the ones to the others, with no more tokens in all."""
    return tuple(
        n if n is None else math.floor(n + part * (other - n))
        for n, other in zip(budgets, others, strict=True)
    )


def _of_the_same_sum(
    budgets: Budgets, start: Budgets, least: int, costs: Sequence[float]
) -> Budgets:
    """Proportional to the roots of what layers cost, within what a round may change."""
    roots = [math.sqrt(cost) for cost in costs]
    if not any(roots):
        return budgets

    def scaled(scale: float) -> Budgets:
        return tuple(
            n if n is None else min(whole, _MORE * n, max(least, -(-n // _LESS), int(scale * root)))
            for n, whole, root in zip(budgets, start, roots, strict=True)
        )

    low, high = 0.0, _MORE * max(n or 0 for n in budgets) / min(x for x in roots if x)
    while scaled(low) != scaled(high) and high - low > 1e-9 * high:
        middle = (low + high) / 2
        if total(scaled(middle)) > total(budgets):
            high = middle
        else:
            low = middle
    return scaled(low)


def greedy(start: Budgets, least: int, step: int, limit: float, measure: Measure) -> Budgets:
    """Budgets at which no layer can give up one more token, one layer at a time.

    A layer that did not fit is left alone for the rest of its step's size, as the others only
    become smaller. But less context is sometimes better, so at the end all are tried once more.

    Arguments:
        start: where it begins; layers with `None` take no part.
        least: no budget goes below it.
        step: tokens that a layer gives up at first; halved down to one.
        limit: perplexity that is not passed.
        measure: perplexity of budgets.
    """
    budgets, everyone = start, [i for i, tokens in enumerate(start) if tokens is not None]
    while step >= 1:
        before, layers = budgets, everyone
        while layers:
            trials = {
                i: replaced(budgets, i, budgets[i] - step)
                for i in layers
                if budgets[i] - step >= least
            }
            values = {i: measure(trial) for i, trial in trials.items()}
            layers = [i for i, value in values.items() if value <= limit]
            if layers:
                budgets = trials[min(layers, key=values.__getitem__)]
        if step > 1 or budgets == before:
            step //= 2
    return budgets


def raised(budgets: Budgets, start: Budgets, limit: float, measure: Measure) -> Budgets:
    """These budgets, or some between them and those at the start, within the limit.

    For the result of a rougher measure.
    """
    part = 1 / 128
    trial = budgets
    while measure(trial) > limit and trial != start:
        trial = tuple(
            n if n is None else n + math.ceil(min(part, 1.0) * (whole - n))
            for n, whole in zip(budgets, start, strict=True)
        )
        part *= 2
    return trial


def replaced(budgets: Sequence[int | None], index: int, tokens: int) -> Budgets:
    """Budgets with another one for one layer."""
    return (*budgets[:index], tokens, *budgets[index + 1 :])
