"""The page of model types says what comes out."""

import importlib.util
import sys
from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from heedful import convert
from helpers import ROOT

DOCS = ROOT / "docs"
SCRIPT = DOCS / "models.py"


def script(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MODELS = script(SCRIPT)


@pytest.fixture
def models():
    return MODELS


@pytest.fixture
def encoders(models, monkeypatch):
    monkeypatch.setitem(sys.modules, "models", models)
    return script(DOCS / "encoders.py")


@pytest.mark.filterwarnings("ignore:this family's cache is not enough")
@pytest.mark.parametrize(
    ("kind", "outcome"),
    [
        ("llama4_text", "supported"),  # chunks
        ("phimoe", "supported"),  # a window that only its mask function knows
        ("gemma2", "supported"),  # soft-capped logits
        ("doge", "not supported"),
        ("bart", "supported"),  # a decoder with cross-attention
    ],
)
def test_a_type_comes_out_as_the_page_says(models, kind, outcome):
    row = models.attempt(kind)
    assert row.outcome == outcome, row.note
    assert models.rows_of((DOCS / "models.md").read_text())[kind] == row


def test_an_encoder_of_sound_beside_a_decoder_is_left_alone(models):
    model = models.tiny("moss_transcribe_diarize")
    before = [type(module) for module in model.model.audio_tower.modules()]
    conversion = convert(model, "mta")
    assert list(conversion.where.values()) == [("decoder",)]
    assert [type(module) for module in model.model.audio_tower.modules()] == before


def test_a_logit_that_differs_makes_a_type_wrong(models, monkeypatch):
    def moved(model, mechanism):
        conversion = convert(model, mechanism)
        next(model.parameters()).add_(1e-3)
        return conversion

    monkeypatch.setattr("heedful.convert", moved)
    row = models.attempt("gemma3_text")
    assert row.outcome == "wrong" and "largest difference" in row.note, row


@pytest.mark.parametrize(("kind", "outcome"), [("t5", "supported"), ("roberta", "supported")])
def test_an_encoder_comes_out_as_the_page_says(encoders, models, kind, outcome):
    row = encoders.attempt(kind)
    assert row.outcome == outcome, row.note
    assert models.rows_of((DOCS / "encoders.md").read_text())[kind] == row


def types_on(page: str) -> list[str]:
    return sorted(MODELS.rows_of((DOCS / page).read_text()))


def test_types_of_one_note_share_a_row(models):
    rows = [
        models.Row("a", "supported", ""),
        models.Row("b", "not supported", "it is b or d"),
        models.Row("c", "supported", ""),
        models.Row("d", "not supported", "it is b or d"),
        models.Row("e", "supported", "but `f` only"),
    ]
    text = models.page(rows)
    assert text.endswith("\n".join([
        "Supported without a note: `a`, `c`.",
        "",
        "| types | outcome | note |",
        "|---|---|---|",
        "| `e` | supported | but `f` only |",
        "| `b`, `d` | not supported | it is b or d |",
        "",
    ]))  # fmt: skip
    assert models.rows_of(text) == {row.kind: row for row in rows}


def test_the_page_lists_every_causal_type(models):
    """What becomes of each, a share of them every day says (`pytest -m exhaustive`)."""
    text = (DOCS / "models.md").read_text()
    assert types_on("models.md") == sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert text == models.page([*models.rows_of(text).values()])


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", types_on("models.md"))
def test_every_causal_type_comes_out_as_the_page_says(models, kind):
    assert models.attempt(kind) == models.rows_of((DOCS / "models.md").read_text())[kind]


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", types_on("encoders.md"))
def test_every_encoder_comes_out_as_the_page_says(encoders, models, kind):
    assert encoders.attempt(kind) == models.rows_of((DOCS / "encoders.md").read_text())[kind]
