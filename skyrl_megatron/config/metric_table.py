"""Every metric: unit, meaning, what a bad value points to, whether more or less of it is better, and what gives it.

The one table of ``stop_when``, ``best_metric``, comparisons of runs, the dashboard and ``docs/metrics.md``, which
``python -m skyrl_megatron.config.metric_table`` prints. :func:`skyrl_megatron.plugins.register_metric` adds a user's.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, cast

from skyrl_megatron.plugins import METRICS

type Direction = Literal["higher", "lower", ""]

RL, PREFERENCES = ("train", "async"), ("dpo", "reward")
GIVEN_BY: dict[str, tuple[str, ...]] = {
    "sft/": ("sft",),
    "dpo/": ("dpo",),
    "rewards/": PREFERENCES,
    "logps/": ("dpo",),
    "eval/**/loss": ("sft", *PREFERENCES),
    "eval/**/rewards/": PREFERENCES,
    "eval/**/logps/": ("dpo",),
    "policy/": (),
    "trainer/": (),
    "timing/": (),
    "estimate/": (),
    "memory/": (),
    "*/": (),
    "": RL,
}
"""Beginning of a name → the verbs that give the metric; (): all. The first that fits."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A row of the table. ``name``: ``*`` matches anything without a slash, ``**`` anything."""

    name: str
    unit: str
    meaning: str
    bad: str = ""
    """What a suspicious value points to."""
    better: Direction = ""
    """Whether higher or lower values are better; "": neither."""
    when: str = ""
    """What else gives it (``rules/evaluation_rules.py``)."""
    verbs: tuple[str, ...] | None = None
    """Verbs that give it; None: by its name, see :meth:`given_by`."""

    @property
    def given_by(self) -> tuple[str, ...]:
        """The verbs of runs that have the metric; (): all."""
        if self.verbs is not None:
            return self.verbs
        return next(verbs for beginning, verbs in GIVEN_BY.items() if self.name.startswith(beginning))


more, less = partial(Metric, better="higher"), partial(Metric, better="lower")

