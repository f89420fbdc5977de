import pytest

from torchtitan_lc.tools.ledger import Ledger


def test_the_peak_keeps_the_names_of_its_moment() -> None:
    ledger = Ledger({"h": 10})
    ledger.take("q", 5)
    ledger.moment(kernel_workspace=7)
    ledger.free("q", 2)
    ledger.take("out", 8)
    assert ledger.peak == {"h": 10, "q": 5, "kernel workspace": 7}
    assert ledger.now == {"h": 10, "q": 3, "out": 8}


def test_freeing_more_than_there_is_is_an_error() -> None:
    ledger = Ledger({"h": 10})
    with pytest.raises(ValueError, match="11 bytes of 'h' are freed, but only 10 are alive"):
        ledger.free("h", 11)
