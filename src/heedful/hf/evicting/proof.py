"""The proof that an evicting cache serves a family, by a few tokens.

The model reads two sequences in several calls, the second padded on the left: with the cache that
transformers makes for it; with an evicting one that evicts nothing, which must agree to the last
bit (up to rounding on a GPU, whose kernels may depend on strides); and under a budget so small that
tokens are evicted in every layer. The last must agree up to rounding with one call without a cache,
in which each attention module's own mask is narrowed to what the budget leaves: the policy's
definition, by a loop over tokens. Kernels that take no mask of queries and keys (FlashAttention,
FlexAttention) are not compared with the definition.

Where a policy is to read attention weights, those that are read must give the attention's own
output, call by call, as tokens are evicted by them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import transformers
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel

from heedful.checks import UserError
from heedful.eviction import TOVA, StreamingLLM
from heedful.eviction.policy import Budget
from heedful.hf.after_eviction import matrices_at_rest
from heedful.hf.cache.counters import Meter
from heedful.hf.evicting.hook import MaskColumns
from heedful.hf.evicting.new import evicting_layers
from heedful.hf.evicting.observing import AttentionCall, weights
from heedful.hf.proof import evaluated, ordinary_tokens, rounding
from heedful.hf.versions import cache_argument, implementation_of

_CALLS = (5, 1, 1, 3, 1, 1, 1, 1)
_TOKENS = sum(_CALLS)
_PADDING = 2  # tokens on the left of the second sequence
_POLICY = StreamingLLM(tokens=6, sinks=1, recent=2)
_OBSERVING = TOVA(tokens=6, sinks=1, recent=2)


def prove(
    model: PreTrainedModel,
    places: dict[int, nn.Module],
    windows: Sequence[int | None],
    hooks: Sequence[MaskColumns],
    observed: bool,
    static: bool = False,
) -> None:
    """Raise unless an evicting cache serves the model; once for each model and implementation.

    Arguments:
        model: unconverted; comes out as it went in.
        places: its attention modules, by their layers in a cache.
        windows: how far back each one's queries see; `None` for all tokens.
        hooks: of the modules; they note the result.
        observed: whether attention weights are to be read.
        static: whether the cache's shapes are not to change.

    Raises:
        ValueError: the results differ, or the model cannot be run on token ids alone.
    """
    modules = list(places.values())
    implementation = implementation_of(modules[0].config) or ""
    proven = all(hook.proven == implementation for hook in hooks)
    observed = observed and any(hook.proven_observed != implementation for hook in hooks)
    static = static and any(hook.proven_static != implementation for hook in hooks)
    if proven and not observed and not static:
        return
    if any(p.device.type == "meta" for p in model.parameters()):
        raise _unproven(model, "its weights are on meta, and nothing can be computed")
    real = torch.ones(2, _TOKENS, dtype=torch.bool)
    real[1, :_PADDING] = False
    budget = Budget(_POLICY, _POLICY.tokens)
    with evaluated(model), torch.no_grad(), matrices_at_rest():
        run = partial(_logits, model, real)
        if observed:
            _prove_weights(model, run, modules, windows)
            for hook in hooks:
                hook.proven_observed = implementation
        if static:
            _prove_static(model, run, modules, windows, budget)
            for hook in hooks:
                hook.proven_static = implementation
        if proven:
            return
        try:
            own = run(DynamicCache(config=model.config))
        except Exception as error:  # a stranger's model: it may need more than token ids
            raise _unproven(model, f"it cannot be run on token ids alone ({error})") from error
        try:
            whole = run(_cache(modules, [None] * len(modules), windows))
            small = run(_cache(modules, [budget] * len(modules), windows))
            shown = [_shown(real, None if w is None else int(w)) for w in windows]
            with _narrowed(modules, shown) as narrowed:
                dense = run(None)
        except (IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise _unproven(model, f"{type(error).__name__}: {error}") from error
    sound = (own.isfinite() & dense.isfinite()).all(
        1
    )  # some eager attention makes NaN of padding in fp64
    if not sound.any():
        raise _unproven(model, "its own outputs are not finite")
    own, whole, small, dense = (x[sound] for x in (own, whole, small, dense))
    exact = own.device.type == "cpu"
    if not (torch.equal(whole, own) if exact else _close(whole, own)):
        raise _unproven(model, "without an eviction its outputs differ from those with its cache")
    if "flash" not in implementation and "flex" not in implementation:
        if not all(narrowed):
            raise _unproven(model, "its attention modules get no mask by keyword")
        if not _close(small, dense):
            raise _unproven(model, "under a budget its outputs differ from the definition's")
    for hook in hooks:
        hook.proven = implementation


def _prove_static(
    model: PreTrainedModel,
    run: Callable[[Cache], Tensor],
    modules: list[nn.Module],
    windows: Sequence[int | None],
    budget: Budget,
) -> None:
    """Raise unless a cache whose shapes do not change gives what one gives whose shapes do."""
    budgets, results = [budget] * len(modules), []
    try:
        for static in (False, True):
            layers = evicting_layers(modules, budgets, windows, 0, Meter(), static=static)
            results.append(run(Cache(layers=layers)))
    except (IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise _unproven(model, f"{type(error).__name__}: {error}") from error
    sound = results[0].isfinite().all(1)
    if not sound.any() or not _close(results[1][sound], results[0][sound]):
        raise _unproven(model, "its outputs with a static cache differ from those with others")


def _prove_weights(
    model: PreTrainedModel,
    run: Callable[[Cache], Tensor],
    modules: list[nn.Module],
    windows: Sequence[int | None],
) -> None:
    """Raise unless the attention weights that are read give the attention's own output."""
    cache = _cache(modules, [Budget(_OBSERVING, _OBSERVING.tokens)] * len(modules), windows)
    agrees: list[bool] = []
    for layer in cache.layers:
        layer.observe = partial(_compare, layer.observe, agrees)
    try:
        run(cache)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise _unproven(model, f"{type(error).__name__}: {error}") from error
    if not all(agrees):
        raise _unproven(model, "its attention weights cannot be read: they do not give its output")


