"""A run's folder without a run: numbers are drawn, files are written by what writes them in a run."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

PHASES = {
    "generate": 2.1,
    "postprocess_generator_output": 0.02,
    "convert_to_training_input": 0.05,
    "fwd_logprobs_values_reward": 0.6,
    "compute_advantages_and_returns": 0.03,
    "policy_train": 2.6,
    "sync_weights": 0.25,
}
CHAT = (
    "<|user|>How many rows has the table orders?<|assistant|>I look it up.\n"
    "<tool_call>SELECT count(*) FROM orders</tool_call>"
)
ANSWER = "\n<tool_response>(1042,)</tool_response>\n"
END = "The table has 1042 rows. 🙂\n\n<answer>1042</answer>"


def config(folder, name="run", **overrides):
    from skyrl_megatron.config import SkyRLTrainConfig

    keys = {"trainer.log_path": str(folder), "trainer.run_name": name, "trainer.logger": "tensorboard"}
    return SkyRLTrainConfig.from_cli_overrides(keys | {key.replace("__", "."): v for key, v in overrides.items()})


def metrics(step: int, total: int, rng: random.Random, *, many: int = 0) -> dict[str, float]:
    """The numbers of a step."""
    done, noise = step / total, rng.gauss(0, 0.03)
    reward = 0.1 + 0.75 * (1 - math.exp(-3 * done)) + noise
    times = {f"timing/{name}": seconds * rng.uniform(0.85, 1.2) for name, seconds in PHASES.items()}
    found = times | {
        "timing/step": sum(times.values()) + rng.uniform(0.05, 0.2),
        "timing/sync_weights_only_transfer": 0.04,
        "timing/train_critic_and_policy": times["timing/policy_train"],
        "reward/avg_raw_reward": reward,
        "reward/avg_pass_at_8": min(1.0, reward + 0.2),
        "reward/zero_variance_groups": max(0.0, 0.2 + 0.5 * done + noise),
        "policy/policy_kl": 0.002 + 0.05 * done + abs(noise) / 20,
        "policy/policy_entropy": 2.1 - 1.4 * done + noise,
        "policy/grad_norm": math.exp(rng.gauss(0.5, 0.4)) * (12 if step % 97 == 50 else 1),
        "policy/policy_loss": noise / 10,
        "policy/final_loss": noise / 10 + 0.01,
        "policy/policy_lr": 1e-6 * min(1.0, step / 20),
        "policy/loss_metrics/clip_ratio": abs(noise) / 2,
        "policy/loss_metrics/is_ratio_mean": 1 + noise / 100,
        "policy/loss_metrics/is_ratio_max": 1.5 + abs(noise) * 10,
        "policy/loss_metrics/is_ratio_min": 0.6 - abs(noise),
        "policy/rollout_train_logprobs_abs_diff_mean": 2e-4 * math.exp(noise),
        "policy/rollout_train_logprobs_abs_diff_max": 5e-2 * math.exp(3 * noise),
        "policy/moe_load_imbalance": 2.2 + noise,
        "policy/moe_dead_experts": max(0.0, noise),
        "policy/moe_router_entropy": 1.9 + noise,
        "policy/moe_microbatch_imbalance_plain": 1.35 + noise,
        "policy/moe_microbatch_imbalance": 1.09 + abs(noise) / 3,
        "policy/moe_microbatch_imbalance_bound": 1.07,
        "policy/moe_balance_s": 0.04 + abs(noise) / 9,
        "policy/moe_rank_imbalance": 1.3 + noise,
        "policy/moe_rank_imbalance_moved": 1.05 + abs(noise) / 3,
        "policy/moe_moved_experts": 4.0 if step % 40 == 0 else 0.0,
        "policy/moe_move_s": 0.8 if step % 40 == 0 else 0.01,
        "policy/moe_routing_replayed": 0.99,
        "policy/moe_routing_mismatch": 0.01 + abs(noise) / 10,
        "policy/peak_memory_bytes": 6.1e10,
        "policy/shared_prefix_share": 0.7 + noise / 10,
        "policy/mfu": 0.38 + noise / 3,
        "policy/tokens_per_second_per_rank": 5400 + 3000 * noise,
        "policy/flops_per_second_per_rank": 3.7e14,
        "policy/score_tokens_per_second_per_rank": 15_000 + 5000 * noise,
        "policy/score_flops_per_second_per_rank": 3.5e14,
        "policy/score_mfu": 0.35 + noise / 3,
        "generate/tokens_per_second_per_rank": 2600 + 900 * noise,
        "generate/flops_per_second_per_rank": 6e13,
        "generate/mfu": 0.06 + abs(noise) / 9,
        "generate/avg_num_tokens": 300 + 500 * done,
        "generate/max_num_tokens": 1024.0,
        "generate/min_num_tokens": 12.0,
        "generate/truncated_ratio": float(int(20 * done)),
        "generate/avg_turns": 2.0 + done,
        "generate/trajectory_time_completion_mean": 1.8,
        "generate/trajectory_time_llm_mean": 1.5,
        "generate/trajectory_time_env_mean": 0.2,
        "generate/trajectory_time_other_mean": 0.1,
        "generate/trajectory_time_completion_p90": 1.9,
        "generate/trajectory_time_completion_max": 2.1,
        "loss/avg_raw_advantages": noise / 100,
        "loss/avg_raw_advantages_abs": 0.7 - 0.4 * done,
        "memory/generate_trainer_gb": 1.4,
        "memory/generate_policy_gb": 0.0,
        "memory/policy_train_trainer_gb": 1.5 + 0.1 * done,
        "memory/policy_train_policy_gb": 48.2,
        "trainer/tokens_per_second": 20_000 + 5000 * done,
        "trainer/weight_sync_gb_per_second": 11.5 + noise,
        "trainer/weight_sync_probe_max_abs_diff": 1e-6 * math.exp(noise),
        "agents/token_in_rate": 1.0 - 0.01 * (step % 7 == 0),
        "agents/calls": 300.0,
        "agents/unmatched": 3.0 * (step % 7 == 0),
        "agents/unattributed": 0.0,
        "environment/outcome_solved": 0.3 + 0.5 * done,
        "environment/outcome_failed": 0.6 - 0.5 * done,
        "environment/forks": 1.2 + noise,
        "async/staleness_max": float(rng.choice((1, 2))),
        "async/staleness_mean": 0.8 + abs(noise),
        "async/staleness_min": 0.0,
        "async/pause_seconds": 0.14,
        "async/buffer_size": float(rng.randint(0, 9)),
        "async/in_flight_groups": 16.0,
        "async/dropped_groups": 0.0,
    }
    found |= {f"environment/made_{number}": rng.random() for number in range(many)}
    if step % 5 == 0:
        found["eval/all/avg_score"] = reward - 0.05
    return found


def write_run(folder: Path, steps: int = 40, *, name: str = "run", tokens: int = 400, many: int = 0, **overrides):
    """Write a run of so many steps, with samples of ``tokens`` tokens every ten steps; return its folder."""
    from skyrl_megatron.config.resolve import run_folder, save_config

    cfg = config(folder, name, **({"trainer__max_training_steps": steps} | overrides))
    save_config(cfg)
    run = run_folder(cfg)
    rng = random.Random(cfg.trainer.seed)
    with (run / "metrics.jsonl").open("w") as file:
        for number in range(4):
            line = {"step": 0, "warmup/step": 10 * number + 1, "warmup/loss": 1.2 - 0.2 * number}
            file.write(json.dumps(line | {"warmup/score": 0.1 * number}) + "\n")
        for step in range(1, steps + 1):
            file.write(json.dumps({"step": step, **metrics(step, steps, rng, many=many)}) + "\n")
    (run / "console.log").write_text("".join(f"2026-01-01 00:00:00 step {n}/{steps}\n" for n in range(steps)))
    looked_at = range(1, steps + 1, max(steps // 10, 1))
    write_lanes(run, looked_at, rng)
    write_loads(run, looked_at, rng)
    write_samples(cfg, looked_at, tokens, rng)
    write_trajectories(run, looked_at, rng)
    return run


def write_lanes(run, steps, rng):
    from skyrl_megatron_observe.timeline import lanes

    with (run / "spans.jsonl").open("w") as file:
        for step in steps:
            now, found = 1e9 + 10 * step, []
            for name, seconds in PHASES.items():
                end = now + seconds * rng.uniform(0.9, 1.1)
                found.append(("trainer", name, now, end))
                for rank in range(4):
                    if name == "policy_train":
                        begin = now + rng.uniform(0, 0.1)
                        found.append((f"policy rank {rank}", "train_mini_batch", begin, end - 0.02))
                        found.append((f"policy rank {rank}", "optim_step", end - 0.4, end - 0.03))
                    if name == "fwd_logprobs_values_reward":
                        late = rng.uniform(0.1, 0.5) * seconds
                        found.append((f"policy rank {rank}", "compute_logprobs", now, end - late))
                    if name == "sync_weights":
                        found.append((f"policy rank {rank}", "send_weights", now + 0.05, end - 0.05))
                for engine in range(2):
                    if name == "generate":
                        late = rng.uniform(0, 0.4) * seconds
                        found.append((f"engine {engine}", "requests", now + 0.01, end - late))
                    if name == "sync_weights":
                        found.append((f"engine {engine}", "load weights", now + 0.06, end - 0.04))
                now = end
            file.write(json.dumps(lanes(step, found)) + "\n")


def write_loads(run, steps, rng, layers=6, experts=16):
    popular = [[rng.gammavariate(2, 1) for _ in range(experts)] for _ in range(layers)]
    with (run / "expert_load.jsonl").open("w") as file:
        for step in steps:
            load = [[int(900 * share * rng.uniform(0.8, 1.2)) for share in row] for row in popular]
            file.write(json.dumps({"step": step, "layers": list(range(1, layers + 1)), "load": load}) + "\n")


def byte_tokenizer() -> Any:
    """One token for each byte; pieces of several characters for frequent words."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers.models import BPE

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([CHAT, ANSWER, END] * 3, trainer)
    return tokenizer


