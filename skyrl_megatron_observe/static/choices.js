// A table of which one row is shown in full beside it: chosen by a click or by the keys.

/**
 * `headings`: of the columns. `rows`: of each row the elements `td`. `chosen`: number of the row that is shown.
 * `choose(number, focus)` shows another one; `focus`: the keys moved to it, so that it is to have the focus.
 */
function choiceTable(headings, rows, chosen, choose) {
  const last = rows.length - 1;
  const key = (number) => (event) => {
    const to = { ArrowDown: number + 1, ArrowUp: number - 1, Enter: number, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    choose(Math.max(0, Math.min(last, to)), true);
  };
  const lines = rows.map((cells, number) =>
    el(
      "tr",
      {
        tabindex: 0,
        class: number === chosen ? "chosen" : "",
        "aria-selected": String(number === chosen),
        click: () => choose(number),
        keydown: key(number),
      },
      ...cells,
    ),
  );
  return el(
    "div",
    { class: "scroll list" },
    el(
      "table",
      { class: "samplelist" },
      el("thead", {}, el("tr", {}, ...headings.map((name) => el("th", {}, name)))),
      el("tbody", {}, ...lines),
    ),
  );
}
