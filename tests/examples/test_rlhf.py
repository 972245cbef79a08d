"""The example of RLHF: its task, its models, what is sampled, and its training functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from examples.rlhf import dpo, grpo, ppo, reward, sft
from examples.rlhf.loop import LocalContext, read_job
from examples.rlhf.losses import token_log_probs
from examples.rlhf.model import Cache, ModelConfig, Policy, Scorer, load_policy, load_scorer
from examples.rlhf.rollout import Batch, Sample, answer_mask, collate, sample_group
from examples.rlhf.task import (
    ANSWER_LENGTH,
    CHARACTERS,
    END,
    HELD_OUT,
    LENGTH,
    MISTAKES,
    PAD,
    PROMPT_LENGTH,
    QUESTIONS,
    Prompt,
    Questions,
    damage,
    decode,
    demonstration,
    encode,
    is_right,
    preference,
    question,
    solve,
    write,
)
from rayzero.engine.data.sampling import SampleOrder
from tests.support.ranks import run_ranks

GROUP, SEED = 8, 3


def make_policy() -> Policy:
    """A policy that is sure of some tokens, not of all."""
    torch.manual_seed(0)
    policy = Policy(ModelConfig())
    with torch.no_grad():
        policy.head.weight.normal_(std=0.15)
    return policy


def test_questions_are_each_there_once() -> None:
    train, held_out = Questions(question), Questions(question, held_out=True)
    assert (len(train), len(held_out)) == (QUESTIONS - HELD_OUT, HELD_OUT)
    prompts = [*train, *held_out]
    assert [it.number for it in prompts] == [*range(QUESTIONS)]
    assert len({it.text for it in prompts}) == QUESTIONS
    assert {len(it.text) for it in prompts} == {PROMPT_LENGTH}
    sorts = sum(it.text[0] == "s" for it in held_out)
    assert 0.4 * HELD_OUT < sorts < 0.6 * HELD_OUT


def test_answers_are_checked() -> None:
    prompts = Prompt(0, "r31425="), Prompt(1, "s31425=")
    assert [solve(it) for it in prompts] == ["52413", "12345"]
    tokens = write(prompts[0], "52413")
    assert decode(tokens) == "r31425=52413."
    assert torch.equal(encode(decode(tokens)), tokens)
    answers = {"52413.": True, "52413_": False, "5241._": False, "52413": False, "524130": False}
    for text, expected in answers.items():
        assert is_right(prompts[0], encode(text)) == expected
    for seed in range(200):
        wrong = damage("12345", Random(seed))
        assert wrong != "12345"
        assert 4 <= len(wrong) <= 5


def test_demonstrations_have_mistakes_and_the_better_answer_is_first() -> None:
    prompts = [question(it) for it in range(2000)]
    demonstrations = [demonstration(it)[PROMPT_LENGTH:] for it in range(2000)]
    right = sum(map(is_right, prompts, demonstrations)) / 2000
    assert right == pytest.approx(1 - MISTAKES, abs=0.03)
    for prompt in prompts[:200]:
        better, worse = preference(prompt.number)
        assert (better.shape, worse.shape) == ((LENGTH,), (LENGTH,))
        assert decode(better).startswith(prompt.text)
        assert is_right(prompt, better[PROMPT_LENGTH:])
        assert not is_right(prompt, worse[PROMPT_LENGTH:])


def test_cache_changes_nothing() -> None:
    policy, tokens = make_policy().double(), torch.randint(0, len(CHARACTERS), (5, LENGTH))
    whole, cache = policy(tokens), Cache()
    sizes = [PROMPT_LENGTH, *[1] * ANSWER_LENGTH]
    parts = [policy(part, cache) for part in tokens.split(sizes, dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-12, atol=1e-12)
    changed = tokens.clone()
    changed[:, 4:] = 0
    assert torch.equal(policy(changed)[:, :4], whole[:, :4]), "it is causal"


def test_models_are_read_from_their_folders(tmp_path: Path) -> None:
    policy = make_policy()
    policy.save(tmp_path / "policy")
    again, scorer = load_policy(tmp_path / "policy"), load_scorer(tmp_path / "policy")
    tokens = torch.randint(0, len(CHARACTERS), (2, LENGTH))
    assert torch.equal(again(tokens), policy(tokens))
    assert torch.equal(scorer.blocks[1].down.weight, policy.blocks[1].down.weight)
    assert scorer(tokens).shape == (2, LENGTH)
    scorer.save(tmp_path / "scorer")
    assert torch.equal(load_scorer(tmp_path / "scorer")(tokens), scorer(tokens))


def test_samples_have_the_policy_s_distribution_and_its_log_probs() -> None:
    """The oracle draws nothing: the first token's frequencies are its probabilities, and the
    log-probabilities are those of a forward over the whole answer."""
    policy, prompt = make_policy(), question(5)
    samples = sample_group(policy, prompt, 6000, SEED)
    answers = torch.stack([it.answer for it in samples])
    tokens = torch.stack([it.tokens for it in samples])
    assert torch.equal(tokens[:, :PROMPT_LENGTH], encode(prompt.text).expand(6000, -1))
    with torch.no_grad():
        logits = policy(tokens)
    expected = logits[0, PROMPT_LENGTH - 1].softmax(-1)
    found = answers[:, 0].bincount(minlength=len(CHARACTERS)) / 6000
    assert expected.max() < 0.7
    deviation = (expected * (1 - expected) / 6000).sqrt()
    assert ((found - expected).abs() < 5 * deviation).all()
    # The second token, where the first one was the likeliest.
    likeliest = answers[:, 0] == expected.argmax()
    following = answers[likeliest][:, 1]
    expected = logits[likeliest][0, PROMPT_LENGTH].softmax(-1)
    found = following.bincount(minlength=len(CHARACTERS)) / len(following)
    deviation = (expected * (1 - expected) / len(following)).sqrt()
    assert ((found - expected).abs() < 5 * deviation + 1e-3).all()
    again = token_log_probs(logits[:, :-1], tokens[:, 1:])[:, PROMPT_LENGTH - 1 :]
    batch = collate(samples)
    torch.testing.assert_close(batch.log_probs, again * batch.mask, rtol=1e-4, atol=1e-4)
    ended = [it for it in answers.tolist() if END in it[:-1]]
    assert len(ended) > 100
    for answer in ended:
        assert set(answer[answer.index(END) + 1 :]) == {PAD}


def test_mask_ends_with_the_answer() -> None:
    answers = torch.tensor([[5, 6, END, PAD], [5, 6, 7, 8], [END, PAD, PAD, PAD], [PAD, 5, 6, END]])
    assert answer_mask(answers).tolist() == [[1, 1, 1, 0], [1] * 4, [1, 0, 0, 0], [1] * 4]


def same(first: Sequence[Sample], second: Sequence[Sample]) -> bool:
    """Whether they are equal to the bit."""
    return len(first) == len(second) and all(
        (a.prompt, a.score, a.advantage) == (b.prompt, b.score, b.advantage)
        and torch.equal(a.answer, b.answer)
        and torch.equal(a.log_probs, b.log_probs)
        for a, b in zip(first, second, strict=True)
    )


class FakeTask:
    def __init__(self, prompts: list[Prompt], samples: list[Sample]) -> None:
        self.prompts = prompts
        self.samples = samples
        self.results: list[Any] = []

    def done(self, results: list[Any]) -> bool:
        self.results = results
        return True


class FakeTasks(list[FakeTask]):
    """All tasks of a worker, after which its function returns."""

    group = GROUP


class FakeRole:
    """`ctx` of a role's function, whose tasks are given."""

    seed = SEED
    device = torch.device("cpu")

    def __init__(self, args: dict[str, Any], weights: dict[str, Tensor]) -> None:
        self.args = args
        self.weights = self
        self.reported: list[dict[str, float]] = []
        self._newest = weights
        self._tasks = FakeTasks()

    def refresh(self, model: Policy, engine: str) -> int:
        assert engine == "policy"
        model.load_state_dict(self._newest)
        return 0

    def report(self, **metrics: float) -> None:
        self.reported.append(metrics)

    def tasks(self, prompts: int = 1) -> FakeTasks:
        assert all(len(task.prompts) <= prompts for task in self._tasks)
        return self._tasks

    def run(self, function: Callable[[Any], None], tasks: list[FakeTask]) -> list[Any]:
        """The results of all tasks."""
        self._tasks[:] = tasks
        function(self)
        return [it for task in tasks for it in task.results]


