"""Give a model of transformers the mechanisms that a file holds."""

from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from heedful.checks import UserError
from heedful.hf.convert import Conversion, replace_attention
from heedful.nn import MechanismConfig, Selective, Standard, from_json
from heedful.ops.impl import Impl


def restore(
    model: PreTrainedModel,
    mechanisms: list[dict],
    tensors: dict,
    impl: Impl,
    verify: bool | None = None,
    attends: bool | None = None,
    kinds: Iterable[type[MechanismConfig]] = (),
) -> Conversion:
    """Convert a model of transformers to saved mechanisms and give it the saved parameters.

    Arguments:
        model: of transformers.
        mechanisms: as `mechanisms_to_json` wrote them.
        tensors: the parameters by name.
        impl, verify: as for `heedful.convert`.
        attends: whether the mechanisms compute attention; by default unless they only rank tokens.
        kinds: classes of mechanisms beside those of the table.
    """
    plan, where = {}, {}
    for part in mechanisms:
        config = from_json(part["mechanism"], kinds)
        plan[config], where[config] = part["layers"], part.get("where", ["decoder"])
    attends = not rank_only(plan) if attends is None else attends
    options = {"where": where, "impl": impl, "verify": verify, "attends": attends}
    conversion = replace_attention(model, plan, **options)
    own = conversion.parameters()
    problems = [f"{name} is missing" for name in sorted(set(own) - set(tensors))]
    problems += [f"{name} is not expected" for name in sorted(set(tensors) - set(own))]
    for name in set(own) & set(tensors):
        if own[name].shape != tensors[name].shape:
            problems.append(f"{name} has shape {tuple(tensors[name].shape)}")
        elif not bool(tensors[name].isfinite().all()):
            problems.append(f"{name} holds NaN or infinity")
    if problems:
        names = ", ".join(map(str, conversion.mechanisms))
        raise UserError(f"the checkpoint does not fit {names}: {problems}")
    for name, parameter in own.items():
        parameter.data = tensors[name].to(parameter.device)  # in the precision it was saved in
    return conversion


def rank_only(mechanisms: Iterable[MechanismConfig]) -> bool:
    """Test whether mechanisms leave attention alone, and only rank cached tokens for eviction."""
    others = [x for x in mechanisms if x != Standard()]
    return bool(others) and all(isinstance(x, Selective) and not x.masks for x in others)


def read_parameters(folder: Path) -> dict[str, Tensor]:
    """The mechanism's parameters."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                tensors |= {key: file.get_tensor(key) for key in file.keys() if ".heedful." in key}  # noqa: SIM118
        except SafetensorError as error:
            raise UserError(f"{path} is damaged ({error}); copy or save it again") from None
    return tensors
