// The charts of each view and their metrics.
const OVERVIEW = [
  { title: "reward", names: ["reward/avg_raw_reward", "eval/all/avg_score"] },
  { title: "evaluation loss", names: ["eval/all/loss"] },
  { title: "chosen answer scores higher", names: ["rewards/accuracies", "eval/all/rewards/accuracies"], floor: 1 },
  { title: "rewards of chosen and rejected answers", names: ["rewards/chosen", "rewards/rejected", "rewards/margins"] },
  { title: "log-probs of chosen and rejected answers", names: ["logps/chosen", "logps/rejected"] },
  { title: "pass at n", names: ["reward/avg_pass_at_*", "eval/all/pass_at_*"], floor: 1 },
  { title: "warm-up by imitation", names: ["warmup/loss", "warmup/score"] },
  { title: "KL to the reference", names: ["policy/policy_kl", "loss/avg_kl*"] },
  { title: "entropy", names: ["policy/policy_entropy"] },
  { title: "gradient norm", names: ["policy/grad_norm", "critic/grad_norm"], log: true },
  { title: "loss", names: ["policy/policy_loss", "policy/final_loss"] },
  {
    title: "response length",
    names: ["generate/avg_num_tokens", "generate/max_num_tokens", "generate/min_num_tokens"],
    floor: 1,
  },
  { title: "clipped", names: ["policy/loss_metrics/clip_ratio", "policy/loss_metrics/tis_*"], floor: 0.01 },
  {
    title: "log-prob difference, trainer − engine",
    names: ["policy/rollout_train_logprobs_abs_diff_mean", "policy/rollout_train_logprobs_abs_diff_max"],
    log: true,
  },
  { title: "probability ratio", names: ["policy/loss_metrics/is_ratio_*"] },
  { title: "groups without variance", names: ["reward/zero_variance_groups"], floor: 1 },
  {
    title: "truncated, failed, unfinished",
    names: ["generate/truncated_ratio", "generate/num_failed", "generate/num_unfinished"],
    floor: 1,
  },
  { title: "advantages", names: ["loss/avg_raw_advantages_abs", "loss/avg_raw_advantages"] },
  { title: "turns", names: ["generate/avg_turns"], floor: 1 },
  { title: "critic", names: ["critic/explained_variance"] },
  { title: "environment", names: ["environment/*"] },
  {
    title: "throughput",
    names: [
      "trainer/tokens_per_second",
      "policy/tokens_per_second_per_rank",
      "*/score_tokens_per_second_per_rank",
      "generate/tokens_per_second_per_rank",
    ],
    floor: 1,
  },
  {
    title: "share of the tokens that shared prefixes save",
    names: ["policy/shared_prefix_share", "critic/shared_prefix_share"],
    floor: 1,
  },
  { title: "MFU", names: ["policy/mfu", "critic/mfu", "*/score_mfu", "generate/mfu"], floor: 0 },
  { title: "learning rate", names: ["policy/policy_lr", "critic/critic_lr"], floor: 0 },
];
const MEMORY = [
  { title: "memory: trainer", names: ["memory/*_trainer_gb"] },
  { title: "memory: policy on its devices", names: ["memory/*_policy_gb"] },
  { title: "memory: other roles", names: ["memory/*_ref_gb", "memory/*_critic_gb", "memory/*_teacher*_gb"] },
  { title: "memory: peak of a rank", names: ["policy/peak_memory_bytes", "critic/peak_memory_bytes"] },
];
const ROLLOUT_TIME = [
  {
    title: "time of a trajectory",
    names: [
      "generate/trajectory_time_completion_mean",
      "generate/trajectory_time_llm_mean",
      "generate/trajectory_time_env_mean",
      "generate/trajectory_time_other_mean",
    ],
    floor: 0,
  },
  {
    title: "the slowest trajectories",
    names: ["generate/trajectory_time_completion_p90", "generate/trajectory_time_completion_max"],
    floor: 0,
  },
  {
    title: "FLOP/s per rank",
    names: [
      "policy/flops_per_second_per_rank",
      "critic/flops_per_second_per_rank",
      "*/score_flops_per_second_per_rank",
      "generate/flops_per_second_per_rank",
    ],
    floor: 0,
  },
];
const ROUTING = [
  { title: "load of the busiest expert", names: ["policy/moe_load_imbalance"], floor: 1 },
  { title: "experts without tokens", names: ["policy/moe_dead_experts"], floor: 0 },
  { title: "entropy of the router", names: ["policy/moe_router_entropy"], floor: 0 },
  {
    title: "load of the busiest EP rank, by micro-batch",
    names: [
      "policy/moe_microbatch_imbalance_plain",
      "policy/moe_microbatch_imbalance",
      "policy/moe_microbatch_imbalance_bound",
    ],
    floor: 1,
  },
  {
    title: "load of the busiest EP rank, by step",
    names: ["policy/moe_rank_imbalance", "policy/moe_rank_imbalance_moved"],
    floor: 1,
  },
  { title: "experts moved", names: ["policy/moe_moved_experts"], floor: 1 },
  { title: "time to plan and move", names: ["policy/moe_balance_s", "policy/moe_move_s"], floor: 0 },
  { title: "routing replay", names: ["policy/moe_routing_mismatch", "policy/moe_routing_replayed"], floor: 0 },
];
const WEIGHTS = [
  { title: "staleness", names: ["async/staleness_max", "async/staleness_mean", "async/staleness_min"], floor: 1 },
  {
    title: "weight sync",
    names: ["timing/sync_weights", "timing/sync_weights_only_transfer", "async/pause_seconds"],
    floor: 0,
  },
  { title: "bandwidth", names: ["trainer/weight_sync_gb_per_second"], floor: 0 },
  { title: "log-prob difference after a sync", names: ["trainer/weight_sync_probe_max_abs_diff"], log: true },
  { title: "groups waiting and in flight", names: ["async/buffer_size", "async/in_flight_groups"], floor: 1 },
  {
    title: "groups lost",
    names: ["async/dropped_groups", "async/filtered_groups", "async/retried_groups", "async/failed_groups"],
    floor: 1,
  },
];

