// The page: views, keys, and updates from a server.
const VIEWS = [
  ["overview", overview],
  ["time", times],
  ["experts", experts],
  ["weights", weights],
  ["samples", samples],
  ["agents", agents],
  ["all metrics", everything],
  ["settings", settings],
];
const EVERY_MS = 2000;
let seen = null;

/** Draw each chart when it comes near the window. Call it again after charts were added. */
function drawWhenSeen() {
  if (seen) seen.disconnect();
  const waiting = new Map(drawn.map((chart) => [chart.svg, chart]));
  seen = new IntersectionObserver(
    (entries) => {
      for (const { isIntersecting, target } of entries) {
        const chart = isIntersecting && waiting.get(target);
        if (chart) {
          waiting.delete(target);
          seen.unobserve(target);
          chart.own.draw();
        }
      }
    },
    { rootMargin: "600px" },
  );
  for (const chart of drawn) {
    chart.own ??= { draw: chart.draw, move: chart.move };
    chart.draw = () => {
      if (!waiting.has(chart.svg)) chart.own.draw();
    };
    chart.move = (...given) => {
      if (!waiting.has(chart.svg)) chart.own.move(...given);
    };
    seen.observe(chart.svg);
  }
}

function show() {
  const view = document.getElementById("view");
  const [name, build] = VIEWS.find(([each]) => each === state.tab) || VIEWS[0];
  const at = view.querySelector(":focus");
  const label = at && at.getAttribute("aria-label");
  const top = scrollY;
  drawn = [];
  view.replaceChildren(...build());
  view.dataset.view = name;
  for (const tab of document.querySelectorAll("[role=tab]")) {
    const mine = tab.dataset.view === name;
    tab.setAttribute("aria-selected", String(mine));
    tab.tabIndex = mine ? 0 : -1;
    if (mine) tab.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
  drawWhenSeen();
  if (label) view.querySelector(`[aria-label="${CSS.escape(label)}"]`)?.focus({ preventScroll: true });
  scrollTo(0, top);
  head();
}

function head() {
  document.getElementById("title").textContent = state.runs.map((run) => run.name).join("  ·  ");
  const parts = state.runs.map((run) => {
    const { x } = points({ columns: run.columns }, "step");
    const total = +run.config["trainer.max_training_steps"] || null;
    const age =
      run.age_s === null
        ? "nothing written yet"
        : state.live
          ? `last output ${run.age_s < 90 ? `${Math.round(run.age_s)} s` : `${Math.round(run.age_s / 60)} min`} ago`
          : "";
    return [x.length ? `step ${format(x[x.length - 1])}${total ? ` of ${format(total)}` : ""}` : "no step yet", age]
      .filter(Boolean)
      .join(", ");
  });
  const quiet = state.runs.every((run) => run.age_s !== null && run.age_s > 300);
  document
    .getElementById("status")
    .replaceChildren(
      state.live
        ? el(
            "span",
            { class: state.lost ? "stale" : quiet ? "" : "live" },
            state.lost ? "server lost · " : quiet ? "quiet · " : "live · ",
          )
        : "",
      parts.join("  ·  "),
    );
}

function open(name) {
  state.tab = name;
  history.replaceState(null, "", `${location.search}#${name.replace(" ", "-")}`);
  scrollTo(0, 0);
  show();
}

async function follow() {
  try {
    const news = await ask();
    state.lost = false;
    if (
      news &&
      !["samples", "agents"].includes(state.tab) &&
      !document.querySelector("select:focus, input[type=search]:focus")
    )
      show();
    else head();
  } catch {
    state.lost = true;
    head();
  }
  setTimeout(follow, EVERY_MS);
}

function wire() {
  const tabs = document.getElementById("tabs");
  VIEWS.forEach(([name], number) =>
    tabs.append(
      el(
        "button",
        {
          role: "tab",
          "data-view": name,
          "aria-controls": "view",
          title: `key ${number + 1}`,
          click: () => open(name),
        },
        name,
      ),
    ),
  );
  tabs.addEventListener("keydown", (event) => {
    const now = VIEWS.findIndex(([name]) => name === state.tab);
    const to = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: VIEWS.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    open(VIEWS[(to + VIEWS.length) % VIEWS.length][0]);
    tabs.querySelector("[aria-selected=true]").focus();
  });
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT)$/.test(event.target.tagName)) return;
    if (VIEWS[+event.key - 1]) open(VIEWS[+event.key - 1][0]);
  });
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  const paint = (theme) => {
    root.dataset.theme = theme;
    for (const chart of drawn) chart.draw();
  };
  paint(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => paint(dark.matches ? "dark" : "light"));
  document
    .getElementById("theme")
    .addEventListener("click", () => paint(root.dataset.theme === "dark" ? "light" : "dark"));
  document.getElementById("smooth").addEventListener("input", (event) => {
    state.smooth = Math.sqrt(event.target.value / 100);
    for (const chart of drawn) chart.draw();
  });
  document.getElementById("unzoom").addEventListener("click", () => setZoom(null));
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) {
      width = innerWidth;
      for (const chart of drawn) chart.draw();
    }
  });
}

(async () => {
  const packed = document.getElementById("packed");
  try {
    take(await inflate(packed.textContent));
  } catch (error) {
    document.getElementById("status").textContent = `the data of this file cannot be read: ${error.message}`;
    return;
  }
  packed.remove();
  wire();
  const asked = location.hash.slice(1).replace("-", " ");
  state.tab = VIEWS.some(([name]) => name === asked) ? asked : "overview";
  show();
  document.body.dataset.ready = "yes";
  if (state.live) setTimeout(follow, EVERY_MS);
})();
