"""Tables of the host kernel: what is refused before anything is written, how work is shared, sums of squares."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest
import torch

from shardopt import _host
from shardopt.swap.host_kernel import (
    HYPER,
    ROW,
    Table,
    adamw_hyper,
    adamw_rows,
    available_isas,
    default_threads,
    first_touch,
    sum_of_squares,
)
from tests.support.host_rows import SETTINGS, Buffers, Format, assert_same_bits, hypers_of, made, rows_of

PLAIN = Format(param="fp32")
BLOCK = 32 * 1024


@pytest.mark.parametrize(("dtype", "fields"), [(ROW, _host.row_fields()), (HYPER, _host.hyper_fields())])
def test_tables_have_the_layout_of_their_structs(dtype: np.dtype[np.void], fields: list[tuple[str, int, int]]) -> None:
    assert dtype.fields is not None
    assert [(name, of[1], of[0].itemsize) for name, of in dtype.fields.items()] == fields


def refused(change: dict[str, object], kind: Format = PLAIN, **options: object) -> str:
    """The error of a step with three good rows, the second of which is changed; nothing may be written."""
    buffers = [made(67, kind, seed=seed) for seed in range(3)]
    before = [one.clone() for one in buffers]
    rows = rows_of(buffers)
    for name, value in change.items():
        rows[1][name] = value(rows) if callable(value) else value
    with pytest.raises(ValueError, match="nothing was written") as raised:
        adamw_rows(rows, hypers_of(), seed=3, **options)
    for one, old in zip(buffers, before, strict=True):
        assert_same_bits(one, old)
    return str(raised.value)


@pytest.mark.parametrize("name", ["param", "grad", "exp_avg", "exp_avg_sq"])
def test_missing_and_misaligned_memory_is_refused_by_name(name: str) -> None:
    assert f"row 1: {name} has address 0" in refused({name: 0})
    assert f"row 1: {name} at address" in refused({name: lambda rows: rows[1][name] + 2})
    assert f"row 1: {name} at address" in refused(
        {name: lambda rows: rows[1][name] + 1}, Format(param="bf16", grad=torch.bfloat16, moments=torch.bfloat16)
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"numel": -1}, "numel is -1"),
        ({"numel": 2**62}, "param has 4611686018427387904 elements, more than there are addresses"),
        ({"hyper": 1}, "hyper is 1; there are 1"),
        ({"hyper": -1}, "hyper is -1"),
        ({"param_dtype": 2}, "param_dtype is 2; it must be 0 to 1"),
        ({"grad_dtype": -1}, "grad_dtype is -1"),
        ({"moment_dtype": 2}, "moment_dtype is 2"),
        ({"master_kind": 3}, "master_kind is 3; it must be 0 to 2"),
        ({"master_kind": 1}, "has a master, but its param is not bf16"),
        ({"master_kind": 1}, "master has address 0"),
        ({"master": 64}, "has a master, but its master_kind is none"),
        ({"max_exp_avg_sq": 2}, "max_exp_avg_sq at address 2"),
        ({"max_exp_avg_sq": -4}, "max_exp_avg_sq has address -4"),
        ({"out": 1}, "out at address 1"),
    ],
)
def test_a_row_that_makes_no_sense_is_refused(change: dict[str, object], said: str) -> None:
    assert f"row 1: {said}" in refused(change)


def test_a_copy_of_a_bf16_parameter_is_refused() -> None:
    assert "row 1: has an out, but its param is not fp32" in refused({"out": 64}, Format(param="bf16"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"index_start": -1}, "has index_start -1, index_run 67 and index_stride 0"),
        ({"index_run": 0}, "index_run 0"),
        ({"index_stride": -1}, "index_stride -1"),
        ({"index_start": 2**63 - 66}, "beyond 64 bits"),
        ({"index_run": 1, "index_stride": 2**58}, "beyond 64 bits"),
    ],
)
def test_global_indices_that_do_not_exist_are_refused_where_they_count(change: dict[str, object], said: str) -> None:
    assert said in refused(change, Format(param="fp32", moments=torch.bfloat16))
    adamw_rows(rows_of([made(67, PLAIN)], index_start=[-1]), hypers_of(), seed=3)
    largest = rows_of([made(67, Format(param="fp32", moments=torch.bfloat16))], index_start=[2**63 - 67])
    adamw_rows(largest, hypers_of(), seed=3)


def test_shared_memory_is_refused_by_the_names_of_both() -> None:
    names = ["embed.weight", "block.0.weight", "head.bias"]
    within = refused({"exp_avg": lambda rows: rows[1]["param"] + 4}, names=names)
    assert "block.0.weight: exp_avg and param share memory" in within
    between = refused({"exp_avg": lambda rows: rows[2]["exp_avg"] + 4}, names=names)
    assert "block.0.weight: exp_avg and exp_avg of head.bias share memory" in between
    # A gradient that is written to has no one value.
    assert "grad" in refused({"grad": lambda rows: rows[0]["param"]}, names=names)
    # Unnoticed between neighbours: a long buffer that covers several others.
    numel, whole = 40, torch.zeros(400)
    pieces = [made(numel, PLAIN, seed=seed) for seed in range(3)]
    inside = [
        Buffers(**{**one.named(), "exp_avg": whole[at : at + numel]})
        for one, at in zip(pieces, (50, 100, 300), strict=True)
    ]
    covering = Buffers(param=whole, grad=torch.zeros(400), exp_avg=torch.zeros(400), exp_avg_sq=torch.zeros(400))
    with pytest.raises(ValueError, match="(?s)row 0: .*row 1: .*row 2: "):
        adamw_rows(rows_of([*inside, covering]), hypers_of(), seed=3)


def test_neighbours_in_one_slab_are_no_overlap() -> None:
    slab = torch.zeros(4 * 67)
    param, grad, exp_avg, exp_avg_sq = slab.split(67)
    adamw_rows(rows_of([Buffers(param=param, grad=grad, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)]), hypers_of(), seed=3)


def test_all_problems_are_in_one_error_and_long_ones_are_cut() -> None:
    buffers = [made(3, PLAIN, seed=seed) for seed in range(40)]
    rows = rows_of(buffers)
    rows[3]["param"], rows[3]["hyper"], rows[17]["grad"] = 0, 5, 0
    with pytest.raises(ValueError, match="(?s)row 3: param .*row 3: hyper .*row 17: grad "):
        adamw_rows(rows, hypers_of(), seed=3)
    rows["param"] = 0
    with pytest.raises(ValueError, match="and 22 more"):
        adamw_rows(rows, hypers_of(), seed=3)


def test_tables_of_another_kind_are_refused() -> None:
    rows, hypers = rows_of([made(3, PLAIN)]), hypers_of()
    with pytest.raises(TypeError, match="rows is an array of float64"):
        adamw_rows(np.zeros(3), hypers, seed=3)
    with pytest.raises(TypeError, match="hypers is a list"):
        adamw_rows(rows, [()], seed=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rows has shape"):
        adamw_rows(rows.reshape(1, 1), hypers, seed=3)
    with pytest.raises(ValueError, match="rows has shape"):
        adamw_rows(np.zeros(4, ROW)[::2], hypers, seed=3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"seed": 3, "num_threads": 0}, "num_threads is 0"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        adamw_rows(rows_of([made(3, PLAIN)]), hypers_of(), **options)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", -1.0),
        ("lr", float("nan")),
        ("eps", -1e-8),
        ("weight_decay", float("inf")),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("beta2", float("nan")),
        ("step", 0),
    ],
)
def test_a_hyper_parameter_out_of_range_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value!r}"):
        adamw_hyper(**{**SETTINGS, name: value})
    with pytest.raises(ValueError, match="(?s)lr is -1.0.*step is 0"):
        adamw_hyper(**{**SETTINGS, "lr": -1.0, "step": 0})


def sized(*numels: int) -> Table:
    """Rows that point nowhere."""
    rows = np.zeros(len(numels), ROW)
    rows["numel"] = numels
    return rows


@pytest.mark.parametrize("num_threads", [1, 2, 3, 64])
@pytest.mark.parametrize(
    "numels", [(), (0,), (1,), (5 * BLOCK + 1, 0, 3, BLOCK), (7,) * 3000, (100, 2**31 + 5, 100), (2**33 + 1,)]
)
def test_shares_cover_every_element_once_in_order_G16(numels: tuple[int, ...], num_threads: int) -> None:
    shares = _host.shares(sized(*numels).view(np.uint8), num_threads)
    blocks = [block for share in shares for block in share]
    reached = [0] * len(numels)
    for row, first, numel in blocks:
        assert first == reached[row]
        assert 0 < numel <= BLOCK
        reached[row] += numel
    assert tuple(reached) == numels
    assert [row for row, _, _ in blocks] == sorted(row for row, _, _ in blocks)
    # A thread for every 32 Ki elements at most, and no share larger than its part and a block.
    total = sum(numels)
    assert len(shares) == max(1, min(num_threads, total // BLOCK))
    assert all(sum(numel for _, _, numel in share) <= total / len(shares) + BLOCK for share in shares)


def test_default_threads_are_the_cpus_shared_among_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(10)))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert default_threads() == 10
    assert default_threads(4) == 2
    assert default_threads(11) == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "5")
    assert default_threads() == 2
    for wrong in ("0", "-1", "many"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", wrong)
        with pytest.raises(ValueError, match=f"LOCAL_WORLD_SIZE='{wrong}'"):
            default_threads()
    with pytest.raises(ValueError, match="local_world_size is 0"):
        default_threads(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_squares_are_those_of_double_and_the_same_everywhere_G4(dtype: torch.dtype) -> None:
    buffers = [made(numel, Format(param="fp32", grad=dtype), seed=numel) for numel in (*range(68), 3 * BLOCK + 5)]
    rows = rows_of(buffers)
    sums = [sum_of_squares(rows, num_threads=threads, isa=isa) for threads in (1, 2, 3) for isa in available_isas()]
    for other in sums[1:]:
        assert np.array_equal(other, sums[0])
    exact = [one.grad.double().square().sum().item() for one in buffers]
    np.testing.assert_allclose(sums[0], exact, rtol=1e-13)
    assert sums[0][0] == 0.0


def test_sums_of_squares_read_nothing_but_gradients_and_refuse_bad_ones() -> None:
    rows = sized(3, 3)
    grad = torch.tensor([3e38, -3e38, 1.0])
    rows["grad"] = grad.data_ptr()
    assert sum_of_squares(rows)[0] == pytest.approx(2 * float(grad[0].double()) ** 2)
    rows["grad"][1] = 0
    with pytest.raises(ValueError, match="head.bias: grad has address 0"):
        sum_of_squares(rows, names=["embed.weight", "head.bias"])
    assert np.isnan(sum_of_squares(rows_of([Buffers(**{**made(3, PLAIN).named(), "grad": grad * torch.nan})])))


def test_sums_of_squares_reach_beyond_32_bits_G16() -> None:
    numel = 2**31 + 67
    # Pages that were never written to are all the same page of zeros, so this takes no memory.
    with mmap.mmap(-1, 2 * numel, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[-2:] = torch.tensor(3.0, dtype=torch.bfloat16).view(torch.int16).numpy().tobytes()
        rows = sized(numel)
        view = np.frombuffer(memory, np.uint8)
        rows["grad"], rows["grad_dtype"] = view.ctypes.data, 1
        assert sum_of_squares(rows).tolist() == [9.0]
        del view


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_first_touch_zeroes_moments_and_nothing_else(moments: torch.dtype) -> None:
    kind = Format(param="fp32", moments=moments, amsgrad=True)
    inputs = [made(numel, kind, seed=numel) for numel in (0, 67, 3 * BLOCK + 5)]
    got = [one.clone() for one in inputs]
    rows = rows_of(got)
    rows["param"] = rows["grad"] = 0
    first_touch(rows, num_threads=3)
    for one, before in zip(got, inputs, strict=True):
        assert not any(one.named()[name].any() for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"))
        assert torch.equal(one.param, before.param)
        assert torch.equal(one.grad, before.grad)
    rows["exp_avg"][1] = 1
    with pytest.raises(ValueError, match="row 1: exp_avg at address 1"):
        first_touch(rows)