TABLE = (
    # reward and evaluation
    more("reward/avg_raw_reward", "reward", "Mean reward of a trajectory", "flat: look at zero_variance_groups"),
    more("reward/avg_pass_at_*", "share", "Prompts with at least one response of positive reward"),
    more("reward/mean_positive_reward", "reward", "Mean reward, with negative rewards counted as 0"),
    less(
        "reward/zero_variance_groups",
        "share",
        "Prompts whose responses all got the same reward: group estimators give them advantage 0",
        "near 1: prompts are too easy or too hard; set dynamic_sampling, or use other data",
        when="several samples",
    ),
    more("eval/**/avg_score", "reward", "Mean score on held-out prompts", "falls while the reward rises: overfitting"),
    more("eval/**/pass_at_*", "share", "Held-out prompts with at least one response of positive score"),
    more("eval/**/mean_positive_reward", "reward", "Mean held-out score, with negative scores counted as 0"),
    more("eval/**/majority_at_*", "share", "Held-out prompts whose most frequent answer is right; ties share"),
    less("eval/**/num_failed", "trajectories", "Held-out samples that failed: they are in no score"),
    less("eval/**/loss", "nats", "Loss per trained token of held-out conversations"),
    less("sft/loss", "nats", "Loss per trained token of the step, before its updates"),
    Metric("sft/trained_tokens", "tokens", "Trained tokens of the step"),
    less("dpo/loss", "nats", "Loss of preferences of the step, before its updates"),
    less("reward/loss", "nats", "Loss of pairs of a reward model, before the updates of the step", verbs=("reward",)),
    more("reward/avg_model_score", "score", "Mean score of the reward model", when="a reward model as teacher"),
    less(
        "reward/unscored_samples",
        "samples",
        "Samples without a score, which are masked",
        when="a reward model as teacher",
    ),
    Metric("dpo/kl", "nats", "`kto`: KL divergence of policy and reference"),
    more("rewards/accuracies", "share", "Pairs whose better answer has the higher reward", when="pairs"),
    more("rewards/margins", "nats", "Difference of both rewards", when="pairs"),
    Metric("rewards/chosen", "nats", "β · log-ratio of policy and reference, or score, of the better answers"),
    Metric("rewards/rejected", "nats", "The same of the other answers"),
    Metric("logps/chosen", "nats", "Log-probs of the better answers"),
    Metric("logps/rejected", "nats", "Log-probs of the other answers"),
    more("eval/**/rewards/accuracies", "share", "The same of held-out pairs", when="pairs"),
    more("eval/**/rewards/margins", "nats", "The same of held-out pairs", when="pairs"),
    Metric("eval/**/rewards/chosen", "nats", "The same of held-out preferences"),
    Metric("eval/**/rewards/rejected", "nats", "The same of held-out preferences"),
    Metric("eval/**/logps/chosen", "nats", "The same of held-out preferences"),
    Metric("eval/**/logps/rejected", "nats", "The same of held-out preferences"),
    Metric("adapter/**", "as the metric", "The metric for one named adapter"),
    Metric(
        "environment/outcome_*", "share", "Trajectories of agents that ended so", "infrastructure: read console.log"
    ),
    Metric("environment/*", "environment's", "Metrics that the environments report and aggregate"),
    # rollout
    Metric(
        "generate/avg_num_tokens", "tokens", "Mean length of responses", "grows to the limit: responses are too long"
    ),
    Metric("generate/*_num_tokens", "tokens", "Length of responses, including tokens from environments"),
    Metric("generate/*_assistant_tokens", "tokens", "Sampled tokens of a response"),
    Metric(
        "generate/avg_tokens_*_rewards", "tokens", "Mean length of responses with a positive reward, and with reward 0"
    ),
    Metric("generate/tokens_per_turn_*", "tokens", "Length of the policy's turns"),
    Metric("generate/avg_turns", "turns", "Turns of the policy in a trajectory"),
    Metric(
        "generate/truncated_ratio",
        "responses",
        "Responses that ended at the length limit",
        "many: raise max_generate_length, or penalize length",
    ),
    less("generate/num_failed", "trajectories", "Trajectories whose environment failed", "above 0: read console.log"),
    Metric("generate/num_unfinished", "trajectories", "Trajectories that ended at their turn limit"),
    less(
        "generate/nonfinite_samples",
        "rows",
        "Rows of samples with NaN or infinite log-probs or rewards",
        "above 0: overflow in the engine",
    ),
    Metric("generate/sampled_batches", "batches", "Batches of prompts that dynamic sampling needed for the step"),
    Metric(
        "generate/refused_by_*",
        "prompts",
        "Prompts that a gate of `dynamic_sampling.gates` refused, by its name",
        "many: their rollouts are paid for and not trained on; use other prompts, or a wider gate",
    ),
    Metric("generate/route_bytes_per_sample", "bytes", "Recorded routing of the engine that is sent with a sample"),
    Metric(
        "generate/trajectory_time_*",
        "s",
        "Time of a trajectory: total, waiting for the engine, waiting for the environment, other",
        "env above llm: environments are the bottleneck",
    ),
    # agents
    more(
        "agents/token_in_rate",
        "share",
        "Agents' calls whose prompt has every earlier answer as the tokens that were sampled",
        "below 1: the agent rewrites answers; console.log and the dashboard show the first",
    ),
    Metric("agents/calls", "calls", "Calls of agents that were sampled"),
    Metric("agents/unmatched", "calls", "Of them, those with an answer in the prompt that was not sampled"),
    Metric("agents/retries", "calls", "Calls that got an earlier answer"),
    less("agents/unattributed", "calls", "Calls without the key of their trajectory", "above 0: an agent has no key"),
    Metric("agents/refused", "calls", "Those, and calls of trajectories that had ended"),
    less("agents/own_ms_*", "ms", "Time of a call in the gateway, without sampling", "above 20: too many agents"),
    Metric(
        "agents/cause_*",
        "trajectories",
        "Trajectories of agents by the cause of their end (`skyrl_megatron_agents/outcome_counts.py`)",
        "sandbox, call, no_call, other: no agent is to blame; read console.log",
    ),
    # loss and update
    Metric("loss/avg_final_rewards", "reward", "Mean reward after penalties"),
    Metric(
        "loss/avg_raw_advantages", "", "Mean advantage over the trained tokens", "far from 0: the baseline is biased"
    ),
    Metric("loss/avg_raw_advantages_abs", "", "Mean absolute advantage", "0: the batch has no learning signal"),
    Metric("loss/avg_length_penalty", "reward", "Mean of the length penalties"),
    Metric("loss/zero_variance_rows", "rows", "Rows masked because all rewards of their group are equal"),
    Metric("loss/avg_kl*", "nats", "KL to the reference that is subtracted from the rewards"),
    Metric("loss/kl_coef", "", "Coefficient of the KL term in the reward"),
    Metric("policy/final_loss", "", "Loss with all its terms"),
    Metric("policy/policy_loss", "", "Policy-gradient loss without other terms"),
    Metric("policy/observation_loss", "nats", "Cross-entropy of the environment's tokens"),
    Metric(
        "policy/policy_entropy",
        "nats",
        "Entropy of the policy over the trained tokens",
        "falls towards 0: entropy collapse; try clip-higher, an entropy loss, or a lower learning rate",
    ),
    Metric(
        "policy/indexer_loss",
        "nats",
        "KL of the indexer's scores to the attention weights of the selected keys",
        "grows: the indexer does not follow the policy; raise dsa_indexer_loss_coeff",
    ),
    Metric(
        "policy/policy_kl", "nats", "KL to the reference", "grows fast: lower the learning rate, or raise kl_loss_coef"
    ),
    Metric(
        "policy/grad_norm",
        "",
        "Norm of the gradient before clipping",
        "spikes: bad samples, or the learning rate is too high",
    ),
    Metric("policy/policy_lr", "", "Learning rate"),
    Metric(
        "policy/attention_logit_max",
        "logits",
        "Largest attention logit before QK-clip, with `qk_clip` or `log_max_attention_logit`",
        "above the threshold: heads are clipped",
    ),
    Metric("policy/num_zeros_in_grad", "entries", "Gradient entries that are 0, with `log_num_zeros_in_grad`"),
    less(
        "policy/skipped",
        "updates",
        "Updates skipped because the gradient was not finite, or above `grad_norm_skip_threshold`",
        "above 0: overflow",
    ),
    Metric("policy/num_microbatches", "", "Micro-batches of a data-parallel replica in an update"),
    Metric("policy/shared_prefix_share", "share", "Tokens of an update that `share_prefixes` did not compute again"),
    Metric(
        "policy/loss_metrics/clip_ratio",
        "share",
        "Tokens whose probability ratio was clipped",
        "above 0.2: updates are too large, or the data is too old",
    ),
    Metric("policy/loss_metrics/is_ratio_*", "", "Ratio of new to old probability", "far from 1: the data is too old"),
    Metric("policy/loss_metrics/tis_*", "share", "Importance weights of the off-policy correction that were capped"),
    Metric("policy/loss_metrics/*", "", "Measurements of the policy loss or the off-policy correction"),
    less(
        "policy/rollout_train_logprobs_abs_diff_*",
        "nats",
        "Log-prob mismatch between trainer and engine for the same tokens",
        "grows: stale weights, different routing or precision; explain-mismatch finds the cause",
    ),
    less(
        "policy/mtp_loss",
        "nats",
        "Cross-entropy of the draft head (multi-token prediction) over the trained tokens",
        "grows: the head does not keep up with the policy; raise mtp.loss_scale or the learning rate",
    ),
    more(
        "policy/mtp_acceptance",
        "share",
        "Share of the trained tokens that speculative decoding would accept from the draft head",
        "falls: speculative decoding with the head gains less",
    ),
    # experts
    less(
        "policy/moe_load_imbalance*",
        "ratio",
        "Tokens of the most loaded expert over the mean",
        "grows: use a load-balancing loss",
    ),
    less("policy/moe_dead_experts*", "share", "Experts that got no token", "grows: routing collapse"),
    Metric("policy/moe_router_entropy*", "nats", "Mean entropy of the router", "falls towards 0: routing collapse"),
    Metric(
        "policy/moe_load_balancing_loss*", "", "The load-balancing loss, without its coefficient; 1 is even", "grows"
    ),
    Metric("policy/moe_z_loss*", "", "The z-loss of router logits, without its coefficient", "grows"),
    Metric("policy/moe_routing_replayed*", "share", "Tokens that were trained with the engine's routing"),
    Metric(
        "policy/moe_routing_mismatch*",
        "share",
        "Replayed tokens that the trainer's router would have sent to other experts",
        "grows: engine and trainer disagree; explain-mismatch finds the cause",
    ),
    Metric(
        "policy/moe_microbatch_imbalance",
        "ratio",
        "Tokens of the busiest EP rank over the mean, of each micro-batch and layer (`moe_balance_experts`)",
        "well above its bound: larger micro-batches, or more of them, leave more choice",
    ),
    Metric("policy/moe_microbatch_imbalance_plain", "ratio", "The same without `moe_balance_experts`"),
    Metric(
        "policy/moe_microbatch_imbalance_bound",
        "ratio",
        "The lowest that any choice of micro-batches has for these rows",
        "well above 1: all rows prefer the experts of some ranks",
    ),
    Metric("policy/moe_balance_s", "s", "Time to plan the micro-batches by experts"),
    Metric("policy/moe_*/**", "", "The metric for one layer"),
    less("*/moe_rank_imbalance", "ratio", "Tokens of the most loaded expert-parallel rank over the mean"),
    Metric("*/moe_rank_imbalance_moved", "ratio", "The same tokens with the experts where they moved"),
    Metric("*/moe_moved_experts", "experts", "Experts of all layers that changed their rank"),
    Metric("*/moe_move_s", "s", "Planning and moving them"),
    # speed
    more("policy/flops_per_second_per_rank", "FLOP/s", "Model FLOP/s of a rank in the training pass"),
    more(
        "*/score_tokens_per_second_per_rank",
        "tokens/s",
        "Tokens that a rank of the role scores per second, without gradients",
    ),
    more("*/score_flops_per_second_per_rank", "FLOP/s", "Model FLOP/s of a rank in the scoring passes"),
    more("*/score_mfu", "share", "Those FLOP/s over the peak of the device", "low: waits, or small batches"),
    more(
        "generate/tokens_per_second_per_rank",
        "tokens/s",
        "Tokens of prompts and responses per second of rollout, per rank of the engines",
        "low: few concurrent requests, or slow environments",
    ),
    more(
        "generate/flops_per_second_per_rank", "FLOP/s", "Model FLOP/s of a rank of the engines, without prefix caching"
    ),
    more("generate/mfu", "share", "Those FLOP/s over the peak of the device", "a few percent are usual"),
    Metric(
        "trainer/*_mini_batches_left_out",
        "mini-batches",
        "Mini-batches without a trainable token; no optimizer step was taken for them",
        "often above 0: for most prompts, all samples succeed or all fail",
    ),
    less(
        "trainer/*_slowest_rank_ratio",
        "ratio",
        "Longest training time of a rank over the median of the others, without waits for other ranks",
        "above 2: a host or device is slow, or the work is uneven",
    ),
    less(
        "trainer/*_stragglers",
        "ranks",
        "Ranks that took more than twice the time of the others for three steps",
        "above 0: console.log names them",
    ),
    less(
        "trainer/healings",
        "times",
        "Replacements of lost ranks since the previous line",
        "above 0: console.log names them, and the host's system log says why their processes ended",
    ),
    Metric("trainer/state_copies_gb", "GB", "Host memory of all peer checkpoints, from which lost ranks are restored"),
    more("policy/mfu", "share", "FLOP/s over the peak of the device", "low: small micro-batches, or waits"),
    more("policy/tokens_per_second_per_rank", "tokens/s", "Tokens that a rank trains on per second"),
    Metric(
        "policy/peak_memory_bytes",
        "bytes",
        "Peak device memory of a rank",
        "near the device's memory: look at the memory of each phase",
    ),
    more("trainer/tokens_per_second", "tokens/s", "Tokens of the step over its duration"),
    more("trainer/tokens_per_second_per_gpu", "tokens/s", "The same for each rank of the policy"),
    Metric("trainer/epoch", "epochs", "Passes over the training prompts"),
    Metric("trainer/global_step", "steps", "Completed steps"),
    more(
        "trainer/weight_sync_gb_per_second",
        "GB/s",
        "Bytes of a weight sync over its duration",
        "low: check the transport",
    ),
    less(
        "trainer/weight_sync_probe_max_abs_diff",
        "nats",
        "Largest log-prob difference of the probe after a sync, trainer − engine",
        "above the precision of the engine's dtype: the weights differ",
    ),
    less("timing/step", "s", "The whole step"),
    less("timing/generate", "s", "Wait for rollouts", "most of the step: add engines, or train asynchronously"),
    less("timing/policy_train", "s", "Forward, backward and optimizer of the policy"),
    less("timing/sync_weights", "s", "Weight sync to the engines, including checks"),
    less("timing/sync_weights_only_transfer", "s", "The transfer within the weight sync"),
    less("timing/keep_state", "s", "Peer checkpoints: each rank copies its own and its peer's state"),
    less(
        "timing/heal",
        "s",
        "Recovery of lost ranks: new processes, process groups and models, then restore from the peer checkpoints",
    ),
    less("timing/first_step*", "s", "From the command to the end of the first step, in total and by part"),
    less("timing/**", "s", "Time of a phase"),
    Metric(
        "estimate/*_s",
        "s",
        "What a phase of the second step takes on paper (`timing/`: what it took); low and high: bounds of the step",
        "far below the measurement: the term that is slower than it can be",
    ),
    Metric("memory/*_trainer_gb", "GB", "Host memory of the trainer's process at the end of a phase", "grows: a leak"),
    Metric("memory/*_gb", "GB", "Device memory of a role at the end of a phase"),
    Metric("sampler/observed_share", "share", "Prompts that an adaptive sampler has observed"),
    Metric(
        "sampler/*_share",
        "share",
        "Prompts in a pool of `data.sampler=pools`: easy, hard, retired",
        "hard near 1: the prompts are too hard for the policy",
    ),
    Metric("sampler/*", "sampler's", "Metrics that a plugin's sampler reports"),
    # asynchronous runs
    Metric("async/staleness_*", "versions", "Age of the weights that sampled the rows of the step"),
    less(
        "async/pause_seconds",
        "s",
        "Pause of the engines for the weight sync",
        "near the step's time: the sync is too slow",
    ),
    Metric(
        "async/buffer_size", "groups", "Finished groups that wait for training", "0: the engines are the bottleneck"
    ),
    Metric("async/in_flight_groups", "groups", "Groups that are being sampled"),
    Metric("async/*_groups", "groups", "Groups that were dropped, filtered, retried or failed"),
    # synchronous steps with oversampling
    Metric("oversampling/open_groups", "groups", "Groups that the next step continues"),
    Metric("oversampling/dropped_groups", "groups", "Groups that were started and not trained"),
    Metric(
        "oversampling/*_trajectories",
        "trajectories",
        "Trajectories that continued (resumed) or started again (restarted)",
        "restarted: their environment cannot be replayed",
    ),
    Metric("oversampling/staleness_*", "versions", "Age of the groups of the step"),
    Metric("oversampling/trained_mean_tokens", "tokens", "Mean length of all samples that were trained so far"),
    Metric(
        "oversampling/started_mean_tokens",
        "tokens",
        "Mean length of all samples that were started so far, estimated where they are not finished",
    ),
    Metric(
        "oversampling/length_bias",
        "share",
        "How much longer trained samples are than started ones; a lower bound of its size with `unfinished=drop`",
        "far below 0: the policy learns from short responses; keep the others, or lower the ratio",
    ),
    Metric("oversampling/token_lag_*", "share", "Trained tokens that are so many versions old"),
    Metric("oversampling/logprob_diff_lag_*", "nats", "Difference of trainer and engine on tokens of this age"),
    Metric("oversampling/mixed_rows", "share", "Rows that several versions sampled"),
    # further roles
    more(
        "critic/explained_variance",
        "share",
        "Variance of the returns that the values explain",
        "negative: worse than predicting the mean",
    ),
    Metric("critic/**", "", "The same metrics for the critic"),
    Metric("teacher/**", "", "Metrics of the teachers' scores"),
    Metric("warmup/step", "steps", "Supervised steps before the first RL step"),
    less("warmup/loss", "nats", "Loss of the warm-up"),
    more("warmup/score", "reward", "Held-out score during the warm-up"),
)


