"""Every attribute of another library's objects that rayzero replaces, and how it does so.

`replace` refuses an attribute that is neither in `PATCHES` nor passed to `declare`, which adapters
to other libraries call. Attributes that rayzero sets on one object only, such as a model, are in
`OBJECT_PATCHES`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Patch:
    """One patch, or several of one kind.

    Args:
        target: the module, class and attribute; `*` for any.
        lasts: when it is installed, and when it is removed.
        tested: the versions with which it is tested.
    """

    target: str
    reason: str
    lasts: str
    tested: str = "torch 2.11, 2.13"


PROCESS = "until the process ends"
_SCRIPT = "a launched script, until its process ends; nothing changes outside of a job"
_ACCELERATE, _TRANSFORMERS = "accelerate 1.15", "transformers 5.23"

PATCHES = (
    Patch(
        "torch.Tensor.is_meta",
        "False: some functions of torch.nn.init skip meta tensors, whose calls are recorded",
        "while `zero_init`, or `recording`, is entered; in all threads",
    ),
    Patch(
        "torch.nn.parameter.Parameter.to",
        "values are not lost to the meta device, where PEFT moves adapters of a `zero.Init` model",
        f"the first DeepSpeed engine or zero.Init, {PROCESS}",
    ),
    *(
        Patch(
            f"torch.nn.parameter.Parameter.{name}",
            "an attribute that DeepSpeed's parameters have; torch's have none of that name",
            f"the first DeepSpeed engine or zero.Init, {PROCESS}",
        )
        for name in ("ds_*", "all_gather", "partition", "partition_numel")
    ),
    *(
        Patch(
            f"torch.optim.*.{name}",
            "runs without torch._dynamo, whose import takes a second and 100 MB, until something "
            "else has imported it",
            f"the start of a worker, {PROCESS}",
        )
        for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad", "step")
    ),
    *(
        Patch(target, "the script is given the process group of its worker", _SCRIPT)
        for target in (
            "torch.distributed*.init_process_group",
            "torch.distributed*.destroy_process_group",
        )
    ),
    Patch("atexit.register", "what a script registers runs where the script ends", _SCRIPT, "3.11"),
    Patch("torch.save", "files of epochs that are finished are not written again", _SCRIPT),
    Patch(
        "torch.utils.data.dataloader.DataLoader.__iter__",
        "the script's own loader yields the batches of a lost step again",
        _SCRIPT,
    ),
    Patch("torch.optim.lr_scheduler.*.__init__", "schedules are found, to be continued", _SCRIPT),
    Patch("*.__iter__", "as DataLoader's: a loader of any class from Accelerate", _SCRIPT),
    Patch("accelerate.*", "Accelerate trains with the job's engine", _SCRIPT, _ACCELERATE),
    Patch("transformers.*", "Trainer continues after a fault", _SCRIPT, _TRANSFORMERS),
)

OBJECT_PATCHES = (
    Patch(
        "model.zero_grad",
        "also zeroes gradients from another engine's loss, as in a GAN",
        "`initialize`, as long as the model lives; copies do not have it",
    ),
    Patch(
        "module._parameters",
        "another dict, with a norm's weights in the dtype of its buffers",
        "the module's forward",
    ),
    Patch(
        "function.__code__ (`torch_private.disable_compiler`)",
        "rayzero's own hooks are marked, so that torch.compile does not trace them",
        PROCESS,
    ),
)

_ABSENT = object()


@dataclass(eq=False)
class Replacement:
    """An attribute that `replace` has replaced."""

    owner: Any
    name: str
    before: Any  # `_ABSENT` where it was inherited, or there was none

    def undo(self) -> None:
        """Restores the attribute. Called once, after a later replacement of the same was undone."""
        _installed.remove(self)
        if self.before is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.before)


_declared = [*PATCHES]
_installed: list[Replacement] = []
Owner: TypeAlias = Any
"""A class, or a module."""


def target_name(owner: Owner, name: str) -> str:
    """Returns the name of an attribute that `Patch.target` matches."""
    home = f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else owner.__name__
    return f"{home}.{name}"


def declare(patch: Patch) -> None:
    """Lets an adapter to another library replace an attribute, in this process."""
    _declared.append(patch)


def replace(owner: Owner, name: str, value: Any) -> Replacement:
    """Replaces an attribute. Raises ValueError if no `Patch` is declared for it."""
    target = target_name(owner, name)
    if not any(fnmatchcase(target, patch.target) for patch in _declared):
        raise ValueError(f"{target} is not in engine/patches.py")
    replacement = Replacement(owner, name, vars(owner).get(name, _ABSENT))
    setattr(owner, name, value)
    _installed.append(replacement)
    return replacement


@contextmanager
def replaced(owner: Owner, name: str, value: Any) -> Iterator[None]:
    """Replaces an attribute in this context."""
    replacement = replace(owner, name, value)
    try:
        yield
    finally:
        replacement.undo()


def installed() -> list[str]:
    """Returns the names of the attributes that are replaced now, in the order of replacement."""
    return [target_name(replacement.owner, replacement.name) for replacement in _installed]


def uninstall_all() -> None:
    """Restores all replaced attributes, the last one first."""
    while _installed:
        _installed[-1].undo()