def _compare(observe: Callable[[AttentionCall], None], agrees: list[bool], call: AttentionCall):
    """Note whether a call's weights give its output, and observe it."""
    found = weights(call, 0, call.query.shape[2])
    value = call.value.repeat_interleave(found.shape[1] // call.value.shape[1], dim=1)
    output = (found @ value[:, :, : found.shape[3]]).transpose(1, 2)
    own = call.output.view_as(output)
    sound = (output.isfinite() & own.isfinite()).flatten(2).all(2)  # padding may attend to nothing
    agrees.append(bool(sound.any()) and _close(output[sound], own[sound]))
    observe(call)


def _unproven(model: PreTrainedModel, reason: str) -> UserError:
    return UserError(
        f"model: {type(model).__name__} is not proven to be supported by a cache that evicts, with "
        f"transformers {transformers.__version__}: {reason}. heedful.convert(model, 'standard') "
        "may serve it, or verify=False to go on without the proof"
    )


def _close(x: Tensor, y: Tensor) -> bool:
    tolerance, wide = rounding(y), torch.promote_types(y.dtype, torch.float32)
    x, y = x.to(wide), y.to(wide)
    return bool((x - y).abs().max() <= tolerance * y.abs().max())


def _cache(
    modules: list[nn.Module], budgets: list[Budget | None], windows: Sequence[int | None]
) -> Cache:
    return Cache(layers=evicting_layers(modules, budgets, windows, 0, Meter()))


def _logits(
    model: PreTrainedModel, real: Bool[Tensor, "2 T"], cache: Cache | None
) -> Float[Tensor, "n V"]:
    """The logits of all real tokens, from several calls with the cache or one without."""
    ids = ordinary_tokens(model, _TOKENS)
    real = real.to(ids.device)
    parts, position = [], 0
    for piece in ids.split(list(_CALLS) if cache is not None else [_TOKENS], dim=1):
        position += piece.shape[1]
        options = {"attention_mask": real[:, :position].long(), "use_cache": cache is not None}
        parts.append(model(piece, **options, **cache_argument(model, cache))[0])
    return torch.cat(parts, dim=1)[real]


def _shown(real: Bool[Tensor, "2 T"], window: int | None) -> Bool[Tensor, "2 1 T T"]:
    """Cached tokens when each token is read, by the rule of the policy."""
    shown = torch.zeros(2, 1, _TOKENS, _TOKENS, dtype=torch.bool)
    for row, is_real in enumerate(real.tolist()):
        first, cached, total = is_real.index(True), [], 0
        for new in _CALLS:
            cached += range(total, total + new)
            for t in range(total, total + new):
                shown[row, 0, t, [j for j in cached if j <= t]] = True
            total += new
            order = partial(_order, is_real, first, total, window)
            while len(cached) >= _POLICY.tokens:
                cached.remove(min(cached, key=order))
    return shown


def _order(
    is_real: list[bool], first: int, total: int, window: int | None, j: int
) -> tuple[int, int]:
    """Order of eviction: what nobody sees at once, protected ones never, of others the oldest."""
    if not is_real[j] or (window is not None and j <= total - window):
        return 0, j
    protected = j < first + _POLICY.sinks or j >= total - _POLICY.recent
    return (2 if protected else 1), j


@contextmanager
def _narrowed(
    modules: list[nn.Module], shown: list[Bool[Tensor, "2 1 T T"]]
) -> Iterator[list[bool]]:
    """Narrow the masks of attention modules for a while; yields whether each has got one."""
    narrowed = [False] * len(modules)

    def narrow(index: int, module: nn.Module, args: tuple, kwargs: dict) -> tuple | None:
        mask = kwargs.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.ndim != 4:
            return None
        narrowed[index], own = True, shown[index].to(mask.device)
        if mask.dtype == torch.bool:
            return args, kwargs | {"attention_mask": mask & own}
        return args, kwargs | {
            "attention_mask": mask.masked_fill(~own, torch.finfo(mask.dtype).min)
        }

    hooks = [
        module.register_forward_pre_hook(partial(narrow, index), with_kwargs=True)
        for index, module in enumerate(modules)
    ]
    try:
        yield narrowed
    finally:
        for hook in hooks:
            hook.remove()
