"""What a try replaces in the script's config, estimates, and measures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rayzero.engine.config import parse_config
from rayzero.engine.device import get_device
from rayzero.engine.planning.persistent import persistent_bytes
from rayzero.engine.planning.search import MemoryEstimate
from rayzero.workers.launch.tries import ScriptSettings, TryEndedError

CPU = get_device(torch.device("cpu"))
GIVEN = {"train_batch_size": 8, "zero_optimization": {"stage": "all", "overlap_comm": False}}


def end_of(settings: ScriptSettings, act: Any) -> dict[str, Any]:
    with pytest.raises(TryEndedError) as ended:
        act(settings)
    return ended.value.result


def test_overrides_are_merged_and_nothing_else_is_touched():
    settings = ScriptSettings({}, None, CPU, 2)
    assert settings.adapt_config(GIVEN) is GIVEN
    settings.on_model(nn.Linear(2, 2))
    settings.on_step_end({"step": 9, "step_s": 1.0})
    changes = {"zero_optimization": {"stage": 1}, "train_batch_size": None, "fp16": {"enabled": 0}}
    merged = ScriptSettings(changes, None, CPU, 2).adapt_config(GIVEN)
    assert merged == {
        "zero_optimization": {"stage": 1, "overlap_comm": False},
        "fp16": {"enabled": 0},
    }
    assert GIVEN["train_batch_size"] == 8


def tied_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
    model[2].weight = model[0].weight
    model[1].requires_grad_(requires_grad=False)
    return model


@pytest.mark.parametrize("optimizer", ["AdamW", "OneBitAdam"])
def test_plan_estimates_the_stages_that_the_config_allows(optimizer: str):
    chosen = {"type": optimizer, "params": {"lr": 0.1}}
    document = GIVEN | {"optimizer": chosen, "gradient_clipping": 0}
    settings = ScriptSettings({}, [], CPU, 4)
    parse_config(settings.adapt_config(document))  # a stage that can be parsed
    told = end_of(settings, lambda it: it.on_model(tied_model()))
    assert told["document"] == document
    assert (told["device_bytes"], told["world_size"]) == (None, 4)
    stages = [0] if optimizer == "OneBitAdam" else [0, 1, 2, 3]
    assert [*told["stage_bytes"]] == stages
    for stage in stages:
        config = parse_config(document | {"zero_optimization": {"stage": stage}})
        with torch.device("meta"):
            held = persistent_bytes(tied_model(), config, 4)
        assert told["stage_bytes"][stage] == MemoryEstimate(held).device_total_bytes > 0


def test_model_that_cannot_be_copied_is_not_estimated():
    class Unique(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("there is one of it")

    settings = ScriptSettings({}, [], CPU, 1)
    settings.adapt_config({"optimizer": {"type": "SGD"}})
    told = end_of(settings, lambda it: it.on_model(Unique(2, 2)))
    assert told["stage_bytes"] == dict.fromkeys(range(4), 0)


def test_steps_are_timed_until_the_last():
    settings, model = ScriptSettings({}, [2, 3], CPU, 2), nn.Linear(4, 1)
    settings.adapt_config(GIVEN)
    settings.on_model(model)
    model(torch.zeros(6, 4))
    model(torch.zeros(1, 4))  # the first counts
    settings.on_step_end({"step": 1, "step_s": 100.0, "step_samples": 12})
    settings.on_step_end({"step": 2, "step_s": 1.0, "step_samples": 12})
    last = {"step": 3, "step_s": 2.0, "step_samples": 12, "flops_per_s": 5.0}
    told = end_of(settings, lambda it: it.on_step_end(last))
    assert told["step_s"] == 1.5
    assert (told["global_batch"], told["flops_per_s"], told["peak_bytes"]) == (12, 5.0, None)
    assert told["input_shape"] == [6, 4]
