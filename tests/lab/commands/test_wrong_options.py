"""Options that a command refuses before it does anything, each kind of check once."""

import pytest

from heedful_lab.commands.bench.options import Bench
from heedful_lab.commands.budget.options import BudgetSearch
from heedful_lab.commands.compare.options import Comparison
from heedful_lab.commands.evaluate.options import Evaluation
from heedful_lab.commands.generate.options import Generation
from heedful_lab.commands.inspect.options import Inspection
from heedful_lab.commands.shrink.options import Shrink
from heedful_lab.commands.train.options import Training

NEEDED = {
    BudgetSearch: {"model": "m", "data": ("x",)},
    Evaluation: {"models": ("m",)},
    Generation: {"model": "m", "prompt": "x"},
    Inspection: {"model": "m", "text": "some text"},
    Shrink: {"model": "m"},
    Training: {"model": "m", "data": ("x",)},
}
WRONG = [
    (Bench, {"mechanisms": ("mtaa",)}, "mechanisms must be one of .*; did you mean 'mta'"),
    (Bench, {"heads": 3}, "heads must be even"),
    (Bench, {"lengths": (0,)}, "lengths must be a whole number of at least 1, got 0"),
    (BudgetSearch, {"data": ()}, "data must name at least one text file: add --data"),
    (BudgetSearch, {"eviction": "none"}, "eviction='none' keeps everything: there is nothing"),
    (BudgetSearch, {"eviction": "my_module:Mine"}, "eviction='my_module:Mine' is a policy of y"),
    (BudgetSearch, {"eviction": "snapkv"}, "got 'snapkv'; did you mean 'snap-kv'"),
    (BudgetSearch, {"loss": -1.0}, "loss must be a percentage of at least 0, got -1.0"),
    (Comparison, {"tasks": ("text",), "budgets": (14.5,)}, "at least 13 .*, got 14.5"),
    (Comparison, {"tasks": ("text",), "budgets": (-1,)}, "budgets must be shares .*, got -1"),
    (Comparison, {"tasks": ("parity",), "budgets": (0.5,)}, "are for the tasks text and recall"),
    (Comparison, {"tasks": ("copy",), "data": ("x",)}, "data is read by the tasks text, spans, tr"),
    (Comparison, {"tasks": ("spans", "translate"), "data": ("x",)}, "spans, translate in two c"),
    (Comparison, {"tasks": ("translate",), "tokenizer": "bpe"}, "tokenizer is for the tasks text"),
    (Comparison, {"tour": "full", "tasks": ("copy",)}, "tour='full' chooses the tasks, and tasks"),
    (Comparison, {"memory_loss": -1}, "memory_loss must be a number of at least 0 .*, got -1"),
    (Evaluation, {"tasks": ("needels",)}, "did you mean 'needles'"),
    (Evaluation, {"tasks": ("copy", "copy")}, "tasks must be different"),
    (Evaluation, {"tasks": ("lm-eval:",)}, "names no task"),
    (Evaluation, {"depths": (0.5, 2)}, "depths must lie between 0 and 1"),
    (Evaluation, {"lengths": (0,)}, "lengths must hold one above 0 for needles"),
    (Evaluation, {"budget": ("few",)}, "budget must be numbers of tokens, or 'own'"),
    (Evaluation, {"eviction": "h2o"}, "needs a budget"),
    (Evaluation, {"stride": 1024}, "stride must be a whole number from 1 to 1023"),
    (Generation, {"prompt": None}, "prompt must be given, or a file with it"),
    (Generation, {"file": "y"}, "prompt must be given, or a file with it, and not both"),
    (Generation, {"eviction": "none", "budget": "9"}, "'none' keeps everything: leave the budget"),
    (Generation, {"temperature": -1.0}, "temperature must be 0 or a number above it, got -1.0"),
    (Generation, {"save_cache": "a", "cache": "b"}, "save_cache writes no text"),
    (Generation, {"cache": "b", "cache_dtype": "int8"}, "the file decides how tokens are kept"),
    (Inspection, {"tokens": 9999}, "tokens must be a whole number from 1 to 2048"),
    (Inspection, {"out": ""}, "out must be a file, got an empty text"),
    (Shrink, {"ratio": 1.0}, "ratio must be a number above 1, got 1.0"),
    (Shrink, {"train": "none", "steps": 3}, "steps is for training, and train='none' has none"),
    (Training, {"steps": 0}, "steps must be a whole number of at least 1"),
    (Training, {"beta2": 1.0}, "beta2 must be a number above 0 below 1, got"),
    (Training, {"recipe": "mat"}, "recipe must be one of .*did you mean 'mta'"),
    (Training, {"held_out": ("./x",)}, "what is trained on tells nothing when it is scored"),
    (Training, {"where": ("encoder",)}, "where says where a mechanism stands"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options", "message"), WRONG)
def test_wrong_options_are_refused(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(**NEEDED.get(kind, {}) | options)
