"""Run by a test in a process of its own: what vLLM says to folders with options, as JSON.

python refused_by_vllm.py ASKED.json ANSWERS.json [VERSION]; nothing is loaded. With a version, vLLM
says that it is that one.
"""

import json
import sys
from pathlib import Path

import vllm
from vllm import EngineArgs
from vllm.plugins import load_general_plugins


def main(requests: str, answers: str, version: str = vllm.__version__) -> None:
    vllm.__version__ = version
    load_general_plugins()
    messages = []
    for folder, options in json.loads(Path(requests).read_text()):
        try:
            EngineArgs(folder, skip_tokenizer_init=True, **options).create_engine_config()
            messages.append("nothing")
        except Exception as error:
            messages.append(str(error))
    Path(answers).write_text(json.dumps(messages))


if __name__ == "__main__":
    main(*sys.argv[1:])
