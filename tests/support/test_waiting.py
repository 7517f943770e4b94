"""What tests wait with."""

from tests.support.waiting import eventually


def test_a_moment_is_enough() -> None:
    looks = iter([False, True, False])
    assert eventually(lambda: next(looks), 60)
    assert list(looks) == [False], "asked again after it held"


def test_it_looks_once_more_when_the_time_is_up() -> None:
    looks: list[bool] = []
    assert not eventually(lambda: bool(looks.append(True)), 0)
    assert len(looks) == 1
