"""The calls of an Accelerate script without a DeepSpeed config, against the same calls on plain
torch; and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from torch.utils.data import DataLoader

import rayzero
from rayzero.engine.errors import ConfigError
from rayzero.huggingface.accelerated_loop import leave_out, read_behind
from rayzero.huggingface.scripted_steps import (
    ScriptedSteps,
    SeveralSteps,
    adapt_options,
    check_prepare,
    split_models,
)
from rayzero.huggingface.trainer import TrainerRun
from tests.support.ranks import run_ranks

ROWS = torch.randn(9, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(4, 2).double()


def train(
    model: Callable[[Tensor], Tensor],
    steps: Any,
    backward: Callable[[Tensor], Any],
    clip: Callable[[float], Tensor],
) -> list[float]:
    """Steps with and without clipping; of two losses; of a loss's own backward; and gradients that
    are dropped."""
    norms = []
    for number, row in enumerate(ROWS):
        losses = [model(row).pow(2).sum()]
        if number == 3:
            losses.append(model(row).abs().sum())
        for loss in losses:
            if number == 4:
                loss.backward()
            else:
                backward(loss)
        if number == 5:
            steps.zero_grad()
            continue
        if number in (1, 2, 6):
            norms.append(float(clip(0.5 * number)))
        steps.step()
        steps.zero_grad()
    steps.step()
    return norms


def compare(rank: int, world: int, stage: int) -> None:
    plain = make_model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    expected = train(
        plain,
        optimizer,
        torch.Tensor.backward,
        lambda norm: nn.utils.clip_grad_norm_(plain.parameters(), norm),
    )
    model = make_model()
    own = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    config = {"gradient_clipping": 0.0, "zero_optimization": {"stage": stage}}
    engine = rayzero.initialize(model=model, optimizer=own, config=config)[0]
    steps = ScriptedSteps(engine, SimpleNamespace(sync_gradients=True))
    norms = train(engine, steps, steps.backward, lambda norm: steps.clip_and_step(norm, 2))
    assert norms == pytest.approx(expected, rel=1e-6)
    assert engine.global_steps == len(ROWS) - 1
    for name, value in engine.module_state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=0, atol=1e-12)
    with pytest.raises(ConfigError, match=r"(?s)norm_type=inf.*allowed: norm_type=2"):
        steps.clip_and_step(1.0, float("inf"))
    steps.backward(engine(ROWS[0]).sum())
    with pytest.raises(
        ConfigError, match=r"(?s)without optimizer.step\(\).*accelerator.accumulate"
    ):
        steps.check_stepped()


@pytest.mark.parametrize("stage", [0, 2])
def test_calls_do_what_they_do_in_torch(stage: int) -> None:
    run_ranks(0, compare, stage)


def test_what_would_train_without_the_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"(?s)FSDP.*--stage 3"):
        adapt_options({"fsdp_plugin": object()})
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
    with pytest.raises(ConfigError, match=r"(?s)Megatron-LM.*--stage 3"):
        adapt_options({})


def test_a_model_is_prepared_with_its_optimizer_and_loader() -> None:
    model, loader = make_model(), DataLoader(list(ROWS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    check_prepare([loader])
    check_prepare([model, optimizer, loader])
    with pytest.raises(ConfigError, match="without its optimizer and the DataLoader"):
        check_prepare([model])
    with pytest.raises(ConfigError, match="without the DataLoader"):
        check_prepare([model, optimizer])
    check_prepare([model, optimizer], knows_batch=True)


def test_each_of_several_models_has_its_optimizer_and_schedules() -> None:
    first, second, loader = make_model(), make_model(), DataLoader(list(ROWS))
    of_first, of_second = (torch.optim.SGD(it.parameters(), lr=0.05) for it in (first, second))
    schedule = torch.optim.lr_scheduler.StepLR(of_second, 1)
    given = [of_second, first, loader, schedule, second, of_first]
    assert split_models(given, scripted=True) == [[1, 2, 5], [4, 0, 3]]
    assert split_models([first, of_first], scripted=False) == [[0, 1]]
    with pytest.raises(ConfigError, match=r"(?s)2 models and a DeepSpeed config.*--stage"):
        split_models(given, scripted=False)
    with pytest.raises(ConfigError, match=r"(?s)a Linear without its optimizer.*only evaluates"):
        split_models([first, of_first, second, loader], scripted=True)


def test_calls_that_are_of_one_model_name_it() -> None:
    first, second = make_model(), make_model()
    engines = [SimpleNamespace(module=it, fp16_enabled=lambda: True) for it in (first, second)]
    each = [ScriptedSteps(it, None) for it in engines]
    several = SeveralSteps(each)
    assert several.of([*second.parameters()]) is each[1]
    with pytest.raises(ConfigError, match="one call for each model"):
        several.of([*first.parameters(), *second.parameters()])
    with pytest.raises(ConfigError, match=r"(?s)fp16, with several models.*bf16"):
        several.backward(torch.zeros(()))


def test_engine_beside_a_trainers_is_refused() -> None:
    run = object.__new__(TrainerRun)
    run._session = SimpleNamespace(engines=["", "critic"])  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"(?s)in addition to its Trainer's.*only evaluate"):
        run.on_step_begin()


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("has_generator", [False, True])
def test_epochs_are_read_again_in_their_order(
    monkeypatch: pytest.MonkeyPatch, persistent: bool, has_generator: bool
) -> None:
    """By a survivor, and by a new worker that has left out the epochs before; Accelerate's own
    iteration is the oracle."""
    wrapped = wraps(skip := accelerate.skip_first_batches)(lambda *args: skip(*args))
    monkeypatch.setattr(accelerate, "skip_first_batches", wrapped)
    engine: Any = SimpleNamespace(device=torch.device("cpu"))

    def make_loader() -> Any:
        torch.manual_seed(3)
        options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork"}
        if has_generator:
            options["generator"] = torch.Generator().manual_seed(5)
        loader: Any = DataLoader(
            range(32),  # type: ignore[arg-type]
            batch_size=4,
            shuffle=True,
            persistent_workers=persistent,
            **options,
        )
        return prepare_data_loader(loader, num_processes=2, process_index=1, rng_types=None)

    def read(loader: Any) -> list[list[int]]:
        return [batch.tolist() for batch in loader]

    survivor, new = make_loader(), make_loader()
    read(survivor)
    order = survivor.synchronized_generator.get_state()
    batches = read(survivor)
    survivor.synchronized_generator.set_state(order)
    leave_out(new)
    for loader in (survivor, new):
        assert read(read_behind(loader, 1, 1, engine, agreed=True)) == batches[1:]
    begins = make_loader()
    leave_out(begins)
    assert read(begins) == batches
