"""One description of state that is spread whole over the ranks: each tells what it has, and all hear it."""

from __future__ import annotations

import json

from shardopt.layouts.tracked import Keeping
from shardopt.portable.export import Described
from shardopt.portable.manifest import ParameterRecord, parameters_json
from shardopt.portable.manifest_reader import read_parameters
from shardopt.presentation.inventory import Inventory
from shardopt.scope import Scope

__all__ = ["merge"]


def merge(
    scope: Scope, inventory: Inventory, described: Described | None, problem: BaseException | None
) -> dict[str, ParameterRecord]:
    """Collective. What other ranks have described of the parameters whose state is not here.

    Everything goes through the first rank, which puts it together once for all.

    Args:
        scope: the ranks.
        inventory: this rank's.
        described: by this rank; None with a problem.
        problem: why this rank cannot describe its state.

    Raises:
        RankFailureError: a rank has a problem, or did not come.
    """
    owned: dict[str, ParameterRecord] = {}
    if described is not None:
        here = {item.fqn for item in inventory.tracked if item.keeping is Keeping.HERE}
        owned = {fqn: record for fqn, record in described.parameters.items() if fqn in here}
    told = scope.gather("state_dict", json.dumps(parameters_json(owned)).encode(), problem=problem)
    together: dict[str, object] = {}
    for one in told:
        together.update(json.loads(one))
    heard = scope.scatter("state_dict", [json.dumps(together).encode()] * scope.size if told else [])
    records = read_parameters(json.loads(heard))
    elsewhere = (item.fqn for item in inventory.tracked if item.keeping is Keeping.ELSEWHERE)
    return {fqn: records[fqn] for fqn in elsewhere}
