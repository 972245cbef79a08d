"""The rollouts of a job: which roles make them, in which order, and for how large a batch."""

from __future__ import annotations

from rayzero.engine.config import parse_config
from rayzero.engine.data.batch_sizes import resolve_batch_sizes
from rayzero.engine.errors import ConfigError, did_you_mean
from rayzero.orchestrator.spec import JobSpec, Rollouts
from rayzero.workers.rollouts.ledger import RolloutPlan

PROMPTS = "prompts"
"""The value of `takes` of the first role in the chain."""


def rollout_stages(spec: JobSpec) -> dict[str, int]:
    """Returns the position of each role with `takes` in the chain from the prompts to the ranks.

    Raises:
        ConfigError: the roles form no such chain.
    """
    takers: dict[str, str] = {}
    for name, role in spec.roles.items():
        if role.takes is None:
            continue
        names = [PROMPTS, *(other for other in spec.roles if other != name)]
        if role.takes not in names:
            raise ConfigError(
                f"role {name} takes {role.takes!r:.100}{did_you_mean(role.takes, names)}",
                allowed=", ".join(names),
                fix=f"roles.{name}.takes in the job file",
            )
        if role.takes in takers:
            raise ConfigError(
                f"roles {takers[role.takes]} and {name} both take {role.takes}",
                allowed="one role, whose workers share its tasks",
                fix=f"roles.{name}.takes, or more workers for one of them",
            )
        takers[role.takes] = name
    chain, last = list[str](), PROMPTS
    while last in takers:
        last = takers[last]
        chain.append(last)
    if left := sorted(set(takers.values()).difference(chain)):
        raise ConfigError(
            f"no role takes {PROMPTS}, so that {', '.join(left)} would have no tasks",
            allowed=f"a chain of roles that begins with `takes: {PROMPTS}`",
            fix=f"roles.{left[0]}.takes in the job file",
        )
    if chain and spec.rollouts is None:
        raise ConfigError(
            f"role {chain[0]} takes {PROMPTS}, but the job has no rollouts",
            allowed="`rollouts: {group: ...}` in a job whose ranks train on what its roles make",
            fix=f"rollouts, or leave out roles.{chain[0]}.takes",
        )
    return {name: place for place, name in enumerate(chain)}


def plan_rollouts(spec: JobSpec) -> RolloutPlan | None:
    """Returns the sizes and limits of the job's rollouts; None if it has none.

    Raises:
        ConfigError: roles, engine or mirrors do not fit.
    """
    stages = rollout_stages(spec)
    if (rollouts := spec.rollouts) is None:
        return None
    if not stages:
        raise ConfigError(
            "the job has rollouts, but no role takes prompts",
            allowed=f"a role with `takes: {PROMPTS}`",
            fix="roles.NAME.takes in the job file",
        )
    if spec.launch is not None or not isinstance(spec.engine, dict):
        raise ConfigError(
            "the job has rollouts, but no "
            + ("function that reads them" if spec.launch is not None else "engine config"),
            allowed="an entrypoint that calls ctx.rollouts(), and `engine:` with train_batch_size",
            fix="entrypoint and engine in the job file",
        )
    _check_mirrors(spec, rollouts)
    batch = resolve_batch_sizes(parse_config(spec.engine), spec.workers.min).global_batch
    if batch % rollouts.group:
        raise ConfigError(
            f"train_batch_size is {batch} samples, with {rollouts.group} samples of each prompt",
            allowed="a multiple of rollouts.group",
            fix="train_batch_size in the engine config, or rollouts.group",
        )
    prompts_per_batch = batch // rollouts.group
    return RolloutPlan(
        prompts_per_batch,
        rollouts.group,
        rollouts.max_version_lag,
        tuple(spec.roles[name].recovery.hang_timeout_s for name in stages),
        rollouts.max_bytes,
        None if spec.steps is None else spec.steps * prompts_per_batch,
    )


def _check_mirrors(spec: JobSpec, rollouts: Rollouts) -> None:
    """Raises ConfigError if mirroring cannot pace the generators. Versions of the weights are
    mirrored steps."""
    if spec.recovery.replicas < 1:
        raise ConfigError(
            "recovery.replicas is 0 in a job with rollouts",
            allowed="1 or more: generators read the weights where they are mirrored to",
            fix="recovery.replicas in the job file",
        )
    every, most = spec.recovery.mirror_every, rollouts.max_version_lag + 1
    if every is not None and every > most:
        raise ConfigError(
            f"recovery.mirror_every is {every}, with a lag of {rollouts.max_version_lag} steps: "
            "trainer and generators would wait for each other",
            allowed=f"up to {most}, rollouts.max_version_lag + 1; by default it is chosen",
            fix="recovery.mirror_every, or rollouts.max_version_lag",
        )