def _matches(name: str, pattern: str) -> bool:
    if "**" not in pattern and name.count("/") != pattern.count("/"):
        return False
    return fnmatch.fnmatchcase(name, pattern)


def registered(name: str) -> Metric | None:
    """Return the row of a metric that a user registered."""
    pattern = next((pattern for pattern in METRICS if _matches(name, pattern)), None)
    return None if pattern is None else Metric(pattern, **cast(Any, METRICS[pattern]))


def describe(name: str) -> Metric | None:
    """Return the row of a metric: a user's, else the first whose pattern matches its name."""
    return registered(name) or _of_table(name)


@cache
def _of_table(name: str) -> Metric | None:
    return next((row for row in TABLE if _matches(name, row.name)), None)


def names_below(
    beginning: str, verb: str, conditions: Mapping[str, bool], numbers: Mapping[str, Collection[int]]
) -> list[str]:
    """Return the rests of the names that begin so, such as ``eval/**/``, in a run of a verb.

    ``conditions``: ``when`` → whether it holds. ``numbers``: rest with ``*`` → its values, such as
    ``pass_at_*`` → the values of k.
    """
    names: list[str] = []
    for row in TABLE:
        rest = row.name.removeprefix(beginning)
        if rest == row.name or not conditions.get(row.when, True) or verb not in (row.given_by or (verb,)):
            continue
        names += [rest.replace("*", str(number)) for number in numbers.get(rest, ())] if "*" in rest else [rest]
    return names


