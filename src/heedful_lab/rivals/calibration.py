"""The calibration that `TriAttention` scores keys with: measured on text, kept in a file."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from transformers import PreTrainedModel

from heedful.checks import UserError
from heedful.files import write_whole
from heedful.hf.family.modules import attention_modules
from heedful.hf.family.rotation import FamilyRotation, rotation_of
from heedful.hf.fingerprints import fingerprint, is_of
from heedful.hf.intercept import LayerCall, intercept
from heedful.nn import Layer, LayerOutput
from heedful_lab.rivals.triattention import Bands, Calibration, QueryStatistics

FORMAT = 1
_PARTS = ("centre", "lengths", "partners", "frequencies")


@torch.no_grad()
def calibrate(model: PreTrainedModel, sequences: Iterable[Int[Tensor, "_B _T"]]) -> Calibration:
    """Measure the queries of every layer before the rotation, over all tokens of the sequences.

    Arguments:
        model: a converted decoder, in eval mode.
        sequences: token ids without padding, each sequence from its beginning.

    Returns:
        The statistics of every layer, for `TriAttention`.

    Raises:
        ValueError: the model is not converted, has no decoder, a layer has no rotary embedding or
            one that cannot be followed, or there are no sequences.
    """
    modules = attention_modules(model)
    if not modules:
        raise UserError(
            "model must be a converted decoder; heedful.convert(model, 'standard') is enough"
        )
    observers = {x.heedful: _Observer(_bands(model, x)) for x in modules}

    def around(
        layer: Layer, call: LayerCall, compute: Callable[[LayerCall], LayerOutput]
    ) -> LayerOutput:
        observers[layer].add(call.q)
        return compute(call)

    with intercept(model, around):
        for ids in sequences:
            model(input_ids=ids.to(model.device), use_cache=False)
    if not all(observer.count for observer in observers.values()):
        raise UserError("sequences must hold at least one token")
    return Calibration(tuple(x.statistics() for x in observers.values()), fingerprint(model))


class _Observer:
    """Adds up what a layer's queries are before the rotation.

    Arguments:
        bands: of its rotary embedding.
    """

    def __init__(self, bands: Bands) -> None:
        self.bands, self.count = bands, 0
        self.centre: Float[Tensor, "H D"] | float = 0.0
        self.lengths: Float[Tensor, "H F"] | float = 0.0

    def add(self, q: Float[Tensor, "B H T D"]) -> None:
        """Count the queries of one call."""
        bands = Bands(*(x.to(q.device) for x in self.bands))
        place = torch.arange(q.shape[2], device=q.device, dtype=bands.frequencies.dtype)
        angles = -place[:, None] * bands.frequencies
        wide = q.to(torch.promote_types(q.dtype, torch.float32))
        before = bands.rotated(wide, angles.cos(), angles.sin())
        self.centre += before.sum((0, 2), dtype=bands.frequencies.dtype)
        self.lengths += bands.lengths(wide).sum((0, 2), dtype=bands.frequencies.dtype)
        self.count += len(q) * q.shape[2]

    def statistics(self) -> QueryStatistics:
        """The means so far."""
        centre, lengths = (x.cpu() / self.count for x in (self.centre, self.lengths))
        return QueryStatistics(centre.float(), lengths.float(), self.bands)


def _bands(model: PreTrainedModel, module: nn.Module) -> Bands:
    """The bands of an attention module's rotary embedding."""
    rotation = rotation_of(model, module)
    if rotation is None:
        raise UserError(
            f"model: {type(module).__name__} {module.heedful.shape.layer} has no rotary embedding, "
            "which a calibration needs; take another policy"
        )
    return bands_of(rotation, module.heedful.shape.dim)


def bands_of(rotation: FamilyRotation, dim: int) -> Bands:
    """The bands of a rotary embedding of so many channels, from what it makes of each channel.

    Raises:
        ValueError: it does more than to rotate channels two by two.
    """
    weight = next(rotation.rotary.buffers())
    unit = torch.eye(dim, device=weight.device)[None, None]
    # Row c is what becomes of channel c.
    turned = rotation(unit, torch.ones(1, dim, device=weight.device))[0, 0].cpu().double()
    cos = turned.diagonal()
    others = turned - cos.diag()
    partners = others.abs().argmax(1)
    alone = ~others.bool().any(1)
    channel = torch.arange(dim)
    partners = torch.where(alone, channel, partners)
    sin = -others[partners, channel]
    two_by_two = torch.equal(partners[partners], channel) and bool((others.bool().sum(1) < 2).all())
    if not two_by_two or not torch.allclose(cos.square() + sin.square(), torch.ones_like(cos)):
        raise UserError(
            "model: its rotary embedding does not rotate channels two by two, which a calibration "
            "needs; take another policy"
        )
    return Bands.of(partners, torch.atan2(sin, cos))


def write_calibration(path: Path, calibration: Calibration, about: dict) -> None:
    """Write a calibration as one file of safetensors, whole or not at all.

    Arguments:
        path: the file.
        calibration: of one model.
        about: how it was made, for people.
    """
    tensors = {}
    for index, layer in enumerate(calibration.layers):
        parts = (layer.centre, layer.lengths, layer.bands.partners, layer.bands.frequencies)
        tensors |= {f"{index}.{x}": t.contiguous() for x, t in zip(_PARTS, parts, strict=True)}
    about = {"format": FORMAT, "model": calibration.model, "about": about}
    write_whole(path, save(tensors, {"heedful.calibration": json.dumps(about)}))


def read_calibration(path: Path, model: nn.Module) -> Calibration:
    """The calibration in a file.

    Arguments:
        path: the file.
        model: the converted model that it is for.

    Returns:
        The calibration, for `TriAttention`.

    Raises:
        ValueError: there is no such file, it is damaged, or the calibration of another model.
    """
    way = "calibrate the model again"
    if not path.is_file():
        raise UserError(f"calibration {path} is not a file; write_calibration writes one")
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("heedful.calibration", "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"calibration {path} is damaged ({error}); {way}") from None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise UserError(
            f"calibration {path} must be a file of write_calibration in format {FORMAT}; {way}"
        )
    if not is_of(about.get("model"), model):
        raise UserError(
            f"calibration {path} is that of another model, or of this one before it was converted "
            f"or trained on; {way}"
        )
    layers = []
    for module in attention_modules(model):
        index = module.heedful.shape.layer
        parts = [tensors.get(f"{index}.{name}") for name in _PARTS]
        if any(x is None or not bool(x.isfinite().all()) for x in parts):
            raise UserError(f"calibration {path} lacks layer {index}, or holds NaN there; {way}")
        layers.append(QueryStatistics(*parts[:2], Bands.of(*parts[2:])))
    return Calibration(tuple(layers), about["model"])
