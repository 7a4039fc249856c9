// The data of the page: unpacked from the file, and kept up to date by a server.
const state = { runs: [], metrics: {}, live: false, tab: "", zoom: null, cursor: null, smooth: 0, hidden: new Set() };
const token = new URLSearchParams(location.search).get("token") || "";

async function inflate(text) {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

/** Read a block of data (layout: run_report.py): whole runs, or new lines of known runs. */
function take(buffer) {
  const size = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
  let offset = 4 + size;
  const runs = header.runs.map((run, number) => {
    const columns = new Map();
    const known = run.after ? state.runs[number].columns : null;
    const before = known ? known.get("step").length : 0;
    for (const name of run.names) {
      const added = new Float32Array(buffer, offset, run.rows);
      offset += 4 * run.rows;
      if (!known) {
        columns.set(name, added);
        continue;
      }
      const whole = new Float32Array(before + run.rows).fill(NaN);
      if (known.has(name)) whole.set(known.get(name));
      whole.set(added, before);
      columns.set(name, whole);
    }
    if (known)
      for (const kind of ["samples", "trajectories"]) run[kind] = { ...state.runs[number][kind], ...run[kind] };
    return { ...run, columns, number };
  });
  Object.assign(state, { runs, live: header.live, metrics: header.metrics });
}

/** Ask the server for new lines; returns whether there are any. */
async function ask() {
  const known = state.runs.map((run) => `${run.life}:${run.lines}`).join(",");
  const before = state.runs.map((run) => `${run.life}:${run.lines}:${run.log.length}`).join();
  take(await (await served(`data?known=${known}`)).arrayBuffer());
  return before !== state.runs.map((run) => `${run.life}:${run.lines}:${run.log.length}`).join();
}

async function served(path) {
  const answer = await fetch(path, {
    headers: { Authorization: `Bearer ${token}` },
    signal: AbortSignal.timeout(20000),
  });
  if (!answer.ok) throw new Error(await answer.text());
  return answer;
}

/** The `samples` or `trajectories` of a step, from the file or the server; null if neither has them. */
async function keptOf(run, kind, step) {
  if (!run[kind][step] && state.live)
    run[kind][step] = await (await served(`${kind}?run=${run.number}&step=${step}`)).json();
  return run[kind][step] || null;
}

function decoded(text, kind) {
  const raw = atob(text || "");
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return new kind(bytes.buffer);
}

const axisOf = (name) => (name.startsWith("warmup/") ? "warmup/step" : "step");

/** Points of a metric within the zoom: x, y without NaN. */
function points(run, name) {
  const ys = run.columns.get(name);
  const xs = run.columns.get(axisOf(name));
  const x = [];
  const y = [];
  if (!ys || !xs) return { x, y };
  const [from, to] = state.zoom && axisOf(name) === "step" ? state.zoom : [-Infinity, Infinity];
  for (let i = 0; i < ys.length; i++) {
    if (ys[i] === ys[i] && xs[i] >= from && xs[i] <= to) {
      x.push(xs[i]);
      y.push(ys[i]);
    }
  }
  return { x, y };
}

const hasNumbers = (run, name) => {
  const column = run.columns.get(name);
  return !!column && column.some((v) => v === v);
};

/** All metrics of any run that match a pattern; `*` matches anything. */
function matching(pattern) {
  const test = new RegExp(`^${pattern.replace(/[.+?^${}()|[\]\\/]/g, "\\$&").replace(/\*/g, ".*")}$`);
  const names = new Set(state.runs.flatMap((run) => run.names));
  return [...names].filter((name) => test.test(name) && state.runs.some((run) => hasNumbers(run, name))).sort();
}

function format(value) {
  if (value === null || value === undefined || value !== value) return "–";
  const size = Math.abs(value);
  if (size >= 1e12 || (size > 0 && size < 1e-3)) return value.toExponential(2);
  for (const [unit, letter] of [
    [1e9, "G"],
    [1e6, "M"],
    [1e4, "k"],
  ])
    if (size >= unit) return `${+(value / (unit === 1e4 ? 1e3 : unit)).toPrecision(4)}${letter}`;
  return String(+value.toPrecision(4));
}

/** An element: tag, attributes (functions are listeners), children. */
function el(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "path", "line", "rect", "text", "circle", "title"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const colour = (number) => `var(--c${number % 8})`;
