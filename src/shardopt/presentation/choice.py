"""Which presentation an optimizer gets: what is known of its class, else what a probe finds."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardopt.errors import PresentationError
from shardopt.layouts.catalog import spec_of, whole_spec_of, why_never
from shardopt.layouts.codec import Codec, codec_of
from shardopt.layouts.declared import RANK_LOCAL
from shardopt.layouts.interchange import qualified
from shardopt.layouts.learnt import LearntCodec
from shardopt.presentation.own_shards import TakesShards
from shardopt.presentation.probe import Finding, probe
from shardopt.presentation.side_storage import refuse_remembered

__all__ = ["COMPUTE", "Choice", "choose", "qualified_name"]

COMPUTE: tuple[str, ...] = ("auto", "local", "dtensor", "owner", "replicated")

# Cheapest first.
_SURE = ("local", "owner", "replicated")


def qualified_name(inner: torch.optim.Optimizer) -> str:
    """Module and name of the optimizer's class."""
    return qualified(type(inner))


@dataclass(frozen=True, slots=True)
class Choice:
    """Which presentation an optimizer gets, and the reason in one sentence.

    Attributes:
        compute: the presentation's name.
        reason: why.
        entries: element-wise entries that the class is known or was seen to keep, where it has no ``ClassSpec``.
        attributes: of the optimizer, which hold plain values and are part of its state.
        common: entries that are tensors of another shape than the parameter's, the same on every rank.
        needs_closure: whether the rule does not run without a closure.
    """

    compute: str
    reason: str
    entries: frozenset[str] = frozenset()
    attributes: frozenset[str] = frozenset()
    common: frozenset[str] = frozenset()
    needs_closure: bool = False


def choose(inner: torch.optim.Optimizer, compute: str, layouts: Collection[str] = ()) -> Choice:
    """Resolves ``compute`` for one inner optimizer.

    Args:
        inner: the optimizer.
        compute: what is asked for.
        layouts: all that are declared of entries of its state.

    Raises:
        PresentationError: ``compute`` is unknown, the class cannot be wrapped, or what was asked for would not, or is
            not known to, equal the unsharded run.
    """
    label = qualified_name(inner)
    if compute not in COMPUTE:
        raise PresentationError(f"compute={compute!r} is unknown; expected one of {', '.join(map(repr, COMPUTE))}.")
    never = why_never(inner)
    if never is not None:
        raise PresentationError(f"{label} cannot be wrapped: {never}")
    codec = codec_of(inner)
    if codec is not None:
        return _quantised(inner, codec, label, compute)
    if isinstance(inner, TakesShards):
        return _by_itself(label, compute)
    if compute == "dtensor":
        return Choice("dtensor", "asked for: the rule runs on the DTensors themselves")
    refuse_remembered(inner)
    if compute == "local" and RANK_LOCAL in layouts:
        return Choice("local", f"asked for; part of the state of {label} is declared to be each rank's own")
    if spec_of(inner) is not None:
        return _known_elementwise(label, compute)
    whole = whole_spec_of(inner)
    if whole is not None:
        why = None if whole.compute == "owner" else whole.reason
        found = Finding(whole.compute, _WHOLE, why, whole.entries, needs_closure=whole.needs_closure)
        return _decided(label, compute, found, "known")
    return _probed(inner, label, compute)


def _quantised(inner: torch.optim.Optimizer, codec: Codec, label: str, compute: str) -> Choice:
    """A class with quantised state: its blocks are counted over what it sees, so that the unsharded run needs all."""
    refusal = codec.refuse(inner)
    if refusal is not None:
        raise PresentationError(f"{label} cannot be wrapped: {refusal}")
    refuse_remembered(inner, codec.constants(inner))
    if isinstance(codec, LearntCodec):
        return _learnt(inner, codec, label, compute)
    if not codec.quantises(inner) and codec.is_elementwise(inner) and compute in ("auto", "local", "owner"):
        return _known_elementwise(label, compute)
    if compute in ("auto", "owner"):
        how = "" if compute == "auto" else "asked for; "
        return Choice(
            "owner",
            f"{how}{label} quantises blocks of what it sees, and whole parameters give it those of the unsharded run",
        )
    apart = codec.is_elementwise(inner)
    if compute == "local" and apart:
        return Choice("local", f"asked for; {label} quantises blocks of each shard, counted from the shard's beginning")
    or_local = "; compute='local' quantises each shard by itself, without communication." if apart else "."
    raise PresentationError(
        f"{label}: compute={compute!r} does not suit quantised state. compute='owner' (what 'auto' takes) gives what "
        f"an unsharded run gives{or_local}"
    )


