"""What changes how the embedded model learns, in one process: losses on samples of an age, and samplers.

    python benchmarks/run.py learning losses [--losses NAME …] [--ages 0 1 4] [--seeds 42 1 2]
    python benchmarks/run.py learning samplers [--samplers shuffle pools] [--to 0.8] [--seeds 42 1 2 3 4]

The policy is the embedded model. It is warmed up on known answers, once per seed; runs of a seed start from the same
weights and moments. A step samples four answers to each of ``--prompts`` prompts and takes twelve updates, as the
embedded run does, with its objective (``PolicyObjective``), estimator, filter and schedule. The model is that of
transformers; a group is one sequence whose answers do not attend to each other.

``losses``: each step trains on samples of the weights that the policy had ``age`` steps before. That is what a full
stream of an asynchronous run delivers, but the same in every run. All losses train on the same number of samples. One
line per loss and age: the held-out score (greedy) half way and at the end, and the difference at the end from
``dual_clip`` at age 0, in points: means over the seeds.

``samplers``: the number of samples until the held-out score is ``--to``. With ``--varied`` a step samples batches
until it has so many groups with different rewards, so that the steps of all samplers have the same updates and rates.
``--trivial`` and ``--wrong`` add rows that teach nothing, as real data have them. One line per sampler: the samples
of each seed, and the ratio of the sums to those of the first sampler.

``--out FILE`` appends every measured step as a line of JSON.
"""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import json
import math
import os
import random
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor

from skyrl_megatron.algorithms.advantages import grpo_scores, rows_with_variance
from skyrl_megatron.algorithms.metrics import metric_values
from skyrl_megatron.algorithms.objective import PolicyObjective
from skyrl_megatron.config.schema.algorithm import AlgorithmConfig
from skyrl_megatron.data.samplers import AdaptiveSampler, SampledRows, make_sampler
from skyrl_megatron.tiny_model import write_embedded_model

ANSWER, SAMPLES, UPDATES, PASSES = 4, 4, 4, 3
"""Tokens of an answer, answers to a prompt, updates of a pass over the samples of a step, and passes."""
CORRECTED = {"off_policy_correction": {"tis_ratio_type": "token"}}
LOSSES: dict[str, dict[str, Any]] = {
    "dual_clip": {"policy_loss_type": "dual_clip"} | CORRECTED,
    "anchored": {"policy_loss_type": "dual_clip", "ratio_anchor": "rollout"},
    "gspo": {"policy_loss_type": "gspo"} | CORRECTED,
    "cispo": {"policy_loss_type": "cispo", "cispo": {"anchor": "rollout"}},
    "rollout_is": {"policy_loss_type": "rollout_is"},
    "dppo": {"policy_loss_type": "dppo"},
    "m2po": {"policy_loss_type": "m2po"},
}
"""Name → settings of ``trainer.algorithm``."""
KINDS = ("sums", "trivial", "wrong")
"""What prompts are: sums, sums with 00, sums with a wrong answer of three digits."""


@dataclass(frozen=True)
class Sums:
    """Prompts [N, P] int64, answers [N, ANSWER] int64, which end with end tokens, and kinds [N] int64 by ``KINDS``."""

    prompts: Tensor
    answers: Tensor
    kinds: Tensor

    def __len__(self) -> int:
        return len(self.prompts)

    def take(self, rows: Tensor) -> Sums:
        """Return some of the rows."""
        return Sums(self.prompts[rows], self.answers[rows], self.kinds[rows])


