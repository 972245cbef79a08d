"""Leaf modules of stage 3, and a mixture of experts of which ranks use different ones, or none.

It is trained in `test_unused_params`.
"""

from __future__ import annotations

import pytest

from rayzero.engine.errors import ConfigError
from rayzero.engine.layout.leaf_modules import (
    get_z3_leaf_modules,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
)
from rayzero.engine.layout.units import find_blocks
from tests.engine.zero.mixture import Experts, Mixture


def test_leaf_modules_are_found_and_have_no_blocks_inside() -> None:
    model = Mixture("parts")
    assert len(find_blocks(model, ())) == 3 + 12
    assert len(find_blocks(Mixture(), ())) == 3
    assert len(find_blocks(Mixture(), ("Linear",))) == 3 + 12
    assert len(set_z3_leaf_modules(model, [Experts])) == 3
    assert get_z3_leaf_modules(model) == [layer.moe for layer in model.layers]
    assert len(find_blocks(model, ())) == 3
    assert len(find_blocks(model, ("Linear",))) == 3
    assert len(unset_z3_leaf_modules(model, ["Experts"])) == 3
    assert len(find_blocks(model, ())) == 3 + 12
    assert set_z3_leaf_modules_by_name(model, ["layers.0.moe"])[0] == [model.layers[0].moe]
    assert set_z3_leaf_modules_by_suffix(model, ["1.moe"])[0] == [model.layers[1].moe]
    assert len(find_blocks(model, ())) == 3 + 4
    with pytest.raises(ConfigError, match="class Expert"):
        set_z3_leaf_modules(model, ["Expert"])
    with pytest.raises(ValueError, match=r"called layers\.9"):
        set_z3_leaf_modules_by_name(model, ["layers.9"])
