// A sample as tokens, coloured by one of their values, or as a conversation.
const BLOCK = 400; // tokens of a block that the browser need not render while it is invisible

const COLOURINGS = {
  "log-prob difference": {
    of: (s) => s.trainer && s.engine && s.engine.map((v, i) => (s.own[i] ? s.trainer[i] - v : NaN)),
    unit: "nats, trainer − engine",
    signed: true,
  },
  advantage: { of: (s) => s.advantages, unit: "advantage", signed: true },
  "log-prob": { of: (s) => s.engine && s.engine.map((v, i) => (s.own[i] ? -v : NaN)), unit: "−log-prob, nats" },
  mask: { of: (s) => s.mask && Float32Array.from(s.mask), unit: "trained on", from: 0, to: 1 },
  support: { of: (s) => s.support && Float32Array.from(s.support), unit: "vocabulary entries sampled from; 0: all" },
  version: { of: (s) => s.versions.length > 0 && versionOf(s), unit: "weights that sampled it" },
  reward: { of: (s) => s.rewards, unit: "reward at the token", signed: true },
};

function versionOf(sample) {
  const found = new Float32Array(sample.tokens.length).fill(NaN);
  for (const [version, from, to] of sample.versions) found.fill(+version, from, to);
  return found;
}

/** Unpack a sample of samples/step_N.json. */
function unpacked(raw) {
  const floats = (name) => (raw[name] ? decoded(raw[name], Float32Array) : null);
  const own = decoded(raw.sampled || raw.mask, Uint8Array); // the policy's tokens; tokens of environments have no log-probs
  return {
    ...raw,
    own,
    prompt: decoded(raw.prompt, Int32Array),
    tokens: decoded(raw.tokens, Int32Array),
    mask: decoded(raw.mask, Uint8Array),
    engine: floats("engine"),
    trainer: floats("trainer"),
    advantages: floats("advantages"),
    rewards: floats("rewards"),
    support: raw.support ? decoded(raw.support, Int32Array) : null,
    versions: raw.versions || [],
  };
}

function tinted(value, low, high, signed) {
  if (value !== value || (low === high && !value)) return "";
  if (signed) {
    const size = Math.max(Math.abs(low), Math.abs(high)) || 1;
    const share = Math.round((62 * Math.abs(value)) / size);
    return `color-mix(in srgb, var(${value > 0 ? "--c2" : "--c5"}) ${share}%, transparent)`;
  }
  return `color-mix(in srgb, var(--c0) ${Math.round(8 + (50 * (value - low)) / (high - low || 1))}%, transparent)`;
}

/** The tokens of a sample. Returns {box, legend}; arrow keys move from token to token. */
function strip(sample, pieces, kind, say) {
  const { of, unit, signed, from = Infinity, to = -Infinity } = COLOURINGS[kind];
  const values = of(sample);
  const box = el("div", { class: "strip", tabindex: 0, role: "group", "aria-label": "tokens of the sample" });
  let low = from;
  let high = to;
  if (values)
    for (const v of values)
      if (v === v) {
        low = Math.min(low, v);
        high = Math.max(high, v);
      }
  const piece = (id) => (pieces[id] ?? `⟨${id}⟩`).replaceAll("\n", "⏎\n");
  const spans = [];
  const add = (ids, response) => {
    for (let from = 0; from < ids.length; from += BLOCK) {
      const block = el("div", {});
      const until = Math.min(from + BLOCK, ids.length);
      for (let i = from; i < until; i++) {
        const span = document.createElement("b");
        span.textContent = piece(ids[i]);
        if (!response) span.className = "off";
        else {
          if (!sample.mask[i]) span.className = "off";
          if (values) span.style.background = tinted(values[i], low, high, signed);
          spans.push(span);
        }
        block.append(span);
      }
      box.append(block);
    }
  };
  add(sample.prompt, false);
  add(sample.tokens, true);
  const order = new Map(spans.map((span, i) => [span, i]));
  let now = -1;
  const show = (i, scroll) => {
    if (now >= 0) spans[now].classList.remove("now");
    now = i;
    spans[i].classList.add("now");
    if (scroll) spans[i].scrollIntoView({ block: "nearest" });
    const facts = [
      `token ${i} of ${spans.length}: ${JSON.stringify(pieces[sample.tokens[i]] ?? "")} (${sample.tokens[i]})`,
    ];
    if (sample.engine && sample.own[i]) facts.push(`engine ${format(sample.engine[i])}`);
    if (sample.trainer) facts.push(`trainer ${format(sample.trainer[i])}`);
    if (sample.trainer && sample.engine && sample.own[i])
      facts.push(`difference ${format(sample.trainer[i] - sample.engine[i])}`);
    if (sample.advantages) facts.push(`advantage ${format(sample.advantages[i])}`);
    if (sample.support) facts.push(`support ${sample.support[i] || "all"}`);
    if (sample.versions.length) facts.push(`version ${format(versionOf(sample)[i])}`);
    say([...facts, sample.mask[i] ? "trained on" : "masked"].join(" · "));
  };
  box.addEventListener("pointerover", (event) => {
    if (order.has(event.target)) show(order.get(event.target), false);
  });
  box.addEventListener("keydown", (event) => {
    const to = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: spans.length - 1 }[event.key];
    if (to === undefined || !spans.length) return;
    event.preventDefault();
    show(Math.max(0, Math.min(spans.length - 1, to)), true);
  });
  const legend = values
    ? el(
        "span",
        { class: "unit" },
        `${unit}: ${format(low)}`,
        el("i", {
          class: "scale",
          style: signed
            ? "background:linear-gradient(90deg,var(--c5),transparent,var(--c2))"
            : "background:linear-gradient(90deg,transparent,var(--c0))",
        }),
        format(high),
      )
    : el("span", { class: "unit" }, "not recorded for this sample");
  return { box, legend };
}

/** Prompt, turns of the policy and answers of the environment; tool calls are highlighted. */
function conversation(sample, pieces) {
  const text = (ids) => Array.from(ids, (id) => pieces[id] ?? `⟨${id}⟩`).join("");
  const parts = [turn("prompt", "prompt", text(sample.prompt))];
  const { own } = sample;
  for (let from = 0; from < sample.tokens.length;) {
    let until = from;
    while (until < sample.tokens.length && own[until] === own[from]) until++;
    const who = own[from] ? "policy" : "environment";
    parts.push(turn(who, `${who} · ${until - from} tokens`, text(sample.tokens.slice(from, until))));
    from = until;
  }
  return el("div", { class: "conversation" }, ...parts);
}

function turn(who, title, text) {
  const pieces = text.split(/(<(tool_call|tool|sql|search|python|code)>[\s\S]*?<\/\2>)/g).filter((_, i) => i % 3 !== 2);
  return el(
    "div",
    { class: `turn ${who}` },
    el("div", { class: "who" }, title),
    ...pieces
      .filter(Boolean)
      .map((piece) =>
        /^<(tool_call|tool|sql|search|python|code)>/.test(piece) ? el("span", { class: "tool" }, piece) : piece,
      ),
  );
}
