"""Parameters that are not those the optimizer was wrapped with: noticed in saves, loads and steps; nothing changes.

Elsewhere the step then works on dead objects without a word, and a save or load does the same or fails on names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from shardopt import NamingError, PlacementError, PresentationError, ShardedStateOptimizer
from shardopt.layouts.tracked import Tracked, track
from shardopt.naming import Name
from shardopt.presentation.identity import Identity
from shardopt.torch_compat import local_shard
from tests.support.snapshot import snapshot

COMPUTES = ("local", "dtensor")
OPERATIONS: dict[str, Callable[[ShardedStateOptimizer, Any], Any]] = {
    "state_dict": lambda optimizer, saved: optimizer.state_dict(),
    "prepare_load": lambda optimizer, saved: optimizer.prepare_load(saved),
    "load_state_dict": lambda optimizer, saved: optimizer.load_state_dict(saved),
    "add_param_group": lambda optimizer, saved: optimizer.add_param_group({"params": []}),
    "step": lambda optimizer, saved: (optimizer.zero_grad(), optimizer.step()),
}


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2, bias=False))


def wrap(model: nn.Module, compute: str = "local") -> ShardedStateOptimizer:
    return ShardedStateOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), model, compute=compute)


def train(optimizer: ShardedStateOptimizer, model: nn.Module, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).square().sum().backward()
        optimizer.step()


def assign(model: nn.Sequential) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def new_parameter(model: nn.Sequential) -> None:
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())


def new_module(model: nn.Sequential) -> None:
    model[0] = nn.Linear(2, 3)


def removed(model: nn.Sequential) -> None:
    model[2] = nn.Identity()


def swapped(model: nn.Sequential) -> None:
    model[0].weight, model[2].weight = model[2].weight, model[0].weight


def to_meta_and_back(model: nn.Sequential) -> None:
    model.to("meta").to_empty(device="cpu")


def narrower(model: nn.Sequential) -> None:
    model.to(torch.bfloat16)


def other_shape(model: nn.Sequential) -> None:
    model[0].bias.data = torch.ones(2)


OTHER = "the model has another parameter of this name now"
BECAME = "this rank's part was torch.float32({}) on cpu and is now {} on cpu"
CHANGES: dict[str, tuple[Callable[[nn.Sequential], None], list[str]]] = {
    "assign": (assign, [f"{name}: {OTHER}" for name in ("0.weight", "0.bias", "2.weight")]),
    "new parameter": (new_parameter, [f"2.weight: {OTHER}"]),
    "new module": (new_module, [f"{name}: {OTHER}" for name in ("0.weight", "0.bias")]),
    "removed": (removed, ["2.weight: the model does not have it any more"]),
    "swapped": (swapped, [f"{name}: {OTHER}" for name in ("0.weight", "2.weight")]),
    "to_empty": (to_meta_and_back, [f"{name}: {OTHER}" for name in ("0.weight", "0.bias", "2.weight")]),
    "dtype": (
        narrower,
        [
            f"{name}: " + BECAME.format(shape, f"torch.bfloat16({shape})")
            for name, shape in (("0.weight", "3, 2"), ("0.bias", "3,"), ("2.weight", "2, 3"))
        ],
    ),
    "shape": (other_shape, ["0.bias: " + BECAME.format("3,", "torch.float32(2,)")]),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("compute", COMPUTES)
def test_1d_changed_parameters_are_refused_all_in_one_list(compute: str, change: str, operation: str) -> None:
    model = layers()
    optimizer = wrap(model, compute)
    train(optimizer, model)
    saved = optimizer.state_dict()
    make, expected = CHANGES[change]
    make(model)
    if operation == "step" and change == "swapped":
        # Both are still used and get gradients: nothing shows in a step, and nothing is lost in it.
        return
    before = snapshot(optimizer, model) if operation != "step" else None
    with pytest.raises(PresentationError) as caught:
        OPERATIONS[operation](optimizer, saved)
    first, *problems, last = str(caught.value).splitlines()
    assert first == f"{len(expected)} parameters are not those that the optimizer was wrapped with:"
    assert [problem.strip() for problem in problems] == expected
    assert "build the optimizer and its wrapper afterwards" in last
    if before is not None:
        assert before.diff(snapshot(optimizer, model), ignore=["attribute._prepared"]) == []


@pytest.mark.parametrize("change", ["dtype", "shape"])
@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "sharded"])
def test_a_step_notices_data_of_another_kind_although_all_gradients_fit_it(
    mesh: DeviceMesh, sharded: bool, compute: str, change: str
) -> None:
    model = layers()
    if sharded:
        fully_shard(model, mesh=mesh)
    optimizer = wrap(model, compute)
    train(optimizer, model)
    optimizer.zero_grad()
    if sharded and change == "shape":
        model.get_parameter("0.bias")._local_tensor = torch.ones(2)
        changed = 1
    else:
        CHANGES[change][0](model)
        changed = len(CHANGES[change][1])
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    with pytest.raises(PresentationError, match=f"^{changed} parameters are not those"):
        optimizer.step()


@pytest.mark.parametrize("compute", COMPUTES)
def test_the_first_step_looks_although_all_gradients_are_there(compute: str) -> None:
    model = layers()
    optimizer = wrap(model, compute)
    model(torch.ones(1, 2)).sum().backward()
    assign(model)
    with pytest.raises(PresentationError, match="3 parameters are not those"):
        optimizer.step()


def test_untying_is_noticed_under_the_other_name() -> None:
    model = nn.ModuleDict({"embed": nn.Linear(3, 3, bias=False), "head": nn.Linear(3, 3, bias=False)})
    model["head"].weight = model["embed"].weight
    optimizer = wrap(model)
    optimizer.state_dict()
    model["head"].weight = nn.Parameter(torch.ones(3, 3))
    with pytest.raises(PresentationError, match=r"\n  head.weight: the model has another parameter of this name now\n"):
        optimizer.state_dict()


def test_wrapping_modules_afterwards_is_no_change() -> None:
    model = layers()
    optimizer = wrap(model)
    keys = set(optimizer.state_dict())
    model[0] = torch.compile(model[0], backend="eager")
    assert set(optimizer.state_dict()) == keys
    # The parameter is where no name leads to it, but it is used.
    model[2] = nn.Sequential(model[2])
    assert set(optimizer.state_dict()) == keys


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One item for each time the models are looked through."""
    seen: list[int] = []
    check = Identity.check

    def counted(self: Identity) -> None:
        seen.append(1)
        check(self)

    monkeypatch.setattr(Identity, "check", counted)
    return seen


