"""What LoRA leaves to write and to copy: bytes of each checkpoint after the first, and the mirror's
share of a step's time on the rank's core.

Two ranks on one node train PEFT's LoRA of a Llama with random weights. Checkpoints are written from
the vault's copy, as a job's are, and by `engine.save_checkpoint`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import rayzero
from benchmarks.mirroring import MirrorSession, no_peer
from benchmarks.step_time import Plan, describe_run
from rayzero.engine.checkpoint.manifest import make_manifest
from rayzero.engine.checkpoint.writer import commit_checkpoint
from rayzero.engine.session import StepRequests, use_session
from rayzero.workers.vault.client import VaultClient
from rayzero.workers.vault.records import SlotRef
from rayzero.workers.vault.vault import Vault

VOCAB, TOKENS, RANKS, LORA_RANK = 8192, 128, 2, 8
PIN = StepRequests(pin=True)


def make_model(width: int, layers: int) -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        use_cache=False,
    )
    lora = LoraConfig(r=LORA_RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted: nn.Module = get_peft_model(LlamaForCausalLM(config), lora)
    return adapted


class Session(MirrorSession):
    """Mirrors as `MirrorSession` does; the versions of `pinned_steps` are pinned."""

    pinned_steps: tuple[int, ...] = ()
    mirror_s = 0.0
    """The last mirror's, of this process's cores: it holds on a busy machine, too."""

    def on_step_end(self, metrics: dict[str, float], agreed: StepRequests) -> None:
        pinned = PIN if self._step + 1 in self.pinned_steps else agreed
        start = process_time()
        super().on_step_end(metrics, pinned)
        self.mirror_s = process_time() - start


def rank_main(rank: int, options: argparse.Namespace, address: str, folder: str) -> None:
    """Main function of a rank. Rank 0 writes what it measured to `folder`."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    client = VaultClient(address, rank)
    measured: dict[str, Any] = {}
    for number, stage in enumerate(options.stages):
        session = Session(rank, RANKS, number + 1, client)
        session.pinned_steps = (options.steps + 1, options.steps + 2)
        measured[str(stage)] = _run_stage(session, stage, options, folder)
        client.announce_complete(number + 2)
        client.release_spares([])
    if rank == 0:
        Path(folder, "measured.json").write_text(json.dumps(measured), encoding="utf-8")
    dist.barrier()
    client.close()
    dist.destroy_process_group()


def _run_stage(
    session: Session, stage: int, options: argparse.Namespace, folder: str
) -> dict[str, Any]:
    model = make_model(options.width, options.layers)
    trained = [param for param in model.parameters() if param.requires_grad]
    facts: dict[str, Any] = {
        "params": sum(param.numel() for param in model.parameters()),
        "trained": sum(param.numel() for param in trained),
    }
    with use_session(session):
        engine, *_ = rayzero.initialize(
            model=model,
            model_parameters=trained,
            config={
                "train_micro_batch_size_per_gpu": options.micro_batch,
                "zero_optimization": {"stage": stage},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            },
        )
    random = torch.Generator().manual_seed(dist.get_rank())
    seconds = []
    session.enabled = True
    for _ in range(options.steps + 2):
        tokens = torch.randint(0, VOCAB, (options.micro_batch, TOKENS), generator=random)
        dist.barrier()
        start = process_time()
        _train(engine, tokens)
        seconds.append((process_time() - start, session.mirror_s))
    measured = seconds[3 : options.steps]  # those before fill new slots, those after are pinned
    facts["step_s"], facts["mirror_s"] = zip(*measured, strict=True)
    tags = Path(folder, f"tags-{stage}")
    sizes = [0]
    for _ in range(3):
        _train(engine, tokens)
        engine.save_checkpoint(tags)
        dist.barrier()
        sizes.append(disk_bytes(tags))
    facts["save_checkpoint"] = [after - before for before, after in pairwise(sizes)]
    return facts


def _train(engine: Any, tokens: Tensor) -> None:
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()


def write_vault_checkpoints(
    vault: Vault, options: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """Bytes of the two checkpoints of each stage, written as a job's are."""
    written = {}
    for number, stage in enumerate(options.stages):
        job, sizes = folder / f"job-{stage}", [0]
        for step in (options.steps + 1, options.steps + 2):
            url = str(job / f"step-{step}")
            refs = [SlotRef(number + 1, rank, step, "node") for rank in range(RANKS)]
            files = vault.write(url, refs)
            commit_checkpoint(url, make_manifest("job", step, number + 1, files, stage=stage))
            sizes.append(disk_bytes(job))
        written[str(stage)] = [after - before for before, after in pairwise(sizes)]
    return written


def disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lora", description=__doc__)
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the result to this file")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    vault = Vault("lora", "node", no_peer)
    try:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(rank_main, args=(options, vault.address(), folder), nprocs=RANKS)
            measured = json.loads(Path(folder, "measured.json").read_text(encoding="utf-8"))
            jobs = write_vault_checkpoints(vault, options, Path(folder))
    finally:
        vault.close()
    for stage, facts in measured.items():
        facts["job"] = jobs[stage]
        state = 12 * facts["trained"]  # fp32 weights and AdamW's two averages
        job, script = (facts[kind][-1] / state for kind in ("job", "save_checkpoint"))
        step_s, mirror_s = median(facts["step_s"]), median(facts["mirror_s"])
        print(
            f"stage {stage}: {facts['params']:,} parameters, {facts['trained']:,} trained; a later "
            f"checkpoint over adapter and optimizer state ({state:,} bytes): job {job:.4f}, "
            f"save_checkpoint {script:.4f}; "
            f"step {step_s:.3f} s of a core, mirror {mirror_s:.4f} s: {mirror_s / step_s:.2%}"
        )
    if options.json:
        text = json.dumps(describe_run(Plan([], 0, 0, RANKS, 1)) | {"stages": measured}, indent=2)
        options.json.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