ARROWS = {"higher": " ↑", "lower": " ↓", "": ""}


def page() -> str:
    """Return ``docs/metrics.md``."""
    lines = [
        "# Metrics",
        "",
        "Each step is one line of `metrics.jsonl`; every tracker gets the same names. `*` is a phase or a statistic;",
        "`**` in `eval/` a data set, `all`, `adapter/NAME`, a set of `data.eval_sets`, or `SET/VALUE` of its column",
        "`group_by`. ↑, ↓: more, less is better, for `best_metric`, `compare` and the dashboard. Held-out files of",
        "one name get the names of their folders too. `stop_when` and `best_metric` take names of the run and those",
        'that a plugin declares: `skyrl_megatron.plugins.register_metric("eval/all/mine", direction="higher")`.',
        "Generated by `python -m skyrl_megatron.config.metric_table`.",
        "",
        "| metric | unit | meaning | a bad value points to |",
        "|---|---|---|---|",
    ]
    lines += [f"| `{row.name}`{ARROWS[row.better]} | {row.unit} | {_meaning(row)} | {row.bad} |" for row in TABLE]
    return "\n".join(lines) + "\n"


def _meaning(row: Metric) -> str:
    """Return the meaning, and what gives the metric where its name does not say it."""
    plain = row.given_by in ((), RL) or row.name.startswith(row.given_by)
    given = ", ".join([*(() if plain else row.given_by), *filter(None, [row.when])])
    return f"{row.meaning} ({given})" if given else row.meaning


if __name__ == "__main__":
    print(page(), end="")
