"""`heedful train` on two nodes: two torchruns of one machine, killed and gone on with."""

import json
import os
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from helpers.command_line import status_of

TEXT = "".join(f"line {i}: {'the quick brown fox '[: i % 21]}jumps\n" for i in range(1500))
CONFIG = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip
OPTIONS = shlex.split(
    "tiny.json --data text.txt --mechanism selective --memory-loss 0.1 --steps 40 --batch 4 "
    "--length 32 --evaluations 3 --device cpu"
)
STATE = Path("two/unfinished/state")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in (".", "elsewhere"):
        Path(name).mkdir(exist_ok=True)
        (Path(name) / "tiny.json").write_text(json.dumps(CONFIG))
        (Path(name) / "text.txt").write_text(TEXT)
    return tmp_path


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start_node(rank: int, port: int, *options: str, folder: str = ".") -> psutil.Popen:
    """The options of docs/train.md, with one process on each node."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(rank),
        "--rdzv-endpoint", f"127.0.0.1:{port}", "--nproc-per-node", "1",
        "-m", "heedful_lab", "train",
        *OPTIONS, *options,
    ]  # fmt: skip
    with open(f"node-{rank}.log", "w") as log:
        settings = {"env": os.environ | {"OMP_NUM_THREADS": "1"}, "start_new_session": True}
        return psutil.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT, **settings)


def kill(nodes: list[psutil.Popen]) -> None:
    running = [node for node in nodes if node.poll() is None]
    everyone = [x for node in running for x in (node, *node.children(recursive=True))]
    for process in everyone:
        process.kill()
    psutil.wait_procs(everyone)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*the run stays what it was")
@pytest.mark.filterwarnings("ignore:.*is cut short or damaged")  # of the moment of the kill
@pytest.mark.filterwarnings("ignore:.*going on from step")  # likewise
@pytest.mark.parametrize("more", [[], ["--fsdp"]], ids=["ddp", "fsdp"])
def test_a_run_on_two_nodes_of_which_one_is_killed_goes_on_as_one_process(folder, more):
    assert status_of("train", *OPTIONS, "--out", "whole") == 0
    port = free_port()
    words = ["--save-minutes", "0.000001", "--out", "two", *more]
    nodes = [start_node(rank, port, *words) for rank in (0, 1)]
    deadline = time.monotonic() + 240
    while not list(STATE.glob("checkpoint-*/whole.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    kill(nodes[1:])
    assert nodes[0].wait(300) != 0  # the other one ends by itself
    assert not Path("two/model.safetensors").exists(), "the run ended before it could be killed"
    newest = max(STATE.glob("checkpoint-*/whole.json"), key=lambda x: x.stat().st_mtime).parent
    whole = {"model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json"}
    assert whole | {"rng_state_0.pth", "rng_state_1.pth"} <= {x.name for x in newest.iterdir()}
    assert status_of("train", *OPTIONS, "--out", "two") == 0
    single, two = (load_file(Path(x) / "model.safetensors") for x in ("whole", "two"))
    assert single.keys() == two.keys()
    for name in single:
        torch.testing.assert_close(single[name], two[name], rtol=1e-3, atol=2e-5)


@pytest.mark.slow
def test_an_output_folder_that_nodes_do_not_share_is_refused(folder):
    port = free_port()
    places = (".", "elsewhere")
    nodes = [start_node(n, port, "--out", "two", folder=place) for n, place in enumerate(places)]
    try:
        assert nodes[1].wait(300) != 0
    finally:
        kill(nodes)
    reason = "out='two' must be on a file system that all nodes share"
    assert reason in Path("node-1.log").read_text()
