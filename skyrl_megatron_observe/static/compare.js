// Configuration and last values; for several runs, their differences.
function settings() {
  const keys = [...new Set(state.runs.flatMap((run) => Object.keys(run.config)))].sort();
  const several = state.runs.length > 1;
  const differs = (key) => new Set(state.runs.map((run) => run.config[key])).size > 1;
  const search = el("input", {
    type: "search",
    placeholder: "part of the key",
    "aria-label": "find keys",
    input: () => fill(),
  });
  const only = el("input", { type: "checkbox", id: "only", checked: several, change: () => fill() });
  const body = el("tbody", {});
  const fill = () =>
    body.replaceChildren(
      ...keys
        .filter((key) => key.includes(search.value.trim()) && (!several || !only.checked || differs(key)))
        .map((key) =>
          el(
            "tr",
            { class: several && differs(key) ? "differs" : "" },
            el("td", {}, key),
            ...state.runs.map((run) => el("td", {}, run.config[key] ?? "–")),
          ),
        ),
    );
  fill();
  return [
    lastValues(),
    el(
      "h2",
      {},
      several ? `configuration: ${keys.filter(differs).length} of ${keys.length} keys differ` : "configuration",
    ),
    el(
      "div",
      { class: "card wide" },
      el("div", { class: "row" }, search, several ? el("label", { for: "only" }, only, " only differences") : null),
      el(
        "div",
        { class: "scroll" },
        el(
          "table",
          { class: "settings" },
          el("thead", {}, el("tr", {}, el("th", {}, "key"), ...state.runs.map((run) => el("th", {}, run.name)))),
          body,
        ),
      ),
    ),
  ];
}

function lastValues() {
  const last = (run, name) => {
    const { y } = points(run, name);
    return y.length ? y[y.length - 1] : NaN;
  };
  const names = matching("*").filter((name) => name !== "step" && !name.startsWith("warmup/"));
  const several = state.runs.length > 1;
  const rows = names.map((name) => {
    const values = state.runs.map((run) => last(run, name));
    const [unit, meaning, , better] = state.metrics[name] || ["", "", "", ""];
    const ratio = several && values[0] ? values[1] / values[0] : NaN;
    const judged =
      !better || !(Math.abs(ratio - 1) > 0.01)
        ? ""
        : (ratio > 1 === (better === "higher")) === values[0] > 0
          ? "better"
          : "worse";
    return el(
      "tr",
      { title: meaning },
      el("td", {}, name, " ", el("span", { class: "unit" }, unit)),
      ...values.map((value) => el("td", { class: "number" }, format(value))),
      several ? el("td", { class: `number ${judged}` }, ratio === ratio ? `${format(100 * (ratio - 1))} %` : "") : null,
    );
  });
  return el(
    "div",
    { class: "card wide" },
    el("h3", {}, "last values"),
    el(
      "div",
      { class: "scroll" },
      el(
        "table",
        { class: "values" },
        el(
          "thead",
          {},
          el(
            "tr",
            {},
            el("th", {}, "metric"),
            ...state.runs.map((run) => el("th", { style: "text-align:right" }, run.name)),
            several ? el("th", { style: "text-align:right" }, "second vs. first") : null,
          ),
        ),
        el("tbody", {}, ...rows),
      ),
    ),
  );
}
