"""What the rank pool and its worker processes say to each other, and what a job comes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

OutcomeKind = Literal["ok", "error", "hang", "died"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one rank of a job came to.

    Attributes:
        rank: the rank, 0 to world size - 1.
        pid: its process.
        kind: ``ok`` returned; ``error`` raised; ``hang`` neither before its deadline; ``died`` its process ended.
        value: what the function returned, when ``ok``.
        error_type: class name of what was raised; empty unless ``error``.
        error: message of what was raised, or one sentence on the hang or the death; empty when ``ok``.
        error_attributes: the plain form of ``failures``, ``missing``, ``problems``, ``operation`` and ``disagree``
            where the exception has them: containers, numbers, strings; an exception inside is "Type: message".
        cause: "Type: message" of the exception's ``__cause__``, or empty.
        traceback: the whole formatted traceback, when ``error``.
        warnings: every warning given while the function ran, as "Category: message (file:line)".
        stacks: the stacks of all threads, when ``hang``.
        points: the names the rank passed to ``reached``, in order.
        output: what the process wrote to stdout and stderr during the job.
    """

    rank: int
    pid: int
    kind: OutcomeKind
    value: Any = None
    error_type: str = ""
    error: str = ""
    error_attributes: Mapping[str, Any] = field(default_factory=dict)
    cause: str = ""
    traceback: str = ""
    warnings: tuple[str, ...] = ()
    stacks: str = ""
    points: tuple[str, ...] = ()
    output: str = ""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Pool to worker: be this rank of this job.

    Attributes:
        port: of the job's TCP store on 127.0.0.1; None asks this rank to host it and to report the port.
        payload: the packed argument tuple.
    """

    job: int
    rank: int
    world_size: int
    process_group: bool
    port: int | None
    module: str
    qualified_name: str
    payload: bytes


@dataclass(frozen=True)
class Resume:
    """Pool to worker: the point or wait with this token may go on."""

    token: int


@dataclass(frozen=True)
class Release:
    """Pool to worker: every rank has finished, so the process group may be destroyed."""

    job: int


@dataclass(frozen=True)
class Stop:
    """Pool to worker: no more jobs."""


@dataclass(frozen=True)
class Ready:
    """Worker to pool: imports are done."""


@dataclass(frozen=True)
class Hosting:
    """Worker to pool: this rank's TCP store listens on this port."""

    job: int
    port: int


@dataclass(frozen=True)
class Reached:
    """Worker to pool: a named point was reached; the thread waits for ``Resume``."""

    job: int
    name: str
    token: int


@dataclass(frozen=True)
class Waiting:
    """Worker to pool: this thread waits until ``count`` ranks have reached the named point."""

    job: int
    name: str
    count: int
    token: int


@dataclass(frozen=True)
class Finished:
    """Worker to pool: the function returned (``payload`` is the packed value) or raised."""

    job: int
    outcome: Outcome
    payload: bytes | None


@dataclass(frozen=True)
class Released:
    """Worker to pool: the process group is gone, this worker is ready for another job."""

    job: int
