"""Which tries autotuning makes, and which it prefers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rayzero.engine.config.autotuning import AutotuningConfig
from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.policies.tuning import Candidate, ScriptFacts, TryResult, Tuner

GIB = 2**30


def facts(**changes: Any) -> ScriptFacts:
    given = {"stage_bytes": {0: 4 * GIB, 2: 2 * GIB}, "device_bytes": None, "unit_batch": 2}
    return ScriptFacts(**given | changes)


def good(candidate: Candidate, step_s: float = 1.0, **fields: Any) -> TryResult:
    shape = (candidate.micro_batch, 8)
    return TryResult(candidate, step_s, 2 * candidate.micro_batch, None, None, shape, **fields)


def full(candidate: Candidate) -> TryResult:
    return TryResult(candidate, failure="out of memory", out_of_memory=True)


def tried(tuner: Tuner, run: Callable[[Candidate], TryResult]) -> list[str]:
    while (candidate := tuner.next()) is not None:
        tuner.record(run(candidate))
    return [result.candidate.name for result in tuner.results]


def test_without_memory_limit_sizes_grow_from_the_smallest():
    tuner = Tuner(AutotuningConfig(num_tuning_micro_batch_sizes=2), facts())
    assert tried(tuner, good) == ["z0-mbs1", "z0-mbs2", "z2-mbs1", "z2-mbs2"]
    assert tuner.best.candidate == Candidate(0, 2)  # as fast as at stage 2, and tried before it


def test_measured_peaks_bound_sizes_and_stages():
    # 10 GiB, of which 9 are used; a sample takes 0.5: 10 samples beside 4 GiB, 14 beside 2.
    limited = facts(device_bytes=10 * GIB, stage_bytes={0: 4 * GIB, 1: 9.5 * GIB, 2: 2 * GIB})

    def run(candidate: Candidate) -> TryResult:
        held = 4 * GIB if candidate.stage == 0 else 2 * GIB
        peak = held + candidate.micro_batch * GIB // 2
        return TryResult(candidate, 1.0, 2, None, peak, (candidate.micro_batch,))

    tuner = Tuner(AutotuningConfig(tuner_early_stopping=50), limited)
    names = ["z0-mbs1", "z0-mbs2", "z0-mbs4", "z0-mbs8", "z2-mbs2", "z2-mbs4", "z2-mbs8"]
    assert tried(tuner, run) == names


def test_out_of_memory_is_a_result_after_which_sizes_shrink():
    tuner = Tuner(AutotuningConfig(min_train_micro_batch_size_per_gpu=2), facts())
    run = {0: full, 2: lambda it: full(it) if it.micro_batch > 4 else good(it)}
    names = ["z0-mbs2", "z2-mbs2", "z2-mbs4", "z2-mbs8"]
    assert tried(tuner, lambda it: run[it.stage](it)) == names
    assert tuner.best.candidate == Candidate(2, 4)
    assert [it.out_of_memory for it in tuner.results] == [True, False, False, True]


def test_batch_limits():
    of_two = {"stage_bytes": {2: 0}}
    limits = {"min_train_batch_size": 4, "max_train_batch_size": 9}
    assert tried(Tuner(AutotuningConfig(**limits), facts(**of_two)), good) == ["z2-mbs2", "z2-mbs4"]
    given = facts(**of_two, global_batch=12)  # 6 a rank
    assert tried(Tuner(AutotuningConfig(), given), good) == ["z2-mbs1", "z2-mbs2", "z2-mbs4"]
    most = {"max_train_micro_batch_size_per_gpu": 3}
    assert tried(Tuner(AutotuningConfig(**most), given), good) == ["z2-mbs1", "z2-mbs2"]


def test_ends_after_tries_that_are_not_better():
    settings = AutotuningConfig(tuner_early_stopping=2, num_tuning_micro_batch_sizes=9)
    slower = tried(Tuner(settings, facts()), lambda it: good(it, step_s=float(it.micro_batch**2)))
    assert slower == ["z0-mbs1", "z0-mbs2", "z0-mbs4"]
    assert len(tried(Tuner(AutotuningConfig(tuner_num_trials=4), facts()), good)) == 4


def test_random_order_tries_the_same():
    both = {"num_tuning_micro_batch_sizes": 3, "tuner_early_stopping": 50}
    grid = tried(Tuner(AutotuningConfig(**both), facts()), good)
    mixed = tried(Tuner(AutotuningConfig(**both, tuner_type="random"), facts()), good)
    assert grid != mixed
    assert sorted(grid) == sorted(mixed)


@pytest.mark.parametrize(("metric", "best"), [("throughput", 2), ("latency", 1)])
def test_metric_decides(metric: str, best: int):
    settings = AutotuningConfig(metric=metric, num_tuning_micro_batch_sizes=2)
    tuner = Tuner(settings, facts(stage_bytes={1: 0}))
    tried(tuner, lambda it: good(it, step_s=1.0 if it.micro_batch == 1 else 1.5))
    assert tuner.best.candidate.micro_batch == best


def test_unknown_flops_and_batches_that_do_not_follow_are_told():
    tuner = Tuner(AutotuningConfig(metric="flops"), facts())
    with pytest.raises(ConfigError, match="peak_flops"):
        tuner.record(good(Candidate(0, 1)))
    tuner = Tuner(AutotuningConfig(), facts())
    tuner.record(TryResult(Candidate(0, 1), 1.0, 2, input_shape=(4, 8)))
    tuner.record(TryResult(Candidate(2, 1), 1.0, 2, input_shape=(4, 8)))
    with pytest.raises(ConfigError, match="arg_mappings"):
        tuner.record(TryResult(Candidate(0, 2), 1.0, 4, input_shape=(4, 8)))
