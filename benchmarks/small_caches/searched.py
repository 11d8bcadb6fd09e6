"""Score a trained model on the evaluation set under the budgets that `heedful budget` found for it.

The search reads training sequences; its budgets are scored on sequences that neither training nor
search has read. One line more for the tables of `heedful compare --budgets`.

    python -m benchmarks.small_caches.searched runs/study-text/models/text-selective-memory-loss-0 \
        --data books --tokenizer bpe --length 768 --out runs/searched.jsonl
"""

from pathlib import Path

from benchmarks.parts import command_line
from heedful.hf.budgets import NAME, read_budgets
from heedful_lab.commands.compare.scratch import Hyperparameters
from heedful_lab.commands.compare.small_caches import bf16_bytes, under_budget
from heedful_lab.records import UnderBudget, append
from heedful_lab.records.environment import environment
from heedful_lab.rivals.models import load
from heedful_lab.tasks import Text


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("model", type=Path, help="folder of a text model with a budgets.json")
    parser.add_argument("--data", nargs="+", default=())
    parser.add_argument("--tokenizer", default="byte")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--name", default="selective + memory loss")
    args = parser.parse_args()
    model = load(args.model, budgets=False, convert=True)
    eviction = read_budgets(args.model / NAME, model)
    task = Text.default(tuple(args.data)).cut(args.length, args.tokenizer)
    hyperparameters = Hyperparameters(held_out=task.recipe.held_out)
    final, peak, rows = under_budget(model, task, eviction, hyperparameters)
    line = UnderBudget(
        "text", args.name, 0, f"searched {'/'.join(map(str, eviction.tokens))}",
        round(sum(eviction.tokens) / len(eviction.tokens)), task.length, task.metric, final, peak,
        bf16_bytes(model, task.length), rows, environment(),
    )  # fmt: skip
    append(args.out, line)
    print(f"{line.policy}: {final}, {peak:,.0f} bytes")


if __name__ == "__main__":
    main()
