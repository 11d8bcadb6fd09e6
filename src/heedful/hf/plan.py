"""What a conversion is asked for: which layers get which mechanism, and in which attention."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from heedful.hf.family.modules import Attention
from heedful.nn import Mechanism, Role, mechanism
from heedful.nn.shape import ROLES


class Part(NamedTuple):
    """What one mechanism is asked for.

    layers: indices, of layers that have such attention.
    roles: where it is to stand.
    asked: whether these roles were named; else it stands in those where it is defined.
    """

    layers: tuple[int, ...]
    roles: tuple[Role, ...]
    asked: bool


def make_plan(
    given: Mechanism | str | Mapping,
    layers: Iterable[int] | None,
    where: Role | Iterable[Role] | Mapping | None,
    found: Iterable[Attention],
    model: str,
) -> dict[Mechanism, Part]:
    """Which layers get which mechanism and where, checked; arguments as of `convert`.

    `found` is the attention of the model, whose class is called `model`.
    """
    known: dict[Role, set[int]] = {}
    for one in found:
        known.setdefault(one.role, set()).add(one.index)
    if not isinstance(given, Mapping):
        if isinstance(where, Mapping):
            raise ValueError("where must be a role or several where mechanism is a single one")
        config, (roles, asked) = _mechanism(given), _roles(where, known, model)
        return {config: Part(_layers(layers, _union(known, roles)), roles, asked)}
    if layers is not None:
        raise ValueError("layers must be None where mechanism names the layers of each mechanism")
    if not given:
        raise ValueError("mechanism must name at least one mechanism with its layers, got {}")
    roles_of = _where_each(where, given)
    plan: dict[Mechanism, Part] = {}
    for one, those in given.items():
        config, (roles, asked) = _mechanism(one), _roles(roles_of[one], known, model)
        chosen = _layers(those, _union(known, roles))
        others = [part.layers for part in plan.values() if {*part.roles} & {*roles}]
        if twice := sorted({i for taken in others for i in taken} & set(chosen)):
            raise ValueError(f"layers must have one mechanism each, got several for {twice}")
        if config in plan:
            raise ValueError(f"mechanism must name each mechanism once, got {config} twice")
        plan[config] = Part(chosen, roles, asked)
    return plan


def settled(
    plan: dict[Mechanism, Part], roles: dict[Mechanism, set[Role]], model: str
) -> dict[Mechanism, tuple[Role, ...]]:
    """The roles in which mechanisms stand now, in order; raises where one stands nowhere."""
    for config, part in plan.items():
        if not roles[config]:
            raise ValueError(
                f"mechanism {config} is not defined in {' or '.join(part.roles)} attention, which "
                f"is all that {model} has in these layers; take another mechanism"
            )
    return {config: tuple(x for x in ROLES if x in roles[config]) for config in plan}


def _roles(
    where: Role | Iterable[Role] | None, known: dict[Role, set[int]], model: str
) -> tuple[tuple[Role, ...], bool]:
    """The roles that are meant, in order, and whether they were named."""
    if where is None:
        return tuple(role for role in ROLES if role in known), False
    several = isinstance(where, Iterable) and not isinstance(where, str)
    named = list(where) if several else [where]
    if not named or not all(isinstance(x, str) and x in ROLES for x in named):
        raise ValueError(f"where must be one or several of {', '.join(ROLES)}, got {where!r}")
    if missing := [role for role in named if role not in known]:
        raise ValueError(
            f"where={missing[0]!r}: {model} has no such attention, but {' and '.join(known)}"
        )
    return tuple(role for role in ROLES if role in named), True


def _where_each(where: object, given: Mapping) -> dict:
    """Places by mechanism, as it is named in `given`."""
    if not isinstance(where, Mapping):
        return dict.fromkeys(given, where)
    named = {_mechanism(one): roles for one, roles in where.items()}
    if named.keys() != {_mechanism(one) for one in given}:
        raise ValueError(
            f"where must name the roles of the same mechanisms, got {list(where)} for {list(given)}"
        )
    return {one: named[_mechanism(one)] for one in given}


def _union(known: dict[Role, set[int]], roles: Iterable[Role]) -> set[int]:
    return set().union(*(known[role] for role in roles))


def _mechanism(given: Mechanism | str) -> Mechanism:
    if isinstance(given, str):
        return mechanism(given)
    if not isinstance(given, Mechanism):
        raise ValueError(
            f"mechanism must be a name or a configuration such as heedful.MultiToken(), got "
            f"{given!r}"
        )
    return given


def _layers(layers: Iterable[int] | None, known: set[int]) -> tuple[int, ...]:
    if layers is None:
        return tuple(sorted(known))
    whole = isinstance(layers, Iterable) and not isinstance(layers, str)
    layers = list(layers) if whole else layers
    if not whole or not all(isinstance(i, int) and not isinstance(i, bool) for i in layers):
        raise ValueError(f"layers must be layer indices such as [0, 2], got {layers!r}")
    chosen = sorted(set(layers))
    if unknown := [index for index in chosen if index not in known]:
        raise ValueError(f"layers must be among 0 to {max(known)}, got {unknown}")
    if not chosen:
        raise ValueError("layers must name at least one layer, got none; None converts all")
    return tuple(chosen)
