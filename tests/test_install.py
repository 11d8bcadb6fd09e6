"""What pip leaves: a base without the command line's packages, and a wheel that works alone."""

import subprocess
import sys
import tomllib
import venv

import pytest

from heedful.compatibility import TESTED
from helpers import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OLDEST, *_, NEWEST = TESTED["transformers"]

SMOKE = """
import tempfile
import torch, heedful
from transformers import AutoModelForCausalLM, LlamaConfig
q = torch.randn(1, 4, 40, 16)
assert heedful.selective_attention(q, q, q).output.shape == q.shape
config = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2, bos_token_id=None,
                     eos_token_id=None, pad_token_id=0)
model = AutoModelForCausalLM.from_config(config).eval()
ids = torch.arange(1, 21)[None]
before = model(ids).logits
conversion = heedful.convert(model, "mta")
assert torch.equal(model(ids).logits, before)
conversion.revert()
heedful.convert(model, "selective")
written = model.generate(ids, max_new_tokens=6, do_sample=False)
assert torch.equal(written, model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=False))
cache = heedful.new_cache(model, heedful.eviction.MostHidden(tokens=16))
model.generate(ids, cache=cache, prefill_chunk_size=8, max_new_tokens=6)
assert cache.nbytes < cache.whole_nbytes
with heedful.MemoryLoss(model) as memory:
    (model(input_ids=ids, labels=ids).loss + 0.1 * memory()).backward()
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    assert torch.equal(heedful.load(folder)(ids).logits, model(ids).logits)
print("sound")
"""

BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
"""


def extra(name: str) -> set[str]:
    """The modules that an extra brings and transformers neither brings nor looks for."""
    lines = PROJECT["optional-dependencies"][name]
    modules = {line.partition(">")[0].replace("-", "_") for line in lines}
    return modules - {"accelerate", "numpy", "tokenizers", "tqdm"}


def test_the_base_needs_nothing_of_the_command_line(tmp_path):
    assert "tyro" in extra("cli") and "matplotlib" in extra("cli")
    blocked = BLOCKED.format(blocked=tuple(extra("cli")))
    process = subprocess.run(
        [sys.executable, "-c", blocked + SMOKE], cwd=tmp_path, capture_output=True, text=True
    )
    assert process.stdout.strip() == "sound", process.stderr[-2000:]


def test_the_command_line_says_what_it_needs(tmp_path):
    code = BLOCKED.format(blocked=("tyro",)) + "from heedful_lab.__main__ import main; main()"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 1 and "Traceback" not in process.stderr
    assert "needs tyro: pip install 'heedful[cli]'" in process.stderr


@pytest.mark.slow
def test_a_wheel_works_in_an_empty_environment(tmp_path):
    """Alone, with the oldest and the newest transformers, then with the command line."""

    def run(*words: str, **options) -> str:
        process = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, **options)
        assert process.returncode == 0, (
            f"{' '.join(words)}\n{(process.stdout + process.stderr)[-3000:]}"
        )
        return process.stdout

    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", str(tmp_path), str(ROOT))
    (wheel,) = tmp_path.glob("heedful-*.whl")
    venv.create(tmp_path / "env", with_pip=True)
    python = str(tmp_path / "env" / "bin" / "python")
    pip = [python, "-m", "pip", "install", "-q"]
    run(*pip, f"torch=={TESTED['torch'][0]}")
    for version in (OLDEST, NEWEST):
        run(*pip, str(wheel), f"transformers=={version}")
        assert run(python, "-c", SMOKE).strip() == "sound"
    assert "matplotlib" not in run(python, "-m", "pip", "list")
    refused = subprocess.run(
        [python, "-m", "heedful_lab"], cwd=tmp_path, capture_output=True, text=True
    )
    assert refused.returncode == 1 and "pip install 'heedful[cli]'" in refused.stderr
    run(*pip, f"{wheel}[cli]")
    assert "commands " in run(python, "-m", "heedful_lab", "doctor")


def test_the_oldest_transformers_is_what_the_project_asks_for_and_newer_ones_are_open():
    (requirement,) = [line for line in PROJECT["dependencies"] if line.startswith("transformers")]
    assert requirement == f"transformers>={OLDEST.removesuffix('.0')}"


def test_a_transformers_that_is_too_old_is_refused_by_its_version(tmp_path):
    """Not by a name that it lacks: heedful looks at the version before it imports any."""
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text('__version__ = "4.57.1"\n')
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import heedful; heedful.convert"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    message = "ImportError: heedful needs transformers 5.17.0 or newer, got 4.57.1: pip install"
    assert process.returncode == 1 and message in process.stderr.splitlines()[-1]
