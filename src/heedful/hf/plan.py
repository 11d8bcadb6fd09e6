"""The plan of a conversion: which layers get which mechanism, and in which attention."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from heedful.checks import UserError
from heedful.hf.family.modules import Attention
from heedful.nn import MechanismConfig, Role, mechanism
from heedful.nn.mechanisms import check_config
from heedful.nn.shape import ROLES


class Assignment(NamedTuple):
    """Layers and roles of one mechanism.

    layers: indices, of layers that have such attention.
    roles: in which attention of these layers.
    explicit: whether the caller named the roles; else it is put where it is defined.
    """

    layers: tuple[int, ...]
    roles: tuple[Role, ...]
    explicit: bool


def make_plan(
    mechanisms: MechanismConfig | str | Mapping,
    layers: Iterable[int] | None,
    where: Role | Iterable[Role] | Mapping | None,
    attention: Iterable[Attention],
    model: str,
) -> dict[MechanismConfig, Assignment]:
    """Assign mechanisms to layers and roles, checked; arguments as of `convert`.

    `attention` is that of the model, whose class is called `model`.
    """
    indices: dict[Role, set[int]] = {}
    for module in attention:
        indices.setdefault(module.role, set()).add(module.index)
    if not isinstance(mechanisms, Mapping):
        if isinstance(where, Mapping):
            raise UserError("where must be a role or several where mechanism is a single one")
        config, (roles, explicit) = _mechanism(mechanisms), _roles(where, indices, model)
        return {config: Assignment(_layers(layers, _union(indices, roles)), roles, explicit)}
    if layers is not None:
        raise UserError("layers must be None where mechanism names the layers of each mechanism")
    if not mechanisms:
        raise UserError("mechanism must name at least one mechanism with its layers, got {}")
    roles_of = _where_each(where, mechanisms)
    plan: dict[MechanismConfig, Assignment] = {}
    for name, layers_of_it in mechanisms.items():
        config, (roles, explicit) = _mechanism(name), _roles(roles_of[name], indices, model)
        assigned = _layers(layers_of_it, _union(indices, roles))
        others = [x.layers for x in plan.values() if {*x.roles} & {*roles}]
        if twice := sorted({i for earlier in others for i in earlier} & set(assigned)):
            raise UserError(f"layers must have one mechanism each, got several for {twice}")
        if config in plan:
            raise UserError(f"mechanism must name each mechanism once, got {config} twice")
        plan[config] = Assignment(assigned, roles, explicit)
    return plan


def mechanism_at(
    plan: dict[MechanismConfig, Assignment], attention: Attention
) -> MechanismConfig | None:
    """The mechanism that the plan has for an attention module: at most one."""
    for config, assignment in plan.items():
        if attention.role in assignment.roles and attention.index in assignment.layers:
            return config
    return None


def settled_roles(
    plan: dict[MechanismConfig, Assignment],
    defined: set[tuple[MechanismConfig | None, Role]],
    model: str,
) -> dict[MechanismConfig, tuple[Role, ...]]:
    """The roles in which mechanisms are now, in order; raises where one is nowhere.

    `defined` has the mechanism and the role of every attention module.
    """
    roles = {config: tuple(x for x in ROLES if (config, x) in defined) for config in plan}
    for config, assignment in plan.items():
        if not roles[config]:
            raise UserError(
                f"mechanism {config} is not defined in {' or '.join(assignment.roles)} attention, "
                f"which is all that {model} has in these layers; take another mechanism"
            )
    return roles


def _roles(
    where: Role | Iterable[Role] | None, indices: dict[Role, set[int]], model: str
) -> tuple[tuple[Role, ...], bool]:
    """The roles that `where` names, in order, and whether it names any."""
    if where is None:
        return tuple(role for role in ROLES if role in indices), False
    several = isinstance(where, Iterable) and not isinstance(where, str)
    names = list(where) if several else [where]
    if not names or not all(isinstance(x, str) and x in ROLES for x in names):
        raise UserError(f"where must be one or several of {', '.join(ROLES)}, got {where!r}")
    if absent := [role for role in names if role not in indices]:
        raise UserError(
            f"where={absent[0]!r}: {model} has no such attention, but {' and '.join(indices)}"
        )
    return tuple(role for role in ROLES if role in names), True


def _where_each(where: object, mechanisms: Mapping) -> dict:
    """Roles by mechanism, as it is named in `mechanisms`."""
    if not isinstance(where, Mapping):
        return dict.fromkeys(mechanisms, where)
    by_mechanism = {_mechanism(name): roles for name, roles in where.items()}
    if by_mechanism.keys() != {_mechanism(name) for name in mechanisms}:
        raise UserError(
            f"where must name the roles of the same mechanisms, got {list(where)} for "
            f"{list(mechanisms)}"
        )
    return {name: by_mechanism[_mechanism(name)] for name in mechanisms}


def _union(indices: dict[Role, set[int]], roles: Iterable[Role]) -> set[int]:
    return set().union(*(indices[role] for role in roles))


def _mechanism(config: MechanismConfig | str) -> MechanismConfig:
    if isinstance(config, str):
        return mechanism(config)
    return check_config(config)


def _layers(layers: Iterable[int] | None, indices: set[int]) -> tuple[int, ...]:
    if layers is None:
        return tuple(sorted(indices))
    whole = isinstance(layers, Iterable) and not isinstance(layers, str)
    layers = list(layers) if whole else layers
    if not whole or not all(isinstance(i, int) and not isinstance(i, bool) for i in layers):
        raise UserError(f"layers must be layer indices such as [0, 2], got {layers!r}")
    ordered = sorted(set(layers))
    if unknown := [index for index in ordered if index not in indices]:
        raise UserError(f"layers must be among 0 to {max(indices)}, got {unknown}")
    if not ordered:
        raise UserError("layers must name at least one layer, got none; None converts all")
    return tuple(ordered)
