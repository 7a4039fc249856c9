// Samples of a step: its groups, a list of samples, and one sample in full.
const look = { run: 0, step: null, sample: 0, kind: "log-prob difference", whole: "tokens" };

function samples() {
  const holders = state.runs.filter((run) => run.sample_steps.length);
  if (!holders.length)
    return [
      el("p", { class: "note" }, "This run keeps no samples (trainer.samples_per_step), or has taken no step yet."),
    ];
  const run = state.runs[look.run].sample_steps.length ? state.runs[look.run] : holders[0];
  look.run = run.number;
  const there = state.live ? run.sample_steps : run.sample_steps.filter((step) => run.samples[step]);
  if (!there.includes(look.step)) look.step = there[there.length - 1] ?? null;
  const below = el("div", {});
  const again = () => {
    below.replaceChildren(el("p", { class: "note" }, "…"));
    fill(run, below);
  };
  const select = el(
    "select",
    {
      "aria-label": "step of the samples",
      change: () => {
        look.step = +select.value;
        look.sample = 0;
        again();
      },
    },
    ...there.map((step) => el("option", { value: step }, `step ${step}`)),
  );
  select.selectedIndex = there.indexOf(look.step);
  const which = el(
    "select",
    {
      "aria-label": "run of the samples",
      change: () => {
        look.run = +which.value;
        look.step = null;
        show();
      },
    },
    ...holders.map((each) => el("option", { value: each.number }, each.name)),
  );
  which.value = run.number;
  const move = (by) => {
    const to = Math.max(0, Math.min(there.length - 1, select.selectedIndex + by));
    select.selectedIndex = to;
    look.step = there[to];
    look.sample = 0;
    again();
  };
  again();
  const left = run.sample_steps.length - there.length;
  return [
    el(
      "div",
      { class: "row" },
      holders.length > 1 ? which : null,
      el("button", { click: () => move(-1), "aria-label": "earlier step" }, "◂"),
      select,
      el("button", { click: () => move(1), "aria-label": "later step" }, "▸"),
      el(
        "span",
        { class: "unit" },
        left > 0 ? `${left} more steps are in the run's folder: open it with skyrl-megatron dashboard to see them` : "",
      ),
    ),
    below,
  ];
}

async function fill(run, below) {
  let step;
  try {
    step = await keptOf(run, "samples", look.step);
  } catch (error) {
    below.replaceChildren(el("p", { class: "note" }, String(error.message)));
    return;
  }
  if (!step) {
    below.replaceChildren(el("p", { class: "note" }, "The samples of this step are not in the file."));
    return;
  }
  const list = step.samples.map(unpacked);
  const detail = el("div", { class: "card" });
  const table = el("div", {});
  look.sample = Math.min(look.sample, list.length - 1);
  const choose = (number, focus) => {
    look.sample = number;
    table.replaceChildren(sampleTable(list, choose, step.of_rows));
    showSample(list[number], step.pieces, detail);
    if (focus) table.querySelector("tr.chosen").focus();
  };
  const groups = step.of_rows ? null : groupsOf(step, list, choose);
  const kinds = step.of_rows ? "sequences" : "samples";
  const rail = el(
    "div",
    { class: "card" },
    groups,
    el("h3", {}, `${list.length} ${kinds} kept of ${step.rows}`),
    table,
  );
  below.replaceChildren(el("div", { class: "samples" }, rail, detail));
  if (list.length) choose(look.sample);
}

/** A square for each prompt of the step, coloured by mean reward; hatched if all rewards are equal. */
function groupsOf(step, list, choose) {
  const means = step.groups.map((group) => group[1]);
  const low = Math.min(...means);
  const high = Math.max(...means);
  const squares = step.groups.map(([uid, mean, std, count]) => {
    const kept = list.findIndex((sample) => sample.uid === uid);
    const text = `prompt ${uid}: ${count} responses, mean reward ${format(mean)}, deviation ${format(std)}${kept < 0 ? "" : "; kept"}`;
    return el("button", {
      class: `${std > 0 ? "" : "flat"} ${kept < 0 ? "" : "kept"}`,
      title: text,
      "aria-label": text,
      style: `background-color:${tinted(mean, low, high, false)}`,
      disabled: kept < 0,
      click: () => choose(kept),
    });
  });
  return el(
    "div",
    { style: "margin-bottom:.8em" },
    el("h3", {}, "groups"),
    el(
      "p",
      { class: "note" },
      `${step.flat_groups} of ${step.group_count} have equal rewards for all responses (hatched)` +
        `${step.groups.length < step.group_count ? `; ${step.groups.length} are shown` : ""}. Darker: higher reward.`,
    ),
    el("div", { class: "groups" }, ...squares),
  );
}

