"""Every name of transformers that is private or differs between its versions, and where it holds.

What the rest of heedful needs of such a name is a small function here. A new release of
transformers is supported by running the tests with it and changing this file alone.
"""

import contextlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar, NamedTuple

import transformers
from torch import Tensor, nn
from torch.utils.data import Sampler
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Cache,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.cache_utils import CacheLayerMixin
from transformers.utils.generic import TransformersKwargs

from heedful.checks import UserError
from heedful.compatibility import TESTED, release

# How a cache is called: `cache` by models and generate since 5.24, `past_key_values` before, and
# `layer_past` by the attention modules of GPT-NeoX in every version.
_CACHES = ("cache", "past_key_values", "layer_past")
# What `generate` hands from step to step; 5.24 renamed it together with the models' argument.
_OF_GENERATE = next(
    name
    for name in _CACHES
    if name in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
)

_PROBE = "heedful_probe"

# What a model may hand to its attention function without a say in who attends to whom.
HARMLESS = frozenset(TransformersKwargs.__annotations__) | {
    "assistant_tokenizer",  # generate hands tokenizers on to the model
    "cache_position",  # until 5.17
    "deterministic",
    "logits_to_keep",
    "position_embeddings",
    "return_dict",
    "sliding_window",
    "tokenizer",
    "use_cache",
}


def newer_than_tested() -> bool:
    """Test whether this transformers is of a later release than the tests have run with."""
    return release(transformers.__version__) > release(TESTED["transformers"][-1])


def cache_among(arguments: Mapping[str, object]) -> object | None:
    """The cache among the arguments of a call, by whichever name; `None` without one."""
    for name in _CACHES:
        if (cache := arguments.get(name)) is not None:
            return cache
    return None


def cache_of(output: object) -> object | None:
    """The cache in what a model returned; `None` without one."""
    # The fields and not the attributes: 5.24 answers to the older name with a deprecation.
    fields = getattr(type(output), "__dataclass_fields__", ())
    return next((getattr(output, name) for name in _CACHES if name in fields), None)


def cache_argument(model: nn.Module, cache: Cache | None) -> dict[str, Cache | None]:
    """The keyword that hands a cache to a model's forward, as the model itself calls it."""
    return {cache_name(model.forward): cache}


def generate_argument(cache: Cache | None) -> dict[str, Cache | None]:
    """The keyword that hands a cache to `generate`."""
    return {_OF_GENERATE: cache}


def cache_name(forward: Callable) -> str:
    """Name of a forward's cache argument; as in `generate` where the signature has none."""
    parameters = inspect.signature(forward).parameters
    return next((name for name in _CACHES if name in parameters), _OF_GENERATE)


def generate_options(options: dict) -> dict:
    """Options of `generate` with the cache under the name that this version reads."""
    return _renamed(options, _OF_GENERATE)


def _renamed(arguments: dict, name: str) -> dict:
    """Arguments with the cache under this name, whichever of the models' two names it had."""
    both = [key for key in _CACHES[:2] if key in arguments]
    if both in ([], [name]):
        return arguments
    caches = {id(x): x for key in both if (x := arguments[key]) is not None}
    if len(caches) > 1:
        raise UserError(f"{' and '.join(both)} are one argument; give one of them")
    others = {key: x for key, x in arguments.items() if key not in both}
    return others | {name: next(iter(caches.values()), None)}


class CacheName(NamedTuple):
    """A forward pre-hook that hands a model its cache by the model's own name for it.

    So `cache=`, the name since 5.24, serves every version, and the older one warns in none.

    name: the model's name.
    """

    name: str

    @classmethod
    def of(cls, model: nn.Module) -> "CacheName":
        """The hook for a model."""
        return cls(cache_name(model.forward))

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return args, _renamed(kwargs, self.name)


class OwnCacheInGenerate:
    """Mixed into a model class: asks `cache_for_generate` before transformers makes a cache.

    The private method that it overrides has had this signature since 5.17.
    """

    def cache_for_generate(
        self, generation_config, cache: Cache | None, mode, prompt: int | None
    ) -> Cache | None:
        """The cache to generate with; `None` leaves it to transformers.

        prompt: how many tokens the decoder's prompt has, those of earlier turns included; `None`
            where that is not known.
        """
        raise NotImplementedError

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, mode, *args) -> None:
        prompt, mask = None, model_kwargs.get("attention_mask")
        if not self.config.is_encoder_decoder:
            # 5.24 notes the length of a mask of ones, which it leaves out.
            prompt = getattr(generation_config, "_mask_length", None)
            prompt = mask.shape[1] if isinstance(mask, Tensor) and mask.ndim == 2 else prompt
        cache = model_kwargs.get(_OF_GENERATE)
        own = self.cache_for_generate(generation_config, cache, mode, prompt)
        if own is None:
            super()._prepare_cache_for_generation(generation_config, model_kwargs, mode, *args)
        else:
            model_kwargs[_OF_GENERATE] = own


def hand_over(layer: CacheLayerMixin, options: dict) -> None:
    """Let a part of a cache reach the attention function with the tokens that it gets.

    Since 5.24 most families give `Cache.update` the arguments that they hand on to attention.
    Elsewhere the hooks on attention modules find the cache by its name.

    Arguments:
        layer: the part of the cache.
        options: what its `update` was called with by keyword.
    """
    if (handed_on := options.get("kwargs")) is not None:
        handed_on["heedful_cache"] = layer


def mark_as_given(cache: Cache) -> None:
    """Mark a cache as the caller's: T5Gemma's `generate` would replace a part of another."""
    cache._is_user_defined = True


def makes_dynamic_cache(model: PreTrainedModel) -> bool:
    """Test whether `generate` makes a dynamic cache for this family; not for recurrent ones."""
    supports = getattr(model, "_supports_default_dynamic_cache", None)
    return supports is not None and supports()


