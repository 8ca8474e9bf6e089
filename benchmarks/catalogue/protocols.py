"""Every optimizer of the catalogue, and the one table of those that are not simply made of parameters and stepped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

import pytorch_optimizer
import torch
from torch.optim import AdamW, Optimizer

from benchmarks.catalogue.models import TrainedModel

__all__ = ["Calls", "Protocol", "classes", "find", "protocol_of", "special"]

Calls = Literal["step", "closure", "closure of a pair", "step after closure", "create_graph", "fused_backward"]
"""How a training loop calls the optimizer: ``step()`` after backward; ``step(closure)``; the same with a closure that
returns the model's outputs and the loss; backward, then ``step(closure)``; ``step()`` after
``backward(create_graph=True)``; ``fused_backward(loss, lr)`` in place of both."""

Make = Callable[[Any, TrainedModel], Sequence[Optimizer]]
"""Optimizers, of the class and of the model's parameters. More than one where the class does not take all of them."""


def _plainly(optimizer: Any, model: TrainedModel) -> Sequence[Optimizer]:
    return [optimizer(model.parameters())]


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How one class is made and called.

    Attributes:
        make: makes it. Options are the class's defaults unless they would leave a parameter as it was, or diverge.
        calls: what a training loop calls.
        compute: what to ask the wrapper for: what ``auto`` cannot try on small parameters, it refuses.
        refused: why no wrapper can run it; then shardopt has to refuse it by name.
    """

    make: Make = _plainly
    calls: Calls = "step"
    compute: str = "auto"
    refused: str = ""


def _with(**options: Any) -> Make:
    return lambda optimizer, model: [optimizer(model.parameters(), **options)]


def _of_model(**options: Any) -> Make:
    return lambda optimizer, model: [optimizer(model, **options)]


def _around_adamw(optimizer: Any, model: TrainedModel) -> Sequence[Optimizer]:
    return [optimizer(AdamW(model.parameters()))]


def _around_large_adamw(optimizer: Any, model: TrainedModel) -> Sequence[Optimizer]:
    return [optimizer(AdamW(model.parameters(), lr=1.0))]


def _in_train_mode(optimizer: Any, model: TrainedModel) -> Sequence[Optimizer]:
    made = optimizer(AdamW(model.parameters()))
    made.train()
    return [made]


def _class_around_adamw(optimizer: Any, model: TrainedModel) -> Sequence[Optimizer]:
    return [optimizer(model.parameters(), AdamW, lr=1e-3)]


def _muon_groups(optimizer: Any, model: TrainedModel) -> Sequence[Optimizer]:
    """Weights of matrices and convolutions to Muon, embeddings and vectors to its AdamW, as its documentation says."""
    matrices = [param for name, param in model.named_parameters() if param.dim() > 1 and "embed" not in name]
    others = [param for name, param in model.named_parameters() if param.dim() == 1 or "embed" in name]
    groups = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False, "lr": 3e-4}]
    return [optimizer([group for group in groups if group["params"]])]


def _matrices_and_adamw(**options: Any) -> Make:
    def make(optimizer: Any, model: TrainedModel) -> Sequence[Optimizer]:
        matrices = [param for param in model.parameters() if param.dim() == 2]
        return [optimizer(matrices, **options), AdamW(param for param in model.parameters() if param.dim() != 2)]

    return make


def _without_offsets(optimizer: Any, model: TrainedModel) -> Sequence[Optimizer]:
    """All but the vector of 5,001 elements, which would take the inverse root of a 5,001 x 5,001 matrix every step."""
    small = [param for param in model.parameters() if param.numel() != 5001]
    large = [param for param in model.parameters() if param.numel() == 5001]
    return [optimizer(small), *[AdamW([param]) for param in large]]


def _factors_and_adamw(optimizer: Any, model: TrainedModel) -> Sequence[Optimizer]:
    others = [param for name, param in model.named_parameters() if name not in ("down", "up")]
    return [optimizer([model.down, model.up]), AdamW(others)]


def _wsam(optimizer: Any, model: TrainedModel) -> Sequence[Optimizer]:
    return [optimizer(model, model.parameters(), AdamW, lr=1e-3)]


class _FixedRho:
    """A schedule for GSAM's radius that has one value."""

    def step(self) -> float:
        return 0.05


def _gsam(optimizer: Any, model: TrainedModel) -> Sequence[Optimizer]:
    return [optimizer(model.parameters(), AdamW(model.parameters()), model, _FixedRho())]


_NEEDS_GRAPH = (
    "differentiates gradients with respect to the parameters it holds; a shard's gradient is no function of the shard, "
    "and FSDP2 has no second backward pass"
)
_STEPS_IN_BACKWARD = "updates each weight from a hook in backward, before gradients are reduced over ranks"

_HOLDS_ANOTHER = (
    "is made around another optimizer, which has a state and groups of its own that only it steps; wrap that one"
)

