"""A small model from scratch for a task, and the hyperparameters of its training.

It is a configuration of transformers plus `convert`; there is no own language model here.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    LlamaConfig,
    PreTrainedModel,
)

from heedful.checks import UserError, check_whole
from heedful.hf import revert
from heedful.nn import LocalGlobal, MechanismConfig, to_json
from heedful_lab.rivals.models import convert, load
from heedful_lab.rivals.simplicial import Simplicial
from heedful_lab.tasks import Task


@dataclass(frozen=True)
class Size:
    """Width, depth and heads of a model from scratch.

    Arguments:
        intermediate: width of a Llama's MLPs; `None` is eight thirds of `hidden`, rounded down to a
            multiple of 16. A BART's are four times `hidden`.
    """

    hidden: int = 128
    layers: int = 4
    heads: int = 4
    intermediate: int | None = None

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads"):
            check_whole(name, getattr(self, name), 1)
        if self.intermediate is not None:
            check_whole("intermediate", self.intermediate, 1)
        if self.hidden % self.heads or self.hidden // self.heads % 2:
            raise UserError(
                f"hidden must be an even multiple of heads (rotary embedding), got hidden="
                f"{self.hidden} with heads={self.heads}"
            )


@dataclass(frozen=True)
class Hyperparameters:
    """Options for training and evaluating a run.

    Arguments:
        steps, batch: optimiser steps and sequences in each.
        learning_rate: peak of a cosine with linear warm-up over `warmup` steps.
        mechanism_rate: factor on the learning rate of the mechanism's own parameters. A kernel
            starts as the identity, with zeros that must reach the size of one; at the rate of the
            model's weights that alone takes Adam hundreds of steps.
        evaluations: how often the evaluation set is scored in the course of a run.
        held_out: how many sequences the evaluation set has.
    """

    steps: int = 400
    batch: int = 32
    learning_rate: float = 3e-3
    warmup: int = 50
    mechanism_rate: float = 1.0
    evaluations: int = 8
    held_out: int = 256

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "evaluations", "held_out"):
            check_whole(name, getattr(self, name), 1)
        check_whole("warmup", self.warmup, 0)
        for name in ("learning_rate", "mechanism_rate"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise UserError(f"{name} must be a positive number, got {value!r}")


Attention = MechanismConfig | dict[MechanismConfig, tuple[int, ...]]
"""The attention of a model's layers: of all, or by their indices."""


def local_global(layers: int, length: int) -> LocalGlobal:
    """Every fourth layer, the last of its four, sees everything; the others the newest sixteenth.

    So the cache of four layers holds 0.3 times what four standard ones hold. Of fewer layers the
    last one sees everything.
    """
    return LocalGlobal(window=max(13, length // 16), every=min(4, layers))


def simplicial(layers: int) -> Simplicial:
    """Every fourth layer, or of fewer the last one, attends to pairs in windows that are small."""
    return Simplicial(window=64, second_window=8, every=min(4, layers))


def described(attention: Attention) -> dict:
    """Attention as a JSON object, for configurations and records."""
    if not isinstance(attention, dict):
        return to_json(attention)
    parts = [to_json(part) | {"layers": list(those)} for part, those in attention.items()]
    return {"kind": "Hybrid", "parts": parts}


def from_scratch(task: Task, mechanism: Attention, size: Size, seed: int) -> PreTrainedModel:
    """A small model for the task, converted; the same seed gives all mechanisms the same start.

    A Llama, or for tasks with a source and a target a BART with `size.layers` layers on each side.
    """
    torch.manual_seed(seed)
    if task.paired:
        return convert(_encoder_decoder(task, size), mechanism).model
    longest = max(other.length for other in (task, *task.evaluations().values()))
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=task.vocab_size,
            hidden_size=size.hidden,
            intermediate_size=size.intermediate or 8 * size.hidden // 3 // 16 * 16 or 16,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            max_position_embeddings=longest,
            # At these widths the usual 0.02 would start the residual stream near zero.
            initializer_range=size.hidden**-0.5,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    return convert(model, mechanism).model


def from_trained(folder: Path, mechanism: Attention, seed: int) -> PreTrainedModel:
    """A trained model with another mechanism in its place; the seed is of what that begins with."""
    torch.manual_seed(seed)
    return convert(revert(load(folder, budgets=False)), mechanism).model


def _encoder_decoder(task: Task, size: Size) -> BartForConditionalGeneration:
    sizes = (task, *task.evaluations().values())
    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=task.vocab_size,
            d_model=size.hidden,
            encoder_layers=size.layers,
            decoder_layers=size.layers,
            encoder_attention_heads=size.heads,
            decoder_attention_heads=size.heads,
            encoder_ffn_dim=4 * size.hidden,
            decoder_ffn_dim=4 * size.hidden,
            max_position_embeddings=max(max(x.length, x.target_length) for x in sizes),
            init_std=size.hidden**-0.5,
            dropout=0.0,
            pad_token_id=task.pad,
            bos_token_id=None,
            eos_token_id=task.eos,
            decoder_start_token_id=task.pad,
            forced_eos_token_id=None,
        )
    )
