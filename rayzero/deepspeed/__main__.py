"""Runs a script in which `import deepspeed` means rayzero:

    python -m rayzero.deepspeed script.py ...
    torchrun --nproc-per-node 2 -m rayzero.deepspeed script.py ...

The engine's log (`steps_per_print`, changes of the config) is printed, as in DeepSpeed.
`-m package.module` runs a module, as python itself does.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from rayzero.deepspeed.install import install
from rayzero.deepspeed.utils import make_stderr_logger

_USAGE = "usage: python -m rayzero.deepspeed (script.py | -m module) [arguments]"


def main(arguments: list[str]) -> int:
    """Returns the exit code, 2 for a mistake in the command. The script's errors propagate."""
    as_module = arguments[:1] == ["-m"]
    rest = arguments[1:] if as_module else arguments
    if not rest or rest[0] in ("-h", "--help"):
        print(_USAGE, file=sys.stdout if rest else sys.stderr)
        return 0 if rest else 2
    target = rest[0]
    if not as_module and not Path(target).is_file():
        print(f"there is no script {target}\n{_USAGE}", file=sys.stderr)
        return 2
    make_stderr_logger("rayzero")
    install()
    sys.argv = rest
    if as_module:
        sys.path.insert(0, "")
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(target).resolve().parent))
        runpy.run_path(target, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