@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "sharded"])
def test_a_step_looks_through_the_models_once_for_a_gradient_that_is_missing(
    mesh: DeviceMesh, looks: list[int], sharded: bool, compute: str
) -> None:
    model = layers()
    if sharded:
        fully_shard(model, mesh=mesh)
    optimizer = wrap(model, compute)
    params = list(model.parameters())

    def step(*without: int) -> int:
        for index, param in enumerate(params):
            param.grad = None if index in without else torch.zeros_like(param)
        before = len(looks)
        optimizer.step()
        return len(looks) - before

    assert step() == 1  # the first
    assert step() == 0
    assert step(1) == 1
    assert [step(1), step(), step(1)] == [0, 0, 0]
    assert step(1, 2) == 1
    assert [step(2), step(1, 2)] == [0, 0]


@pytest.fixture(params=["before the first forward", "after a step", "after an evaluation"])
def trained(request: pytest.FixtureRequest, mesh: DeviceMesh) -> tuple[ShardedStateOptimizer, Any]:
    model: Any = layers()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = wrap(model)
    if request.param != "before the first forward":
        train(optimizer, model)
    if request.param == "after an evaluation":
        evaluate(model)
    return optimizer, model


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.ones(1, 2))


@pytest.mark.parametrize("change", ["assign", "new parameter", "new module", "dtype"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_1d_changes_under_fsdp_are_refused(
    trained: tuple[ShardedStateOptimizer, Any], change: str, operation: str
) -> None:
    optimizer, model = trained
    saved = optimizer.state_dict()
    make, expected = CHANGES[change]
    make(model)
    with pytest.raises(PresentationError) as caught:
        OPERATIONS[operation](optimizer, saved)
    _, *problems, _ = str(caught.value).splitlines()
    assert [problem.split(":")[0].strip() for problem in problems] == [text.split(":")[0] for text in expected]


def test_1d_an_evaluation_is_no_change(mesh: DeviceMesh) -> None:
    model: Any = layers()
    fully_shard(model, mesh=mesh)
    params = list(model.parameters())
    evaluate(model)
    assert isinstance(model, FSDPModule)
    assert not any(isinstance(param, DTensor) for param in model.parameters())
    # Also when the wrapper is built: the optimizer has the sharded parameters from before.
    optimizer = ShardedStateOptimizer(torch.optim.AdamW(params, lr=0.1), model)
    train(optimizer, model)
    evaluate(model)
    optimizer.load_state_dict(optimizer.state_dict())
    for param in params:
        param.grad = None
    optimizer.step()
    assert "state.2.weight.exp_avg" in optimizer.state_dict()


def test_1d_an_evaluation_is_no_change_to_parts_of_the_module_that_was_sharded(mesh: DeviceMesh) -> None:
    model: Any = layers()
    fully_shard(model, mesh=mesh)
    optimizer = ShardedStateOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), nn.ModuleList([*model]))
    train(optimizer, model)
    evaluate(model)
    optimizer.load_state_dict(optimizer.state_dict())
    again = ShardedStateOptimizer(torch.optim.AdamW(optimizer.param_groups[0]["params"]), nn.ModuleList([*model]))
    assert set(again.state_dict()) == set(optimizer.state_dict())


@pytest.mark.parametrize("named", [False, True], ids=["positions", "names"])
def test_1d_an_optimizer_built_before_fully_shard_is_refused(mesh: DeviceMesh, named: bool) -> None:
    model = layers()
    inner = torch.optim.AdamW(model.named_parameters() if named else model.parameters())
    fully_shard(model, mesh=mesh)
    with pytest.raises(NamingError, match=r"^3 optimizer parameters are in none of the models.*after fully_shard"):
        ShardedStateOptimizer(inner, model)