def _learnt(inner: torch.optim.Optimizer, codec: LearntCodec, label: str, compute: str) -> Choice:
    """A class that learns from all parameters that it sees how they are quantised: fewer of them are another rule."""
    couples = f"{label} learns from all parameters that it sees what the codes of each of them mean"
    if compute in ("auto", "replicated"):
        how = "" if compute == "auto" else "asked for; "
        return Choice("replicated", f"{how}{couples}, and to all of them it is what it is unsharded")
    if compute != "local":
        raise PresentationError(
            f"{couples}, so compute={compute!r} would differ from the unsharded run. compute='replicated' (what "
            "'auto' takes) equals it; compute='local' steps the shards of each rank by themselves, which does not."
        )
    why_not = codec.why_not_local(inner)
    if why_not is not None:
        raise PresentationError(
            f"{label}: compute='local' would be wrong, since {why_not}. compute='replicated' (what 'auto' takes) gives "
            "what an unsharded run gives."
        )
    return Choice("local", f"asked for; {couples}, and each rank from its shards alone")


def _by_itself(label: str, compute: str) -> Choice:
    if compute not in ("auto", "dtensor"):
        raise PresentationError(
            f"{label} takes the shards of DTensors by itself, so it cannot be shown anything else; leave "
            f"compute={compute!r} out."
        )
    return Choice("shards", f"{label} is element-wise and takes the shards of DTensors by itself")


_WHOLE = "needs whole parameters to update one"


def _known_elementwise(label: str, compute: str) -> Choice:
    if compute in ("auto", "local"):
        return Choice("local", f"{label} is element-wise: a shard's update needs only the shard")
    return Choice(compute, f"asked for; {label} is element-wise, so that compute='local' would be right and cheaper")


def _probed(inner: torch.optim.Optimizer, label: str, compute: str) -> Choice:
    try:
        found = _remembered(inner)
    except Exception as error:
        why = f"{type(error).__name__}: {str(error)[:200]}"
        if compute in ("auto", "local"):
            raise PresentationError(
                f"{label} could not be tried on small parameters ({why}), so nothing is known of its rule. Pass "
                "compute='replicated', which is right for every rule that runs unsharded; compute='owner' if it "
                "updates each parameter by itself; or compute='dtensor' for torch's own dispatch."
            ) from error
        return Choice(compute, f"asked for; {label} could not be tried on small parameters ({why})")
    return _decided(label, compute, found, "tried on small parameters")


def _decided(label: str, compute: str, found: Finding, how: str) -> Choice:
    """The choice, when what is asked for is at least as careful as what was found."""
    reasons = {
        "local": f"{label} gives the same bits on parts of tensors as on whole ones, and mixes no elements ({how})",
        "owner": f"{label} updates each parameter by itself, but not in parts: it {found.why_not} ({how})",
        "replicated": f"{label} does not update each parameter by itself: it {found.why_not_owner} ({how})",
    }
    asked = found.compute if compute == "auto" else compute
    if _SURE.index(asked) < _SURE.index(found.compute):
        why = found.why_not if found.compute == "owner" else found.why_not_owner
        raise PresentationError(
            f"{label} {why} ({how}), so compute={compute!r} could silently differ from the unsharded run. Pass "
            f"compute={found.compute!r}, or 'auto'; or compute='dtensor' to run it on the DTensors with torch's own "
            "dispatch, if its rule supports them."
        )
    reason = reasons[found.compute] if asked == found.compute else f"asked for; {reasons[found.compute]}"
    common = found.common if asked == "local" else frozenset()
    return Choice(asked, reason, found.entries, found.attributes, common, found.needs_closure)


# By the class itself, since two may have one name, and weakly, since another may get its place in memory.
_FINDINGS: weakref.WeakKeyDictionary[type[torch.optim.Optimizer], dict[str, Finding]] = weakref.WeakKeyDictionary()


def _remembered(inner: torch.optim.Optimizer) -> Finding:
    """What the probe finds, once for each class, options and numbers of dimensions."""
    known = _FINDINGS.setdefault(type(inner), {})
    key = _signature(inner)
    if key not in known:
        known[key] = probe(inner)
    return known[key]


def _signature(inner: torch.optim.Optimizer) -> str:
    groups = [
        (sorted({param.dim() for param in group["params"]}), _values(group, ("params", "param_names")))
        for group in inner.param_groups
    ]
    return repr((groups, _values(vars(inner), ("state", "param_groups", "defaults"))))


def _values(held: Mapping[str, Any], leave_out: tuple[str, ...]) -> list[tuple[str, str]]:
    return [(key, repr(value)) for key, value in held.items() if key not in leave_out and "hooks" not in key]
