"""Conversations about passages of books, answered by the model itself: text for `--recipe hide`.

Books alone do not teach selectors what an instruction or the chat template's tokens are worth.

    python -m benchmarks.real.chats smollm2 --books books-train --out chats.jsonl
"""

import random
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.parts import command_line
from heedful import stock_model, stock_tokenizer
from heedful.files import write_lines

BEFORE = (
    "Summarise the following text in two sentences.",
    "Who and what is this passage about?",
    "Read the passage and say what happens in it.",
    "List three facts that the text states.",
    "Which mood does this text have, and which words show it?",
    "Explain the following text to a child.",
)
AFTER = (
    "Summarise the text above in two sentences.",
    "What is the most important point of this passage?",
    "Which people and places does the text name?",
    "Give the passage a title and say why it fits.",
    "What might happen next?",
    "Ask one question that this text answers, and answer it.",
)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("model", help="MODEL with a chat template")
    parser.add_argument("--books", type=Path, required=True, help="folder of books, one per file")
    parser.add_argument("--conversations", type=int, default=96)
    parser.add_argument("--words", type=int, nargs=2, default=(80, 560), help="of a passage")
    parser.add_argument("--reply-tokens", type=int, default=110)
    parser.add_argument("--batch", type=int, default=8)
    options = parser.parse_args()
    model, tokenizer = stock_model(options.model), stock_tokenizer(options.model)
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.eos_token
    requests = sorted(
        prompts(options.books, options.conversations, tuple(options.words)), key=len
    )  # of like lengths together: little padding
    conversations = []
    for at in tqdm(range(0, len(requests), options.batch), desc="answers"):
        batch = [[{"role": "user", "content": x}] for x in requests[at : at + options.batch]]
        inputs = tokenizer.apply_chat_template(
            batch, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            ids = model.generate(**inputs, max_new_tokens=options.reply_tokens, do_sample=False)
        replies = tokenizer.batch_decode(
            ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        conversations += [
            [*messages, {"role": "assistant", "content": reply.strip()}]
            for messages, reply in zip(batch, replies, strict=True)
        ]
    random.Random(0).shuffle(conversations)
    write_lines(options.out, [{"messages": x} for x in conversations])


def prompts(books: Path, count: int, words: tuple[int, int]) -> list[str]:
    """A passage of a book each, with an instruction before or behind it."""
    draws = random.Random(0)
    paths = sorted(books.glob("*.txt"))
    texts = {path: path.read_text().split() for path in paths}
    made = []
    for number in range(count):
        text = texts[paths[number % len(paths)]]
        length = min(draws.randint(*words), len(text))
        start = draws.randrange(len(text) - length + 1)
        passage = " ".join(text[start : start + length])
        instruction = draws.choice(BEFORE if number % 2 else AFTER)
        order = (instruction, passage) if number % 2 else (passage, instruction)
        made.append("\n\n".join(order))
    return made


if __name__ == "__main__":
    main()
