"""Names and identity on several ranks: activation checkpointing, parameters that FSDP does not hold, evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardopt import PresentationError, RankFailureError, ShardedStateOptimizer
from tests.support.gather import gathered_parameters, whole
from tests.support.ranks import RankPool
from tests.support.raw_values import value_differences

Values = dict[str, Any]


class Net(nn.Module):
    """Two blocks, which may be wrapped, and parameters that the FSDP root owns or leaves alone.

    5 and 3 rows are uneven on 2 ranks.
    """

    def __init__(self, checkpointing: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 3)) for _ in range(2)]
        self.blocks = nn.ModuleList(map(checkpoint_wrapper, blocks) if checkpointing else blocks)
        self.scale = nn.Parameter(torch.randn(3))
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = inputs + block(inputs)
        return inputs * self.scale * self.gain


def net(sharded: bool = True, *, checkpointing: bool = False, ignored: tuple[str, ...] = ()) -> Any:
    """Collective if ``sharded``. FSDP shards no 0-d parameter, so ``gain`` stays plain."""
    model = Net(checkpointing)
    if sharded:
        plain = {model.get_parameter(name) for name in (*ignored, "gain")}
        for block in model.blocks:
            fully_shard(block, ignored_params=plain)
        fully_shard(model, ignored_params=plain)
    return model


def train(optimizer: ShardedStateOptimizer, model: nn.Module, steps: range, *outside: Tensor) -> None:
    """Real steps on batches that are the same on every rank, so that plain parameters' gradients are too."""
    for step in steps:
        optimizer.zero_grad()
        inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        loss = model(inputs).square().mean()
        for index, param in enumerate(outside):
            loss = loss * (index + 2) + param.square().sum()
        loss.backward()
        optimizer.step()


def held(optimizer: ShardedStateOptimizer) -> Values:
    """Collective. The state, whole, by name and by place: 0-d entries are not in ``sharded_state``."""
    found: dict[str, Any] = dict(optimizer.sharded_state())
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for index, param in enumerate(params):
        entries = optimizer.state.get(param, {})
        found.update({f"{index}.{name}": value for name, value in entries.items() if value.dim() == 0})
    return whole(found)


def adamw(model: nn.Module, **options: Any) -> ShardedStateOptimizer:
    return ShardedStateOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1, **options), model)


def save_checkpointed(path: str, checkpointing: bool) -> tuple[Values, list[str], Values]:
    model = net(checkpointing=checkpointing)
    optimizer = adamw(model)
    train(optimizer, model, range(2))
    keys = sorted(optimizer.state_dict())
    dcp.save({"model": model, "optim": optimizer}, checkpoint_id=path)
    saved = held(optimizer)
    train(optimizer, model, range(2, 4))
    return saved, keys, held(optimizer)


def load_checkpointed(path: str, sharded: bool, checkpointing: bool) -> tuple[Values, list[str], Values]:
    model = net(sharded, checkpointing=checkpointing)
    optimizer = adamw(model)
    dcp.load({"model": model, "optim": optimizer}, checkpoint_id=path)
    loaded, keys = held(optimizer), sorted(optimizer.state_dict())
    train(optimizer, model, range(2, 4))
    return loaded, keys, held(optimizer)


@pytest.mark.parametrize("saved_with", [False, True], ids=["saved bare", "saved checkpointing"])
def test_J2_activation_checkpointing_on_one_side_or_both(ranks: RankPool, tmp_path: Path, saved_with: bool) -> None:
    path = str(tmp_path)
    (saved, keys, end), *_ = ranks.run(2, save_checkpointed, path, saved_with)
    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    assert not [key for key in stored if "_checkpoint_wrapped_module" in key]
    assert "state.blocks.0.0.weight.exp_avg" in keys
    for loaded_with in (False, True):
        for loaded, loaded_keys, finish in ranks.run(2, load_checkpointed, path, True, loaded_with):
            assert value_differences(saved, loaded) == []
            assert loaded_keys == keys
            assert value_differences(end, finish) == []
    ((loaded, loaded_keys, _),) = ranks.run(1, load_checkpointed, path, False, True, process_group=False)
    assert value_differences(saved, loaded) == []
    assert loaded_keys == keys


