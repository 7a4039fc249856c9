// Curves over the step: one card each. All cards share a cursor and a zoom.
const HEIGHT = 190;
const LEFT = 46;
const RIGHT = 8;
const TOP = 8;
const BOTTOM = 20;
let drawn = []; // charts of the view: {move(), draw()}

function ticks(low, high, count) {
  if (!(high > low)) return [low];
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const unit = [1, 2, 5, 10].find((each) => each * power >= rough) * power;
  const found = [];
  for (let n = Math.ceil(low / unit - 1e-9); n <= high / unit + 1e-9; n++) found.push(+(n * unit).toPrecision(12)); // a sum would miss 0
  return found;
}

/** Ticks of a logarithmic axis: [position in decades, value]. */
function decades(low, high) {
  const found = [];
  const marks = high - low > 2.5 ? [1] : [1, 2, 5];
  const every = Math.max(1, Math.ceil((high - low) / 6));
  for (let power = Math.floor(low); power <= high; power++)
    for (const mark of marks) {
      const at = power + Math.log10(mark);
      if (at >= low && at <= high && power % every === 0) found.push([at, mark * 10 ** power]);
    }
  return found;
}

function smoothed(values, weight) {
  let kept = 0;
  let mass = 0;
  return values.map((value) => {
    kept = weight * kept + (1 - weight) * value;
    mass = weight * mass + 1 - weight;
    return kept / mass;
  });
}

/** Path of a curve in pixels. Each pixel column keeps its first, lowest, highest and last point, so no spike is lost. */
function pathOf(x, y, px, py) {
  const parts = [];
  let column = null;
  let first;
  let low;
  let high;
  let last;
  const flush = () => {
    if (column !== null)
      for (const each of new Set([first, low, high, last].sort((a, b) => a - b)))
        parts.push(`${px(x[each]).toFixed(1)} ${py(y[each]).toFixed(1)}`);
  };
  for (let i = 0; i < x.length; i++) {
    const at = Math.round(px(x[i]));
    if (at !== column) {
      flush();
      column = at;
      first = low = high = i;
    }
    if (y[i] < y[low]) low = i;
    if (y[i] > y[high]) high = i;
    last = i;
  }
  flush();
  return parts.length ? `M${parts.join("L")}` : "";
}

function nearest(xs, at) {
  let low = 0;
  let high = xs.length - 1;
  while (low < high) {
    const mid = (low + high) >> 1;
    if (xs[mid] < at) low = mid + 1;
    else high = mid;
  }
  return low > 0 && at - xs[low - 1] < xs[low] - at ? low - 1 : low;
}

