"""One name for a parameter, whatever wraps its module."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardopt import NamingError
from shardopt.naming import Name, canonical, name_parameters, names_of


class Old(nn.Module):
    """FSDP1 keeps the module it wraps under this name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._fsdp_wrapped_module = module


def _compiled(module: nn.Module) -> Any:
    # The default backend would import all of Inductor, which is not what is tested.
    return torch.compile(module, backend="eager")


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {"compile": _compiled, "ac": checkpoint_wrapper, "fsdp1": Old}
ORDERS = [order for length in range(4) for order in itertools.permutations(WRAPPERS, length)]


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2, bias=False))


def fqns(*models: nn.Module) -> list[str]:
    return [name.fqn for name in names_of(models).values()]


@pytest.mark.parametrize("order", ORDERS, ids="+".join)
def test_J1_wrappers_in_any_order_leave_the_name(order: tuple[str, ...]) -> None:
    model = nn.ModuleDict({"stem": nn.Linear(2, 2), "block": block()})
    plain = fqns(model)
    for name in order:
        model["block"] = WRAPPERS[name](model["block"])
    model["block"] = nn.Sequential(model["block"])
    raw = [name for name, _ in model.named_parameters()]
    assert sum(part in raw[-1] for part in ("_orig_mod", "_checkpoint", "_fsdp")) == len(order)
    assert fqns(model) == [name.replace("block.", "block.0.") for name in plain]
    wrapped: nn.Module = model
    for name in order:
        wrapped = WRAPPERS[name](wrapped)
    assert fqns(wrapped) == fqns(model)


def test_only_whole_components_are_stripped() -> None:
    assert canonical("_orig_mod.a._checkpoint_wrapped_module._fsdp_wrapped_module._orig_mod.b") == "a.b"
    # "module" is a name people give: in a name alone it is not taken for a wrapper's.
    assert canonical("module.my_orig_mod.b") == "module.my_orig_mod.b"


DATA_PARALLEL: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DistributedDataParallel": DistributedDataParallel,
    "DataParallel": nn.DataParallel,
}


@pytest.mark.parametrize("kind", DATA_PARALLEL)
def test_J1_data_parallel_is_known_by_its_type_not_by_the_name(mesh: DeviceMesh, kind: str) -> None:
    wrap = DATA_PARALLEL[kind]

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.ModuleDict({"module": nn.Linear(2, 2, bias=False)})

    expected = ["module.module.weight"]
    assert fqns(Holder()) == expected
    assert [name for name, _ in wrap(Holder()).named_parameters()] == ["module.module.module.weight"]
    assert fqns(wrap(Holder())) == expected
    for inner, outer in itertools.permutations(WRAPPERS, 2):
        assert fqns(WRAPPERS[outer](wrap(WRAPPERS[inner](Holder())))) == expected
    holder = Holder()
    holder.module["module"] = wrap(holder.module["module"])
    assert fqns(holder) == expected


@pytest.mark.parametrize("order", [order for order in ORDERS if "fsdp1" not in order], ids="+".join)
@pytest.mark.parametrize("at", range(3))
def test_J1_fully_shard_before_between_or_after_other_wrappers(
    mesh: DeviceMesh, order: tuple[str, ...], at: int
) -> None:
    plain = fqns(nn.ModuleList([block()]))
    inner: nn.Module = block()
    for index in range(3):
        if index == at:
            fully_shard(inner, mesh=mesh)
        if index < len(order):
            inner = WRAPPERS[order[index]](inner)
    model = nn.ModuleList([inner])
    assert fqns(model) == plain
    assert all(isinstance(param, DTensor) for param in model.parameters())


def test_names_are_found_after_an_evaluation_left_fsdp_unsharded(mesh: DeviceMesh) -> None:
    model = block()
    fully_shard(model, mesh=mesh)
    params = list(model.parameters())
    expected = names_of([model])
    with torch.no_grad():
        model(torch.ones(1, 2))
    assert not any(shown is param for shown, param in zip(model.parameters(), params, strict=True))
    assert names_of([model]) == expected
    assert set(expected) == set(map(id, params))
    # Through a wrapper, and with a parameter that FSDP does not manage beside them.
    holder = nn.ModuleDict({"a": _compiled(model), "b": nn.Linear(1, 1, bias=False)})
    assert fqns(holder) == ["a.0.weight", "a.0.bias", "a.2.weight", "b.weight"]
    assert set(map(id, params)) < set(names_of([holder]))


def test_a_module_that_names_its_parameters_in_its_own_way_does_not_change_them() -> None:
    class Renamed(nn.Linear):
        def named_parameters(self, *args: Any, **options: Any) -> Any:
            return ((f"other.{name}", param) for name, param in super().named_parameters(*args, **options))

    assert fqns(nn.Sequential(Renamed(2, 2))) == ["0.weight", "0.bias"]


def test_tied_parameters_have_the_first_name_and_aliases() -> None:
    model = nn.ModuleDict({"embed": nn.Linear(3, 3, bias=False), "head": nn.Linear(3, 3, bias=False)})
    model["head"].weight = model["embed"].weight
    assert list(names_of([model]).values()) == [Name("embed.weight", ("head.weight",))]
    # Seen through a wrapper and without it, it is no alias of itself.
    seen_twice = nn.ModuleDict({"a": model["embed"]})
    assert list(names_of([seen_twice, _compiled(seen_twice)]).values()) == [Name("a.weight")]


