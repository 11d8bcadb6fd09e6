"""Losses of what layers report: how much of its context each still needs, how large groups are."""

import logging
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from heedful.checks import UserError
from heedful.nn import Layer, LayerOutput
from heedful.nn.layer import GroupingReport
from heedful.ops import Visibility
from heedful.ops.common.checks import check_tau

_log = logging.getLogger("heedful")


class _MemoryReport(NamedTuple):
    """Report of one layer on one forward pass."""

    memory: Float[Tensor, "B Tq"]
    visibility: Visibility | None
    keys: int


class AuxOutputs:
    """Collects auxiliary layer outputs of the last forward pass.

    By forward hooks, so that nothing is saved with the model. A subclass defines which layers and
    which of their outputs; `what` names these in messages.
    """

    what: str
    way_out: str

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise UserError(f"model must be a converted model, got {type(model).__name__}")
        layers = [x for x in model.modules() if isinstance(x, Layer)]
        self._layers = [layer for layer in layers if self._reports_of(layer)]
        if not self._layers:
            kinds = ", ".join(sorted({type(layer).__name__ for layer in layers})) or "none"
            raise UserError(
                f"model must have layers that report {self.what}, and this {type(model).__name__} "
                f"has none (its heedful layers: {kinds}); call {self.way_out}"
            )
        self._reports: list = []
        self._under_way = self._trains = False
        self._hooks = [
            model.register_forward_pre_hook(self._begin),
            model.register_forward_hook(self._end, always_call=True),
        ]
        for layer in self._layers:
            self._hooks.append(layer.register_forward_hook(self._collect, with_kwargs=True))

    def _reports_of(self, layer: Layer) -> bool:
        raise NotImplementedError

    def _read(self, args: tuple[Tensor, ...], kwargs: dict, output: LayerOutput):
        raise NotImplementedError

    def _collected(self) -> list:
        """The reports of the newest forward pass, which are then discarded."""
        reports, self._reports = self._reports, []
        if not self._hooks:
            name = type(self).__name__
            raise UserError(f"this {name} was removed; make a new one: {name}(model)")
        if not reports:
            raise UserError(
                f"no layer has reported {self.what} since the last call: run the model, as in "
                "model(**batch), before each call of this; in eval mode with use_cache=False"
            )
        return reports

    def remove(self) -> None:
        """Take the hooks away from the model; a second call does nothing."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._layers, self._reports = [], [], []

    def __enter__(self) -> "AuxOutputs":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __getstate__(self) -> dict:
        """Without what a pass has left: copies of a model, which copy its hooks, start anew."""
        return self.__dict__ | {"_reports": [], "_under_way": False}

    def _begin(self, model: nn.Module, args: tuple) -> None:
        if getattr(model, "_is_replica", False):
            raise UserError(
                f"{type(self).__name__} does not work under torch.nn.DataParallel, whose replicas "
                "run at once; use DistributedDataParallel"
            )
        self._reports, self._under_way, self._trains = [], True, torch.is_grad_enabled()

    def _end(self, model: nn.Module, args: tuple, output: object) -> None:
        self._under_way = False

    def _collect(
        self, layer: Layer, args: tuple[Tensor, ...], kwargs: dict, output: LayerOutput
    ) -> None:
        # A layer that is computed again in the backward pass is outside of the model's forward.
        if not self._under_way:
            return
        if self._trains and not torch.is_grad_enabled():
            raise UserError(
                f"this {self.what} would have no gradient: the layers run without grad inside a "
                "forward pass with it, as under reentrant checkpointing; give its kwargs "
                "{'use_reentrant': False}"
            )
        report = self._read(args, kwargs, output)
        if report is not None:
            self._reports.append(report)


class MemoryLoss(AuxOutputs):
    r"""The memory loss of a converted model: how many tokens its layers still need at worst.

    $$ \frac{1}{L\thinspace n} \sum_l \sum_d \max_{i \in d} M_i^l, \qquad
       M_i = i - \frac{1}{\tau} \sum_k \min(F_{ik}, \tau) $$

    over the L layers that report memory and the documents d, with n real tokens in the batch. For
    sequences without padding, each of one document, this is the mean over sequences of the paper's
    term. `i` counts what query i sees before itself: earlier real tokens of its document, and
    within a sliding window only those, as a key that has left the window is needed by nobody. Where
    several selectors mask (`selector="per-head"`), F's sum is their mean. Other layers that report
    memory say what they count. The gradient goes through one position per document and layer, the
    first of the largest.

    Training adds a small multiple, 0.1 in the paper: `loss = model(**batch).loss + 0.1 * memory()`.
    What is counted is the newest forward pass of the model; calling clears it. In a batch of
    several passes (gradient accumulation, pairs of preferences) call after each of them.

    Layers report by forward hooks, and compute memory while their `tau` is set. `remove()`, or
    leaving the `with` block, takes both away. Neither is saved with the model.

    Arguments:
        model: a converted model, or a wrapper of one, such as PEFT's.
        tau: from which F on a token counts as not needed; the paper has 1.

    Raises:
        ValueError: no layer of the model can report memory, it has a memory loss already, or `tau`
            is not a positive number.

    Source: Leviathan et al., "Selective Attention Improves Transformer", arXiv 2410.02703,
    section 4.
    """

    what = "memory"
    way_out = "heedful.convert(model, 'selective')"

    def __init__(self, model: nn.Module, tau: float = 1.0) -> None:
        if tau is None:
            raise UserError("tau must be a positive number, got None")
        self.tau = check_tau(tau)
        super().__init__(model)
        if any(layer.tau is not None for layer in self._layers):
            self.remove()
            raise UserError(
                "model has a memory loss already, or a tau of its own: use that one, or remove() it"
            )
        for layer in self._layers:
            layer.tau = self.tau
        self._armed = True

    def _reports_of(self, layer: Layer) -> bool:
        return layer.reports_memory

    def _read(
        self, args: tuple[Tensor, ...], kwargs: dict, output: LayerOutput
    ) -> _MemoryReport | None:
        return _MemoryReport(output.memory, kwargs.get("visibility"), args[1].shape[2])

    def __call__(self) -> Float[Tensor, ""]:
        """The term of the newest forward pass, without its factor, and forget that pass.

        Raises:
            ValueError: there was no forward pass since the last call, or the newest one went on
                from a cache, so that sequences are not whole.
        """
        reports = self._collected()
        terms = [_term(report, self.tau).to(reports[0].memory.device) for report in reports]
        return torch.stack(terms).mean()

    def remove(self) -> None:
        """Take hooks and `tau` away from the model; a second call does nothing."""
        if getattr(self, "_armed", False):
            for layer in self._layers:
                layer.tau = None
        super().remove()


def _term(report: _MemoryReport, tau: float) -> Float[Tensor, ""]:
    """Of one layer: the sum over documents of the largest M, per real token."""
    memory, keys = report.memory, report.keys
    visibility = Visibility() if report.visibility is None else report.visibility
    if memory.shape[1] != keys or not visibility.in_place:
        raise UserError(
            f"memory() needs whole sequences, and the newest forward pass went on from a cache "
            f"({memory.shape[1]} new of {keys} tokens); call it right after a pass without cache"
        )
    earlier, document, real = _counted_rows(visibility, memory)
    needed = (earlier - memory / tau).masked_fill(~real, float("-inf"))
    at = _greatest(needed.detach(), document, real)
    there = at < keys
    return needed.gather(1, at.clamp(max=keys - 1)).where(there, 0).sum() / real.sum().clamp(min=1)


def _counted_rows(
    visibility: Visibility, like: Float[Tensor, "B T"]
) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Per token: how many it sees before itself, its document's number, whether it is real.

    Counted by running sums, so that no T x T mask is made.
    """
    length, device = like.shape[1], like.device
    segments = visibility.segments()
    real = torch.ones_like(like, dtype=torch.bool)
    real = real if segments is None else (segments >= 0).expand(like.shape)
    first = visibility.first_tokens(length, device).expand(like.shape)
    token = torch.arange(length, device=device).expand(like.shape)
    start = token.where(first, 0).cummax(1).values
    if visibility.window is not None:
        start = start.maximum(token - (visibility.window - 1))
    before = real.cumsum(1) - real.long()
    earlier = before - before.gather(1, start)
    return earlier, (first.cumsum(1) - 1).clamp(min=0), real


