"""Names of transformers that are private or change with versions stand in one file."""

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers
from transformers import DynamicCache

import heedful
from heedful.compatibility import release
from heedful.hf import versions
from helpers.families import tiny, tokens

SRC = Path(heedful.__file__).parent
HERE = SRC / "hf" / "versions.py"
OTHERS = sorted(path for path in SRC.parent.rglob("*.py") if path != HERE)
CHANGING = re.compile(
    "past_key_values|layer_past|gradient_checkpointing|activation_checkpointing_e"
)
# Where the private names are defined that a model, a configuration, a cache or a Trainer has.
FOREIGN = (
    "cache_utils", "configuration_utils", "generation.utils", "generation.configuration_utils",
    "masking_utils", "modeling_outputs", "modeling_utils", "trainer", "utils.generic",
)  # fmt: skip


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and len(name) > 1


def private_names_of_transformers() -> set[str]:
    actual = set()
    for module in FOREIGN:
        tree = ast.parse(Path(find_spec(f"transformers.{module}").origin).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                actual.add(node.attr)
            elif isinstance(node, ast.ClassDef):
                actual |= {x.name for x in node.body if isinstance(x, ast.FunctionDef)}
    of_torch = vars(torch.nn.Module()).keys()
    return {x for x in filter(private, actual) if x not in of_torch and not hasattr(torch, x)}


def own_names(tree: ast.AST) -> set[str]:
    """Private attributes that the classes of a file give themselves."""
    actual = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            actual |= {node.attr} if ast.unparse(node.value) == "self" else set()
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            actual.add(node.target.id)
    return actual


def private_names_in(path: Path) -> set[str]:
    """Private attributes that a file reads, sets, overrides, or names in a text."""
    tree = ast.parse(path.read_text())
    actual = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            actual.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            actual.add(node.value)
        elif isinstance(node, ast.ClassDef):
            foreign = not all(ast.unparse(base).startswith("_") for base in node.bases)
            methods = {x.name for x in node.body if isinstance(x, ast.FunctionDef)}
            actual |= methods if foreign else set()
    return set(filter(private, actual)) - own_names(tree)


def test_no_other_file_knows_a_private_name():
    theirs = private_names_of_transformers()
    assert {"_attn_implementation", "_prepare_cache_for_generation", "_save_checkpoint"} <= theirs
    assert private_names_in(HERE) & theirs
    actual = {str(p.relative_to(SRC.parent)): private_names_in(p) & theirs for p in OTHERS}
    assert {path: names for path, names in actual.items() if names} == {}


def test_no_other_file_knows_a_name_that_changes():
    actual = {str(p.relative_to(SRC.parent)): CHANGING.findall(p.read_text()) for p in OTHERS}
    assert {path: names for path, names in actual.items() if names} == {}


@pytest.mark.skipif(
    release(transformers.__version__) < (5, 24),
    reason="families hand Cache.update what they hand to attention since transformers 5.24",
)
@pytest.mark.parametrize("name", ["standard", "mta", "selective"])
def test_a_cache_reaches_attention_whatever_it_is_called(name, monkeypatch):
    """As if the family's attention modules called it by a name that nobody knows."""
    model, ids = tiny(), tokens(1, 9)
    heedful.convert(model, name)
    cached = model.generate(ids, max_new_tokens=6, do_sample=False)
    monkeypatch.setattr("heedful.hf.attention.cache_among", lambda arguments: None)
    again = model.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(again, cached)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_converted_model_takes_its_cache_by_either_name(name):
    """The newest name in every version, and the older one without a warning."""
    model, ids = tiny(), tokens(1, 9)
    heedful.convert(model, "mta")
    expected = model(input_ids=ids).logits[:, 5:]
    cache = heedful.new_cache(model)
    model(input_ids=ids[:, :5], **{name: cache})
    actual = model(input_ids=ids[:, 5:], **{name: cache}).logits
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-11)
    output = model.generate(ids, max_new_tokens=3, **{name: heedful.new_cache(model)})
    assert torch.equal(output, model.generate(ids, max_new_tokens=3))


def test_two_caches_are_refused():
    model, ids = tiny(), tokens(1, 9)
    heedful.convert(model, "standard")
    cache, other = heedful.new_cache(model), heedful.new_cache(model)
    for call in (model, model.generate):
        with pytest.raises(ValueError, match="cache and past_key_values are one argument"):
            call(ids, cache=cache, past_key_values=other)
    model(ids, cache=cache, past_key_values=None)
    assert cache.get_seq_length() == 9


def test_the_name_that_is_written_is_the_models_own():
    model = tiny()
    (name,) = versions.cache_argument(model, None)
    assert name == ("cache" if release(transformers.__version__) >= (5, 24) else name)
    cache = DynamicCache(config=model.config)
    out = model(input_ids=tokens(1, 4), use_cache=True, **versions.cache_argument(model, cache))
    assert versions.cache_of(out) is cache and cache.get_seq_length() == 4