def reported(role: FakeRole, name: str) -> list[float]:
    return [it[name] for it in role.reported if name in it]


def make_samples(
    role: FakeRole, module: Any, prompts: Sequence[Prompt], sizes: Sequence[int]
) -> list[Sample]:
    """What the two roles of a job make of prompts, in tasks of these sizes."""
    tasks, left = [], list(prompts)
    for size in sizes:
        tasks.append(FakeTask(left[:size], []))
        del left[:size]
    assert not left
    groups = role.run(module.generate, tasks)
    answered = [FakeTask([prompt], group) for prompt, group in zip(prompts, groups, strict=True)]
    samples: list[Sample] = role.run(module.score, answered)
    return samples


def test_samples_do_not_depend_on_tasks_and_workers(tmp_path: Path) -> None:
    policy, prompts = make_policy(), [question(it) for it in range(10, 18)]
    policy.save(tmp_path)
    args = {"actor_model_name_or_path": tmp_path}

    def worker() -> FakeRole:
        return FakeRole(args, policy.state_dict())

    role = worker()
    whole = make_samples(role, grpo, prompts, [4, 4])
    assert reported(role, "reward") == [it.score for it in whole]
    assert sum(reported(role, "tokens")) == sum(
        text.index(".") + 1 if "." in text else len(text)
        for text in (decode(it.answer) for it in whole)
    )
    parts = make_samples(worker(), grpo, prompts, [1, 3, 2, 2])
    backwards = [
        sample
        for prompt in reversed(prompts)
        for sample in make_samples(worker(), grpo, [prompt], [1])[::-1]
    ]
    assert same(whole, parts)
    assert same(whole, backwards[::-1])
    with torch.no_grad():  # all tokens are equally likely: answers tell the random numbers
        policy.head.weight.zero_()
        policy.head.bias.zero_()
    answers = {
        tuple(it.answer.tolist())
        for prompt in prompts
        for it in sample_group(policy, prompt, GROUP, SEED)
    }
    assert len(answers) > 0.9 * len(prompts) * GROUP, "each has its own"
    other = sample_group(policy, prompts[0], GROUP, SEED + 1)
    assert not same(whole[:GROUP], grpo.check_group(other))