_PO = "pytorch_optimizer."
# Not in the list that pytorch_optimizer has of its optimizers, but for Magma.
_AROUND_ANOTHER: Mapping[str, Protocol] = {
    "FriendlySAM": Protocol(make=_class_around_adamw, calls="step after closure", refused=_HOLDS_ANOTHER),
    "GSAM": Protocol(make=_gsam, calls="closure of a pair", refused=_HOLDS_ANOTHER),
    "LookSAM": Protocol(make=_class_around_adamw, calls="step after closure", refused=_HOLDS_ANOTHER),
    "Lookahead": Protocol(make=_around_adamw, refused=_HOLDS_ANOTHER),
    "Magma": Protocol(refused=_HOLDS_ANOTHER),
    "OrthoGrad": Protocol(make=_around_adamw, refused=_HOLDS_ANOTHER),
    "PCGrad": Protocol(make=_around_adamw, refused=_HOLDS_ANOTHER),
    "SAM": Protocol(make=_class_around_adamw, calls="step after closure", refused=_HOLDS_ANOTHER),
    "ScheduleFreeWrapper": Protocol(make=_in_train_mode, refused=_HOLDS_ANOTHER),
    # It scales updates by a factor that starts at 1e-8.
    "TRAC": Protocol(make=_around_large_adamw, refused=_HOLDS_ANOTHER),
    "WSAM": Protocol(make=_wsam, calls="step after closure", refused=_HOLDS_ANOTHER),
}
_PROTOCOLS: Mapping[str, Protocol] = {
    "torch.optim.LBFGS": Protocol(make=_with(max_iter=4, lr=0.1), calls="closure"),
    "torch.optim.Muon": Protocol(make=_matrices_and_adamw()),
    "torch.optim.SparseAdam": Protocol(refused="takes sparse gradients only, which FSDP2 cannot shard"),
    **{f"{_PO}{name}": Protocol(make=_muon_groups) for name in ("AdaGO", "AdaMuon", "Muon", "MuonClip", "NorMuon")},
    _PO + "DistributedMuon": Protocol(make=_muon_groups, refused="communicates by itself"),
    _PO + "AdaHessian": Protocol(calls="create_graph", refused=_NEEDS_GRAPH),
    _PO + "SophiaH": Protocol(calls="create_graph", refused=_NEEDS_GRAPH),
    _PO + "LOMO": Protocol(make=_of_model(), calls="fused_backward", refused=_STEPS_IN_BACKWARD),
    _PO + "AdaLOMO": Protocol(make=_of_model(), calls="fused_backward", refused=_STEPS_IN_BACKWARD),
    # Its default lr is 1. The two models have one block for each of its three rules.
    _PO + "AdamMini": Protocol(make=_of_model(lr=1e-3, num_embeds=24, num_heads=4), compute="replicated"),
    _PO + "AliG": Protocol(make=_with(max_lr=0.1), calls="closure", compute="replicated"),
    _PO + "BSAM": Protocol(
        make=_with(num_data=1000, lr=0.01, rho=1e-3), calls="step after closure", compute="replicated"
    ),
    # Without opt_einsum, torch multiplies its two triangular factors of a 160 x 192 matrix out first: 3.8 GB.
    _PO + "Kron": Protocol(make=_with(memory_save_mode="smart_one_diag")),
    _PO + "LoRARite": Protocol(make=_factors_and_adamw),
    _PO + "Ranger21": Protocol(make=_with(num_iterations=30)),
    # Its search for a multiplier takes up to 100 orthogonalizations a matrix and step.
    _PO + "SpectralSphere": Protocol(make=_matrices_and_adamw(solver_max_iterations=5)),
    # Blocks of its default size, 1,024, take a second a step.
    _PO + "DASH": Protocol(make=_with(block_size=128)),
    # By default it trains weights below 1e-3 only, of which most parameters have none.
    _PO + "SaRA": Protocol(
        make=_with(threshold=0.9, lr=1e-3), refused="keeps masks in a table of its own, under the parameters themselves"
    ),
    _PO + "Shampoo": Protocol(make=_without_offsets),
    # Diverges at its default of 0.1.
    _PO + "VSGD": Protocol(make=_with(lr=1e-3)),
    **{f"{_PO}{name}": protocol for name, protocol in _AROUND_ANOTHER.items()},
}


def classes() -> Mapping[str, Any]:
    """Every class by ``"torch.optim.<name>"`` or ``"pytorch_optimizer.<name>"``, sorted.

    A class of torch that pytorch_optimizer lists too is there once, as torch's.
    """
    torchs = {value for value in vars(torch.optim).values() if isinstance(value, type) and issubclass(value, Optimizer)}
    torchs.discard(Optimizer)
    others = {pytorch_optimizer.load_optimizer(name) for name in pytorch_optimizer.get_supported_optimizers()}
    others |= {getattr(pytorch_optimizer, name) for name in _AROUND_ANOTHER}
    by_name = {f"torch.optim.{known.__name__}": known for known in torchs}
    by_name |= {f"{_PO}{known.__name__}": known for known in others - torchs}
    return dict(sorted(by_name.items(), key=lambda item: item[0].rpartition(".")[2].lower()))


def find(wanted: Sequence[str]) -> list[str]:
    """Names of the classes that ``wanted`` names, in full or by their last part, in any case; all for none.

    Raises:
        ValueError: there is no such class.
    """
    known = list(classes())
    if not wanted:
        return known
    found: list[str] = []
    for one in wanted:
        matches = [name for name in known if one.lower() in (name.lower(), name.rpartition(".")[2].lower())]
        if not matches:
            raise ValueError(f"{one!r} is no optimizer of torch.optim or pytorch_optimizer")
        found += [name for name in matches if name not in found]
    return found


def special() -> Set[str]:
    """Names of the classes that are not simply made of parameters and stepped."""
    return _PROTOCOLS.keys()


def protocol_of(name: str) -> Protocol:
    """How the class is made and called."""
    return _PROTOCOLS.get(name, Protocol())
