"""The search of budgets from its rule, in as many trials as it takes."""


def plain_greedy(start, least, step, limit, perplexity_of) -> tuple[int, ...]:
    """Every layer at every step, from the rule itself."""
    budgets = list(start)
    while step >= 1:
        while True:
            values = {}
            for i in range(len(budgets)):
                trial = [*budgets[:i], budgets[i] - step, *budgets[i + 1 :]]
                if trial[i] >= least and (value := perplexity_of(tuple(trial))) <= limit:
                    values[i] = value
            if not values:
                break
            budgets[min(values, key=values.__getitem__)] -= step
        step //= 2
    return tuple(budgets)
