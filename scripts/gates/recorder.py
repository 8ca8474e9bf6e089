"""A plugin of pytest that selects the tests of gates and writes down what became of each, as it happens.

    SHARDOPT_GATE=request.json python -m pytest -p gate_recorder FILES

``request.json`` has ``wanted`` (node ids; one without parameters stands for all of that test's) and ``record``, the
file that gets a line of JSON for each event. A run that ends without a line ``finished`` did not end by itself. What a
fixture that tests share runs on ranks counts for the first of them alone: a gate needs tests with runs of their own.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Recorder", "matches", "pytest_configure"]


def matches(wanted: str, nodeid: str) -> bool:
    """Whether the test is the wanted one, or one of its parameters."""
    return nodeid == wanted or nodeid.startswith(f"{wanted}[")


class Recorder:
    """Writes the record of one run.

    Args:
        wanted: node ids.
        record: file that is written anew.
    """

    def __init__(self, wanted: list[str], record: Path) -> None:
        self._wanted = wanted
        self._file = record.open("w", encoding="utf-8", buffering=1)
        self._test = ""

    def _write(self, event: str, **values: Any) -> None:
        self._file.write(json.dumps({"event": event, **values}) + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keeps the wanted tests; trylast: what other options would take away has been taken away, and is missed."""
        self._write("missing", tests=[name for name in self._wanted if not any(matches(name, i.nodeid) for i in items)])
        items[:] = [item for item in items if any(matches(name, item.nodeid) for name in self._wanted)]

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        """A gate's tests are never left out."""
        left_out = [item.nodeid for item in items if any(matches(name, item.nodeid) for name in self._wanted)]
        self._write("deselected", tests=left_out)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A module that cannot be imported, or skips itself, has no tests to miss."""
        if report.outcome != "passed":
            self._write("collection", test=report.nodeid, outcome=report.outcome, text=_last_line(report.longrepr))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """From here on the numbers of ranks are seen."""
        self._write("selected", tests=[item.nodeid for item in session.items])
        from tests.support.ranks import RankPool

        genuine = RankPool.outcomes

        def outcomes(pool: RankPool, world_size: int, *args: Any, **options: Any) -> Any:
            self._write("ranks", test=self._test, ranks=world_size)
            return genuine(pool, world_size, *args, **options)

        RankPool.outcomes = outcomes  # type: ignore[method-assign]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Says in which test a run was that did not end."""
        self._test = nodeid
        self._write("began", test=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One line for each phase of a test."""
        self._write(
            "phase",
            test=report.nodeid,
            phase=report.when,
            outcome=report.outcome,
            expected_to_fail=hasattr(report, "wasxfail"),
            seconds=report.duration,
            text=_last_line(report.longrepr),
        )

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Also says whose code was tested."""
        package = sys.modules.get("shardopt")
        kernel = sys.modules.get("shardopt._host")
        places = [getattr(module, "__file__", None) for module in (package, kernel)]
        self._write("finished", status=int(exitstatus), package=places[0], kernel=places[1])
        self._file.close()


def _last_line(longrepr: Any) -> str:
    if isinstance(longrepr, tuple):
        return str(longrepr[-1])
    crash = getattr(longrepr, "reprcrash", None)
    text = str(longrepr or "") if crash is None else crash.message
    return text.strip().partition("\n")[0][:300]


def pytest_configure(config: pytest.Config) -> None:
    """Registers the recorder that the environment asks for."""
    request = json.loads(Path(os.environ["SHARDOPT_GATE"]).read_text(encoding="utf-8"))
    config.pluginmanager.register(Recorder(request["wanted"], Path(request["record"])), "gate recorder")
