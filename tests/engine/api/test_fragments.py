"""DeepSpeed's tensor fragment API, `GatheredParameters` and `Init` at every stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rayzero
from rayzero.engine.api import tensor_fragments
from rayzero.engine.api.params import GatheredParameters, Init
from rayzero.engine.errors import ConfigError, EngineError
from tests.engine import zoo
from tests.engine.api.saving import make_engine
from tests.support.ranks import run_ranks

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def backward(engine: rayzero.Engine, batch: Tensor) -> None:
    part = batch.chunk(engine.world_size)[engine.rank]
    engine.backward(engine(part[:, :-1], targets=part[:, 1:])["loss"])


def assert_close(a: Tensor | None, b: Tensor) -> None:
    assert a is not None
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def check_full_state(rank: int, world: int, stage: int, zero: dict[str, Any]) -> None:
    """Reads all of the state, and in the last two steps changes that of one weight."""
    model, plain = zoo.make_model(torch.float64), zoo.make_model(torch.float64)
    params = dict(model.named_parameters())
    engine = make_engine(stage, model, zero)
    optimizer = torch.optim.AdamW(zoo.two_groups(plain), lr=1e-2)
    frozen = model.blocks[0].frozen.weight
    weight, changed = model.blocks[0].up.weight, plain.blocks[0].up.weight
    for step, batch in enumerate(zoo.batches(4, 12)):
        assert tensor_fragments.safe_get_full_grad(params["embed.weight"]) is None
        backward(engine, batch)
        optimizer.zero_grad()
        plain(batch[:, :-1], batch[:, 1:])["loss"].backward()
        for name, expected in plain.named_parameters():
            if expected.requires_grad:
                assert_close(
                    tensor_fragments.safe_get_full_fp32_param(params[name]), expected.detach()
                )
                assert_close(tensor_fragments.safe_get_full_grad(params[name]), expected.grad)
                state = tensor_fragments.safe_get_full_optimizer_state(params[name], "exp_avg")
                if step:
                    assert_close(state, optimizer.state[expected]["exp_avg"])
                    with pytest.raises(ConfigError, match=r"'velocity'\n  allowed: exp_avg"):
                        tensor_fragments.safe_get_full_optimizer_state(params[name], "velocity")
                else:
                    assert state is None
        assert tensor_fragments.safe_get_full_fp32_param(frozen) is None
        assert tensor_fragments.safe_get_full_grad(frozen) is None
        if step > 1:
            value = torch.arange(70, dtype=torch.float64).view(7, 10) / 70
            tensor_fragments.safe_set_full_grad(weight, value)
            tensor_fragments.safe_set_full_fp32_param(weight, value + 1)
            tensor_fragments.safe_set_full_optimizer_state(weight, value + 2, "exp_avg_sq")
            with torch.no_grad():
                changed.grad.copy_(value)
                changed.copy_(value + 1)
                optimizer.state[changed]["exp_avg_sq"].copy_(value + 2)
        engine.step()
        optimizer.step()
    state = engine.state_dict()
    for name, tensor in plain.state_dict().items() if rank == 0 else ():
        assert_close(state[name], tensor)


@pytest.mark.parametrize(
    ("world", "more"),
    [(3, {}), (2, {"offload_optimizer": {"device": "cpu"}})],
    ids=["3", "2-offload"],
)
@STAGES
def test_full_state_equals_pytorch(stage: int, world: int, more: dict[str, Any]) -> None:
    run_ranks(world, check_full_state, stage, more)


def local_fragments(rank: int, world: int) -> list[Tensor]:
    """Fragments of a matrix that is split between two shards."""
    torch.manual_seed(0)
    model = nn.Linear(40, 40).double()
    engine = make_engine(3, model)
    engine.backward(engine(torch.ones(3, 40, dtype=torch.float64)).square().mean())
    full = tensor_fragments.safe_get_full_grad(model.weight)
    local = tensor_fragments.safe_get_local_grad(model.weight)
    main = tensor_fragments.safe_get_local_fp32_param(model.weight)
    assert full is not None
    assert local is not None
    assert main is not None
    assert 0 < local.numel() < 1600
    assert full.any()
    tensor_fragments.safe_set_local_grad(model.weight, torch.zeros_like(local))
    assert_close(tensor_fragments.safe_get_full_grad(model.weight), torch.zeros_like(full))
    engine.step()
    moment = tensor_fragments.safe_get_local_optimizer_state(model.weight, "exp_avg")
    assert moment is not None
    return [full.flatten(), local, main, moment]


def test_local_fragments_make_up_the_tensor() -> None:
    parts = run_ranks(2, local_fragments)
    assert_close(torch.cat([local for _, local, _, _ in parts]), parts[0][0])
    assert sum(main.numel() for _, _, main, _ in parts) == 1600
    assert not any(moment.any() for *_, moment in parts)


def test_misuse() -> None:
    engine = make_engine(0, zoo.make_model())
    weight = engine.module.embed.weight
    with pytest.raises(EngineError, match="before it was reduced"):
        tensor_fragments.safe_set_full_grad(weight, weight.detach())
    with pytest.raises(EngineError, match="the full parameter's shape"):
        tensor_fragments.safe_set_full_fp32_param(weight, torch.zeros(2))
    with pytest.raises(EngineError, match="not trained by any engine"):
        tensor_fragments.safe_set_full_fp32_param(nn.Parameter(torch.zeros(2)), torch.zeros(2))
    assert tensor_fragments.safe_get_full_fp32_param(nn.Parameter(torch.zeros(2))) is None


def modify_gathered(rank: int, world: int, stage: int, low: bool) -> None:
    model = zoo.make_model()
    engine = make_engine(stage, model, bf16={"enabled": low})
    backward(engine, next(zoo.batches(1, 12)))
    engine.step()
    weight, other = model.embed.weight, model.blocks[0].up.weight
    frozen = model.blocks[1].frozen.weight
    before = {
        tensor: tensor_fragments.safe_get_full_fp32_param(tensor) for tensor in (weight, other)
    }
    with GatheredParameters([weight, other, frozen]):
        assert_close(weight.data.float(), before[weight].to(weight.dtype).float())
    memory = weight.data_ptr()
    with (
        pytest.raises(ConfigError, match=r"modifier_rank=2\) on 2 ranks\n  allowed: 0 to 1,"),
        GatheredParameters([weight], modifier_rank=2),
    ):
        pass
    assert weight.data_ptr() == memory, "it was not gathered"
    mirrored = engine.state.constants_version
    with GatheredParameters([weight, other, frozen, weight], modifier_rank=1):
        if rank == 1:
            weight.data[0] = 0.5
            frozen.data.fill_(2.0)
    assert engine.state.constants_version != mirrored, "mirrors copy the frozen weight again"
    after = {
        tensor: tensor_fragments.safe_get_full_fp32_param(tensor) for tensor in (weight, other)
    }
    assert (after[weight][0] == 0.5).all()
    assert torch.equal(
        after[weight][1:], before[weight][1:]
    )  # with the precision of the main weights
    assert torch.equal(after[other], before[other])
    with GatheredParameters(frozen):
        assert (frozen.data == 2.0).all()
    tokens = torch.zeros(1, 3, dtype=torch.long)
    logits = engine(tokens)["logits"].float()
    state = engine.state_dict()
    if rank == 0:
        plain = zoo.make_model().to(torch.bfloat16 if low else torch.float32)
        plain.load_state_dict(state)
        assert (state["blocks.1.frozen.weight"] == 2.0).all()
        torch.testing.assert_close(logits, plain(tokens)["logits"].float())
    value = torch.full_like(before[other], 0.3)
    tensor_fragments.safe_set_full_fp32_param(other, value)
    assert torch.equal(tensor_fragments.safe_get_full_fp32_param(other), value), "in fp32"
    backward(engine, next(zoo.batches(1, 12)))
    engine.step()
    assert engine.skipped_steps == 0


@pytest.mark.parametrize("low", [False, True], ids=["fp32", "bf16"])
@STAGES
def test_gathered_parameters(stage: int, low: bool) -> None:
    run_ranks(2, modify_gathered, stage, low)


def write_without_modifier(rank: int, world: int) -> list[str]:
    """What each of two engines tells this rank, of which rank 1 writes."""
    told = []
    for checks in (False, True):
        model = zoo.make_model()
        zero = {"stage": 3, "enable_sanity_checks": checks}
        config = {"train_batch_size": 2, "optimizer": {"type": "SGD"}, "zero_optimization": zero}
        engine, *_ = rayzero.initialize(model=model, config=config)
        before = tensor_fragments.safe_get_full_fp32_param(model.embed.weight)
        try:
            with GatheredParameters([model.embed.weight, model.blocks[0].up.weight]):
                if rank == 1:
                    torch.nn.init.zeros_(model.embed.weight)
            told.append("")
        except EngineError as error:
            told.append(str(error).partition("\n")[0])
        assert torch.equal(tensor_fragments.safe_get_full_fp32_param(model.embed.weight), before)
        with GatheredParameters([model.embed.weight]):
            assert torch.equal(model.embed.weight, before), "read only is no error"
        assert engine.global_steps == 0
    return told


def test_writes_without_modifier_rank_are_lost_or_an_error_on_all_ranks() -> None:
    """As in DeepSpeed 0.19.8, by `enable_sanity_checks`."""
    for rank, told in enumerate(run_ranks(2, write_without_modifier)):
        assert told[0] == ""
        assert told[1].startswith("1 parameters were written to inside GatheredParameters")
        assert f"{rank} of them on this rank" in told[1]


def initialize_deferred(rank: int, world: int, stage: int) -> dict[str, Tensor]:
    """Builds a model on the meta device and sets weights before the engine exists."""
    with Init(dtype=torch.float32, config_dict_or_path={}):
        model = zoo.make_model()
        with GatheredParameters(model.twice.bias, modifier_rank=0):
            if rank == 0:
                nn.init.constant_(model.twice.bias, 3.0)
        with GatheredParameters(model.head.weight, modifier_rank=1):
            nn.init.constant_(model.head.weight, float(rank))
    assert all(param.device.type == "meta" for param in model.parameters())
    with GatheredParameters([model.twice.weight, model.embed.weight], modifier_rank=0):
        if rank == 0:
            nn.init.constant_(model.twice.weight, 4.0)
    with Init(enabled=False):
        assert nn.Linear(1, 1).weight.device.type == "cpu"
    with GatheredParameters([model.twice.weight, model.blocks[2].mix], modifier_rank=1):
        if rank == 1:
            nn.init.constant_(model.twice.weight, 5.0)
            nn.init.constant_(model.blocks[2].mix, 6.0)
    with (
        pytest.raises(EngineError, match="allowed: 0 to 1"),
        GatheredParameters(model.twice.weight, modifier_rank=2),
    ):
        pass
    return make_engine(stage, model).state_dict()


@pytest.mark.parametrize("stage", [1, 3])
def test_init_context_equals_ordinary_construction(stage: int) -> None:
    state = run_ranks(2, initialize_deferred, stage)[0]
    expected = zoo.make_model()
    with torch.no_grad():
        expected.twice.bias.fill_(3.0)
        expected.twice.weight.fill_(5.0)
        expected.head.weight.fill_(1.0)
        expected.blocks[2].mix.fill_(6.0)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(state[name], tensor), name


def test_data_parallel_group_is_rejected() -> None:
    with pytest.raises(ConfigError, match="one data parallel"):
        Init(data_parallel_group=object())