def with_outside(sharded: bool) -> tuple[Any, list[nn.Parameter], ShardedStateOptimizer]:
    """The net with a plain bias beside sharded weights; a 0-d and a 1-d parameter of no module."""
    model = net(sharded, ignored=("blocks.1.2.bias",))
    outside = [nn.Parameter(torch.ones(())), nn.Parameter(torch.arange(3.0))]
    named = [*model.named_parameters(), ("loss.temperature", outside[0]), ("loss.weights", outside[1])]
    return model, outside, ShardedStateOptimizer(torch.optim.AdamW(named, lr=0.1), model)


def save_outside(path: str) -> tuple[Values, Values]:
    model, outside, optimizer = with_outside(sharded=True)
    assert not isinstance(model.get_parameter("blocks.1.2.bias"), DTensor)
    train(optimizer, model, range(2), *outside)
    dcp.save({"model": model, "optim": optimizer, "loss": outside}, checkpoint_id=path)
    saved = held(optimizer)
    train(optimizer, model, range(2, 4), *outside)
    return saved, {**held(optimizer), "outside": [param.detach() for param in outside]}


def load_outside(path: str, sharded: bool) -> tuple[Values, Values]:
    model, outside, optimizer = with_outside(sharded)
    dcp.load({"model": model, "optim": optimizer, "loss": outside}, checkpoint_id=path)
    loaded = held(optimizer)
    train(optimizer, model, range(2, 4), *outside)
    return loaded, {**held(optimizer), "outside": [param.detach() for param in outside]}


def test_parameters_of_no_module_and_outside_fsdp_are_saved_on_2_ranks_and_loaded_on_2_and_1(
    ranks: RankPool, tmp_path: Path
) -> None:
    path = str(tmp_path)
    (saved, end), *_ = ranks.run(2, save_outside, path)
    assert saved["state.loss.temperature.exp_avg"].shape == ()
    assert saved["state.loss.weights.exp_avg"].shape == (3,)
    assert saved["state.gain.exp_avg"] != 0
    for loaded, finish in ranks.run(2, load_outside, path, True):
        assert value_differences(saved, loaded) == []
        assert value_differences(end, finish) == []
    ((loaded, _),) = ranks.run(1, load_outside, path, False, process_group=False)
    assert value_differences(saved, loaded) == []


def save_kinds(path: str, ignored: tuple[str, ...]) -> tuple[Values, Values]:
    model = net(ignored=ignored)
    optimizer = adamw(model)
    train(optimizer, model, range(2))
    dcp.save({"model": model, "optim": optimizer}, checkpoint_id=path)
    saved = held(optimizer)
    train(optimizer, model, range(2, 3))
    return saved, gathered_parameters(model)


def load_kinds(path: str, ignored: tuple[str, ...], foreach: bool) -> tuple[Values, dict[str, bool], Values]:
    model = net(ignored=ignored)
    optimizer = adamw(model, foreach=foreach)
    dcp.load({"model": model, "optim": optimizer}, checkpoint_id=path)
    loaded = held(optimizer)
    # Bare torch fails in this step: DTensors and plain tensors meet in one call.
    train(optimizer, model, range(2, 3))
    kinds = {name: isinstance(param, DTensor) for name, param in model.named_parameters()}
    return loaded, kinds, gathered_parameters(model)


@pytest.mark.parametrize("foreach", [False, True], ids=["single", "foreach"])
@pytest.mark.parametrize("direction", [1, -1], ids=["sharded to plain", "plain to sharded"])
def test_K7_state_of_a_module_that_goes_in_or_out_of_fsdp_fits_and_the_step_works(
    ranks: RankPool, tmp_path: Path, direction: int, foreach: bool
) -> None:
    outside = ("blocks.0.2.weight", "blocks.0.2.bias")
    saved_as, loaded_as = [(), outside][::direction]
    (saved, end), *_ = ranks.run(2, save_kinds, str(tmp_path), saved_as)
    for loaded, kinds, finish in ranks.run(2, load_kinds, str(tmp_path), loaded_as, foreach):
        assert value_differences(saved, loaded) == []
        assert [kinds[name] for name in outside] == [not loaded_as] * 2
        assert value_differences(end, finish) == []


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.ones(1, 3))