def batch_of(
    tokenizer: Any, tokens: int, rng: random.Random, *, groups: int = 6, samples: int = 4
) -> tuple[Any, list[list[int]], Any]:
    """Rows as a step trains on: a turn with a tool call, its answer, and a turn that is as long as it must be."""
    import torch

    from skyrl_megatron.types import PaddedBatch

    prompt, call = (tokenizer.encode(part).ids for part in CHAT.split("<|assistant|>"))
    answer, end = tokenizer.encode(ANSWER).ids, tokenizer.encode(END).ids
    rest = (end * (tokens // len(end) + 1))[: max(tokens - len(call) - len(answer), 8)]
    response, mask = [*call, *answer, *rest], [1] * len(call) + [0] * len(answer) + [1] * len(rest)
    rows, length = groups * samples, len(response)
    sampled = torch.tensor(mask, dtype=torch.float32)
    rewards = torch.zeros(rows, length)
    rewards[:, -1] = torch.tensor([float(row // samples == 1 or rng.random() < 0.5) for row in range(rows)])
    engine = -torch.rand(rows, length) * sampled
    batch = PaddedBatch(
        sequences=torch.tensor([prompt + response] * rows),
        attention_mask=torch.ones(rows, len(prompt) + length, dtype=torch.bool),
        response_mask=torch.ones(rows, length),
        loss_mask=sampled.repeat(rows, 1),
        uids=[str(11 + row // samples) for row in range(rows)],
        rewards=rewards,
        rollout_logprobs=engine,
        advantages=(rewards.sum(1, keepdim=True) - rewards.sum(1).mean()) * sampled,
    ).flat()
    trainer = engine + torch.randn(rows, length).clamp(-3, 3) * 1e-3
    trainer = torch.where(sampled > 0, trainer, -9.0)  # engines give 0 for what they did not sample
    return batch, [mask] * rows, trainer.flatten()


def write_samples(cfg, steps, tokens, rng):
    import numpy as np

    from skyrl_megatron_observe.samples import SampleLog

    tokenizer = byte_tokenizer()
    log = SampleLog(cfg, tokenizer, max(steps))
    batch, masks, trainer = batch_of(tokenizer, tokens, rng)
    for step in steps:
        half = int(batch.response_lengths[0]) // 2
        spans = [[(str(step - 2), 0, half), (str(step - 1), half, 2 * half)]] * len(batch)
        log.note({"stop_reasons": ["stop"] * len(batch), "loss_masks": masks, "rollout_versions": spans})
        rows = log.chosen(batch)
        log.write(step, batch, rows, batch.responses.select(trainer, np.asarray(rows)).numpy())


def write_trajectories(run, steps, rng):
    """Agents that continue, edit their history, compact it, and fail."""
    from skyrl_megatron.inference.protocol import Generation
    from skyrl_megatron.rollout.interface import TrajectoryID
    from skyrl_megatron_agents.graph import Graph
    from skyrl_megatron_agents.rows import Outcome, OutcomeKind
    from skyrl_megatron_agents.trajectory_records import TrajectoryRecords

    tokenizer = byte_tokenizer()
    records = TrajectoryRecords(run / "trajectories", _Decoder(tokenizer), 4, 1)
    outcomes = (
        Outcome(OutcomeKind.SOLVED, 1.0, "tests pass"),
        Outcome(OutcomeKind.FAILED, 0.0, "the tests ended with exit code 1"),
        Outcome(OutcomeKind.CONTEXT_FULL, why="the prompt has 40,000 tokens"),
    )
    for step in steps:
        for sample, outcome in enumerate(outcomes):
            graph, difference = Graph(), ""
            messages = [{"role": "user", "content": "How many rows has the table orders?"}]
            for number in range(6 + sample):
                if number == 2:  # another question after the first answer
                    messages = [*messages[:2], {"role": "user", "content": "And of customers?"}]
                if number == 3:  # another answer of the client's than the sampled one
                    messages[1] = {"role": "assistant", "content": "I looked it up."}
                if number == 4:
                    messages = [{"role": "user", "content": "Summary: the table has 1042 rows. Go on."}]
                match = graph.match(messages)
                if match.unmatched is not None:
                    difference = difference or graph.difference(match)
                text = messages[-1]["content"] if match.parent else str(messages)
                words = tokenizer.encode(CHAT.partition("<|assistant|>")[2] if number < 5 else END).ids
                generation = Generation(words, [-rng.random() for _ in words], "stop", [("7", 0, len(words))], None)
                answer = {"role": "assistant", "content": tokenizer.decode(words)}
                graph.add(match, tokenizer.encode(text).ids, generation, answer)
                messages = [*messages, answer, {"role": "user", "content": f"{ANSWER} {number}"}]
            [id] = records.chosen(step, [TrajectoryID(str(11 + sample), 0)])
            records.write(step, id, graph, outcome, "all", difference)


class _Decoder:
    """The call that transformers' tokenizers have."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def decode(self, tokens: Any) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))
