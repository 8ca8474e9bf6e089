"""The AdamW step on host memory: one set of bits, whatever level, threads and cuts; written only where it should be."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from shardopt.swap.host_kernel import adamw_rows, available_isas
from tests.support import host_reference
from tests.support.host_rows import (
    DTYPES,
    FORMATS,
    Buffers,
    Format,
    assert_same_bits,
    hypers_of,
    made,
    rows_of,
)

# Past two batches of the widest level, so every tail length follows whole batches and whole vectors.
LENGTHS = range(68)
PLAIN = Format(param="fp32")
# The draws of moments, the copy that goes past the caches, and both 16-bit halves of a parameter.
DIVERSE = [
    PLAIN,
    Format(param="fp32 with a copy", grad=torch.bfloat16),
    Format(param="bf16 with a remainder", grad=torch.bfloat16, moments=torch.bfloat16, amsgrad=True),
]
# Three threads of as many elements as one takes at least, and more rows than threads.
BIG = 3 * 32 * 1024 + 4099


def stepped(buffers: Buffers, isa: str, **changed: float) -> Buffers:
    copy = buffers.clone()
    adamw_rows(rows_of([copy]), hypers_of(changed), seed=3, num_threads=1, isa=isa)
    return copy


def test_the_portable_levels_are_always_there() -> None:
    assert available_isas()[:2] == ("scalar", "lanes16")


@pytest.mark.parametrize("kind", FORMATS, ids=str)
def test_every_format_gives_the_bits_of_the_reference_G6_G8(kind: Format) -> None:
    # The reference's multiply-add rounds twice, in double and in float: too rarely to be met here.
    for numel, change in itertools.product((0, 1, 67, 4099), ({}, {"beta1": 0.3, "maximize": True})):
        inputs = made(numel, kind, seed=numel)
        expected, hypers = inputs.clone(), hypers_of(change)
        with np.errstate(over="ignore"):
            for row in rows_of([expected]):
                host_reference.step_row(row, hypers[0], 3, 0.75)
        for isa in available_isas():
            got = inputs.clone()
            adamw_rows(rows_of([got]), hypers, seed=3, grad_scale=0.75, isa=isa)
            assert_same_bits(got, expected)


@pytest.mark.parametrize("kind", FORMATS, ids=str)
def test_every_length_gives_the_scalar_bits_G4(kind: Format) -> None:
    for numel in LENGTHS:
        inputs = made(numel, kind, seed=numel)
        expected = stepped(inputs, "scalar")
        for isa in available_isas()[1:]:
            assert_same_bits(stepped(inputs, isa), expected)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("kind", DIVERSE, ids=str)
def test_only_the_view_is_written_at_every_offset_G4(isa: str, kind: Format) -> None:
    inputs = made(100, kind)
    for offset, numel in itertools.product(range(18), (0, 1, 16, 33, 80)):
        whole, expected = inputs.clone(), inputs.clone()
        adamw_rows(rows_of([whole.part(offset, numel)]), hypers_of(), seed=3, isa=isa)
        for name, part in stepped(inputs.part(offset, numel), "scalar").named().items():
            expected.named()[name][offset : offset + numel] = part
        assert_same_bits(whole, expected)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("num_chunks", [1, 7, 64])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_level_threads_and_chunks_change_no_bit_G2(isa: str, num_chunks: int, num_threads: int) -> None:
    for kind in DIVERSE:
        inputs = made(BIG, kind)
        expected = stepped(inputs, available_isas()[-1])
        got = inputs.clone()
        size = -(-BIG // num_chunks)
        starts = range(0, BIG, size)
        parts = [got.part(start, size) for start in starts]
        adamw_rows(rows_of(parts, index_start=list(starts)), hypers_of(), seed=3, num_threads=num_threads, isa=isa)
        assert_same_bits(got, expected)


@pytest.mark.parametrize("kind", DIVERSE, ids=str)
def test_a_call_for_each_chunk_changes_no_bit_G2(kind: Format) -> None:
    inputs = made(1003, kind)
    got = inputs.clone()
    for start in range(0, 1003, 13):
        adamw_rows(rows_of([got.part(start, 13)], index_start=[start]), hypers_of(), seed=3)
    assert_same_bits(got, stepped(inputs, "scalar"))


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_identical_rows_get_identical_results_whoever_is_beside_them_G1(num_threads: int) -> None:
    inputs = made(40_003, PLAIN)
    copies = [inputs.clone() for _ in range(5)]
    # Gradients are only read, and may be shared.
    shared = [Buffers(**{**copy.named(), "grad": inputs.grad}) for copy in copies]
    adamw_rows(rows_of(shared), hypers_of(), seed=3, num_threads=num_threads)
    expected = stepped(inputs, "scalar")
    for copy in shared:
        assert_same_bits(copy, expected)


def test_settings_are_those_of_the_row_G7() -> None:
    changes = [{}, {"weight_decay": 0.0}, {"lr": 1.0, "step": 1}, {"maximize": True}]
    inputs = [made(67, PLAIN, seed=seed) for seed in range(6)]
    used = [0, 1, 2, 3, 1, 0]
    got = [one.clone() for one in inputs]
    adamw_rows(rows_of(got, hyper=used), hypers_of(*changes), seed=3)
    for one, before, hyper in zip(got, inputs, used, strict=True):
        assert_same_bits(one, stepped(before, "scalar", **changes[hyper]))


def test_nothing_is_kept_between_calls_G3() -> None:
    program = (
        "from tests.unit.swap.test_host_kernel import DIVERSE, made, stepped\n"
        "print([stepped(made(67, kind), '').exp_avg.float().tolist() for kind in DIVERSE])"
    )
    here = [stepped(made(67, kind), "").exp_avg.float().tolist() for kind in DIVERSE]
    fresh = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert fresh.stdout.strip() == str(here)


@pytest.mark.parametrize("places", [(0,), (5,), (2,), (0, 1, 4, 5), tuple(range(6))])
def test_rows_without_elements_are_skipped_whatever_they_say_G21(places: tuple[int, ...]) -> None:
    inputs = [made(0 if place in places else 40_000, PLAIN, seed=place) for place in range(6)]
    got = [one.clone() for one in inputs]
    rows = rows_of(got)
    for place in places:
        # An empty tensor's address may be null.
        rows[place]["param"] = rows[place]["grad"] = 0
        rows[place]["hyper"] = 99
    adamw_rows(rows, hypers_of(), seed=3, num_threads=3)
    for one, before in zip(got, inputs, strict=True):
        assert_same_bits(one, stepped(before, "scalar"))
    adamw_rows(rows[:0], hypers_of(), seed=3)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("moments", DTYPES)
def test_extreme_values_agree_with_scalar(isa: str, moments: torch.dtype) -> None:
    # Signed zeros, subnormals, values whose square overflows or underflows, infinities and NaN, in every pairing.
    extremes = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 1e-30, 1.0, 3e38, -3e38, torch.inf, -torch.inf, torch.nan])
    param, grad, exp_avg = (grid.flatten() for grid in torch.meshgrid(extremes, extremes, extremes, indexing="ij"))
    inputs = Buffers(
        param=param,
        grad=grad,
        exp_avg=exp_avg.to(moments),
        exp_avg_sq=exp_avg.abs().to(moments),
        max_exp_avg_sq=param.abs().to(moments),
        out=torch.zeros(param.numel(), dtype=torch.bfloat16),
    )
    got, expected = stepped(inputs, isa).named(), stepped(inputs, "scalar").named()
    for name, tensor in got.items():
        assert torch.equal(tensor.isnan(), expected[name].isnan()), name
        assert torch.equal(tensor.nan_to_num(nan=0.0), expected[name].nan_to_num(nan=0.0)), name
        assert torch.equal(tensor.signbit() & ~tensor.isnan(), expected[name].signbit() & ~tensor.isnan()), name


def test_bits_do_not_depend_on_whether_torch_flushes_subnormals() -> None:
    # The moments stay subnormal, on this thread and on the others, which inherit its settings.
    tiny = Buffers(**{name: torch.full((BIG,), 3e-39) for name in ("param", "grad", "exp_avg", "exp_avg_sq")})
    expected = stepped(tiny, "scalar")
    for isa in available_isas():
        got = tiny.clone()
        assert torch.set_flush_denormal(True)
        try:
            adamw_rows(rows_of([got]), hypers_of(), seed=3, num_threads=3, isa=isa)
            assert torch.tensor(3e-39).mul(0.5).item() == 0.0  # as it was before the call
        finally:
            torch.set_flush_denormal(False)
        assert_same_bits(got, expected)
    assert expected.exp_avg[0] > 0


def test_the_gil_is_free_while_the_kernel_runs() -> None:
    """A half-done step can only be seen by a thread that runs during it."""
    numel = 4_000_000
    saw_half_done = False
    # Tried again because a busy machine may not give this thread a core during one call; a held GIL fails all of them.
    for _ in range(50):
        tensors = Buffers(
            param=torch.zeros(numel), grad=torch.ones(numel), exp_avg=torch.zeros(numel), exp_avg_sq=torch.zeros(numel)
        )
        first, last = tensors.exp_avg[:1].numpy(), tensors.exp_avg[-1:].numpy()

        def step(rows: np.ndarray) -> None:
            adamw_rows(rows, hypers_of(), seed=3, num_threads=1, isa="scalar")

        thread = threading.Thread(target=step, args=[rows_of([tensors])])
        thread.start()
        while thread.is_alive() and not saw_half_done:
            saw_half_done = last[0] == 0 and first[0] != 0
        thread.join()
        if saw_half_done:
            break
    assert saw_half_done


def test_calls_from_two_threads_do_not_disturb_each_other() -> None:
    inputs = [made(BIG, PLAIN, seed=seed) for seed in range(2)]
    got = [one.clone() for one in inputs]

    def stepping(one: Buffers) -> Callable[[], None]:
        return lambda: [adamw_rows(rows_of([one]), hypers_of(), seed=3, num_threads=2) for _ in range(10)] and None

    threads = [threading.Thread(target=stepping(one)) for one in got]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, before in zip(got, inputs, strict=True):
        expected = before
        for _ in range(10):
            expected = stepped(expected, "")
        assert_same_bits(one, expected)


@pytest.mark.parametrize("isa", available_isas())
def test_the_environment_can_force_a_level(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDOPT_CPU_ISA", isa)
    inputs = made(67, PLAIN)
    got = inputs.clone()
    adamw_rows(rows_of([got]), hypers_of(), seed=3)
    assert_same_bits(got, stepped(inputs, "scalar"))


def test_a_level_this_build_or_cpu_lacks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of([made(8, PLAIN)])
    for isa in {"avx2", "avx512", "no-such-level"} - set(available_isas()):
        with pytest.raises(ValueError, match=f"'{isa}' .*available here: scalar, lanes16"):
            adamw_rows(rows, hypers_of(), seed=3, isa=isa)
        monkeypatch.setenv("SHARDOPT_CPU_ISA", isa)
        with pytest.raises(ValueError, match=f"SHARDOPT_CPU_ISA='{isa}'"):
            adamw_rows(rows, hypers_of(), seed=3)
        adamw_rows(rows, hypers_of(), seed=3, isa="scalar")
