// Time: stacked phases of every step, and the timeline of one step with lanes for trainer, ranks and engines.
const PHASES = [
  "generate",
  "postprocess_generator_output",
  "convert_to_training_input",
  "teacher",
  "fwd_logprobs_values_reward",
  "compute_advantages_and_returns",
  "critic_train",
  "policy_train",
  "update_ref",
  "save_checkpoints",
  "save_hf_model",
  "sync_weights",
  "eval",
];
const MAIN = {
  generate: 0,
  policy_train: 1,
  sync_weights: 2,
  fwd_logprobs_values_reward: 3,
  eval: 4,
  save_checkpoints: 5,
  critic_train: 6,
};

const hue = (name) => {
  const phase =
    {
      requests: "generate",
      optim_step: "eval",
      keep_samples: "other",
      "train policy": "policy_train",
      train_mini_batch: "policy_train",
      compute_logprobs: "fwd_logprobs_values_reward",
      compute_values: "critic_train",
      send_weights: "sync_weights",
      score: "sync_weights",
      save_checkpoint: "save_checkpoints",
    }[name] || name;
  return phase in MAIN
    ? colour(MAIN[phase])
    : /sync|weights|sleep|wake|pause|resume|probe/.test(phase)
      ? colour(2)
      : colour(7);
};

/** Seconds of each phase and of the rest, per step: {x, layers: [[name, [seconds]]], shares}. */
function phaseSeconds(run) {
  const steps = points(run, "timing/step");
  const at = new Map(steps.x.map((x, i) => [x, i]));
  const rest = [...steps.y];
  const layers = [];
  for (const phase of PHASES.filter((name) => name !== "eval" && hasNumbers(run, `timing/${name}`))) {
    const { x, y } = points(run, `timing/${phase}`);
    const seconds = new Array(steps.x.length).fill(0);
    x.forEach((step, i) => {
      if (at.has(step)) {
        seconds[at.get(step)] = y[i];
        rest[at.get(step)] -= y[i];
      }
    });
    layers.push([phase, seconds]);
  }
  layers.push(["other", rest.map((value) => Math.max(value, 0))]);
  const total = ([, seconds]) => seconds.reduce((sum, value) => sum + value, 0);
  const all = steps.y.reduce((sum, value) => sum + value, 0);
  const small = layers.filter((layer) => layer[0] === "other" || total(layer) < 0.015 * all);
  const other = steps.x.map((_, i) => small.reduce((sum, [, seconds]) => sum + seconds[i], 0));
  return {
    x: steps.x,
    layers: [...layers.filter((layer) => !small.includes(layer)), ["other", other]],
    shares: layers.map((layer) => [layer[0], total(layer) / all, total(layer) / steps.x.length]),
  };
}

