// Trajectories of agents: metrics of their calls, and the graph of one trajectory with the messages of a path.
const AGENTS = [
  { title: "token-in rate", names: ["agents/token_in_rate"] },
  { title: "calls of agents", names: ["agents/calls", "agents/retries"], floor: 1 },
  {
    title: "unmatched, unattributed, refused",
    names: ["agents/unmatched", "agents/unattributed", "agents/refused"],
    floor: 1,
  },
  { title: "outcomes", names: ["environment/outcome_*"], floor: 1 },
  { title: "causes", names: ["agents/cause_*"] },
  { title: "calls and forks of a trajectory", names: ["environment/calls", "environment/forks"], floor: 1 },
  { title: "the gateway's own time", names: ["agents/own_ms_median", "agents/own_ms_p99"], floor: 1 },
];
const seenAgents = { step: null, number: 0, call: 0 };
const WIDE = 104;
const HIGH = 54;
const BOX = [76, 34];

function agents() {
  const panels = grid(AGENTS);
  const run = state.runs.find((each) => each.trajectory_steps.length);
  if (!run)
    return [
      panels,
      el(
        "p",
        { class: "note" },
        panels.children.length
          ? "This run keeps no trajectories (trainer.samples_per_step)."
          : "This run has no agents (generator.name), or no step has been logged yet.",
      ),
    ];
  const there = state.live ? run.trajectory_steps : run.trajectory_steps.filter((step) => run.trajectories[step]);
  if (!there.includes(seenAgents.step)) seenAgents.step = there[there.length - 1] ?? null;
  const below = el("div", {});
  const select = el(
    "select",
    {
      "aria-label": "step of the trajectories",
      change: () => {
        Object.assign(seenAgents, { step: +select.value, number: 0, call: 0 });
        fillAgents(run, below);
      },
    },
    ...there.map((step) => el("option", { value: step }, `step ${step}`)),
  );
  select.selectedIndex = there.indexOf(seenAgents.step);
  fillAgents(run, below);
  return [el("div", { class: "row" }, select, el("span", { class: "unit" }, "sampled in this step")), below, panels];
}

async function fillAgents(run, below) {
  let list;
  try {
    list = await keptOf(run, "trajectories", seenAgents.step);
  } catch (error) {
    below.replaceChildren(el("p", { class: "note" }, String(error.message)));
    return;
  }
  if (!list || !list.length) {
    below.replaceChildren(el("p", { class: "note" }, "The trajectories of this step are not in the file."));
    return;
  }
  const detail = el("div", { class: "card" });
  const table = el("div", {});
  const choose = (number, focus) => {
    if (number !== seenAgents.number) seenAgents.call = 0;
    seenAgents.number = number;
    table.replaceChildren(trajectoryTable(list, choose));
    showTrajectory(list[number], detail);
    if (focus) table.querySelector("tr.chosen").focus();
  };
  below.replaceChildren(
    el(
      "div",
      { class: "samples" },
      el("div", { class: "card" }, el("h3", {}, `${list.length} trajectories kept`), table),
      detail,
    ),
  );
  choose(Math.min(seenAgents.number, list.length - 1));
}

function trajectoryTable(list, choose) {
  const rows = list.map((trajectory) => [
    el("td", {}, `${trajectory.uid}_${trajectory.sample}`),
    el("td", {}, trajectory.outcome),
    el("td", { class: "number" }, format(trajectory.reward)),
    el("td", { class: "number" }, String(trajectory.count)),
    el("td", { class: "number" }, String(trajectory.forks)),
  ]);
  return choiceTable(["trajectory", "outcome", "reward", "calls", "forks"], rows, seenAgents.number, choose);
}

/** Place each call: column by its depth; a fork begins a new line. */
function placed(calls) {
  const at = new Map();
  const continued = new Set();
  let lines = 0;
  for (const call of calls) {
    const parent = at.get(call.parent);
    const first = parent && !continued.has(call.parent);
    if (parent) continued.add(call.parent);
    at.set(call.number, { column: parent ? parent.column + 1 : 0, line: first ? parent.line : lines++ });
  }
  return { at, lines, columns: 1 + Math.max(0, ...[...at.values()].map((place) => place.column)) };
}

/** Whether and where a call's answer is trained on. */
const training = (call) => (call.row === null ? "not trained on" : `trained on in row ${call.row + 1}`);

