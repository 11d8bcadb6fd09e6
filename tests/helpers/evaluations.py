"""A folder of models and text to evaluate, and evaluations of it."""

from pathlib import Path

from heedful_lab.commands.evaluate.options import Evaluation

BOOK = "The red bus went to the garden, and nobody in the garden saw a bus before. " * 60


def evaluation_of(tmp_path: Path, *models: str, **options) -> Evaluation:
    options = {"haystack": ("book.txt",), "data": ("book.txt",), "samples": 2} | options
    return Evaluation(models or ("plain",), out=str(tmp_path / "run"), **options)
