"""Names in checkpoints: the same whatever wraps the modules, over generations, and for parameters of no module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

from shardopt import LoadError, NamingError, ShardedStateOptimizer
from tests.support.rules import bits
from tests.unit.test_naming import ORDERS, WRAPPERS

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def model_in(order: tuple[str, ...] = ()) -> nn.ModuleDict:
    """The same parameters, one of its modules in wrappers; the first is the innermost."""
    torch.manual_seed(0)
    inner: nn.Module = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2, bias=False))
    for name in order:
        inner = WRAPPERS[name](inner)
    return nn.ModuleDict({"stem": nn.Linear(2, 2), "block": inner})


def wrap(model: nn.Module) -> ShardedStateOptimizer:
    return ShardedStateOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), model)


def train(optimizer: ShardedStateOptimizer, steps: int, seed: int = 0) -> None:
    source = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.randn(param.shape, generator=source)
        optimizer.step()


def held(optimizer: ShardedStateOptimizer) -> list[Any]:
    """The state's bits, in the order of the parameters."""
    return [bits(optimizer.state.get(param)) for group in optimizer.param_groups for param in group["params"]]


def stored_keys(path: Path) -> set[str]:
    return set(FileSystemReader(path).read_metadata().state_dict_metadata)


@pytest.mark.parametrize("order", ORDERS, ids="+".join)
@pytest.mark.parametrize("direction", ["save wrapped, load bare", "save bare, load wrapped"])
def test_J1_wrappers_in_any_order_on_one_side_only(order: tuple[str, ...], direction: str, tmp_path: Path) -> None:
    orders = (order, ()) if direction.startswith("save wrapped") else ((), order)
    saving, loading = (wrap(model_in(one)) for one in orders)
    train(saving, 2)
    dcp.save({"optim": saving}, checkpoint_id=tmp_path)
    dcp.load({"optim": loading}, checkpoint_id=tmp_path)
    assert held(loading) == held(saving)
    assert None not in held(loading)
    # Through the whole model, too.
    root = WRAPPERS["compile"](model_in(order))
    outermost = wrap(root)
    dcp.load({"optim": outermost}, checkpoint_id=tmp_path)
    assert held(outermost) == held(saving)


def test_J3_three_generations_have_the_same_keys(tmp_path: Path) -> None:
    keys: list[set[str]] = []
    expected: list[Any] = []
    for generation in range(3):
        # Compiled from the second generation on, as a run that was resumed with other settings.
        order = ("ac", "compile") if generation else ()
        optimizer = wrap(WRAPPERS["compile"](model_in(order)) if generation else model_in(order))
        if generation:
            dcp.load({"optim": optimizer}, checkpoint_id=tmp_path / str(generation - 1))
            assert held(optimizer) == expected
        train(optimizer, 1, seed=generation)
        keys.append(set(optimizer.state_dict()))
        dcp.save({"optim": optimizer}, checkpoint_id=tmp_path / str(generation))
        assert stored_keys(tmp_path / str(generation)) == stored_keys(tmp_path / "0")
        expected = held(optimizer)
    assert keys[0] == keys[1] == keys[2]


