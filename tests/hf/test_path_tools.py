"""Tools that are given nothing but a path: processes of their own, which never import heedful."""

import json
import os
import signal
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

import heedful
from heedful.eviction import MostHidden
from heedful.hf.budgets import write_budgets
from heedful.hf.save import SHIM
from helpers.encoder_families import tiny as tiny_pair
from helpers.families import logits, stir, tiny, tokens

TIMEOUT = 120  # seconds; each takes about ten
CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def of_bytes() -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>", chat_template=CHAT
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A selective model with budgets, and its tokenizer."""
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("saved")
    tokenizer = of_bytes()
    model = tiny(
        dtype=torch.float32,
        vocab_size=len(tokenizer),
        max_position_embeddings=512,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    heedful.convert(model, "selective")
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    write_budgets(place / "budgets.json", MostHidden(tokens=(13, 14, 15)), model, {})
    return place


@pytest.fixture
def elsewhere(tmp_path) -> dict[str, str]:
    """The environment of another process: offline, and with a cache of its own."""
    here = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = os.pathsep.join([str(Path(heedful.__file__).parents[1]), *sys.path])
    return here | {
        "HF_HOME": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": paths,
    }


def run(code: str, environment: dict, *arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=TIMEOUT,
    )  # fmt: skip


OPEN = """
import sys, torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer
assert not any(name.startswith("heedful") for name in sys.modules)
folder, pair, out = sys.argv[1:]
trusted = {"trust_remote_code": True}
config = AutoConfig.from_pretrained(folder, **trusted)
assert config.max_position_embeddings == 512 and not config.is_encoder_decoder
model = AutoModelForCausalLM.from_pretrained(folder, **trusted)
tokenizer = AutoTokenizer.from_pretrained(folder, **trusted)
ids = tokenizer("a red bus and one car", return_tensors="pt").input_ids
options = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True}
written = model.generate(ids, **options)
from heedful.hf.versions import cache_of
sizes = cache_of(written).tokens
assert all(n <= budget for n, budget in zip(sizes, (13, 14, 15), strict=True)), sizes
both = AutoModelForSeq2SeqLM.from_pretrained(pair, **trusted)
source = torch.arange(3, 14)[None]
with torch.no_grad():
    results = {
        "logits": model(ids, use_cache=False).logits,
        "written": written.sequences,
        "pair": both(input_ids=source, decoder_input_ids=source, use_cache=False).logits,
    }
torch.save(results, out)
"""


def test_auto_classes_open_it_where_heedful_was_never_imported(folder, elsewhere, tmp_path):
    """With its tokenizer, its cache and its budgets; an encoder-decoder too."""
    pair = tiny_pair("t5")  # in fp64: in fp32 it errs by 3e-4, and by threads
    heedful.convert(pair, "mta")
    stir(pair, 0.1, only=".heedful.")
    pair.save_pretrained(tmp_path / "pair")
    process = run(OPEN, elsewhere, folder, tmp_path / "pair", tmp_path / "answer")
    assert process.returncode == 0, process.stderr[-3000:]
    actual = torch.load(tmp_path / "answer")
    model = heedful.load(folder)
    ids = of_bytes()("a red bus and one car", return_tensors="pt").input_ids
    source = torch.arange(3, 14)[None]
    with torch.no_grad():
        expected = {
            "logits": model(ids, use_cache=False).logits,
            "written": model.generate(ids, max_new_tokens=5, do_sample=False),
            "pair": pair(input_ids=source, decoder_input_ids=source, use_cache=False).logits,
        }
    for name, x in expected.items():
        torch.testing.assert_close(actual[name], x, rtol=1e-5, atol=1e-5)  # other threads


def test_untrusted_it_is_refused_and_the_folder_says_how_else(folder, elsewhere):
    code = (
        "import sys; from transformers import AutoModelForCausalLM; "
        "AutoModelForCausalLM.from_pretrained(sys.argv[1])"
    )
    process = run(code, elsewhere, folder)
    assert process.returncode == 1
    assert f"inspect the repository content at {folder}" in process.stderr
    assert "pass the argument `trust_remote_code=True`" in process.stderr
    shim = (folder / SHIM).read_text()
    for way in ("heedful.register()", "trust_remote_code=True", "heedful.load(folder)"):
        assert way in shim
    with pytest.raises(Exception, match=r"after heedful.register\(\); or .* trust_remote_code="):
        LlamaForCausalLM.from_pretrained(folder)


@pytest.mark.slow
def test_registered_no_trust_is_needed(folder, elsewhere):
    code = """
