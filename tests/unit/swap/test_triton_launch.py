"""What a launch refuses before it reaches a GPU, and what it says without triton."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shardopt.swap.device_rows import Kind
from shardopt.swap.kernel_rows import DtypeCode, MasterKind
from shardopt.swap.triton_kernel import launch_adamw, require_triton

PLAIN = Kind(param_dtype=DtypeCode.FP32, grad_dtype=DtypeCode.FP32, moment_dtype=DtypeCode.FP32)
FULL = Kind(
    param_dtype=DtypeCode.BF16,
    grad_dtype=DtypeCode.BF16,
    moment_dtype=DtypeCode.BF16,
    master_kind=MasterKind.REMAINDER16,
    amsgrad=True,
)


def arguments(kind: Kind) -> dict[str, Tensor]:
    moment = torch.float32 if kind.moment_dtype == DtypeCode.FP32 else torch.bfloat16
    made = {
        "rows": torch.zeros(2, 11, dtype=torch.int64),
        "blocks": torch.zeros(2, 2, dtype=torch.int32),
        "hypers": torch.zeros(1, 8),
        "scalars": torch.zeros(2),
        "exp_avg": torch.zeros(64, dtype=moment),
        "exp_avg_sq": torch.zeros(64, dtype=moment),
    }
    if kind.amsgrad:
        made["max_exp_avg_sq"] = torch.zeros(64, dtype=moment)
    if kind.master_kind != MasterKind.NONE:
        made["master"] = torch.zeros(64, dtype=torch.int16)
    return made


@pytest.mark.parametrize("kind", [PLAIN, FULL], ids=["plain", "full"])
def test_what_fits_is_not_refused_and_no_blocks_are_no_launch(kind: Kind) -> None:
    # A launch would need a GPU.
    launch_adamw(kind, **arguments(kind), num_blocks=0)


SPOILS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "dtype": lambda tensor: tensor.double(),
    "shape": lambda tensor: tensor[..., None],
    "strides": lambda tensor: torch.stack([tensor, tensor], -1)[..., 0],
    "device": lambda tensor: tensor.to("meta"),
    "none": lambda tensor: None,
}


@pytest.mark.parametrize("spoil", SPOILS)
# The device of exp_avg is what the others are compared with, and it is never None.
@pytest.mark.parametrize("name", [name for name in arguments(FULL) if name != "exp_avg"])
def test_a_tensor_that_is_not_what_the_kind_asks_for_is_refused_by_name(name: str, spoil: str) -> None:
    given = arguments(FULL)
    with pytest.raises(ValueError, match=f"nothing was launched for Kind(?s:.*)\n  {name} is [^\n]*must be [^\n]*$"):
        launch_adamw(FULL, **{**given, name: SPOILS[spoil](given[name])}, num_blocks=0)


@pytest.mark.parametrize("spoil", ["dtype", "shape", "strides"])
def test_an_exp_avg_that_is_not_what_the_kind_asks_for_is_refused(spoil: str) -> None:
    given = arguments(FULL)
    with pytest.raises(ValueError, match="\n  exp_avg is [^\n]*must be torch.bfloat16, contiguous, of shape"):
        launch_adamw(FULL, **{**given, "exp_avg": SPOILS[spoil](given["exp_avg"])}, num_blocks=0)


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master"])
def test_a_slot_that_is_not_aligned_is_refused_for_an_aligned_kind(name: str) -> None:
    given = arguments(FULL)
    given[name] = torch.zeros(65, dtype=given[name].dtype)[1:]
    launch_adamw(FULL, **given, num_blocks=0)
    with pytest.raises(ValueError, match=f"\n  {name} is at address [^\n]* must be a multiple of 16$"):
        launch_adamw(replace(FULL, aligned=True), **given, num_blocks=0)


def test_all_that_is_wrong_is_told_at_once() -> None:
    given = arguments(PLAIN)
    given |= {
        "blocks": torch.zeros(3, 2, dtype=torch.int32),
        "hypers": torch.zeros(1, 7),
        "exp_avg_sq": torch.zeros(63),
        "master": torch.zeros(64),
    }
    with pytest.raises(ValueError, match="nothing was launched") as refused:
        launch_adamw(PLAIN, **given, num_blocks=-1)
    must = "; it must be torch.float32, contiguous, of shape"
    assert str(refused.value).splitlines()[1:] == [
        f"  hypers is torch.float32 of shape (1, 7) and strides (7, 1) on cpu{must} any x 8, on cpu",
        f"  exp_avg_sq is torch.float32 of shape (63,) and strides (1,) on cpu{must} 64, on cpu",
        "  master is a tensor of torch.float32; for this kind it must be None",
        "  blocks has 3 rows; it must have as many as rows, 2",
        "  num_blocks is -1; it must be that of the rows",
    ]


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
from shardopt.swap.triton_kernel import require_triton
try:
    require_triton()
except ImportError as error:
    print(error)
"""


def test_without_triton_one_error_says_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, check=True)
    assert done.stdout == (
        "SwapAdamW steps parameters on a GPU with a Triton kernel, and triton cannot be imported (import of triton "
        "halted; None in sys.modules); install it: pip install 'shardopt[triton]'\n"
    )


def test_with_triton_there_is_none() -> None:
    require_triton()
