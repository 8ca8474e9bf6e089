"""What the Triton kernel is compiled to for GPUs of three generations; none is needed to compile."""

from __future__ import annotations

import importlib.util
import itertools
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest
import torch

from shardopt.swap.device_rows import BLOCK, Kind
from shardopt.swap.kernel_rows import DtypeCode, MasterKind
from tests.support.device_chunks import chunk_of
from tests.support.host_rows import FORMATS, Format, made
from tests.support.triton_worker import Compiled, compiler

Compile: TypeAlias = Callable[[tuple[Kind, int]], Compiled]

CAPABILITIES = (80, 90, 100)
NARROW = Format(param="bf16 with a remainder", grad=torch.bfloat16, moments=torch.bfloat16, amsgrad=True)
MIXED = Format(param="fp32 with a copy", grad=torch.bfloat16, moments=torch.bfloat16, amsgrad=True)
QUICK = [
    (Format(param="fp32"), 80),
    (Format(param="fp32"), 90),
    (Format(param="bf16 over fp32", grad=torch.bfloat16), 90),
    (MIXED, 100),
    (NARROW, 90),
    (Format(param="bf16", grad=torch.bfloat16, moments=torch.bfloat16), 100),
    # ptxas spills here unless it is told how many registers there are.
    (Format(param="fp32 with a copy", amsgrad=True), 100),
]
EVERY = [
    pytest.param(
        kind, capability, marks=() if (kind, capability) in QUICK else pytest.mark.slow, id=f"{kind}-{capability}"
    )
    for kind, capability in itertools.product(FORMATS, CAPABILITIES)
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compile]:
    with compiler(tmp_path_factory.mktemp("triton")) as ask:
        yield ask


def kind_of(form: Format, *, aligned: bool) -> Kind:
    return chunk_of([made(1, form)]).kind(aligned=aligned)


def streams(kind: Kind) -> tuple[list[int], list[int]]:
    """Bytes of an element of everything that is loaded, and of everything that is stored."""
    param, grad, moment = (
        4 if dtype == DtypeCode.FP32 else 2 for dtype in (kind.param_dtype, kind.grad_dtype, kind.moment_dtype)
    )
    state = [moment] * (3 if kind.amsgrad else 2)
    master = {MasterKind.NONE: [], MasterKind.FP32: [4], MasterKind.REMAINDER16: [2]}[kind.master_kind]
    # Behind an fp32 master, the parameter is only written.
    read = [] if kind.master_kind == MasterKind.FP32 else [param]
    return [grad, *state, *master, *read], [param, *state, *master, *([2] if kind.has_out else [])]


def elements_per_thread(kind: Kind) -> int:
    """Of the widest stream, as many as fill 128 bits."""
    return 16 // max(itertools.chain(*streams(kind)))


def global_accesses(text: str, load: str, store: str) -> tuple[Counter[str], Counter[str]]:
    loads, stores = (Counter(re.findall(rf"\b{name}\.([.\w]+)", text)) for name in (load, store))
    return loads, stores


def tool(name: str, *arguments: str | Path) -> str:
    spec = importlib.util.find_spec("triton")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(("form", "capability"), EVERY)
def test_every_stream_is_as_wide_as_it_can_be(form: Format, capability: int, compiled: Compile, tmp_path: Path) -> None:
    kind = kind_of(form, aligned=True)
    made_of = compiled((kind, capability))
    loaded, stored = streams(kind)
    per_thread = elements_per_thread(kind)
    assert made_of.num_warps * 32 * per_thread == BLOCK

    # fp32: 128 bits. bf16: 128 bits where everything is of 16 bits, else 64, as a thread has four elements of each.
    access_of = {2: "v2.b32" if per_thread == 4 else "v4.b32", 4: "v4.b32"}
    narrowest = {2: "b16", 4: "b32"}
    loads, stores = global_accesses(made_of.ptx, "ld.global", "st.global")
    # The table and the numbers of a row are loaded by themselves, so single words may be anything.
    assert {name: count for name, count in loads.items() if name[0] == "v"} == Counter(map(access_of.get, loaded))
    # A row's last few elements are stepped one by one, in code of their own.
    assert loads["b16"] == loaded.count(2)
    assert stores == Counter(map(access_of.get, stored)) + Counter(map(narrowest.get, stored))

    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(made_of.cubin)
    loads, stores = global_accesses(tool("cuobjdump", "-sass", cubin), "LDG.E", "STG.E")
    assert loads["128"] == sum(access_of[size] == "v4.b32" for size in loaded)
    assert stores["128"] == sum(access_of[size] == "v4.b32" for size in stored)
    assert stores["64"] == sum(access_of[size] == "v2.b32" for size in stored)


@pytest.mark.parametrize(("form", "capability"), EVERY)
def test_nothing_spills_and_a_thousand_threads_fit(
    form: Format, capability: int, compiled: Compile, tmp_path: Path
) -> None:
    kind = kind_of(form, aligned=True)
    made_of = compiled((kind, capability))
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(made_of.cubin)
    usage = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", tool("cuobjdump", "-res-usage", cubin))
    assert usage is not None
    registers, stack, local = map(int, usage.groups())
    assert (stack, local) == (0, 0)
    assert not re.search(r"\b(LDL|STL)\b", tool("cuobjdump", "-sass", cubin))
    # 65,536 registers of a multiprocessor, for programs of 1,024 elements.
    assert 65536 // (registers * 32 * made_of.num_warps) >= 4


@pytest.mark.parametrize(("form", "capability"), EVERY)
def test_every_operation_rounds_as_it_is_written(form: Format, capability: int, compiled: Compile) -> None:
    kind = kind_of(form, aligned=True)
    made_of = compiled((kind, capability))
    operations = Counter(re.findall(r"\b((?:fma|div|sqrt|rsqrt|rcp|ex2|cvt)\.[.\w]*f(?:16|32)\w*)\b", made_of.ptx))
    # Two at once, on compute capability 10.0.
    operations["fma.rn.f32"] += 2 * operations.pop("fma.rn.f32x2", 0)
    # A thread's elements, and once more for a row's last few.
    copies = elements_per_thread(kind) + 1
    assert operations == {"fma.rn.f32": 3 * copies, "div.rn.f32": 2 * copies, "sqrt.rn.f32": copies}
    for inexact in (".approx", ".ftz", ".full", ".bf16"):
        assert inexact not in made_of.ptx
    # ptxas is not to make more of them either.
    assert made_of.enable_fp_fusion is False


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=() if form == MIXED else pytest.mark.slow, id=str(form)) for form in FORMATS]
)
def test_nothing_is_wide_where_rows_are_not_aligned(form: Format, compiled: Compile) -> None:
    kind = kind_of(form, aligned=False)
    loaded, stored = streams(kind)
    loads, stores = global_accesses(compiled((kind, 90)).ptx, "ld.global", "st.global")
    assert not [name for name in loads if name[0] == "v"]
    per_thread = elements_per_thread(kind)
    assert loads["b16"] == per_thread * loaded.count(2)
    assert stores == {
        name: per_thread * stored.count(size) for name, size in (("b16", 2), ("b32", 4)) if size in stored
    }


def test_a_kind_is_compiled_once_wherever_its_tensors_lie(compiled: Compile) -> None:
    # The worker's tensors are aligned to 64 bytes, which triton would take note of.
    assert compiled((kind_of(MIXED, aligned=False), 90)).assumed == {}