function showTrajectory(found, detail) {
  const { calls } = found;
  const { at, lines, columns } = placed(calls);
  const byNumber = new Map(calls.map((call) => [call.number, call]));
  const shade = (call) =>
    call.row === null ? "var(--card)" : `color-mix(in srgb, ${colour(call.row)} 30%, var(--card))`;
  const stroke = (call) => (call.unmatched ? "var(--warn)" : call.row === null ? "var(--soft)" : colour(call.row));
  const svg = el("svg", {
    class: "calls",
    role: "group",
    "aria-label": "calls of the trajectory",
    "data-chart": "calls",
    viewBox: `0 0 ${columns * WIDE} ${lines * HIGH}`,
    style: `width:${columns * WIDE}px;height:${lines * HIGH}px`,
  });
  const messages = el("div", { class: "scroll messages" });
  const nodes = new Map();
  const xy = ({ column, line }) => [column * WIDE + 8, line * HIGH + 10];
  for (const call of calls) {
    const [x, y] = xy(at.get(call.number));
    if (at.has(call.parent)) {
      const [px, py] = xy(at.get(call.parent));
      const x0 = px + BOX[0];
      const y0 = py + BOX[1] / 2;
      const y1 = y + BOX[1] / 2;
      const half = (x0 + x) / 2;
      svg.append(el("path", { class: "edge", d: `M${x0} ${y0}C${half} ${y0} ${half} ${y1} ${x} ${y1}` }));
    }
    const unmatched = call.unmatched ? "; an answer in its prompt was not sampled" : "";
    const said =
      `call ${call.number}: ${call.start} tokens of prompt, of which ${call.new} new; ` +
      `${call.sampled} sampled, ${training(call)}${unmatched}`;
    const node = el(
      "g",
      {
        tabindex: 0,
        role: "button",
        "aria-label": said,
        click: () => choose(call.number),
        keydown: (event) => move(event, call),
      },
      el("title", {}, said),
      el("rect", {
        class: `call${call.unmatched ? " unmatched" : ""}${call.row === null ? "" : " trained"}`,
        x,
        y,
        width: BOX[0],
        height: BOX[1],
        rx: 5,
        style: `fill:${shade(call)};stroke:${stroke(call)}`,
      }),
      el("text", { x: x + 7, y: y + 14 }, `${call.number}`),
      el("text", { x: x + 7, y: y + 27 }, `${format(call.new)} + ${format(call.sampled)}`),
    );
    nodes.set(call.number, node);
    svg.append(node);
  }
  const move = (event, call) => {
    const child = calls.find((each) => each.parent === call.number);
    const to = {
      ArrowLeft: call.parent,
      ArrowRight: child?.number,
      ArrowUp: call.number - 1,
      ArrowDown: call.number + 1,
      Enter: call.number,
      " ": call.number,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    if (byNumber.has(to)) {
      choose(to);
      nodes.get(to).focus();
    }
  };
  const choose = (number) => {
    seenAgents.call = number;
    const path = [];
    for (let call = byNumber.get(number); call; call = byNumber.get(call.parent)) path.unshift(call);
    for (const [each, node] of nodes)
      node.setAttribute(
        "class",
        path.some((call) => call.number === each) ? (each === number ? "chosen path" : "path") : "",
      );
    messages.replaceChildren(
      ...path.flatMap((call) => [
        el(
          "div",
          { class: "turn environment" },
          el(
            "div",
            { class: "who" },
            `prompt of call ${call.number}: ${call.new} new tokens${call.unmatched ? " · has an answer that was not sampled" : ""}`,
          ),
          call.prompt,
        ),
        el(
          "div",
          { class: `turn policy${call.row === null ? " untrained" : ""}` },
          el("div", { class: "who" }, `answer: ${call.sampled} tokens, ${training(call)} · ended: ${call.ended}`),
          call.answer,
        ),
      ]),
    );
    messages.scrollTop = messages.scrollHeight;
  };
  const legend = el(
    "div",
    { class: "legend" },
    ...Array.from({ length: Math.min(found.rows, 8) }, (_, row) =>
      el("span", {}, el("i", { style: `background:${colour(row)}` }), `row ${row + 1}`),
    ),
    el("span", {}, el("i", { style: "border:1px solid var(--soft)" }), "not trained on"),
    el("span", {}, el("i", { style: "border:1px dashed var(--warn)" }), "unmatched"),
    el("span", {}, "number of the call, new tokens of its prompt + sampled tokens"),
  );
  const facts = [
    found.outcome,
    found.reward === null ? "no sample" : `reward ${format(found.reward)}`,
    `${found.count} calls`,
    `${found.forks} forks`,
    `${found.rows} rows`,
    found.why,
    found.count > calls.length && `${calls.length} calls are shown`,
  ].filter(Boolean);
  detail.replaceChildren(
    el("h3", { class: found.outcome === "solved" ? "good" : "" }, facts.join(" · ")),
    found.difference ? el("p", { class: "note differs" }, `First unmatched message: ${found.difference}`) : "",
    el("div", { class: "scroll" }, svg),
    legend,
    messages,
  );
  if (calls.length) choose(byNumber.has(seenAgents.call) ? seenAgents.call : 0);
}