class OtherLayout(nn.Module):
    """As a later release may lay a compiled module out: the wrapper's component is in the tree, but not in names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module

    def named_parameters(self, prefix: str = "", *args: Any, **options: Any) -> Any:
        for name, param in super().named_parameters(prefix, *args, **options):
            yield name.replace("_orig_mod.", ""), param


def test_J4_names_do_not_depend_on_how_a_release_spells_them(tmp_path: Path) -> None:
    spelled = [WRAPPERS["compile"](model_in()), OtherLayout(model_in())]
    names = [[name for name, _ in model.named_parameters()] for model in spelled]
    assert all(name.startswith("_orig_mod.") for name in names[0])
    assert names[1] == [name.removeprefix("_orig_mod.") for name in names[0]]
    saving, loading = map(wrap, spelled)
    train(saving, 2)
    assert set(saving.state_dict()) == set(loading.state_dict())
    dcp.save({"optim": saving}, checkpoint_id=tmp_path)
    assert not [key for key in stored_keys(tmp_path) if "_orig_mod" in key]
    data = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"block.0.weight" in data
    assert b"_orig_mod" not in data
    dcp.load({"optim": loading}, checkpoint_id=tmp_path)
    assert held(loading) == held(saving)


def with_outside(*names: str) -> tuple[nn.Module, list[nn.Parameter], torch.optim.Optimizer]:
    """A model, and an optimizer over it and over parameters that no module holds: 0-d, then vectors."""
    model = model_in()
    outside = [nn.Parameter(torch.ones(index) if index else torch.ones(())) for index in range(len(names))]
    named = [*model.named_parameters(), *zip(names, outside, strict=True)]
    return model, outside, torch.optim.AdamW(named, lr=0.1)


def test_parameters_of_no_module_are_saved_under_the_optimizers_names(tmp_path: Path) -> None:
    saving, loading = (
        ShardedStateOptimizer(inner, model) for model, _, inner in (with_outside("loss.t", "loss.w") for _ in range(2))
    )
    train(saving, 2)
    assert {"state.loss.t.exp_avg", "state.loss.w.exp_avg"} < set(saving.state_dict())
    dcp.save({"optim": saving}, checkpoint_id=tmp_path)
    dcp.load({"optim": loading}, checkpoint_id=tmp_path)
    assert held(loading) == held(saving)
    model, _, inner = with_outside("loss.t", "loss.other")
    with pytest.raises(LoadError, match=r"loss.w: the checkpoint has it, this optimizer does not update it"):
        ShardedStateOptimizer(inner, model).prepare_load(tmp_path)


def test_the_model_is_no_place_to_look_for_a_parameter_of_no_module() -> None:
    model, _, inner = with_outside("loss.t")
    optimizer = ShardedStateOptimizer(inner, model)
    train(optimizer, 1)
    # A module with a parameter of this name appears: the optimizer's is another, and nothing was replaced.
    model["loss"] = nn.ParameterDict({"t": nn.Parameter(torch.ones(2))})
    assert "state.loss.t.exp_avg" in optimizer.state_dict()


def test_two_optimizers_may_not_have_one_name_for_two_parameters() -> None:
    model = model_in()
    inners = [
        torch.optim.SGD([*model["stem"].named_parameters(prefix="stem"), ("t", nn.Parameter(torch.ones(2)))]),
        torch.optim.AdamW([*model["block"].named_parameters(prefix="block"), ("t", nn.Parameter(torch.ones(2)))]),
    ]
    with pytest.raises(NamingError, match=r"stand for other parameters: 't' of shape \(2,\)"):
        ShardedStateOptimizer(inners, model)


def test_a_group_that_is_added_brings_names() -> None:
    model, _, inner = with_outside("loss.t")
    optimizer = ShardedStateOptimizer(inner, model)
    new = nn.Parameter(torch.ones(2))
    before = set(optimizer.state_dict())
    for name, sentence in (
        ("loss.t", r"^\['loss.t'\]: another parameter has this name already; give each a name of its own"),
        ("stem.weight", "stand for other parameters: 'stem.weight'"),
    ):
        with pytest.raises(NamingError, match=sentence):
            optimizer.add_param_group({"params": [(name, new)]})
    with pytest.raises(NamingError, match="group 1 position 0 of shape"):
        optimizer.add_param_group({"params": [new]})
    assert set(optimizer.state_dict()) == before
    optimizer.add_param_group({"params": [("loss.w", new)]})
    train(optimizer, 1)
    assert {"state.loss.w.exp_avg", "state.loss.w.exp_avg_sq"} == set(optimizer.state_dict()) - before


def test_tied_parameters_are_saved_once_under_their_first_name(tmp_path: Path) -> None:
    def tied(*order: str) -> ShardedStateOptimizer:
        model = nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in order})
        model["head"].weight = model["embed"].weight
        return wrap(model)

    saving, same = tied("embed", "head"), tied("embed", "head")
    train(saving, 2)
    assert [key for key in saving.state_dict() if "exp_avg_sq" in key] == ["state.embed.weight.exp_avg_sq"]
    dcp.save({"optim": saving}, checkpoint_id=tmp_path)
    dcp.load({"optim": same}, checkpoint_id=tmp_path)
    assert held(same) == held(saving)


def test_a_parameter_tied_across_two_models_is_saved_under_the_first_ones_name() -> None:
    body, head = nn.ModuleDict({"embed": nn.Linear(3, 3)}), nn.ModuleDict({"out": nn.Linear(3, 3, bias=False)})
    head["out"].weight = body["embed"].weight
    optimizer = ShardedStateOptimizer(torch.optim.SGD(body.parameters(), lr=0.1, momentum=0.9), [body, head])
    assert [key for key in optimizer.state_dict() if "weight" in key] == ["state.embed.weight.momentum_buffer"]