function stackedCard(run) {
  const svg = el("svg", {
    height: 240,
    tabindex: 0,
    role: "img",
    "data-chart": "phases",
    "aria-label": "seconds of each phase by step",
  });
  const legend = el("div", { class: "legend" });
  const card = el(
    "section",
    { class: "card wide" },
    el("div", { class: "head" }, el("h3", {}, "time per phase ", el("span", { class: "unit" }, "s per step"))),
    svg,
    legend,
  );
  const chart = { svg, series: [] };
  chart.draw = () => {
    const { x, layers } = phaseSeconds(run);
    const width = svg.clientWidth || 800;
    const high = 240;
    const bars = Math.min(x.length, Math.floor((width - LEFT - RIGHT) / 3));
    const per = x.length / Math.max(bars, 1);
    const means = layers.map(([, seconds]) =>
      Array.from({ length: bars }, (_, b) => {
        const from = Math.floor(b * per);
        const to = Math.max(Math.floor((b + 1) * per), from + 1);
        let sum = 0;
        for (let i = from; i < to; i++) sum += seconds[i];
        return sum / (to - from);
      }),
    );
    const tops = Array.from({ length: bars }, (_, b) => means.reduce((sum, layer) => sum + layer[b], 0));
    const top = Math.max(1e-9, ...tops) * 1.05;
    const each = (width - LEFT - RIGHT) / Math.max(bars, 1);
    const py = (v) => high - BOTTOM - (v / top) * (high - TOP - BOTTOM);
    const parts = [];
    const base = new Array(bars).fill(0);
    for (const at of ticks(0, top, 4))
      parts.push(
        el("line", { class: "gridline", x1: LEFT, x2: width - RIGHT, y1: py(at), y2: py(at) }),
        el("text", { x: LEFT - 6, y: py(at) + 3.5, "text-anchor": "end" }, format(at)),
      );
    layers.forEach(([name], number) => {
      let d = "";
      for (let b = 0; b < bars; b++) {
        const low = py(base[b]);
        const up = py((base[b] += means[number][b]));
        const x0 = LEFT + b * each;
        if (low - up > 0.05)
          d += `M${x0.toFixed(2)} ${low.toFixed(2)}V${up.toFixed(2)}h${(each * (each > 4 ? 0.86 : 1)).toFixed(2)}V${low.toFixed(2)}Z`;
      }
      parts.push(el("path", { d, style: `fill:${hue(name)}`, class: "layer" }, el("title", {}, name)));
    });
    const px = (v) => LEFT + (nearest(x, v) / per + 0.43) * each;
    const shown = ticks(x[0] || 0, x[x.length - 1] || 1, Math.max(2, width / 110)).filter(Number.isInteger);
    for (const at of shown)
      if (at >= x[0]) parts.push(el("text", { x: px(at), y: high - 5, "text-anchor": "middle" }, format(at)));
    parts.push(el("text", { class: "axis", x: LEFT - 12, y: high - 5, "text-anchor": "end" }, "step"));
    chart.cursor = el("line", { class: "cursor", y1: TOP, y2: high - BOTTOM, visibility: "hidden" });
    svg.setAttribute("viewBox", `0 0 ${width} ${high}`);
    svg.replaceChildren(...parts, chart.cursor);
    Object.assign(chart, {
      px,
      width,
      x0: x[0],
      x1: x[x.length - 1],
      series: layers.map(([name, seconds]) => ({ name, x, y: seconds })),
      inverse: (pixel) => x[Math.max(0, Math.min(x.length - 1, Math.floor(((pixel - LEFT) / each) * per)))],
    });
    chart.values = layers.map(() => el("b", {}));
    legend.replaceChildren(
      ...layers
        .map(([name], number) =>
          el("span", {}, el("i", { style: `background:${hue(name)}` }), `${name} `, chart.values[number]),
        )
        .reverse(),
    );
    chart.move();
  };
  chart.move = () => {
    const at = state.cursor;
    const there = at !== null && at >= chart.x0 && at <= chart.x1;
    chart.cursor.setAttribute("visibility", there ? "visible" : "hidden");
    if (there) for (const end of ["x1", "x2"]) chart.cursor.setAttribute(end, chart.px(at));
    chart.series.forEach((s, number) => {
      chart.values[number].textContent = format(s.y[at === null ? s.y.length - 1 : nearest(s.x, at)]);
    });
  };
  listen(chart, true);
  drawn.push(chart);
  return card;
}

/** What of a step's tokens was computed, if rows share prefixes; else empty. */
function computedTokens(run, step) {
  const at = (name) => {
    const { x, y } = points(run, name);
    return y[x.indexOf(step)];
  };
  const share = at("policy/shared_prefix_share");
  const total = at("trainer/tokens_per_second") * at("timing/step");
  if (share === undefined || total !== total) return "";
  const saved = `${(100 * share).toFixed(1)} % are prefixes that were computed with another row`;
  return `unique tokens ${format((1 - share) * total)} of ${format(total)}: ${saved}.`;
}

