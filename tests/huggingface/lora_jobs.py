"""LoRA of a Llama with random weights, as a training function; its plain PyTorch oracle."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests.workers.recovery_jobs import log_to_file

SAMPLES, LENGTH, VOCABULARY, TOKENS = 12, 60, 64, 8


class Tokens:
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        use_cache=False,
    )
    lora = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    model: nn.Module = get_peft_model(LlamaForCausalLM(config), lora)
    return model.double()


def train(ctx: Any) -> dict[str, Any]:
    log_to_file(ctx)
    engine, _, loader, _ = ctx.initialize(model=make_model(), training_data=Tokens())
    for tokens in loader.steps(ctx.steps - engine.progress.step):
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    weights = engine.state_dict()
    if ctx.is_main:
        torch.save(weights, ctx.output_dir / "weights.pt")
    return {}


def oracle(steps: int, seed: int) -> dict[str, Tensor]:
    """Weights after plain PyTorch; only the sample order is rayzero's."""
    from rayzero.engine.data.sampling import SampleOrder

    model, data, order = make_model(), Tokens(), SampleOrder(LENGTH, seed)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for step in range(steps):
        tokens = torch.stack([data[int(it)] for it in order.indices(step * SAMPLES, SAMPLES)])
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}
