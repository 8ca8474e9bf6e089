"""Quantised state in one process: options that change, codecs that do odd things, checkpoints that are damaged."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from examples.own_codec import Momentum8, Momentum8Codec
from shardopt import (
    Blocks,
    Form,
    LoadError,
    PlacementError,
    ShardedStateOptimizer,
    Subject,
    declare_interchangeable,
)
from shardopt.layouts import codec as codecs
from shardopt.layouts import interchange
from shardopt.portable.handles import BytesHandle
from tests.ranks.quantised_runs import drawn, make, widest_step

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected an existing")

SHAPES = {"a": (64, 8), "b": (9, 9)}


class Net(nn.Module):
    def __init__(self, shapes: Mapping[str, tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(drawn(name, shape, 0).to(dtype)))


def wrapped(
    steps: int,
    build: Callable[[Any], torch.optim.Optimizer],
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    **options: Any,
) -> tuple[Net, ShardedStateOptimizer]:
    model = Net(shapes, options.pop("dtype", torch.float32))
    optimizer = ShardedStateOptimizer(build(model.parameters()), model, **options)
    for number in range(steps):
        step(model, optimizer, number + 1)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    for name, param in model.named_parameters():
        param.grad = drawn(name, param.shape, number).to(param.dtype)
    optimizer.step()


def momentum(**options: Any) -> Callable[[Any], Momentum8]:
    return lambda params: Momentum8(params, **{"block": 32, "smallest": 16, **options})


def meaning(optimizer: ShardedStateOptimizer, name: str) -> tuple[Tensor, Form]:
    inventory = optimizer._inventory
    value = inventory.quantised(inventory.by_fqn[name])["momentum"]
    assert isinstance(value, Blocks)
    assert value.codes is not None
    scales = value.scales.repeat_interleave(value.form.block)[: value.codes.numel()]
    return value.codes.float() * scales.view(value.codes.shape), value.form


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("by_path", [True, False])
def test_a_load_that_brings_another_block_quantises_by_that(tmp_path: Path, steps: int, by_path: bool) -> None:
    _, source = wrapped(2, momentum(block=32))
    dcp.save({"optim": source}, checkpoint_id=tmp_path)
    model, target = wrapped(steps, momentum(block=40))
    if by_path:
        target.prepare_load(tmp_path).commit()
    else:
        dcp.load({"optim": target}, checkpoint_id=tmp_path)
    assert target.param_groups[0]["block"] == 32
    for name in SHAPES:
        got, wanted = meaning(target, name), meaning(source, name)
        assert got[1].is_like(wanted[1])
        assert torch.equal(got[0], wanted[0])
    step(model, target, 3)
    target.state_dict()


def test_a_block_that_is_kept_gets_exact_values_quantised_once(tmp_path: Path) -> None:
    _, source = wrapped(2, momentum(block=32))
    dcp.save({"optim": source}, checkpoint_id=tmp_path)
    model, target = wrapped(0, momentum(block=40))
    prepared = target.prepare_load(tmp_path, hyperparameters="keep")
    assert prepared.report.requantised == {"'momentum' had blocks that lie otherwise here": ["a", "b"]}
    prepared.commit()
    for name in SHAPES:
        (got, form), (wanted, _) = meaning(target, name), meaning(source, name)
        assert form.block == 40
        assert ((got - wanted).abs() <= wanted.abs().max() / 127 * widest_step(form)).all()
    step(model, target, 3)


class Copying(Momentum8Codec):
    def read(self, subject: Subject, state: Mapping[str, Any], entry: str) -> Any:
        value = super().read(subject, state, entry)
        return Blocks(value.form, value.codes.clone(), value.scales.clone()) if isinstance(value, Blocks) else value


class InPlace(Momentum8Codec):
    def quantise(self, values: Tensor, form: Form) -> Blocks:
        made = super().quantise(values, form)
        values.fill_(-10.0)
        return made


class WrongCount(Momentum8Codec):
    def quantise(self, values: Tensor, form: Form) -> Blocks:
        made = super().quantise(values, form)
        return Blocks(made.form, made.codes, made.scales[:-1])


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[[codecs.Codec], None]:
    monkeypatch.setattr(codecs, "_REGISTERED", dict(codecs._REGISTERED))
    return lambda codec: codecs.register_codec(Momentum8, codec)


def test_what_a_codec_copies_is_replaced_and_not_filled(
    tmp_path: Path, register: Callable[[codecs.Codec], None]
) -> None:
    register(Copying())
    _, source = wrapped(2, momentum())
    dcp.save({"optim": source}, checkpoint_id=tmp_path)
    _, target = wrapped(1, momentum())
    dcp.load({"optim": target}, checkpoint_id=tmp_path)
    assert all(torch.equal(meaning(target, name)[0], meaning(source, name)[0]) for name in SHAPES)


def test_quantising_writes_to_nobodys_state(register: Callable[[codecs.Codec], None]) -> None:
    register(InPlace())
    _, source = wrapped(2, momentum(smallest=1 << 20))
    before = {name: value.clone() for name, value in source.sharded_state().items()}
    _, target = wrapped(0, momentum())
    target.prepare_load(source.state_dict(), hyperparameters="keep")
    assert all(torch.equal(value, before[name]) for name, value in source.sharded_state().items())


def test_codes_and_scales_that_do_not_fit_are_refused(register: Callable[[codecs.Codec], None]) -> None:
    register(WrongCount())
    _, source = wrapped(2, momentum(smallest=1 << 20))
    _, target = wrapped(0, momentum())
    with pytest.raises(LoadError, match="momentum8 has made 512 codes and 15 scales of 512 values in blocks of 32"):
        target.prepare_load(source.state_dict(), hyperparameters="keep")


@pytest.mark.parametrize("kind", ["bnb-AdamW8bit", "ao-AdamW8bit"])
@pytest.mark.parametrize("by_path", [True, False])
def test_a_parameter_without_elements_comes_back(tmp_path: Path, kind: str, by_path: bool) -> None:
    shapes = {"a": (64, 128), "empty": (0, 4)}
    _, source = wrapped(2, lambda params: make(kind, params), shapes)
    dcp.save({"optim": source}, checkpoint_id=tmp_path)
    _, target = wrapped(0, lambda params: make(kind, params), shapes)
    if by_path:
        target.prepare_load(tmp_path).commit()
    else:
        dcp.load({"optim": target}, checkpoint_id=tmp_path)
    assert len(target.optimizers[0].state) == 2


def test_a_users_subclass_is_taken_apart_like_its_library() -> None:
    import torchao.optim

    make("ao-AdamW8bit", [nn.Parameter(torch.zeros(1))])  # puts its kernel out of the compiler's way

    class Mine(torchao.optim.AdamW8bit):
        pass

    _, optimizer = wrapped(1, Mine, {"a": (64, 128)})
    assert optimizer.state_dict()["state.a.exp_avg"].dtype == torch.uint8


def test_state_that_is_made_of_tensors_is_refused_without_a_codec_B13(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "_KNOWN", {})
    _, optimizer = wrapped(1, lambda params: make("ao-AdamW8bit", params), {"a": (64, 128)}, compute="dtensor")
    with pytest.raises(PlacementError, match="state 'exp_avg' is a torchao.*register_codec"):
        optimizer.state_dict()


def test_numbers_of_another_dtype_are_converted_only_when_told_so(tmp_path: Path) -> None:
    build = lambda params: make("ao-AdamW8bit", params)  # noqa: E731
    shapes = {"small": (8, 8)}
    _, source = wrapped(2, build, shapes)
    dcp.save({"optim": source}, checkpoint_id=tmp_path)
    _, target = wrapped(0, build, shapes, dtype=torch.bfloat16)
    with pytest.raises(LoadError, match="saved as float32, this optimizer keeps bfloat16; dtype='live' converts"):
        target.prepare_load(tmp_path)
    target.prepare_load(tmp_path, dtype="live").commit()


def edit(entry: Mapping[str, Any]) -> Callable[[Any], None]:
    return lambda manifest: manifest["parameters"]["a"]["entries"]["momentum"].update(entry)


def shards(*segments: list[Any]) -> Callable[[Any], None]:
    def change(manifest: Any) -> None:
        manifest["parameters"]["a"]["entries"]["momentum"].update(block=None, segments=list(segments))
        manifest["parameters"]["a"]["blob"] = 64

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (edit({"block": 64}), "expected \\(64, 1\\)|expected \\(8,\\)"),
        (edit({"per_byte": 2}), "expected \\(64, 4\\)"),
        (edit({"per_byte": 3}), "3 codes in a byte"),
        (edit({"per_byte": 2, "block": 33}), "blocks of \\[33\\]"),
        (edit({"codes": "uint8"}), "stored as int8, and the manifest says uint8"),
        (edit({"codes": None}), "what its codes mean is not in the checkpoint"),
        (edit({"table": "00"}), "the table '00' of its codes is lacking or changed"),
        (edit({"codec": "other"}), "was quantised by 'other', this optimizer by 'momentum8'"),
        (
            shards([[0, 0], [32, 8], 0, 32, None, None], [[0, 0], [32, 8], 32, 32, None, None]),
            "its shards overlap, or leave a part of it out",
        ),
        (
            shards([[0, 0], [32, 8], 0, 32, None, None], [[32, 0], [32, 8], 0, 32, None, None]),
            "has shards that share bytes of its blob",
        ),
        (shards([[0, 0], [32, 8], 0, 32, None, None]), "shards that are not together the shape"),
        (shards([[0, 0], [65, 8], 0, 32, None, None]), "a shard at"),
        (shards([[0, 0], [64, 8], 0, None, None, None]), "blocks of \\[None\\]"),
        (shards(["odd"]), "a shard is"),
    ],
)
def test_a_damaged_manifest_is_refused_and_nothing_changes(
    tmp_path: Path, change: Callable[[Any], None], said: str
) -> None:
    _, source = wrapped(2, momentum())
    saved = dict(source.state_dict())
    manifest = json.loads(saved["manifest"].contents().numpy().tobytes())
    change(manifest)
    saved["manifest"] = BytesHandle.of(json.dumps(manifest, separators=(",", ":")).encode())
    if "segments" in json.dumps(manifest["parameters"]["a"]) and manifest["parameters"]["a"]["blob"]:
        saved["blob.a"] = BytesHandle.of(b"\0" * 64)
    dcp.save({"optim": saved}, checkpoint_id=tmp_path)
    _, target = wrapped(1, momentum())
    before = {name: meaning(target, name)[0] for name in SHAPES}
    with pytest.raises(LoadError, match=said):
        target.prepare_load(tmp_path)
    assert all(torch.equal(meaning(target, name)[0], value) for name, value in before.items())


def test_tables_are_what_their_names_say(tmp_path: Path) -> None:
    shapes = {"a": (64, 128)}
    _, source = wrapped(2, lambda params: make("bnb-AdamW8bit", params), shapes)
    saved = dict(source.state_dict())
    manifest = json.loads(saved["manifest"].contents().numpy().tobytes())
    tables = manifest["extra"]["tables"]
    assert len(tables) == 2
    one, other = tables
    tables[one], tables[other] = tables[other], tables[one]
    saved["manifest"] = BytesHandle.of(json.dumps(manifest, separators=(",", ":")).encode())
    dcp.save({"optim": saved}, checkpoint_id=tmp_path)
    _, target = wrapped(0, lambda params: make("bnb-AdamW8bit", params), shapes)
    with pytest.raises(LoadError, match="of its codes is lacking or changed"):
        target.prepare_load(tmp_path)


def test_codes_that_are_no_numbers_are_not_loaded() -> None:
    shapes = {"a": (64, 128)}
    _, source = wrapped(2, lambda params: make("ao-AdamWFp8", params), shapes)
    state: Any = source.optimizers[0].state
    (entries,) = state.values()
    entries["exp_avg"].codes.view(torch.uint8)[0, 0] = 0x7F
    _, target = wrapped(0, lambda params: make("ao-AdamWFp8", params), shapes)
    with pytest.raises(LoadError, match="state 'exp_avg' holds"):
        target.prepare_load(source.state_dict())


def test_a_load_replaces_live_state_that_does_not_fit(tmp_path: Path) -> None:
    _, source = wrapped(2, momentum())
    dcp.save({"optim": source}, checkpoint_id=tmp_path)
    model, target = wrapped(1, momentum())
    state: Any = target.optimizers[0].state[model.get_parameter("a")]
    state["scale"] = state["scale"][:-1].clone()
    target.prepare_load(tmp_path).commit()
    assert all(torch.equal(meaning(target, name)[0], meaning(source, name)[0]) for name in SHAPES)


def test_what_is_kept_as_plain_numbers_is_said_once_for_all(tmp_path: Path) -> None:
    _, source = wrapped(2, momentum())
    dcp.save({"optim": source}, checkpoint_id=tmp_path)
    _, target = wrapped(0, momentum(smallest=1 << 30))
    report = target.prepare_load(tmp_path, hyperparameters="keep").report
    assert report.notes == ["hyperparameters='keep': every group keeps its live values."]
    said = str(report).splitlines()
    assert said[0] == "2 entries to restore on this rank"
    assert said[1] == "state 'momentum' was saved as codes and scales, and is kept as float32 here (2): a, b"


@pytest.fixture
def alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interchange, "_ALIKE", [])
    declare_interchangeable(Momentum8, torch.optim.SGD)


@pytest.mark.usefixtures("alike")
@pytest.mark.parametrize("to_quantised", [True, False])
def test_classes_that_are_declared_alike_and_keep_other_entries_are_refused(tmp_path: Path, to_quantised: bool) -> None:
    def sgd(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    _, source = wrapped(2, sgd if to_quantised else momentum())
    dcp.save({"optim": source}, checkpoint_id=tmp_path)
    _, target = wrapped(0, momentum() if to_quantised else sgd)
    with pytest.raises(LoadError, match="declared to be like it .* has to keep entries of the same names") as raised:
        target.prepare_load(tmp_path, hyperparameters="keep")
    assert ("but not ['momentum'], which this" in str(raised.value)) == to_quantised
    assert ("this optimizer keeps no such state of it" in str(raised.value)) != to_quantised
    assert not any(target.optimizers[0].state.values())
