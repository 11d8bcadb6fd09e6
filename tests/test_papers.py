"""BibTeX of what a model uses."""

import re

import pytest

import heedful
from heedful.nn.mechanisms import TABLE
from helpers.families import tiny


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_every_mechanism_but_standard_attention_has_a_paper(row):
    entries = heedful.cite(row.name)
    assert heedful.cite(row.config) == entries
    keys = re.findall(r"^@article\{(\w+),$", entries, re.MULTILINE)
    assert len(keys) == {"standard": 0, "mta-selective": 2}.get(row.name, 1)
    assert entries.count("{") == entries.count("}")


def test_a_model_cites_each_of_its_papers_once():
    model = tiny("llama")
    heedful.convert(model, {"mta": [0], "selective": [1]})
    entries = heedful.cite(model)
    assert entries.count("@article") == 2
    assert "arXiv:2504.00927" in entries and "arXiv:2410.02703" in entries


def test_what_has_no_paper_is_refused():
    with pytest.raises(ValueError, match="did you mean 'selective'"):
        heedful.cite("selectiv")
    with pytest.raises(ValueError, match="not converted"):
        heedful.cite(tiny("llama"))
    with pytest.raises(ValueError, match=r"source must be .* got 3"):
        heedful.cite(3)