def elsewhere(param: torch.Tensor) -> nn.Parameter:
    """A parameter on the host whose mesh is of GPUs; there is no hardware behind it, so nothing can be computed."""
    mesh = DeviceMesh("cuda", torch.tensor([0]), _init_backend=False, _rank=0)
    meta = TensorMeta(param.shape, param.stride(), param.dtype)
    local = local_shard(param) if isinstance(param, DTensor) else param.detach()
    return nn.Parameter(DTensor(local.detach(), DTensorSpec(mesh, (Shard(0),), tensor_meta=meta), requires_grad=False))


def test_B14_parameters_that_are_not_on_their_meshs_device_are_refused_all_in_one_list() -> None:
    model = layers()
    model[0].weight, model[2].weight = elsewhere(model[0].weight), elsewhere(model[2].weight)
    with pytest.raises(PlacementError) as caught:
        wrap(model)
    first, second = str(caught.value).splitlines()
    assert first.startswith("0.weight: this rank's shard is on cpu, its mesh on 'cuda'; move the model there before")
    assert second.startswith("2.weight: ")
    # A group that is added is checked in the same way.
    head = layers()
    optimizer = ShardedStateOptimizer(torch.optim.AdamW(head.parameters()), nn.ModuleList([head, model]))
    with pytest.raises(PlacementError, match=r"1\.2\.weight: this rank's shard is on cpu"):
        optimizer.add_param_group({"params": [model[0].bias, model[2].weight]})


def offloaded(mesh: DeviceMesh) -> tuple[Any, ShardedStateOptimizer]:
    """A model as CPUOffloadPolicy has it: parameters on the host, a mesh of GPUs."""
    model: Any = layers()
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    for managed in model._get_fsdp_state()._fsdp_param_group.fsdp_params:
        managed.sharded_param = elsewhere(managed.sharded_param)
        managed.to_sharded()
    return model, ShardedStateOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), model, consensus="off")


def test_B14_F13_parameters_that_fsdp_keeps_on_the_host_may_be_there_and_so_is_their_state(mesh: DeviceMesh) -> None:
    model, optimizer = offloaded(mesh)
    for param in model.parameters():
        param.grad = elsewhere(param).detach()
    optimizer.step()
    _, fresh = offloaded(mesh)
    fresh.load_state_dict(optimizer.state_dict())
    for one in (optimizer, fresh):
        assert len(one.state) == 3
        live = list(one.state.values())
        assert all(value.device.type == "cpu" for entries in live for value in entries.values())
        shown = [local_shard(value).data_ptr() for value in one.sharded_state().values()]
        # from_local would have tried to copy them to the mesh's device.
        assert sorted(shown) == sorted(e[name].data_ptr() for e in live for name in ("exp_avg", "exp_avg_sq"))
    pairs = zip(optimizer.state.values(), fresh.state.values(), strict=True)
    assert all(torch.equal(old[name], new[name]) for old, new in pairs for name in old)


def test_B14_a_dtensor_of_state_is_on_its_parameters_device() -> None:
    tracked: Tracked = track(Name("weight"), elsewhere(torch.ones(4, 2)), optimizer=0, group=0)
    local = torch.ones(4, 2)
    placed = tracked.as_param(local)
    assert local_shard(placed).data_ptr() == local.data_ptr()


@pytest.mark.parametrize("flag", ["foreach", "fused"])
def test_K7_kinds_that_cannot_step_together_are_refused_when_the_wrapper_is_made(mesh: DeviceMesh, flag: str) -> None:
    model: Any = layers()
    fully_shard(model, mesh=mesh, ignored_params={model[0].bias})
    sharded, plain, other = model.parameters()
    mixed = torch.optim.AdamW([{"params": [sharded, plain]}, {"params": [other]}], **{flag: True})
    sentence = rf"^group 0 has 1 DTensors and 1 plain tensors \(0\.bias\), which {flag}=True puts into one call"
    with pytest.raises(PresentationError, match=sentence):
        ShardedStateOptimizer(mixed, model, compute="dtensor")
    apart = torch.optim.AdamW([{"params": [sharded, other]}, {"params": [plain]}], **{flag: True})
    together = torch.optim.AdamW(model.parameters())
    for inner, compute in ((mixed, "local"), (apart, "dtensor"), (together, "dtensor")):
        optimizer = ShardedStateOptimizer(inner, model, compute=compute)
        train(optimizer, model)
        # Loads, too: the kinds are those of this run, whatever the checkpoint's were.
        optimizer.load_state_dict(optimizer.state_dict())
        train(optimizer, model)
    first = ShardedStateOptimizer(torch.optim.AdamW([other], **{flag: True}), model, compute="dtensor")
    with pytest.raises(PresentationError, match=r"^group 1 has 1 DTensors and 1 plain tensors"):
        first.add_param_group({"params": [sharded, plain]})
    assert len(first.param_groups) == 1
