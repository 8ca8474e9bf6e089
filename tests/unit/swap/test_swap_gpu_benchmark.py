"""The benchmark of SwapAdamW on a GPU: what of it can be tried without one."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from tests.unit.swap.swap_cases import same_bits

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"

pytestmark = pytest.mark.timeout(560)


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("swap_gpu", BENCHMARKS / "swap_gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "swap_gpu", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, on which it would run")
def test_without_a_gpu_it_says_that_it_did_not_run(tmp_path: Path) -> None:
    out = tmp_path / "swap_gpu.jsonl"
    command = [sys.executable, "-W", "error", "benchmarks/swap_gpu.py", "--out", str(out)]
    done = subprocess.run(command, cwd=BENCHMARKS.parent, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout == "swap_gpu: torch finds no CUDA device, so nothing was measured.\n"
    assert not out.exists()


def test_the_serial_swap_is_adamw(benchmark: ModuleType) -> None:
    config = benchmark.Config(mebi=1, tensors=3, steps=1)
    params = benchmark.parameters(config, torch.device("cpu"))
    assert [param.numel() for param in params] == [1 << 18, 3 << 17, 3 << 17]
    twins = [nn.Parameter(param.detach().clone()) for param in params]
    serial, other = benchmark.SerialSwap(params, pin=False), torch.optim.AdamW(twins, fused=True)
    for number in range(3):
        for param, twin in zip(params, twins, strict=True):
            param.grad.fill_(0.1 + number)
            twin.grad = param.grad.clone()
        serial.step()
        other.step()
    assert same_bits([param.detach() for param in params], [twin.detach() for twin in twins])


def test_the_limit_is_the_slower_of_link_and_memory(benchmark: ModuleType) -> None:
    link = benchmark.Rates(link=50e9, memory=200e9)
    memory = benchmark.Rates(link=50e9, memory=80e9)
    assert link.limit(10**9) == pytest.approx(160)
    assert memory.limit(10**9) == pytest.approx(200)


def test_each_bar_can_be_missed(benchmark: ModuleType, tmp_path: Path) -> None:
    good = {"swap": 110.0, "serial": 200.0, "fused": 1.0}
    assert all(bar.passed for bar in benchmark.bars_of(good, 100.0, {"peak": 10.0, "ring": 10.0}))
    for medians, limit, peak, name in (
        (good, 90.0, 10.0, "swap / limit"),
        ({**good, "serial": 180.0}, 100.0, 10.0, "serial / swap"),
        (good, 100.0, 10.2, "peak device memory / ring"),
    ):
        missed = [bar.name for bar in benchmark.bars_of(medians, limit, {"peak": peak, "ring": 10.0}) if not bar.passed]
        assert missed == [name]
    pytest.importorskip("matplotlib", reason="the picture is drawn with it")
    benchmark.draw(good, 100.0, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000
