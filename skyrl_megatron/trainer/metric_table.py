"""Every metric's unit, meaning, and what a bad value points to: for the dashboard, for ``docs/metrics.md``, for
comparisons. ``python -m skyrl_megatron.trainer.metric_table`` prints that page."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class Metric:
    """A row of the table. ``name``: ``*`` stands for anything without a slash, a last ``**`` for anything at all."""

    name: str
    unit: str
    meaning: str
    bad: str = ""
    """What a value that looks wrong points to."""


TABLE = (
    # reward and evaluation
    Metric("reward/avg_raw_reward", "reward", "Mean reward of a response", "flat: see zero_variance_groups"),
    Metric("reward/avg_pass_at_*", "share", "Prompts of which some response has a positive reward"),
    Metric("reward/mean_positive_reward", "reward", "Mean of rewards, negative ones counted as 0"),
    Metric(
        "reward/zero_variance_groups",
        "share",
        "Prompts whose responses all got one reward, which teach group estimators nothing",
        "near 1: prompts too easy or too hard; use dynamic_sampling, or other data",
    ),
    Metric(
        "eval/*/avg_score", "reward", "Mean score on held-out prompts", "falls while the reward rises: over-fitted"
    ),
    Metric("eval/*/pass_at_*", "share", "Held-out prompts of which some response has a positive score"),
    Metric("eval/*/mean_positive_reward", "reward", "Mean of held-out scores, negative ones counted as 0"),
    Metric("eval/adapter/**", "reward", "The same of one adapter's held-out prompts"),
    Metric("adapter/**", "as the metric", "The metric of one named adapter"),
    Metric("environment/*", "environment's", "What the environments report, as they aggregate it"),
    # rollout
    Metric("generate/avg_num_tokens", "tokens", "Mean length of responses", "grows to the limit: overlong responses"),
    Metric("generate/*_num_tokens", "tokens", "Length of responses, those of environments included"),
    Metric("generate/*_assistant_tokens", "tokens", "Sampled tokens of a response"),
    Metric("generate/avg_tokens_*_rewards", "tokens", "Mean length of responses with, and without a reward"),
    Metric("generate/tokens_per_turn_*", "tokens", "Length of the policy's turns"),
    Metric("generate/avg_turns", "turns", "Turns of the policy in a trajectory"),
    Metric(
        "generate/truncated_ratio",
        "responses",
        "Responses that ended at the length limit",
        "many: raise max_generate_length, or penalise length",
    ),
    Metric("generate/num_failed", "trajectories", "Trajectories whose environment failed", "above 0: see console.log"),
    Metric("generate/num_unfinished", "trajectories", "Trajectories that ended at their turn limit"),
    Metric(
        "generate/nonfinite_samples",
        "rows",
        "Rows with log-probs or rewards that are no numbers",
        "above 0: overflow in the engine",
    ),
    Metric("generate/sampled_batches", "batches", "Batches of prompts that dynamic sampling needed for the step"),
    Metric("generate/route_bytes_per_sample", "bytes", "Experts of the engine that travel with a sample"),
    Metric(
        "generate/trajectory_time_*",
        "s",
        "Time of trajectories: in all, waiting for the engine, for the environment, other",
        "env above llm: environments are the bottleneck",
    ),
    # loss and update
    Metric("loss/avg_final_rewards", "reward", "Mean reward after penalties"),
    Metric("loss/avg_raw_advantages", "", "Mean advantage of the tokens trained on", "far from 0: baseline is off"),
    Metric("loss/avg_raw_advantages_abs", "", "Mean size of advantages", "0: nothing to learn in this batch"),
    Metric("loss/zero_variance_rows", "rows", "Rows masked because their group has one reward"),
    Metric("loss/avg_kl*", "nats", "KL to the reference that rewards are reduced by"),
    Metric("loss/kl_coef", "", "Coefficient of the KL in the reward"),
    Metric("policy/final_loss", "", "Loss with all its terms"),
    Metric("policy/policy_loss", "", "Policy-gradient loss alone"),
    Metric(
        "policy/policy_entropy",
        "nats",
        "Entropy of the policy at its tokens",
        "falls towards 0: collapse; clip-higher, entropy loss, lower rate",
    ),
    Metric(
        "policy/indexer_loss",
        "nats",
        "Divergence of the indexer's scores from the attention paid to the chosen keys",
        "grows: the indexer does not follow the policy, raise dsa_indexer_loss_coeff",
    ),
    Metric("policy/policy_kl", "nats", "KL to the reference", "grows fast: lower the rate, raise kl_loss_coef"),
    Metric(
        "policy/grad_norm",
        "",
        "Norm of the gradient before clipping",
        "spikes: bad samples, or a rate that is too high",
    ),
    Metric("policy/policy_lr", "", "Learning rate"),
    Metric("policy/skipped", "updates", "Updates left out because the gradient was not finite", "above 0: overflow"),
    Metric("policy/num_microbatches", "", "Micro-batches of a replica in an update"),
    Metric(
        "policy/loss_metrics/clip_ratio",
        "share",
        "Tokens whose ratio was clipped",
        "above 0.2: updates too large, or data too old",
    ),
    Metric("policy/loss_metrics/is_ratio_*", "", "Ratio of new to old probability", "far from 1: data too old"),
    Metric("policy/loss_metrics/tis_*", "share", "Weights of the off-policy correction that were capped"),
    Metric("policy/loss_metrics/*", "", "What the policy loss or off-policy correction measures"),
    Metric(
        "policy/rollout_train_logprobs_abs_diff_*",
        "nats",
        "Difference of log-probs between trainer and engine for the same tokens",
        "grows: stale weights, routes or precision; explain-gap tells which",
    ),
    Metric(
        "policy/mtp_loss",
        "nats",
        "Cross-entropy of the draft head (multi-token prediction) at the tokens trained on",
        "grows: the policy moves faster than the head follows; raise mtp.loss_scale or the rate",
    ),
    Metric(
        "policy/mtp_acceptance",
        "share",
        "Tokens that speculative sampling would take from the draft head, at the tokens trained on",
        "falls: engines that draft with the head gain less",
    ),
    # experts
    Metric(
        "policy/moe_load_imbalance*",
        "ratio",
        "Tokens of the busiest expert over the mean",
        "grows: use a balance loss",
    ),
    Metric("policy/moe_dead_experts*", "share", "Experts without a token", "grows: routing collapses"),
    Metric("policy/moe_router_entropy*", "nats", "Mean entropy of the routing", "falls towards 0: routing collapses"),
    Metric("policy/moe_routing_replayed*", "share", "Tokens that were trained with the engine's experts"),
    Metric(
        "policy/moe_routing_mismatch*",
        "share",
        "Replayed tokens that the trainer would have sent elsewhere",
        "grows: engine and trainer disagree; explain-gap tells why",
    ),
    Metric("policy/moe_*/**", "", "The metric of one layer"),
    # speed
    Metric("policy/flops_per_second_per_rank", "FLOP/s", "Arithmetic of a rank in the training pass"),
    Metric(
        "*/score_tokens_per_second_per_rank", "tokens/s", "Tokens that a rank of the role scores, without gradients"
    ),
    Metric("*/score_flops_per_second_per_rank", "FLOP/s", "Arithmetic of a rank in these passes"),
    Metric("*/score_mfu", "share", "Of these, over those of the device at its best", "low: waits, or small batches"),
    Metric(
        "generate/tokens_per_second_per_rank",
        "tokens/s",
        "Tokens of prompts and responses over the time of rollouts, for each rank of the engines",
        "low: few requests at a time, or environments that are slow",
    ),
    Metric("generate/flops_per_second_per_rank", "FLOP/s", "Arithmetic of a rank of the engines, nothing cached"),
    Metric("generate/mfu", "share", "Of these, over those of the device at its best", "usual: a few percent"),
    Metric(
        "trainer/*_mini_batches_left_out",
        "mini-batches",
        "Mini-batches without a token to train on, of which no optimizer step was taken",
        "often above 0: most prompts are solved, or unsolved, by all samples",
    ),
    Metric(
        "trainer/*_slowest_rank_ratio",
        "ratio",
        "Longest own time of a rank in training over the median of the others'; waits for others are left out",
        "above 2: one host or device is slow, or the work is uneven",
    ),
    Metric(
        "trainer/*_stragglers",
        "ranks",
        "Ranks above twice the others for three steps",
        "above 0: console.log names them",
    ),
    Metric(
        "trainer/healings",
        "times",
        "Lost ranks that were replaced since the line before",
        "above 0: console.log names them, and the host's log says what ended their processes",
    ),
    Metric("trainer/state_copies_gb", "GB", "Host memory of all copies that lost ranks would be filled from"),
    Metric("policy/mfu", "share", "FLOP/s over those of the device at its best", "low: small micro-batches, or waits"),
    Metric("policy/tokens_per_second_per_rank", "tokens/s", "Tokens that a rank trains on in a second"),
    Metric(
        "policy/peak_memory_bytes", "bytes", "Most memory that a rank held", "near the device's: see memory per phase"
    ),
    Metric("trainer/tokens_per_second", "tokens/s", "Tokens of the step over its time"),
    Metric("trainer/tokens_per_second_per_gpu", "tokens/s", "The same for each rank of the policy"),
    Metric("trainer/epoch", "epochs", "Passes over the prompts"),
    Metric("trainer/global_step", "steps", "Steps that are complete"),
    Metric("trainer/weight_sync_gb_per_second", "GB/s", "Bytes of a weight sync over its time", "low: see transport"),
    Metric(
        "trainer/weight_sync_probe_max_abs_diff",
        "nats",
        "Largest gap of the probe after a sync, trainer against engine",
        "above the precision of the engine's type: weights differ",
    ),
    Metric("timing/step", "s", "The whole step"),
    Metric("timing/generate", "s", "Waiting for rollouts", "most of the step: add engines, or train asynchronously"),
    Metric("timing/policy_train", "s", "Forward, backward and optimizer of the policy"),
    Metric("timing/sync_weights", "s", "New weights for the engines, checks included"),
    Metric("timing/sync_weights_only_transfer", "s", "Of these the transfer alone"),
    Metric("timing/keep_state", "s", "Copies of the ranks' state, own and neighbours'"),
    Metric("timing/heal", "s", "Lost ranks: new processes, groups and models, and back to the copies"),
    Metric("timing/first_step*", "s", "From the command to the end of the first step, and its parts"),
    Metric("timing/**", "s", "Time of a phase"),
    Metric("memory/*_trainer_gb", "GB", "Memory of the trainer's own process at the end of a phase", "grows: a leak"),
    Metric("memory/*_gb", "GB", "What a role holds on its devices at the end of a phase"),
    # asynchronous runs
    Metric("async/staleness_*", "versions", "Age of the weights that sampled the rows of the step"),
    Metric(
        "async/pause_seconds", "s", "Engines stood still for the weight sync", "near the step's time: sync is too slow"
    ),
    Metric("async/buffer_size", "groups", "Finished groups that wait to be trained", "0: engines are the bottleneck"),
    Metric("async/in_flight_groups", "groups", "Groups that are being sampled"),
    Metric("async/*_groups", "groups", "Groups that were dropped, filtered, retried or failed"),
    # further roles
    Metric(
        "critic/explained_variance",
        "share",
        "Variance of the returns that values explain",
        "negative: worse than a mean",
    ),
    Metric("critic/**", "", "The critic's, as of the policy"),
    Metric("teacher/**", "", "What teachers say of the rows"),
    Metric("warmup/step", "steps", "Steps of imitation before the first one of RL"),
    Metric("warmup/loss", "nats", "Loss of the imitation"),
    Metric("warmup/score", "reward", "Held-out score in the imitation"),
)


def _matches(name: str, pattern: str) -> bool:
    if not pattern.endswith("**") and name.count("/") != pattern.count("/"):
        return False
    return fnmatch.fnmatchcase(name, pattern)


@cache
def describe(name: str) -> Metric | None:
    """Return the first row that a metric's name fits."""
    return next((row for row in TABLE if _matches(name, row.name)), None)


def page() -> str:
    """Return ``docs/metrics.md``."""
    lines = [
        "# Metrics",
        "",
        "One line of `metrics.jsonl` a step, and the same names in every tracker. Written by",
        "`python -m skyrl_megatron.trainer.metric_table`; `*` stands for a dataset, a phase, a statistic.",
        "",
        "| metric | unit | meaning | a bad value points to |",
        "|---|---|---|---|",
    ]
    lines += [f"| `{row.name}` | {row.unit} | {row.meaning} | {row.bad} |" for row in TABLE]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
