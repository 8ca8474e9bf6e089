"""One name for a parameter, whatever wraps its module."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

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
    # "module" is a name people give, so DistributedDataParallel's is not taken for a wrapper's.
    assert canonical("module.my_orig_mod.b") == "module.my_orig_mod.b"


def test_tied_parameters_have_the_first_name_and_aliases() -> None:
    model = nn.ModuleDict({"embed": nn.Linear(3, 3, bias=False), "head": nn.Linear(3, 3, bias=False)})
    model["head"].weight = model["embed"].weight
    assert list(names_of([model]).values()) == [Name("embed.weight", ("head.weight",))]
    # Seen through a wrapper and without it, it is no alias of itself.
    seen_twice = nn.ModuleDict({"a": model["embed"]})
    assert list(names_of([seen_twice, _compiled(seen_twice)]).values()) == [Name("a.weight")]


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
    sentence = (
        r"2 optimizer parameters are in none of the models: group 1 position 0 of shape \(3,\), group 1 position 1 of"
    )
    with pytest.raises(NamingError, match=sentence) as caught:
        name_parameters(groups, [model])
    assert "Pass every module that holds them (model=[model, head])" in str(caught.value)


def test_a_long_list_is_cut_with_its_count() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(1)) for _ in range(23)]}]
    with pytest.raises(NamingError, match=r"23 optimizer parameters.*position 19 of shape \(1,\) and 3 more\. Pass"):
        name_parameters(groups, [block()])