class RolesContext(LocalContext):
    """One whose samples are made by the roles' functions, in tasks of other sizes than the loop."""

    def __init__(self, job: dict[str, Any], module: Any) -> None:
        super().__init__(job)
        self._module = module

    def rollouts(self, prompts: Any, engine: Any, collate_fn: Any) -> Any:
        order = SampleOrder(len(prompts), self.seed)
        context = self

        class Loader:
            def until(self, steps: int) -> Iterator[Batch]:
                while engine.global_steps < steps:
                    numbers = order.indices(engine.global_steps * 4, 4).tolist()
                    role = FakeRole(context.args, engine.module.state_dict())
                    yield collate_fn(
                        make_samples(
                            role, context._module, [prompts[it] for it in numbers], [1, 2, 1]
                        )
                    )

        return Loader()


def short_job(name: str, steps: int, folder: Path, **args: Any) -> dict[str, Any]:
    job = read_job(name)
    batch = 4 * GROUP if "rollouts" in job else 32
    for config in (job["engine"], *(job["args"].get(it, {}) for it in ("critic", "reference"))):
        if config:
            config["train_batch_size"] = batch
    paths = {
        key: str(folder / Path(value).name)
        for key, value in job["args"].items()
        if isinstance(value, str)
    }
    return job | {"steps": steps, "seed": SEED, "args": job["args"] | paths | args}


def run_roles_and_loop(rank: int, world: int, folder: Path) -> None:
    torch.manual_seed(1)
    make_policy().save(folder / "actor-models")
    Scorer(ModelConfig()).save(folder / "reward-models")
    for name, module in (("job", grpo), ("ppo", ppo)):
        job = short_job(name, 4, folder)
        judge = grpo.check_group
        if module is ppo:
            judge = partial(ppo.rate_group, load_scorer(folder / "reward-models"))
        results = []
        for ctx in (LocalContext(job, judge), RolesContext(job, module)):
            module.train(ctx)
            weights = load_policy(job["args"]["output_dir"]).state_dict()
            results.append((ctx.reported, weights))
        (rewards, weights), (same_rewards, same_weights) = results
        assert len(rewards) == 4
        assert rewards == same_rewards
        for key, value in weights.items():
            assert torch.equal(value, same_weights[key])
        first = load_policy(folder / "actor-models")
        if module is ppo:
            assert not torch.equal(first.head.weight, weights["head.weight"]), "it has trained"


def test_roles_train_as_the_loop_to_the_bit(tmp_path: Path) -> None:
    run_ranks(0, run_roles_and_loop, tmp_path)


def run_chain(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """The steps before the third one."""
    made = {"sft": sft.train(LocalContext(short_job("sft", 3, folder, model={"width": 32})))}
    dist.barrier()  # rank 0 writes the folder
    made["reward"] = reward.train(LocalContext(short_job("reward", 3, folder)))
    made["dpo"] = dpo.train(LocalContext(short_job("dpo", 3, folder)))
    return made


def test_chain_of_folders(tmp_path: Path) -> None:
    made, nothing = run_ranks(2, run_chain, tmp_path)
    assert nothing == {"sft": {}, "reward": {}, "dpo": {}}
    assert sorted(it.name for it in tmp_path.iterdir()) == [
        "actor-models",
        "dpo-models",
        "reward-models",
    ]
    assert load_scorer(tmp_path / "reward-models").config.width == 32
    assert set(made["dpo"]) == {"exact_match", "exact_match_greedy"}
    assert 0 <= made["reward"]["accuracy"] <= 1


def run_learning(rank: int, world: int, folder: Path) -> tuple[float, float]:
    torch.set_num_threads(1)
    small = read_job("sft") | {"steps": 100, "args": {"output_dir": folder / "actor-models"}}
    before = sft.train(LocalContext(small))
    job = read_job("job")
    folders = {"actor_model_name_or_path": folder / "actor-models", "output_dir": folder / "grpo"}
    params = {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.0}
    job["engine"] |= {"optimizer": {"type": "AdamW", "params": params}}
    del job["engine"]["scheduler"]
    ctx = LocalContext(job | {"steps": 30, "args": folders}, grpo.check_group)
    after = grpo.train(ctx)
    return before["exact_match"], after["exact_match"]


@pytest.mark.slow
def test_grpo_raises_exact_match(tmp_path: Path) -> None:
    ((before, after),) = run_ranks(0, run_learning, tmp_path)
    assert before < 0.35
    assert after > before + 0.15