/** A card with a curve for each metric and run. `spec`: title, names, log (scale), floor (minimum for the top of the axis). */
function lineCard(spec) {
  const names = spec.names.flatMap(matching);
  if (!names.length) return null;
  const id = spec.title;
  const several = state.runs.length > 1;
  const legend = el("div", { class: "legend" });
  const svg = el("svg", {
    height: HEIGHT,
    tabindex: 0,
    role: "img",
    "aria-label": spec.title,
    "data-chart": spec.title,
  });
  const [unit] = state.metrics[names[0]] || [""];
  const card = el(
    "section",
    { class: "card" },
    el(
      "div",
      { class: "head" },
      el("h3", {}, spec.title, " ", el("span", { class: "unit" }, unit || "")),
      whyButton(names),
    ),
    svg,
    legend,
  );
  const chart = { svg, series: [] };

  chart.draw = () => {
    const width = svg.clientWidth || 380;
    const series = [];
    for (const name of names)
      for (const run of state.runs) {
        const hidden = state.hidden.has(`${id}|${name}|${run.number}`);
        const { x, y } = points(run, name);
        if (!x.length && !hasNumbers(run, name)) continue;
        const index = several ? run.number : names.indexOf(name);
        const dash = several && names.length > 1 ? ["", "5 3", "2 2", "8 3 2 3"][names.indexOf(name) % 4] : "";
        series.push({ name, run, x, y, hidden, colour: colour(index), dash });
      }
    const shown = series.filter((each) => !each.hidden && each.x.length);
    let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
    const log = spec.log && shown.some((s) => s.y.some((v) => v > 0));
    for (const s of shown)
      for (let i = 0; i < s.x.length; i++) {
        const v = s.y[i];
        if (log && !(v > 0)) continue;
        if (s.x[i] < x0) x0 = s.x[i];
        if (s.x[i] > x1) x1 = s.x[i];
        if (v < y0) y0 = v;
        if (v > y1) y1 = v;
      }
    if (x0 > x1) [x0, x1, y0, y1] = [0, 1, 0, 1];
    if (x0 === x1) {
      x0 -= 0.5;
      x1 += 0.5;
    }
    const scale = log ? (v) => Math.log10(Math.max(v, y0)) : (v) => v;
    let [bottom, top] = [scale(y0), scale(y1)];
    if (spec.floor !== undefined && !log) {
      bottom = Math.min(bottom, 0);
      top = Math.max(top, spec.floor);
    }
    const room = (top - bottom || Math.abs(top) || 1) * 0.06;
    bottom -= spec.floor !== undefined && !log && bottom === 0 ? 0 : room;
    top += room;
    const px = (v) => LEFT + ((v - x0) / (x1 - x0)) * (width - LEFT - RIGHT);
    const py = (v) => HEIGHT - BOTTOM - ((scale(v) - bottom) / (top - bottom)) * (HEIGHT - TOP - BOTTOM);
    const plain = (v) => HEIGHT - BOTTOM - ((v - bottom) / (top - bottom)) * (HEIGHT - TOP - BOTTOM);
    const parts = [];
    let marks = log ? decades(bottom, top) : [];
    if (marks.length < 2)
      marks = log // within less than a decade
        ? ticks(10 ** bottom, 10 ** top, 4).map((each) => [Math.log10(each), each])
        : ticks(bottom, top, 6).map((each) => [each, each]);
    for (const [at, value] of marks) {
      parts.push(el("line", { class: "gridline", x1: LEFT, x2: width - RIGHT, y1: plain(at), y2: plain(at) }));
      parts.push(el("text", { x: LEFT - 6, y: plain(at) + 3.5, "text-anchor": "end" }, format(+value.toPrecision(3))));
    }
    for (const at of ticks(x0, x1, Math.max(2, width / 60)).filter((v) => Number.isInteger(v)))
      parts.push(el("text", { x: px(at), y: HEIGHT - 5, "text-anchor": "middle" }, format(at)));
    parts.push(el("text", { class: "axis", x: LEFT - 12, y: HEIGHT - 5, "text-anchor": "end" }, "step"));
    for (const s of shown) {
      const style = `stroke:${s.colour};stroke-dasharray:${s.dash}`;
      if (state.smooth && s.x.length >= 30) {
        parts.push(el("path", { class: "curve faint", d: pathOf(s.x, s.y, px, py), style }));
        parts.push(el("path", { class: "curve", d: pathOf(s.x, smoothed(s.y, state.smooth), px, py), style }));
      } else parts.push(el("path", { class: "curve", d: pathOf(s.x, s.y, px, py), style }));
      if (s.x.length < 30)
        for (let i = 0; i < s.x.length; i++)
          parts.push(el("circle", { cx: px(s.x[i]), cy: py(s.y[i]), r: 2.2, style: `fill:${s.colour}` }));
    }
    chart.cursor = el("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    svg.replaceChildren(...parts, chart.cursor);
    Object.assign(chart, {
      series,
      px,
      inverse: (pixel) => x0 + ((pixel - LEFT) / (width - LEFT - RIGHT)) * (x1 - x0),
      x0,
      x1,
      width,
    });
    writeLegend();
    chart.move();
  };
  const writeLegend = () => {
    chart.values = chart.series.map(() => el("b", {}));
    legend.replaceChildren(
      ...chart.series.map((s, number) =>
        el(
          "button",
          {
            class: s.hidden ? "off" : "",
            title: s.name,
            click: () => {
              const key = `${id}|${s.name}|${s.run.number}`;
              if (!state.hidden.delete(key)) state.hidden.add(key);
              chart.draw();
            },
          },
          el("i", { style: `background:${s.colour}` }),
          several ? `${s.run.name} ` : "",
          names.length > 1 || !several ? `${labelOf(s.name, names)} ` : "",
          chart.values[number],
        ),
      ),
    );
  };
  chart.move = () => {
    const at = state.cursor;
    const there = at !== null && at >= chart.x0 && at <= chart.x1;
    chart.cursor.setAttribute("visibility", there ? "visible" : "hidden");
    if (there) {
      chart.cursor.setAttribute("x1", chart.px(at));
      chart.cursor.setAttribute("x2", chart.px(at));
    }
    chart.series.forEach((s, number) => {
      if (s.x.length) chart.values[number].textContent = format(s.y[at === null ? s.y.length - 1 : nearest(s.x, at)]);
    });
  };
  listen(chart, axisOf(names[0]) === "step");
  drawn.push(chart);
  return card;
}

const shortName = (name) =>
  name
    .replace(/^(policy|reward|generate|timing|trainer|async|memory|loss)\//, "")
    .replace("loss_metrics/", "")
    .replace("rollout_train_logprobs_abs_diff", "logprob diff");
/** The label of a curve: its short name, or the full name if another curve of the chart has the same short name. */
const labelOf = (name, names) =>
  names.filter((each) => shortName(each) === shortName(name)).length > 1 ? name : shortName(name);

/** Pointer and keys of a chart: they move the cursor of all charts; dragging zooms. */
function listen(chart, zooms) {
  const { svg } = chart;
  let begin = null;
  let brush = null;
  const at = (event) =>
    Math.round(chart.inverse(((event.clientX - svg.getBoundingClientRect().left) / svg.clientWidth) * chart.width));
  svg.addEventListener("pointermove", (event) => {
    setCursor(at(event));
    if (begin === null) return;
    if (!brush) svg.append((brush = el("rect", { class: "brush", y: TOP, height: HEIGHT - TOP - BOTTOM })));
    const [from, to] = [begin, at(event)].sort((a, b) => a - b);
    brush.setAttribute("x", chart.px(from));
    brush.setAttribute("width", Math.max(chart.px(to) - chart.px(from), 0));
  });
  svg.addEventListener("pointerleave", () => {
    if (begin === null) setCursor(null);
  });
  svg.addEventListener("pointerdown", (event) => {
    if (zooms && event.pointerType === "mouse") {
      begin = at(event);
      svg.setPointerCapture(event.pointerId);
    }
  });
  svg.addEventListener("pointerup", (event) => {
    const [from, to] = [begin, at(event)].sort((a, b) => a - b);
    const was = begin;
    begin = brush = null;
    if (was !== null && to - from >= 1) setZoom([from, to]);
    else chart.draw();
  });
  svg.addEventListener("keydown", (event) => {
    const xs = (chart.series.find((s) => s.x.length) || { x: [0] }).x;
    const now = state.cursor === null ? xs.length - 1 : nearest(xs, state.cursor);
    const to = {
      ArrowLeft: now - 1,
      ArrowRight: now + 1,
      Home: 0,
      End: xs.length - 1,
      PageUp: now - 10,
      PageDown: now + 10,
    }[event.key];
    if (event.key === "Escape") {
      setCursor(null);
      setZoom(null);
    }
    if (to === undefined) return;
    event.preventDefault();
    setCursor(xs[Math.max(0, Math.min(xs.length - 1, to))]);
  });
}

function setCursor(at) {
  state.cursor = at;
  for (const chart of drawn) chart.move();
}

function setZoom(zoom) {
  state.zoom = zoom;
  document.getElementById("unzoom").hidden = !zoom;
  for (const chart of drawn) chart.draw();
}

/** A question mark that shows what the metrics of a card mean, and what bad values point to. */
function whyButton(names) {
  const known = names.filter((name) => state.metrics[name]).slice(0, 6);
  if (!known.length) return null;
  const text = known
    .map((name) => {
      const [, meaning, bad] = state.metrics[name];
      return `${name}: ${meaning}${bad ? `\n   ${bad}` : ""}`;
    })
    .join("\n");
  let bubble = null;
  const hide = () => {
    if (bubble) {
      bubble.remove();
      bubble = null;
    }
  };
  const show = (event) => {
    hide();
    const place = event.target.getBoundingClientRect();
    document.body.append((bubble = el("div", { class: "bubble", role: "tooltip" }, text)));
    bubble.style.left = `${Math.max(8, Math.min(place.left + scrollX, scrollX + innerWidth - bubble.offsetWidth - 12))}px`;
    bubble.style.top = `${place.bottom + scrollY + 4}px`;
  };
  return el(
    "button",
    { class: "why", "aria-label": text, pointerenter: show, pointerleave: hide, focus: show, blur: hide, click: show },
    "?",
  );
}
