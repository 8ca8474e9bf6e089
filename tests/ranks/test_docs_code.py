"""The Python of the documentation runs, on the ranks that its pages say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.docs_code import run_session
from tests.support.docs_blocks import PAGES, ROOT, Block, Session, sessions
from tests.support.ranks import RankError, RankPool

RUN = {
    path.relative_to(ROOT).as_posix(): found
    for path in PAGES
    if (found := sessions(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")))
}


@pytest.mark.parametrize("page", RUN)
def test_the_blocks_of_a_page_run_in_order(ranks: RankPool, tmp_path: Path, page: str) -> None:
    for session in RUN[page]:
        done = ranks.run(
            session.num_ranks, run_session, session, str(tmp_path / "run"), process_group=session.process_group
        )
        assert done == [len(session.blocks)] * session.num_ranks


def test_a_block_that_is_wrong_fails_with_its_line(ranks: RankPool, tmp_path: Path) -> None:
    session = Session("docs/wrong.md", (Block(7, "x = 1\nx.gone\n", "1 rank"),), 1, True, True)
    with pytest.raises(RankError, match=r'(?s)"docs/wrong.md", line 8.*no attribute .gone'):
        ranks.run(1, run_session, session, str(tmp_path))