import sys
finders = list(sys.meta_path)
import heedful
from transformers import AutoModelForCausalLM
assert [x for x in sys.meta_path if x not in finders and "heedful" in repr(x)] == []
heedful.register()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert model._heedful.eviction.tokens == (13, 14, 15)
"""
    process = run(code, elsewhere, folder)
    assert process.returncode == 0, process.stderr[-3000:]
    assert not Path(elsewhere["HF_HOME"], "modules", "transformers_modules", "saved0").exists()


def test_what_the_auto_classes_take_aside_is_not_lost(folder):
    with pytest.raises(ValueError, match=r"attn_implementation is not an option of heedful.load"):
        AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16


def test_a_reverted_model_names_no_shim(folder, tmp_path):
    model = heedful.revert(heedful.load(folder))
    model.save_pretrained(tmp_path)
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text())
    assert not (tmp_path / SHIM).exists()
    assert AutoConfig.from_pretrained(tmp_path).model_type == "llama"
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    ids = tokens()
    assert torch.equal(logits(again, ids), logits(model, ids))


@pytest.mark.slow
def test_a_pipeline_opens_a_path(folder, elsewhere):
    code = """
import sys
from transformers import pipeline
write = pipeline("text-generation", model=sys.argv[1], trust_remote_code=True)
(found,) = write("a red", max_new_tokens=4, do_sample=False)
assert found["generated_text"].startswith("a red"), found
print(type(write.model).__name__, write.model._heedful.mechanism)
"""
    process = run(code, elsewhere, folder)
    assert process.returncode == 0, process.stderr[-3000:]
    assert process.stdout.split()[0] == "HeedfulLlamaForCausalLM" and "Selective" in process.stdout


@pytest.mark.slow
def test_the_command_line_of_lm_eval(folder, elsewhere, tmp_path):
    pytest.importorskip("lm_eval")
    rows = [{"question": f"{n} buses are", "choices": [" red", " a"], "answer": 0} for n in "12"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "choose",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "question",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    }
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "choose.yaml").write_text(yaml.safe_dump(task))
    process = subprocess.run(
        [
            *(sys.executable, "-m", "lm_eval", "--model", "hf", "--tasks", "choose"),
            *("--model_args", f"pretrained={folder},trust_remote_code=True"),
            *("--include_path", tmp_path / "tasks", "--output_path", tmp_path / "results"),
            *("--device", "cpu", "--batch_size", "2"),
        ],
        env=elsewhere, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=TIMEOUT,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    (results,) = (tmp_path / "results").rglob("results*.json")
    accuracy = json.loads(results.read_text())["results"]["choose"]["acc,none"]
    model, read = heedful.load(folder), of_bytes()
    right = 0
    for row in rows:
        start = read(row["question"], return_tensors="pt").input_ids
        sums = []
        for choice in row["choices"]:
            own = read(choice, return_tensors="pt").input_ids
            inputs = logits(model, torch.cat([start, own], 1))[0, start.shape[1] - 1 : -1]
            sums.append(inputs.log_softmax(-1).gather(1, own[0, :, None]).sum())
        right += sums[0] > sums[1]
    assert accuracy == right / len(rows)


ASK = """
import json, sys, time, urllib.error, urllib.request
address, folder = sys.argv[1:]
for _ in range(300):
    try:
        urllib.request.urlopen(f"{address}/health", timeout=5)
        break
    except (urllib.error.URLError, OSError):
        time.sleep(0.2)
body = {
    "model": folder,
    "messages": [{"role": "user", "content": "a red bus"}],
    "max_tokens": 5,
    "temperature": 0.0,
}
request = urllib.request.Request(
    f"{address}/v1/chat/completions",
    json.dumps(body).encode(),
    {"content-type": "application/json"},
)
print(urllib.request.urlopen(request, timeout=60).read().decode())
"""


@pytest.mark.slow
@pytest.mark.skipif(
    any(find_spec(name) is None for name in ("fastapi", "uvicorn", "openai", "pydantic")),
    reason="transformers serve needs its extra: pip install 'transformers[serving]'",
)
def test_transformers_serve_answers_a_chat(folder, elsewhere, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = "from transformers.cli.transformers import main; main()"
    options = ("--trust-remote-code", "--host", "127.0.0.1", "--port", port, "--device", "cpu")
    with open(tmp_path / "log", "w+") as log:
        server = subprocess.Popen(
            [sys.executable, "-c", start, "serve", str(folder), *map(str, options)],
            env=elsewhere, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
        try:
            client = run(ASK, elsewhere, f"http://127.0.0.1:{port}", folder)
        finally:
            server.send_signal(signal.SIGKILL)
            server.wait()
        log.seek(0)
        assert client.returncode == 0, f"{client.stderr[-2000:]}\n{log.read()[-4000:]}"
    answer = json.loads(client.stdout)
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["usage"]["completion_tokens"] == 5