def sums(tokenizer: Any, seed: int, trivial: float = 0.0, wrong: float = 0.0) -> tuple[Sums, Sums]:
    """Return the sums of the embedded run to train on, and those held out.

    ``trivial``, ``wrong``: shares of the rows to train on that are sums with 00, and that have an answer of three
    digits, which the policy never gives. They are added to the sums.
    """
    pairs = [(a, b) for a in range(10, 50) for b in range(a, 100 - a)]
    draw = random.Random(seed)
    draw.shuffle(pairs)
    held_out = len(pairs) // 5

    def both(some: list[tuple[int, int]]) -> list[tuple[int, int, int, int]]:
        return [(a, b, a + b, 0) for pair in some for a, b in sorted({pair, pair[::-1]})]

    def encode(rows: list[tuple[int, int, int, int]]) -> Sums:
        prompts, answers = [], []
        for a, b, total, _ in rows:
            chat = [{"role": "user", "content": f"{a:02}+{b:02}="}]
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            prompts.append(tokenizer.encode(text, add_special_tokens=False))
            answer = tokenizer.encode(str(total), add_special_tokens=False)
            answers.append(answer + [tokenizer.eos_token_id] * (ANSWER - len(answer)))
        return Sums(torch.tensor(prompts), torch.tensor(answers), torch.tensor([row[3] for row in rows]))

    rows = both(pairs[held_out:])
    each = len(rows) / (1 - trivial - wrong)
    zeros = [pair for b in range(10, 100) for pair in ((0, b, b, 1), (b, 0, b, 1))]
    more = [zeros[place % len(zeros)] for place in range(round(trivial * each))]
    more += [(*rows[draw.randrange(len(rows))][:2], draw.randrange(200, 1000), 2) for _ in range(round(wrong * each))]
    return encode(rows + more), encode(both(pairs[:held_out]))