class ImplementationProxy:
    """A configuration for an attention module, which finds its attention function by it.

    All is the original's, at any time, but for the name of its attention implementation, which
    becomes another where `names` has one for it.

    Arguments:
        config: the original.
    """

    names: ClassVar[Mapping[str, str]] = {}

    def __init__(self, config: PreTrainedConfig) -> None:
        vars(self)["original"] = config

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") or name == "original":  # as copies ask before there is one
            raise AttributeError(name)
        return getattr(self.original, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.original, name, value)

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)

    @property
    def _attn_implementation(self) -> str | None:
        own = self.original._attn_implementation
        return self.names.get(own, own)


def implementation_of(config: PreTrainedConfig | ImplementationProxy) -> str | None:
    """The attention implementation of a configuration, or of the one that a proxy stands for."""
    return getattr(config, "original", config)._attn_implementation


def set_implementation(config: PreTrainedConfig, name: str | None) -> None:
    """Set the attention implementation of a configuration, which must be known by then."""
    config._attn_implementation = name


@contextlib.contextmanager
def attention_replaced(
    model: nn.Module, attend: Callable, mask: Callable | None = None
) -> Iterator[None]:
    """Let `attend` be the attention function of a model, or of a part of one, for a while.

    `mask` makes its masks; without it transformers makes none.
    """
    configs = (getattr(module, "config", None) for module in model.modules())
    configs = {id(x): x for x in configs if isinstance(x, PreTrainedConfig)}
    before = [(config, implementation_of(config)) for config in configs.values()]
    AttentionInterface.register(_PROBE, attend)
    if mask is not None:
        AttentionMaskInterface.register(_PROBE, mask)
    try:
        for config, _ in before:
            set_implementation(config, _PROBE)
        yield
    finally:
        for config, implementation in before:
            set_implementation(config, implementation)
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(_PROBE, None)


def ignoring(family: type[PreTrainedModel], pattern: str) -> type[PreTrainedModel]:
    """A model class that loads weights without a report of those whose names fit a pattern."""
    patterns = [*(family._keys_to_ignore_on_load_unexpected or []), pattern]
    return type(family.__name__, (family,), {"_keys_to_ignore_on_load_unexpected": patterns})


class TrainerSteps:
    """Mixed in before a Trainer: its private steps under public names, for subclasses to override.

    Each does what Trainer does. All of them have been there since 5.17.
    """

    def sampler_of_rows(self) -> Sampler:
        """The order in which training rows are taken."""
        return super()._get_train_sampler()

    def write_weights(self, folder: str, weights: dict[str, Tensor] | None) -> None:
        """Save the model, or these weights of it."""
        self._save(folder, weights)

    def read_weights(self, checkpoint: str) -> None:
        """Load the model's weights from a checkpoint."""
        super()._load_from_checkpoint(checkpoint)

    def write_optimizer(self, folder: str) -> None:
        """Save the states of optimiser and scheduler."""
        super()._save_optimizer_and_scheduler(folder)

    def read_optimizer(self, checkpoint: str | None) -> None:
        """Load the states of optimiser and scheduler, if there is a checkpoint."""
        super()._load_optimizer_and_scheduler(checkpoint)

    def write_checkpoint(self, *args, **kwargs) -> None:
        """Save all that a run resumes from."""
        super()._save_checkpoint(*args, **kwargs)

    def warn_of_missing(self, load_result: tuple) -> None:
        """Warn of weights that a checkpoint lacks."""
        super()._issue_warnings_after_load(load_result)

    def on_device(self, batch: dict) -> dict:
        """A batch on the device where the model is."""
        return self._prepare_inputs(batch)

    def _get_train_sampler(self, train_dataset=None) -> Sampler:
        return self.sampler_of_rows()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        self.read_weights(resume_from_checkpoint)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.write_optimizer(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        self.read_optimizer(checkpoint)

    def _save_checkpoint(self, *args, **kwargs) -> None:
        self.write_checkpoint(*args, **kwargs)

    def _issue_warnings_after_load(self, load_result: tuple) -> None:
        self.warn_of_missing(load_result)


def checkpointing_options(enabled: bool) -> dict:
    """The option of `TrainingArguments` that recomputes layers in the backward pass.

    `activation_checkpointing` in 5.24 and 5.23, `gradient_checkpointing` in 5.17.
    """
    parameters = inspect.signature(transformers.TrainingArguments).parameters
    names = ("activation_checkpointing", "gradient_checkpointing")
    name = next(name for name in names if name in parameters)
    return {name: True, f"{name}_kwargs": {"use_reentrant": False}} if enabled else {}


def make_ordinary(model: PreTrainedModel) -> None:
    """Take from a model whose weights were dequantised the marks of a quantized one.

    With them `save_pretrained` and training raise.
    """
    marks = ("quantization_config", "_pre_quantization_dtype", "_is_quantized")
    for part in (x for x in model.modules() if isinstance(x, PreTrainedModel)):
        for name in (*marks, "_model_name_or_path"):  # the last: a GGUF file's title
            vars(part.config).pop(name, None)
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        vars(model).pop(name, None)


def own_tokens_only(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A tokenizer of a GGUF file without tokens that are not in the file.

    5.24 adds GPT-2's `<|endoftext|>` to byte pairs that lack it, and the model has no row for it.
    """
    backend = tokenizer.backend_tokenizer
    state, words = json.loads(backend.to_str()), backend.get_vocab_size(with_added_tokens=False)
    own = [token for token in state["added_tokens"] if token["id"] < words]
    if len(own) < len(state["added_tokens"]):
        tokenizer._tokenizer = type(backend).from_str(json.dumps(state | {"added_tokens": own}))
    return tokenizer
