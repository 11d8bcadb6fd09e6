"""A cross of tests leaves out nothing that an axis has."""

from itertools import product

from helpers.crosses import cover


def test_every_value_of_each_axis_is_covered():
    axes = {"mechanism": range(9), "family": range(17), "dtype": range(2)}
    cases = [
        {f"{axis}={value}" for axis, value in zip(axes, values, strict=True)}
        for values in product(*axes.values())
    ]
    kept = cover(cases)
    assert set().union(*(cases[at] for at in kept)) == set().union(*cases)
    assert len(kept) == 17  # of 306: as many as the longest axis is long


def test_what_fits_only_one_is_kept():
    assert cover([{"a=1", "b=1"}, {"a=1", "b=2"}, {"a=1", "b=1"}]) == {0, 1}
