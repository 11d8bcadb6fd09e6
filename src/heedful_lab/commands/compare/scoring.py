"""Scores of a model on a task's evaluation set."""

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from heedful_lab.commands.compare.scratch import Hyperparameters
from heedful_lab.tasks import Pairs, Samples, Task, token_losses
from heedful_lab.tasks.samples import IGNORE


def final_scores(
    model: PreTrainedModel, task: Task, hyperparameters: Hyperparameters
) -> tuple[str, dict]:
    """The task's metric, and its value on every evaluation split, judged split first."""
    splits = {
        name: score(model, other, hyperparameters) for name, other in task.evaluations().items()
    }
    final = {name: scores[task.metric] for name, scores in splits.items()}
    judged = next(iter(splits.values()))
    return task.metric, final | {name: judged[name] for name in task.also}


def score(model: PreTrainedModel, task: Task, hyperparameters: Hyperparameters) -> dict[str, float]:
    """The task's scores of a model on its evaluation set, the same at every call."""
    return score_rows(model, task, task.held_out(hyperparameters.held_out), hyperparameters.batch)


@torch.no_grad()
def score_rows(
    model: PreTrainedModel, task: Task, rows: Samples | Pairs, batch: int
) -> dict[str, float]:
    """The task's scores of a model on these sequences, `batch` of them at once."""
    training = model.training
    model.eval()
    if task.paired:
        scores = _score_pairs(model, task, rows, batch)
        model.train(training)
        return scores
    values = []
    for ids, labels in zip(rows.input_ids.split(batch), rows.labels.split(batch), strict=True):
        logits = model(input_ids=ids.to(model.device), use_cache=False).logits.float().cpu()
        predicted = task.scored_by == "predictions"
        values.append(logits.argmax(-1) if predicted else token_losses(logits, labels))
    model.train(training)
    return task.score(torch.cat(values), rows.labels)


def _score_pairs(model: PreTrainedModel, task: Task, rows: Pairs, batch: int) -> dict[str, float]:
    """Scores of an encoder-decoder: the mean loss of the targets' tokens, and the task's own.

    What the task scores as texts is written by greedy decoding.
    """
    losses, texts = [], []
    for part in zip(*(x.split(batch) for x in rows), strict=True):
        pairs = Pairs(*part)
        inputs = {name: x.to(model.device) for name, x in pairs.inputs().items()}
        logits = model(**inputs, use_cache=False).logits.float().cpu()
        losses.append(
            cross_entropy(
                logits.transpose(1, 2), pairs.labels, reduction="none", ignore_index=IGNORE
            )
        )
        if task.scored_by == "texts":
            texts += write(model, task, pairs)
    whole = torch.cat(losses)
    scores = task.score(texts if task.scored_by == "texts" else whole, rows.labels)
    return scores | {"loss": (whole.sum() / (rows.labels != IGNORE).sum()).item()}


@torch.no_grad()
def write(model: PreTrainedModel, task: Task, rows: Pairs) -> list[str]:
    """Generate an encoder-decoder's texts for the sources, one batch, by greedy decoding."""
    ids = model.generate(
        input_ids=rows.input_ids.to(model.device),
        attention_mask=rows.attention_mask.to(model.device),
        max_new_tokens=task.target_length,
        do_sample=False,
    )
    return [task.decode(row[1:]) for row in ids.tolist()]  # the first begins each of them