def _greatest(
    needed: Float[Tensor, "B T"], document: Int[Tensor, "B T"], real: Bool[Tensor, "B T"]
) -> Int[Tensor, "B T"]:
    """The first position of the largest value of each document; T where there is none."""
    length = needed.shape[1]
    largest = torch.full_like(needed, float("-inf"))
    largest = largest.scatter_reduce(1, document, needed, "amax")
    token = torch.arange(length, device=needed.device).expand(needed.shape)
    place = token.where(real & (needed == largest.gather(1, document)), length)
    return torch.full_like(document, length).scatter_reduce(1, document, place, "amin")


class GroupingLoss(AuxOutputs):
    r"""The loss that keeps learned groups (`cif`) at their configured size.

    It is $(g\,\overline{\alpha} - 1)^2$ for the configured size g and the mean weight of a token,
    averaged over the layers that make groups.

    Training adds it: `loss = model(**batch).loss + grouping()`. What is counted is the newest
    forward pass; calling clears it. If the mean size falls below half or rises above twice the
    configured one, the log warns once, until it is back in range.

    Arguments:
        model: a converted model, or a wrapper of one.

    Raises:
        ValueError: no layer of the model learns where its groups end.

    Source: Dong and Xu, "CIF", arXiv 1905.11235.
    """

    what = "groups"
    way_out = "heedful.convert(model, heedful.Grouped('cif'))"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.sizes: list[float] = []
        self._collapsed: set[int] = set()

    def _reports_of(self, layer: Layer) -> bool:
        return layer.learns_groups

    def _read(
        self, args: tuple[Tensor, ...], kwargs: dict, output: LayerOutput
    ) -> GroupingReport | None:
        return output.grouping

    def __call__(self) -> Float[Tensor, ""]:
        """The term of the newest forward pass; `sizes` holds the mean sizes of its groups.

        Raises:
            ValueError: there was no forward pass of whole sequences since the last call.
        """
        reports = self._collected()
        losses = [report.loss.to(reports[0].loss.device) for report in reports]
        self.sizes = torch.stack([r.size.detach().to(losses[0].device) for r in reports]).tolist()
        for number, (size, report) in enumerate(zip(self.sizes, reports, strict=True)):
            if report.target / 2 <= size <= report.target * 2:
                self._collapsed.discard(number)
            elif number not in self._collapsed:
                self._collapsed.add(number)
                _log.warning(
                    "grouping %d of %d: groups have %.3g tokens, and should have %d: it has "
                    "collapsed, or is about to; give GroupingLoss a larger factor, or start with "
                    "smaller groups",
                    number, len(reports), size, report.target,
                )  # fmt: skip
        return torch.stack(losses).mean()
