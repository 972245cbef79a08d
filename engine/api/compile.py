"""`engine.compile()`, with DeepSpeed's arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rayzero.engine.builder import compile_model
from rayzero.engine.compiling import is_compiled
from rayzero.engine.engine import Engine
from rayzero.engine.errors import ConfigError


class CompileMethods(Engine):
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
