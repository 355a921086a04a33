"""Two ranks that locate together; locate_rank.py holds what each of them asserts."""

from pathlib import Path

from tests.support import processes

RANK = processes.SUPPORT / "diagnosis" / "locate_rank.py"


def test_the_rank_that_broke_names_the_operation(tmp_path: Path):
    said = processes.ranks(RANK, [(tmp_path, rank, 2) for rank in range(2)])  # a rank that fails fails this test
    assert [out.split() for out in said] == [["located"], ["located"]]
