"""Host memory of each rank while a model is loaded at stage 3, as proportional set size (PSS).

Pages of files that are only read do not count: the kernel drops them when it needs room.

    torchrun --standalone --nproc-per-node 2 benchmarks/loading_memory.py [--small] [WAY ...]

`from_pretrained`: transformers' Llama with `HfDeepSpeedConfig` alive; `load_pretrained`:
`rayzero.zero_init` and `rayzero.load_pretrained`. Each rank prints one JSON line for each way: the
peak and the rest over what it had before, in bytes, and what they may be: half of the weights, the
largest tensor, and 10 %. Every weight is compared with the file's, to the bit. Exits 1 if a peak is
above its limit.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import safe_open

import rayzero.deepspeed

rayzero.deepspeed.install()

from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402
from transformers.integrations import HfDeepSpeedConfig  # noqa: E402

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3},
}


def pss() -> int:
    """Bytes of this process in memory; pages that several map are divided among them."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    kinds = ("Pss_Anon:", "Pss_Shmem:")
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(kinds))


class PeakMemory:
    """The peak of PSS over what it was at entry, sampled by a thread every 5 ms."""

    def __enter__(self) -> PeakMemory:
        self._begin, self.peak = pss(), 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._stop.wait(0.005):
            self.peak = max(self.peak, pss() - self._begin)

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self.rest = pss() - self._begin


def model_config(*, small: bool) -> LlamaConfig:
    """A model of 420 MB in fp32; of 27 MB, if small."""
    width = 256 if small else 1024
    return LlamaConfig(
        vocab_size=8000,
        hidden_size=width,
        intermediate_size=width * 3,
        num_hidden_layers=3 if small else 7,
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )


def load(way: str, folder: str, config: LlamaConfig) -> Any:
    if way == "from_pretrained":
        alive = HfDeepSpeedConfig(CONFIG)
        model = LlamaForCausalLM.from_pretrained(folder)
        del alive
    else:
        with rayzero.zero_init():
            model = LlamaForCausalLM(config)
        rayzero.load_pretrained(model, folder)
    return rayzero.initialize(model=model, config=CONFIG)[0]


def differing(engine: Any, folder: str) -> list[str]:
    """Weights that are not the files'; on rank 0."""
    state, wrong = engine.module_state_dict(), []
    for file in Path(folder).glob("*.safetensors") if dist.get_rank() == 0 else ():
        with safe_open(file, "pt") as opened:
            wrong += [
                it
                for it in opened.offset_keys()
                if not torch.equal(state[it], opened.get_tensor(it))
            ]
    return wrong


def measure(way: str, folder: str, config: LlamaConfig) -> bool:
    dist.barrier()
    with PeakMemory() as memory:
        engine = load(way, folder, config)
    sizes = [param.numel() * param.itemsize for param in engine.module.parameters()]
    allowed = (sum(sizes) / 2 + max(sizes)) * 1.1
    wrong = differing(engine, folder)
    row = {"way": way, "rank": dist.get_rank(), "peak": memory.peak, "rest": memory.rest}
    print(json.dumps({**row, "weights": sum(sizes), "allowed": int(allowed), "wrong": wrong}))
    sys.stdout.flush()
    engine.close()
    return memory.peak <= allowed and not wrong


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--save", metavar="FOLDER", help="only save the model there")
    parser.add_argument("ways", nargs="*", default=["from_pretrained", "load_pretrained"])
    options = parser.parse_args()
    config = model_config(small=options.small)
    if options.save:
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(options.save, max_shard_size="200MB")
        return 0
    dist.init_process_group("gloo")
    folders = [tempfile.mkdtemp(prefix="rz-load-")] if dist.get_rank() == 0 else [""]
    if dist.get_rank() == 0:  # in another process, so that no rank has had the weights before
        command = [sys.executable, __file__, "--save"]
        subprocess.run([*command, f"{folders[0]}/warm", "--small"], check=True)
        subprocess.run([*command, f"{folders[0]}/model", *["--small"] * options.small], check=True)
    dist.broadcast_object_list(folders)
    for way in options.ways:  # what is imported on first use counts as before
        load(way, f"{folders[0]}/warm", model_config(small=True)).close()
    good = [measure(way, f"{folders[0]}/model", config) for way in options.ways]
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folders[0])
    dist.destroy_process_group()
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
