// Distribution of tokens over experts: layers × experts of one step, and the experts of one layer over the steps.
/** `axes`: for rows and columns what they are, and the number of the n-th one. */
function heatCard(title, axes, rows, columns, value, labels) {
  const [down, right] = axes;
  const note = `Rows are ${down.name}s, columns ${right.name}s. Point at one for its number.`;
  const [left, below] = [el("div", { class: "ticks down" }), el("div", { class: "ticks" })];
  const scale = (place, axis, count) => {
    const at = count < 2 ? [0] : [0, count >> 1, count - 1];
    place.replaceChildren(...at.map((n, i) => el("span", {}, i ? `${axis.of(n)}` : `${axis.name} ${axis.of(n)}`)));
  };
  const canvas = el("canvas", { role: "img", "data-chart": title, "aria-label": title, tabindex: 0 });
  const caption = el("p", { class: "note", "aria-live": "polite" }, note);
  const chart = { svg: canvas, move() {} };
  chart.draw = () => {
    const style = getComputedStyle(document.documentElement);
    const [from, to] = ["--heat0", "--heat1"].map((name) => rgb(style.getPropertyValue(name).trim()));
    const warn = rgb(style.getPropertyValue("--c1").trim());
    const [n, m] = [rows(), columns()];
    canvas.width = m;
    canvas.height = n;
    scale(left, down, n);
    scale(below, right, m);
    canvas.style.height = `${Math.min(Math.max(n * 14, 90), 420)}px`;
    const context = canvas.getContext("2d");
    const image = context.createImageData(m, n);
    for (let r = 0; r < n; r++)
      for (let c = 0; c < m; c++) {
        const v = value(r, c);
        const t = Math.min(v / 2, 1);
        const over = Math.min(Math.max((v - 2) / 4, 0), 1);
        const mixed = from.map((low, i) => (low + (to[i] - low) * t) * (1 - over) + warn[i] * over);
        image.data.set([...mixed, 255], 4 * (r * m + c));
      }
    context.putImageData(image, 0, 0);
  };
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const r = Math.floor(((event.clientY - box.top) / box.height) * rows());
    const c = Math.floor(((event.clientX - box.left) / box.width) * columns());
    if (r >= 0 && r < rows() && c >= 0 && c < columns())
      caption.textContent = `${labels(r, c)}: ${format(value(r, c))} × the mean`;
  });
  drawn.push(chart);
  return el(
    "section",
    { class: "card wide" },
    el(
      "div",
      { class: "head" },
      el("h3", {}, title),
      el(
        "span",
        { class: "unit" },
        "0",
        el("i", { class: "scale", style: "background:linear-gradient(90deg,var(--heat0),var(--heat1),var(--c1))" }),
        "6 × the mean",
      ),
    ),
    el("div", { class: "heat" }, left, canvas, el("div"), below),
    caption,
  );
}

const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

function experts() {
  const routing = grid(ROUTING);
  const perLayer = matching("policy/moe_load_imbalance/layer_*");
  if (perLayer.length)
    routing.append(lineCard({ title: "load of the busiest expert by layer", names: perLayer.slice(0, 8), floor: 1 }));
  const run = state.runs.find((each) => each.experts.length);
  if (!run)
    return [
      routing.children.length
        ? routing
        : el("p", { class: "note" }, "This model has no experts, or no step has been logged yet."),
      ...(routing.children.length
        ? [el("p", { class: "note" }, "This run recorded no tokens per expert (expert_load.jsonl).")]
        : []),
    ];
  const lines = run.experts.map((line) => ({
    ...line,
    share: line.load.map((row) => {
      const mean = row.reduce((a, b) => a + b, 0) / row.length || 1;
      return row.map((v) => v / mean);
    }),
  }));
  const now = () => lines[step.selectedIndex];
  const layers = () => now().layers;
  const step = el(
    "select",
    {
      "aria-label": "step of the loads",
      change: () => {
        state.loadStep = +step.value;
        redraw();
      },
    },
    ...lines.map((line) => el("option", { value: line.step }, `step ${line.step}`)),
  );
  const layer = el(
    "select",
    {
      "aria-label": "layer",
      change: () => {
        state.loadLayer = layer.selectedIndex;
        redraw();
      },
    },
    ...lines[0].layers.map((each) => el("option", {}, `layer ${each}`)),
  );
  const at = lines.findIndex((line) => line.step === state.loadStep);
  step.selectedIndex = at < 0 ? lines.length - 1 : at;
  layer.selectedIndex = Math.min(state.loadLayer || 0, lines[0].layers.length - 1);
  const parts = el(
    "div",
    { class: "grid" },
    heatCard(
      "tokens by layer and expert",
      [
        { name: "layer", of: (n) => layers()[n] },
        { name: "expert", of: (n) => n },
      ],
      () => layers().length,
      () => now().load[0].length,
      (r, c) => now().share[r][c],
      (r, c) => `layer ${layers()[r]}, expert ${c}, ${format(now().load[r][c])} tokens`,
    ),
    heatCard(
      "tokens by expert over the steps",
      [
        { name: "expert", of: (n) => n },
        { name: "step", of: (n) => lines[n].step },
      ],
      () => lines[0].load[0].length,
      () => lines.length,
      (r, c) => lines[c].share[layer.selectedIndex][r],
      (r, c) => `step ${lines[c].step}, expert ${r}`,
    ),
  );
  const mine = drawn.slice(-2);
  const redraw = () => mine.forEach((chart) => chart.draw());
  return [
    el("div", { class: "row" }, state.runs.length > 1 ? el("b", {}, run.name) : null, step, layer),
    parts,
    el("h2", {}, "routing"),
    routing,
  ];
}
