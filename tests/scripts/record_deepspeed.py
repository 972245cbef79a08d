"""Writes `deepspeed_losses.json`: what the scripts print with the real DeepSpeed, on two CPU ranks.

`python tests/scripts/record_deepspeed.py TORCHRUN [SCRIPT...]`, where TORCHRUN is that of an
environment with deepspeed 0.19.8, ninja and the `hf` libraries. It compiles operators at first use,
which takes minutes. A run that fails there is left out with the script's later ones, and named.
If it waits for ever, a compilation was killed: delete the `lock` in its folder of torch_extensions.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from together import HERE, RUNS

# `training_data=`: the order of the samples is ours; several backwards of two engines before a
# step: they differ from the second step on, and ours are plain torch's (test_own_backward.py);
# no losses; float64.
OMITTED = ("ds_cifar", "ds_gan", "ds_zero3_generate", "check_equal")


def losses(output: str) -> dict[str, list[list[float]]]:
    """{script: the losses of each of its runs} of what `together.py` printed."""
    runs: dict[str, list[list[float]]] = {}
    for line in output.splitlines():
        name, _, rest = line.partition(" ")
        if rest.startswith('{"losses"'):
            printed, _ = json.JSONDecoder().raw_decode(rest)
            runs.setdefault(name, []).append(printed["losses"])
    return runs


def main(torchrun: str, *names: str) -> None:
    variables = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    variables["PATH"] = f"{Path(torchrun).parent}:{os.environ['PATH']}"  # ninja's
    target = HERE / "deepspeed_losses.json"
    recorded = json.loads(target.read_text()) if names else {}
    for name in names or (name for name in RUNS if name not in OMITTED):
        with tempfile.TemporaryDirectory() as folder:
            command = [torchrun, "--standalone", "--nproc-per-node", "2", HERE / "together.py"]
            done = subprocess.run(
                [*command, folder, name], env=os.environ | variables, capture_output=True, text=True
            )
        recorded |= losses(done.stdout)
        print(name, "recorded" if done.returncode == 0 else done.stderr[-2000:], flush=True)
    target.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