/** The timeline of one step: one lane for each process. */
function ganttCard(run) {
  const chosen = run.spans.findIndex((line) => line.step === state.spanStep);
  const select = el(
    "select",
    {
      "aria-label": "step of the lanes",
      change: () => {
        state.spanStep = +select.value;
        chart.draw();
      },
    },
    ...run.spans.map((line) => el("option", { value: line.step }, `step ${line.step}`)),
  );
  select.selectedIndex = chosen < 0 ? run.spans.length - 1 : chosen;
  const svg = el("svg", { role: "img", "data-chart": "lanes", "aria-label": "lanes of one step" });
  const tokens = el("p", { class: "note", "data-tokens": "" });
  const caption = el(
    "p",
    { class: "note", "aria-live": "polite" },
    "Point at a bar to see its times. The share at the right is the part of the step in which the lane works.",
  );
  const card = el(
    "section",
    { class: "card wide" },
    el("div", { class: "head" }, el("h3", {}, "lanes of one step"), select),
    svg,
    tokens,
    caption,
  );
  const chart = { svg, move() {} };
  chart.draw = () => {
    const line = run.spans[Math.max(select.selectedIndex, 0)];
    const lanes = Object.entries(line.lanes);
    tokens.textContent = computedTokens(run, line.step);
    const width = svg.clientWidth || 800;
    const names = width < 500 ? 84 : 130;
    const high = 22 * lanes.length + 24;
    const from = Math.min(...lanes.flatMap(([, spans]) => spans.map((span) => span[1])));
    const until = Math.max(...lanes.flatMap(([, spans]) => spans.map((span) => span[2])), from + 1e-6);
    const px = (t) => names + ((t - from) / (until - from)) * (width - names - 48);
    const parts = [];
    for (const at of ticks(0, until - from, Math.max(3, width / 120)))
      parts.push(
        el("line", { class: "gridline", x1: px(at + from), x2: px(at + from), y1: 0, y2: high - 20 }),
        el("text", { x: px(at + from), y: high - 6, "text-anchor": "middle" }, `${format(at)} s`),
      );
    lanes.forEach(([lane, spans], row) => {
      const y = 22 * row + 3;
      parts.push(
        el(
          "text",
          { x: names - 8, y: y + 12, "text-anchor": "end" },
          lane.length > names / 6.2 ? `…${lane.slice(-Math.floor(names / 6.6))}` : lane,
          el("title", {}, lane),
        ),
      );
      for (const [name, begin, end] of spans) {
        const text = `${lane} · ${name}: ${format(end - begin)} s, from ${format(begin - from)} to ${format(end - from)} s`;
        const wide = px(end) - px(begin);
        parts.push(
          el(
            "rect",
            {
              class: "span",
              x: px(begin),
              y,
              width: Math.max(wide, 1),
              height: 17,
              style: `fill:${hue(name)}`,
              pointerenter: () => {
                caption.textContent = text;
              },
            },
            el("title", {}, text),
          ),
        );
        if (wide > 6.4 * name.length) parts.push(el("text", { class: "onspan", x: px(begin) + 4, y: y + 12 }, name));
      }
      parts.push(
        el(
          "text",
          { x: width - 4, y: y + 12, "text-anchor": "end" },
          `${Math.round((100 * covered(spans)) / (until - from))} %`,
        ),
      );
    });
    svg.setAttribute("height", high);
    svg.setAttribute("viewBox", `0 0 ${width} ${high}`);
    svg.replaceChildren(...parts);
  };
  drawn.push(chart);
  return card;
}

/** Seconds in which a lane works; overlapping spans count once. */
function covered(spans) {
  let sum = 0;
  let end = -Infinity;
  for (const [, from, to] of [...spans].sort((a, b) => a[1] - b[1])) {
    sum += Math.max(0, to - Math.max(from, end));
    end = Math.max(end, to);
  }
  return sum;
}

function shareTable(run) {
  const rows = phaseSeconds(run)
    .shares.sort((a, b) => b[1] - a[1])
    .slice(0, 8);
  return el(
    "section",
    { class: "card" },
    el("h3", {}, `shares of the time · ${run.name}`),
    el(
      "table",
      { class: "shares" },
      el("thead", {}, el("tr", {}, ...["phase", "share", "s per step"].map((t) => el("th", {}, t)))),
      el(
        "tbody",
        {},
        ...rows.map(([name, share, seconds]) =>
          el(
            "tr",
            {},
            el(
              "td",
              {},
              el("i", { class: "scale", style: `width:.8em;height:.8em;margin:0 .5em 0 0;background:${hue(name)}` }),
              name,
            ),
            el("td", { class: "number" }, `${(100 * share).toFixed(1)} %`),
            el("td", { class: "number" }, format(seconds)),
          ),
        ),
      ),
    ),
  );
}

function times() {
  const parts = el("div", { class: "grid" });
  for (const run of state.runs.filter((each) => hasNumbers(each, "timing/step"))) {
    if (state.runs.length > 1) parts.append(el("h2", { class: "wide" }, run.name));
    parts.append(stackedCard(run));
    if (run.spans.length) parts.append(ganttCard(run));
    else parts.append(el("p", { class: "note" }, "This run recorded no lanes of ranks and engines (spans.jsonl)."));
    parts.append(shareTable(run));
  }
  parts.append(...[...ROLLOUT_TIME, ...MEMORY].map(lineCard).filter(Boolean));
  return parts.children.length ? [parts] : [el("p", { class: "note" }, "No step has been logged yet.")];
}