def save_after_evaluation(path: str) -> tuple[Values, list[bool]]:
    model = net()
    params = list(model.parameters())
    evaluate(model)
    # The root shows its parameters whole, and the wrapper is built over the sharded ones.
    optimizer = ShardedStateOptimizer(torch.optim.AdamW(params, lr=0.1), model)
    train(optimizer, model, range(2))
    evaluate(model)
    shown = [any(param is one for one in model.parameters()) for param in params]
    keys = set(optimizer.state_dict())
    dcp.save({"optim": optimizer}, checkpoint_id=path)
    assert shown == [any(param is one for one in model.parameters()) for param in params]
    saved = held(optimizer)
    # The gradients of the last step are still there; without them the step looks for replaced parameters.
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    assert set(optimizer.state_dict()) == keys
    return saved, shown


def load_after_evaluation(path: str, sharded: bool) -> Values:
    model = net(sharded)
    optimizer = adamw(model)
    evaluate(model)
    dcp.load({"optim": optimizer}, checkpoint_id=path)
    return held(optimizer)


def test_1d_saved_and_loaded_right_after_an_evaluation(ranks: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path)
    (saved, shown), *_ = ranks.run(2, save_after_evaluation, path)
    # `scale` is the root's; everything in the blocks is sharded again, and `gain` is nobody's.
    assert shown == [False] + [True] * 9
    for world_size, sharded in ((2, True), (1, False)):
        for loaded in ranks.run(world_size, load_after_evaluation, path, sharded):
            assert value_differences(saved, loaded) == []


def replace_on_one_rank(operation: str) -> tuple[str, str]:
    model = net()
    optimizer = adamw(model)
    train(optimizer, model, range(1))
    saved = optimizer.state_dict()
    if dist.get_rank() == 1:
        model.gain = nn.Parameter(torch.ones(()))
    optimizer.zero_grad()
    try:
        getattr(optimizer, operation)(*[saved] * (operation == "prepare_load"))
    except (PresentationError, RankFailureError) as error:
        return type(error).__name__, str(error)
    return "nothing", ""


@pytest.mark.parametrize("operation", ["state_dict", "prepare_load", "step"])
def test_1d_a_parameter_replaced_on_one_rank_is_every_ranks_error(ranks: RankPool, operation: str) -> None:
    (_, other), (kind, own) = ranks.run(2, replace_on_one_rank, operation)
    assert kind in ("PresentationError", "RankFailureError")
    assert "gain: the model has another parameter of this name now" in own
    assert "rank 1" in other
    assert "gain" in other


def tied(sharded: bool) -> tuple[nn.Module, ShardedStateOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.ReLU(), nn.Linear(3, 3, bias=False))
    model[2].weight = model[0].weight
    if sharded:
        fully_shard(model)
    return model, adamw(model)


def save_tied(path: str) -> Values:
    model, optimizer = tied(sharded=True)
    train(optimizer, model, range(2))
    evaluate(model)
    assert [key for key in optimizer.state_dict() if key.endswith("exp_avg")] == ["state.0.weight.exp_avg"]
    dcp.save({"optim": optimizer}, checkpoint_id=path)
    return held(optimizer)


def load_tied(path: str, sharded: bool) -> Values:
    _, optimizer = tied(sharded)
    dcp.load({"optim": optimizer}, checkpoint_id=path)
    return held(optimizer)


def test_tied_parameters_have_one_name_under_fsdp_too(ranks: RankPool, tmp_path: Path) -> None:
    saved, *_ = ranks.run(2, save_tied, str(tmp_path))
    assert {"state.0.weight.exp_avg", "0.step"} < set(saved)
    for world_size, sharded in ((2, True), (1, False)):
        for loaded in ranks.run(world_size, load_tied, str(tmp_path), sharded):
            assert value_differences(saved, loaded) == []