const grid = (panels) => el("div", { class: "grid" }, ...panels.map(lineCard));

function overview() {
  const run = state.runs[0];
  const log = el("pre", { class: "log", tabindex: 0, "aria-label": "last lines of the log" }, run.log.join("\n"));
  const last = el("section", { class: "card wide" }, el("h3", {}, "last lines of the log"), log);
  const panels = grid(OVERVIEW);
  if (!panels.children.length) panels.append(el("p", { class: "note" }, "No step has been logged yet."));
  if (state.runs.length === 1 && run.log.length) panels.append(last);
  requestAnimationFrame(() => {
    log.scrollTop = log.scrollHeight;
  });
  return [panels];
}

function weights() {
  const panels = grid(WEIGHTS);
  return panels.children.length ? [panels] : [el("p", { class: "note" }, "No weight sync has been logged yet.")];
}

/** All metrics, with a search by part of the name. */
function everything() {
  const found = el("div", { class: "grid" });
  const names = matching("*").filter((name) => name !== "step");
  const search = el("input", {
    type: "search",
    placeholder: `part of the name of ${names.length} metrics`,
    "aria-label": "find metrics",
    size: 34,
    input: () => fill(),
  });
  const fill = () => {
    drawn = drawn.filter((chart) => !found.contains(chart.svg));
    found.replaceChildren(
      ...names
        .filter((name) => name.includes(search.value.trim()))
        .map((name) => lineCard({ title: name, names: [name] })),
    );
    drawWhenSeen();
  };
  fill();
  return [el("div", { class: "row" }, search), found];
}
