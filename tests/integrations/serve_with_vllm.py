"""Run by a test in a process of its own: answers of vLLM to requests of token ids, as JSON.

python serve_with_vllm.py FOLDER REQUESTS.json ANSWERS.json: options of `LLM`, and rounds, each a
list of prompts with the numbers of tokens to make; a later round may continue earlier answers.
First comes a prompt that is too long: of it, what vLLM says.
"""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError


def main(folder: str, requests: str, answers: str) -> None:
    calls = json.loads(Path(requests).read_text())
    llm = LLM(folder, enforce_eager=True, skip_tokenizer_init=True, **calls["options"])
    try:
        llm.generate({"prompt_token_ids": calls["too long"]}, use_tqdm=False)
        replies = ["nothing"]
    except VLLMValidationError as error:
        replies = [str(error)]
    for turn in calls["turns"]:
        options = [
            SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
            for n in turn["tokens"]
        ]
        prompts = [{"prompt_token_ids": ids} for ids in turn["prompts"]]
        outputs = llm.generate(prompts, options, use_tqdm=False)
        replies.append([list(output.outputs[0].token_ids) for output in outputs])
    Path(answers).write_text(json.dumps(replies))


if __name__ == "__main__":
    main(*sys.argv[1:])