class Policy:
    """The embedded model and what a step needs of it: samples, log-probs, a score."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer, Qwen3MoeForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.model = Qwen3MoeForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.end: int = self.tokenizer.eos_token_id

    def log_probs(self, prompts: Tensor, answers: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies [B, n, ANSWER], in nats, of ``answers`` [B, n, ANSWER] to ``prompts`` [B, P].

        A row holds the prompt and its n answers, none of which attends to another.
        """
        (batch, length), samples = prompts.shape, answers.shape[1]
        owner = torch.cat([torch.full([length], -1), torch.arange(samples).repeat_interleave(ANSWER)])
        place = torch.cat([torch.arange(length), length + torch.arange(ANSWER).repeat(samples)])
        visible = ((owner[None] == -1) | (owner[None] == owner[:, None])) & (place[None] <= place[:, None])
        hidden = self.model.model(
            input_ids=torch.cat([prompts, answers.flatten(1)], 1),
            position_ids=place[None].expand(batch, -1),
            attention_mask=visible[None, None].expand(batch, 1, -1, -1),
        ).last_hidden_state
        first = hidden[:, None, length - 1 : length].expand(-1, samples, -1, -1)
        rest = hidden[:, length:].unflatten(1, (samples, ANSWER))[:, :, :-1]
        logits = self.model.lm_head(torch.cat([first, rest], 2)).log_softmax(-1)
        return logits.gather(-1, answers[..., None]).squeeze(-1), -(logits.exp() * logits).sum(-1)

    @torch.no_grad()
    def sample(self, prompts: Tensor, samples: int, draw: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Return ``samples`` answers to each prompt and their log-probs, [B, n, ANSWER]; greedy without ``draw``."""
        out = self.model(input_ids=prompts, use_cache=True)
        cache, scores = out.past_key_values, out.logits[:, -1].repeat_interleave(samples, 0).log_softmax(-1)
        cache.batch_repeat_interleave(samples)
        tokens: list[Tensor] = []
        found: list[Tensor] = []
        for place in range(ANSWER):
            if place:
                scores = self.model(input_ids=tokens[-1], past_key_values=cache).logits[:, -1].log_softmax(-1)
            tokens.append(scores.exp().multinomial(1, generator=draw) if draw else scores.argmax(-1, keepdim=True))
            found.append(scores.gather(-1, tokens[-1]))
        shape = (len(prompts), samples, ANSWER)
        return torch.cat(tokens, 1).view(shape), torch.cat(found, 1).view(shape)

    def mask(self, answers: Tensor) -> Tensor:
        """Return 1 for the tokens of ``answers`` up to the first end token, which counts: float, same shape."""
        ended = answers == self.end
        return (ended.cumsum(-1) - ended.long() == 0).float()

    def right(self, task: Sums, answers: Tensor) -> Tensor:
        """Return [B, n] float: 1 for the right answers."""
        expected = task.answers[:, None].expand_as(answers)
        return ((answers == expected) | (self.mask(expected) == 0)).all(-1).float()

    def score(self, task: Sums) -> float:
        """Return the share of prompts whose greedy answer is right."""
        return float(self.right(task, self.sample(task.prompts, 1, None)[0]).mean())


def warm_up(policy: Policy, task: Sums, held_out: Sums, seed: int, most: int) -> dict[str, Any]:
    """Train on known answers until a quarter of the held-out sums is right, by the plan of ``embedded/warmup.py``,
    for ``most`` steps.

    Return the optimizer's state: with new moments the first steps are too large.
    """
    from skyrl_megatron_tools.embedded.warmup import WarmUp

    plan, draw = WarmUp(), torch.Generator().manual_seed(seed)
    adam = torch.optim.Adam(policy.model.parameters(), lr=plan.lr)
    for step in range(1, most + 1):
        some = task.take(torch.randint(len(task), [plan.rows], generator=draw))
        mask = policy.mask(some.answers[:, None])
        loss = -(policy.log_probs(some.prompts, some.answers[:, None])[0] * mask).sum() / mask.sum()
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        adam.step()
        if loss <= plan.eval_loss:
            adam.param_groups[0]["lr"] = plan.fine_lr
            if step % plan.eval_interval == 0 and policy.score(held_out) >= plan.min_score:
                break
    return adam.state_dict()


@dataclass(frozen=True)
class Plan:
    """A run."""

    loss: str = "dual_clip"
    age: int = 0
    sampler: str = "shuffle"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    seed: int = 42
    prompts: int = 512
    steps: int = 64
    lr: float = 4e-4
    decays: bool = True
    """Whether the rate falls to 0 by a cosine."""
    every: int = 8
    """Steps between two measurements of the held-out score."""
    enough: float = 2.0
    """Held-out score at which the run ends."""
    varied: int = 0
    """Groups with different rewards that a step trains on: batches are sampled until it has them. 0: one batch."""
    trivial: float = 0.0
    wrong: float = 0.0
    """Shares of the prompts to train on, see :func:`sums`."""


class Order:
    """The prompts of each step by a sampler, which observes the rewards."""

    def __init__(self, plan: Plan, rows: int) -> None:
        known: Any = range(rows)
        self.sampler = make_sampler(plan.sampler, plan.options, SampledRows(known, ["sums"]), plan.prompts, plan.seed)
        self.batch, self.number = plan.prompts, 0

    def draw(self) -> Tensor:
        """Return the rows of the next step."""
        number, self.number = self.number, self.number + 1
        if isinstance(self.sampler, AdaptiveSampler):
            return torch.from_numpy(self.sampler.draw(number).copy())
        epoch, place = divmod(number, len(self.sampler) // self.batch)
        rows = self.sampler.epoch(epoch)[place * self.batch : (place + 1) * self.batch]
        return torch.from_numpy(rows.copy())

    def observe(self, rows: Tensor, rewards: Tensor) -> None:
        """Tell the sampler the rewards [B, n] of a step."""
        if isinstance(self.sampler, AdaptiveSampler):
            for row, each in zip(rows.tolist(), rewards.double().numpy(), strict=True):
                self.sampler.observe(row, self.sampler.score(each))


def train(policy: Policy, task: Sums, held_out: Sums, moments: dict[str, Any], plan: Plan) -> Iterator[dict[str, Any]]:
    """Train by ``plan``; yield the metrics of the steps at which the score was measured."""
    always = {"use_kl_loss": False, "use_entropy_loss": True, "entropy_loss_coef": 0.01}
    objective = PolicyObjective(AlgorithmConfig.from_dict_config(always | LOSSES[plan.loss]))
    behaviour, draw = copy.deepcopy(policy), torch.Generator().manual_seed(plan.seed)
    adam = torch.optim.Adam(policy.model.parameters())
    adam.load_state_dict(copy.deepcopy(moments))
    versions = collections.deque([copy.deepcopy(policy.model.state_dict())], maxlen=plan.age + 1)
    order, sampled = Order(plan, len(task)), 0
    for step in range(1, plan.steps + 1):
        share = 0.5 * (1 + math.cos(math.pi * (step - 1) / plan.steps)) if plan.decays else 1.0
        adam.param_groups[0]["lr"] = plan.lr * share
        behaviour.model.load_state_dict(versions[0])
        some, answers, rollout, rewards = sample_step(policy, behaviour, task, order, plan.varied, draw)
        sampled += len(some)
        measured = update(policy, objective, adam, some.prompts, answers, rollout, rewards, plan.varied)
        for place, kind in enumerate(KINDS):
            measured[f"{kind}_drawn"] = float((some.kinds == place).float().mean())
        versions.append(copy.deepcopy(policy.model.state_dict()))
        if step % plan.every == 0 or step == plan.steps:
            score = policy.score(held_out)
            line = {"step": step, "samples": sampled * SAMPLES, "score": score}
            yield dataclasses.asdict(plan) | measured | line | {"reward": float(rewards.mean())}
            if score >= plan.enough:
                break


def sample_step(
    policy: Policy, behaviour: Policy, task: Sums, order: Order, varied: int, draw: torch.Generator
) -> tuple[Sums, Tensor, Tensor, Tensor]:
    """Return the prompts of a step, their answers and log-probs [B, n, ANSWER] and rewards [B, n], which the sampler
    observes. Batches are sampled until ``varied`` groups have different rewards."""
    found: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    useful = 0
    while not found or useful < varied:
        rows = order.draw()
        some = task.take(rows)
        answers, rollout = behaviour.sample(some.prompts, SAMPLES, draw)
        rewards = policy.right(some, answers)
        order.observe(rows, rewards)
        found.append((rows, answers, rollout, rewards))
        useful += int((rewards.amax(1) > rewards.amin(1)).sum())
    rows, answers, rollout, rewards = (torch.cat(each) for each in zip(*found, strict=True))
    return task.take(rows), answers, rollout, rewards


def update(
    policy: Policy,
    objective: PolicyObjective,
    adam: torch.optim.Optimizer,
    prompts: Tensor,
    answers: Tensor,
    rollout: Tensor,
    rewards: Tensor,
    most: int = 0,
) -> dict[str, float]:
    """Take the updates of a step; return the means of their metrics. Groups without variance have no part in them,
    nor have those after the first ``most`` with variance, unless that is 0."""
    uids = [str(row) for row in range(len(answers)) for _ in range(SAMPLES)]
    varied = rows_with_variance(rewards.flatten(), uids).view_as(rewards)[:, 0].nonzero()[:, 0]
    kept = varied[:most] if most else varied
    advantages = grpo_scores(rewards.flatten(), uids).view_as(rewards)[..., None].expand_as(rollout)
    mask, old = policy.mask(answers), torch.zeros_like(rollout)
    if objective.needs_old_log_probs and len(kept):
        with torch.no_grad():
            old[kept] = policy.log_probs(prompts[kept], answers[kept])[0]
    found: dict[str, list[float]] = collections.defaultdict(list)
    for rows in [each for _ in range(PASSES) for each in kept.tensor_split(UPDATES) if len(each)]:
        log_probs, entropy = (each.flatten(0, 1) for each in policy.log_probs(prompts[rows], answers[rows]))
        known: dict[str, Any] = {
            "old_log_probs": old[rows].flatten(0, 1),
            "rollout_log_probs": rollout[rows].flatten(0, 1),
        }
        tokens = mask[rows].flatten(0, 1)
        loss, metrics = objective(
            objective.totals(tokens, **known),
            log_probs,
            advantages[rows].flatten(0, 1),
            tokens,
            entropy=entropy,
            **known,
        )
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        adam.step()
        for name, value in metric_values(metrics).items():
            found[name].append(value)
    share = {"varied_share": len(varied) / len(answers)}
    return {name: statistics.fmean(values) for name, values in found.items()} | share


class Seeds:
    """Warmed-up policies by seed, kept in ``folder``; runs start from them."""

    def __init__(self, folder: Path, out: Path | None, warm_up_steps: int) -> None:
        self.folder, self.out, self.warm_up_steps = folder, out, warm_up_steps

    def run(self, plan: Plan) -> list[dict[str, Any]]:
        """Run a plan; return its measured steps."""
        policy = Policy(write_embedded_model(self.folder / f"seed_{plan.seed}", plan.seed))
        task, held_out = sums(policy.tokenizer, plan.seed, plan.trivial, plan.wrong)
        warm = self.folder / f"seed_{plan.seed}_trivial_{plan.trivial:g}_warm.pt"
        if not warm.exists():
            known = task.take((task.kinds < 2).nonzero()[:, 0])
            moments = warm_up(policy, known, held_out, plan.seed, self.warm_up_steps)
            torch.save((policy.model.state_dict(), moments), warm)
        weights, moments = torch.load(warm)
        policy.model.load_state_dict(weights)
        lines = []
        for line in train(policy, task, held_out, moments, plan):
            lines.append(line)
            if self.out is not None:
                with self.out.open("a") as file:
                    file.write(f"{json.dumps(line)}\n")
        return lines


def compare_losses(seeds: Seeds, args: argparse.Namespace, base: Plan) -> None:
    """Print the scores of each loss and age."""
    synchronous = None
    for age in args.ages:
        for loss in args.losses:
            runs = [seeds.run(dataclasses.replace(base, loss=loss, age=age, seed=seed)) for seed in args.seeds]
            places = ((len(runs[0]) - 1) // 2, -1)
            half, end = (statistics.fmean(lines[place]["score"] for lines in runs) for place in places)
            if (loss, age) == ("dual_clip", 0):
                synchronous = end
            points = "" if synchronous is None else f", {100 * (end - synchronous):+.1f} points"
            entropy = statistics.fmean(lines[-1].get("policy_entropy", 0.0) for lines in runs)
            print(f"{loss}, age {age}: {half:.3f} half way, {end:.3f}{points}, entropy {entropy:.2f}", flush=True)


def compare_samplers(seeds: Seeds, args: argparse.Namespace, base: Plan) -> None:
    """Print the samples that each sampler needs."""
    first = None
    for sampler in args.samplers:
        options = json.loads(args.options) if sampler == "pools" else {}
        plan = dataclasses.replace(base, sampler=sampler, options=options, every=min(args.every, 2), enough=args.to)
        runs = [seeds.run(dataclasses.replace(plan, seed=seed)) for seed in args.seeds]
        needed = [lines[-1]["samples"] for lines in runs if lines[-1]["score"] >= args.to]
        if len(needed) < len(runs):
            print(f"{sampler}: {len(runs) - len(needed)} of {len(runs)} seeds did not reach {args.to}: raise --steps")
            continue
        first = first or sum(needed)
        print(f"{sampler}: {' '.join(f'{each:,}' for each in needed)} samples, {sum(needed) / first:.2f}x", flush=True)


def main() -> None:
    """Run it."""
    from smoke import parse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["losses", "samplers"], nargs="?", default="losses")
    parser.add_argument("--losses", nargs="+", choices=sorted(LOSSES), default=list(LOSSES))
    parser.add_argument("--ages", nargs="+", type=int, default=[0, 1, 4])
    parser.add_argument("--samplers", nargs="+", default=["shuffle", "pools"])
    parser.add_argument("--options", default="{}", help="data.sampler_options of pools, as JSON")
    parser.add_argument("--to", type=float, default=0.8)
    parser.add_argument("--seeds", nargs="+", type=int, default=[42])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=512, help="of a sampled batch")
    parser.add_argument("--varied", type=int, default=0, help="groups with different rewards that fill a step")
    parser.add_argument("--trivial", type=float, default=0.0)
    parser.add_argument("--wrong", type=float, default=0.0)
    parser.add_argument("--every", type=int, default=8)
    parser.add_argument("--lr", type=float, default=4e-4)
    parser.add_argument("--folder", type=Path, help="keeps the warmed-up models")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--warm-up-steps", type=int, default=1000, help="at most")
    args = parse(parser, steps=2, prompts=16, every=1, warm_up_steps=2, losses=["dual_clip", "anchored"], to=0.0)
    torch.set_num_threads(1)
    base = Plan(
        steps=args.steps,
        prompts=args.prompts,
        lr=args.lr,
        every=args.every,
        varied=args.varied,
        trivial=args.trivial,
        wrong=args.wrong,
    )
    with tempfile.TemporaryDirectory() as temporary:
        seeds = Seeds(args.folder or Path(temporary), args.out, args.warm_up_steps)
        (compare_losses if args.what == "losses" else compare_samplers)(seeds, args, base)


if __name__ == "__main__":
    main()