/** Columns of the table: name → text of a sample. Rows of data have no reward, but a share that is trained. */
const SAMPLE_COLUMNS = {
  prompt: (sample) => sample.uid,
  reward: (sample) => format(sample.reward),
  advantage: (sample) => format(meanOf(sample.advantages, sample.mask)),
  tokens: (sample) => String(sample.tokens.length),
  ended: (sample) => sample.stop || "",
};
const ROW_COLUMNS = {
  row: (sample) => sample.uid,
  answer: (sample) => sample.answer || "",
  tokens: (sample) => String(sample.prompt.length + sample.tokens.length),
  trained: (sample) => String(trainedOf(sample)),
};

function trainedOf(sample) {
  return sample.mask.reduce((count, one) => count + (one ? 1 : 0), 0);
}

function sampleTable(list, choose, ofRows) {
  const { answer, ...others } = ROW_COLUMNS;
  const named = list.some((sample) => sample.answer);
  const columns = ofRows ? (named ? ROW_COLUMNS : others) : SAMPLE_COLUMNS;
  const numbers = ["reward", "advantage", "tokens", "trained"];
  const rows = list.map((sample) =>
    Object.entries(columns).map(([name, text]) =>
      el("td", numbers.includes(name) ? { class: "number" } : {}, text(sample)),
    ),
  );
  return choiceTable(Object.keys(columns), rows, look.sample, choose);
}

function meanOf(values, mask) {
  if (!values) return NaN;
  let sum = 0;
  let count = 0;
  for (let i = 0; i < values.length; i++)
    if (mask[i]) {
      sum += values[i];
      count++;
    }
  return count ? sum / count : NaN;
}

function showSample(sample, pieces, detail) {
  const caption = el("p", { class: "note", "aria-live": "polite" }, "Point at a token, or use the arrow keys.");
  const body = el("div", {});
  const bar = el("div", { class: "row" });
  const draw = () => {
    const buttons = ["tokens", "conversation"].map((name) =>
      el(
        "button",
        {
          "aria-pressed": String(look.whole === name),
          click: () => {
            look.whole = name;
            draw();
          },
        },
        name,
      ),
    );
    const kinds = el(
      "select",
      {
        "aria-label": "colour tokens by",
        change: () => {
          look.kind = kinds.value;
          draw();
        },
      },
      ...Object.keys(COLOURINGS)
        .filter((name) => COLOURINGS[name].of(sample))
        .map((name) => el("option", {}, name)),
    );
    const usable = [...kinds.options].some((option) => option.value === look.kind) ? look.kind : "mask";
    kinds.value = usable;
    if (look.whole === "conversation") {
      bar.replaceChildren(...buttons);
      body.replaceChildren(conversation(sample, pieces));
      return;
    }
    const { box, legend } = strip(sample, pieces, usable, (text) => {
      caption.textContent = text;
    });
    bar.replaceChildren(...buttons, kinds, legend);
    body.replaceChildren(box, caption);
  };
  draw();
  const ofRows = sample.reward === null || sample.reward === undefined;
  const facts = [
    ofRows ? `row ${sample.uid}` : `prompt ${sample.uid}`,
    ofRows ? sample.answer : `reward ${format(sample.reward)}`,
    ofRows && `${trainedOf(sample)} trained`,
    `${sample.prompt.length} + ${sample.tokens.length} tokens`,
    sample.stop && `ended: ${sample.stop}`,
    sample.adapter && `adapter ${sample.adapter}`,
    sample.versions.length && `versions ${[...new Set(sample.versions.map((span) => span[0]))].join(", ")}`,
  ].filter(Boolean);
  detail.replaceChildren(el("h3", {}, facts.join(" · ")), el("div", { style: "height:.5em" }), bar, body);
}
