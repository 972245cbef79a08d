"""The engine as an `nn.Module`, which scripts and libraries check for, with the model's own names.

The engine registers nothing: every method of `nn.Module` that it does not define is called on the
model, and attributes (`training`, `_modules`) are looked up there. So parameters keep the model's
names, and a module that holds an engine sees the model. `compile()` has DeepSpeed's arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from rayzero.engine.api.alternatives import NOT_DELEGATED, unsupported_attribute
from rayzero.engine.builder import compile_model
from rayzero.engine.engine import Engine
from rayzero.engine.errors import ConfigError
from rayzero.engine.torch_private import is_compiled

if TYPE_CHECKING:
    # The engine's train, state_dict and compile have narrower signatures than nn.Module's.
    ModuleMethods = Engine
else:

    class ModuleMethods(Engine, nn.Module):
        """See the module's docstring. Setting an attribute registers nothing, and costs nothing."""

        __setattr__ = object.__setattr__
        __delattr__ = object.__delattr__
        __dir__ = object.__dir__
        __reduce_ex__ = object.__reduce_ex__

        def __repr__(self) -> str:
            return f"{type(self).__name__}({self.module!r})"

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            """The full model on rank 0; with `nn.Module`'s arguments, which a module around the
            engine passes, that of the model as it is."""
            if args or kwargs:
                return self.module.state_dict(*args, **kwargs)
            return super().state_dict()

    def _delegate(name: str) -> property:
        def of_model(self: ModuleMethods) -> Any:
            if name in NOT_DELEGATED:
                raise unsupported_attribute(name, ())
            return getattr(self.module, name)

        return property(of_model, doc=getattr(nn.Module, name).__doc__)

    for _name, _value in vars(nn.Module).items():
        _own = any(_name in vars(base) for base in (ModuleMethods, Engine))
        if callable(_value) and not _own and not _name.startswith("__"):
            setattr(ModuleMethods, _name, _delegate(_name))


class CompileMethods(ModuleMethods):
    """The engine's methods for torch.compile."""

    def compile(
        self,
        backend: str | Callable[..., Any] | None = None,
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: None = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compiles the model in place: as a whole at stages 0 to 2, block by block at stage 3.

        Args:
            backend: torch.compile's; by default the config's `compile.backend`.
            compile_kwargs: torch.compile's other arguments, over the config's `compile.kwargs`.
            schedule: DeepCompile's; refused, as is compiled autograd.

        Raises:
            ConfigError: a schedule or compiled autograd is requested.
        """
        if schedule is not None or compiled_autograd_enabled:
            raise ConfigError(
                "engine.compile() was given a schedule, or compiled_autograd_enabled",
                allowed="backend and compile_kwargs: forward is compiled, and its backward with it",
            )
        options = dict(compile_kwargs or {}) | ({} if backend is None else {"backend": backend})
        compile_model(self.module, self.settings.config, options)

    @property
    def is_compiled(self) -> bool:
        """Whether the model, or a module in it, is compiled."""
        return any(map(is_compiled, self.module.modules()))
