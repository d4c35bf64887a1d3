"""Attributes that are replaced for a while."""

from __future__ import annotations

import math

import pytest

from ortlaunch.base.attributes import replaced


class Upper:
    @staticmethod
    def three() -> int:
        return 3


class Lower(Upper): ...


def test_an_attribute_is_as_it_was_afterwards() -> None:
    before = dict(vars(Upper)), dict(vars(Lower)), math.pi
    with pytest.raises(KeyError), replaced(math, "pi", 3), replaced(Upper, "three", staticmethod(lambda: 4)):
        with replaced(Lower, "three", staticmethod(lambda: 5)):
            assert (math.pi, Upper.three(), Lower.three()) == (3, 4, 5)
        assert Lower.three() == 4
        raise KeyError
    assert (dict(vars(Upper)), dict(vars(Lower)), math.pi) == before
    assert Upper().three() == 3


def test_an_attribute_that_is_not_there_is_not_made() -> None:
    with pytest.raises(AttributeError), replaced(math, "tau_of_tomorrow", 3):
        pass
    assert not hasattr(math, "tau_of_tomorrow")