def test_a_module_at_two_places_has_its_first_name_and_the_other_as_alias() -> None:
    layer = nn.Linear(2, 2)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    assert list(names_of([model]).values()) == [Name("0.weight", ("2.weight",)), Name("0.bias", ("2.bias",))]
    # One of the two places may be wrapped.
    model[2] = _compiled(layer)
    assert list(names_of([model]).values()) == [Name("0.weight", ("2.weight",)), Name("0.bias", ("2.bias",))]


def test_a_parameter_tied_across_two_models_has_the_first_ones_name() -> None:
    body, head = nn.ModuleDict({"embed": nn.Linear(3, 3)}), nn.ModuleDict({"out": nn.Linear(3, 3, bias=False)})
    head["out"].weight = body["embed"].weight
    assert list(names_of([body, head]).values()) == [Name("embed.weight", ("out.weight",)), Name("embed.bias")]
    assert list(names_of([head, body]).values()) == [Name("out.weight", ("embed.weight",)), Name("embed.bias")]


def test_two_parameters_of_one_name_are_refused_and_all_are_listed() -> None:
    with pytest.raises(
        NamingError, match=r"2 names stand for two parameters each.*: 0.weight, 2.weight\. .*ModuleDict"
    ):
        names_of([nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2, bias=False)), _without_bias()])
    model = nn.Module()
    model.register_module("_orig_mod", nn.Linear(2, 2, bias=False))
    model.weight = nn.Parameter(torch.ones(2))
    with pytest.raises(NamingError, match="1 names stand for two parameters each.*: weight"):
        names_of([model])


def _without_bias() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 2, bias=False))


def test_parameters_are_named_in_the_groups_order() -> None:
    model = block()
    first, bias, last = model.parameters()
    named = name_parameters([{"params": [last]}, {"params": [bias, first]}], [model], first_group=5)
    assert [(group, name.fqn) for group, _, name in named] == [(5, "2.weight"), (6, "0.bias"), (6, "0.weight")]
    assert all(map(lambda item, param: item[1] is param, named, [last, bias, first]))


def test_a_parameter_of_no_model_is_refused_and_all_are_listed() -> None:
    model = block()
    groups = [
        {"params": [*model.parameters()]},
        {"params": [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(()))]},
    ]
    with pytest.raises(NamingError, match="^2 optimizer parameters are in none of the models and have no") as caught:
        name_parameters(groups, [model])
    assert "group 1 position 0 of shape (3,), group 1 position 1 of shape ()." in str(caught.value)
    assert "Pass every module that holds them (model=[model, head])" in str(caught.value)
    assert "or build the optimizer from named parameters (AdamW([*model.named_parameters(), " in str(caught.value)
    assert "build it after fully_shard" in str(caught.value)


def test_a_long_list_is_cut_with_its_count() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(1)) for _ in range(23)]}]
    with pytest.raises(NamingError, match=r"23 optimizer parameters.*position 19 of shape \(1,\) and 3 more\. Pass"):
        name_parameters(groups, [block()])


def outside(*named: tuple[str, nn.Parameter]) -> list[dict[str, Any]]:
    """The groups of an optimizer built from named parameters."""
    return torch.optim.SGD(named, lr=0.1).param_groups


def test_a_parameter_outside_the_models_has_the_optimizers_name() -> None:
    model = block()
    temperature = nn.Parameter(torch.ones(()))
    groups = outside(*model.named_parameters(), ("_orig_mod.loss.temperature", temperature))
    *_, (group, param, name) = name_parameters(groups, [model])
    assert param is temperature
    assert (group, name) == (0, Name("loss.temperature", in_model=False))
    # What the model calls its own parameters goes first.
    groups = outside(("mine", model[0].weight))
    assert [name for _, _, name in name_parameters(groups, [model])] == [Name("0.weight")]


def test_names_of_the_optimizer_that_stand_for_other_parameters_are_refused_and_all_are_listed() -> None:
    model = block()
    stray = [nn.Parameter(torch.ones(2)) for _ in range(5)]
    names = ["0.weight", "loss", "_orig_mod.loss", "_orig_mod", "fine"]
    with pytest.raises(NamingError, match="^3 optimizer parameters are in none of the models, and the names") as caught:
        name_parameters(outside(*zip(names, stray, strict=True)), [model])
    assert "'0.weight' of shape (2,), '_orig_mod.loss' of shape (2,), '_orig_mod' of shape (2,). " in str(caught.value)
    assert "build it after fully_shard" in str(caught.value)


def test_names_that_do_not_go_with_the_parameters_are_refused() -> None:
    groups = outside(("loss", nn.Parameter(torch.ones(2))))
    for names in (["loss", "more"], [None]):
        groups[0]["param_names"] = names
        with pytest.raises(NamingError, match="group 3: 'param_names' is .* but the group has 1 parameters"):
            name_parameters(groups, [block()], first_group=3)
