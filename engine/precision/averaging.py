"""Where the average over ranks and micro-steps is taken: before the sum over the ranks, or after.

Both cost nothing: before is a factor of backward's seed, after is a factor in the optimizer. In
exact arithmetic it is the same. In 16 bits it is not: what comes before may vanish, what comes
after may overflow in the sum.
"""

from __future__ import annotations

from rayzero.engine.errors import ConfigError


def factor_after(
    micro_steps: int, world_size: int, *, average_first: bool, prescale: bool, predivide: float
) -> float:
    """What summed gradients are to be multiplied by; backward's seed has the rest.

    Args:
        average_first: see `Precision`.
        prescale: divide by the ranks before the sum, as `prescale_gradients` asks.
        predivide: divide by this before the sum and by the rest after it, as
            `gradient_predivide_factor` asks. As in DeepSpeed `prescale` overrules it.

    Raises:
        ConfigError: nothing can be divided by it.
    """
    if predivide <= 0.0:
        raise ConfigError(
            f"gradient_predivide_factor is {predivide:g}", allowed="more than 0; 1 for no division"
        )
    if average_first and (prescale or predivide == 1.0):
        return 1.0
    over_steps = 1.0 if average_first else 1.0 / micro_steps
    if prescale:
        return over_steps
    return over_steps * predivide / world_size
