"""The paths that guides import from, which no release removes without a warning."""

import importlib
import re

import pytest

from helpers import ROOT

PATHS = {
    "heedful": {
        "LowRank", "Visibility", "differential_attention", "grouped_attention",
        "multi_token_attention", "selective_attention", "summarise",
    },
    "heedful_lab.commands.compare.findings": {"summarise", "table"},
    "heedful_lab.commands.compare.one_model": {"Hyperparameters", "Size", "train"},
    "heedful_lab.commands.inspect.arrays": {"page_data"},
    "heedful_lab.commands.inspect.page": {"write_inspection"},
    "heedful.data": {"ByteTokenizer"},
    "heedful.eviction": {"CachedTokens", "Eviction"},
    "heedful.hf.look": {"look_into"},
    "heedful.hf.stock": {"stock_model", "stock_tokenizer"},
    "heedful.nn": {"HeadShape", "MultiToken", "Standard", "StandardAttention", "ablations"},
    "heedful.ops.grouped": {"fixed_groups"},
    "heedful.ops.grouped.neighbourhood": {"score_pairs"},
    "heedful_lab.records": {"read_records"},
    "heedful_lab.rivals.canon": {"Canon"},
    "heedful_lab.rivals.knocking": {"KnockingHeads"},
    "heedful_lab.rivals.models": {"convert"},
    "heedful_lab.tasks": {"Copy", "MagicNumbers", "Recall", "Spans", "Summarise", "Translate"},
    "heedful_lab.tasks.babilong": {"only_label"},
    "heedful_lab.tasks.needles": {"all_found"},
    "heedful.testing": {"assert_causal", "assert_matches_oracle"},
    "heedful.training.sequences": {"TrainingSequences", "encode"},
    "heedful.training.trainer": {"LayerTrainer", "parameter_groups"},
}  # fmt: skip


@pytest.mark.parametrize("module", PATHS)
def test_each_path_leads_to_its_names(module):
    missing = {name for name in PATHS[module] if not hasattr(importlib.import_module(module), name)}
    assert not missing


def test_guides_import_from_no_other_path():
    used: dict[str, set[str]] = {}
    for page in (*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        lines = re.findall(
            r"^from (heedful[\w.]*) import ([^#\n]+)", page.read_text(), re.MULTILINE
        )
        for module, names in lines:
            used.setdefault(module, set()).update(x.strip() for x in names.split(","))
    assert used == PATHS
