"use strict";

const read = (id) => JSON.parse(document.getElementById(id).textContent);

// Inserts a run's data as text, never as markup.
function make(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "-";
  return typeof value === "number" ? String(Number(value.toFixed(digits))) : String(value);
}

// ---- Charts

const COLORS = ["#2563a8", "#d9822b", "#1b7f4b", "#8e4ec6", "#b42318", "#5b6774", "#0e7c86"];
const DASHES = ["solid", "dash", "dot"]; // for curves beyond the number of colours

/* Exponential moving average with bias correction. */
function smoothed(values, weight) {
  let sum = 0, norm = 0;
  return values.map((value) => {
    sum = sum * weight + value * (1 - weight);
    norm = norm * weight + (1 - weight);
    return sum / norm;
  });
}

function traces(figure, weight) {
  return figure.data.flatMap((trace, i) => {
    const color = COLORS[i % COLORS.length];
    if (trace.type !== "scatter" || trace.mode === "markers") return [trace];
    const dash = DASHES[Math.floor(i / COLORS.length) % DASHES.length];
    const line = { width: 1.8, color, dash, ...trace.line };
    if (trace.meta !== "smooth" || weight === 0) return [{ ...trace, line }];
    const raw = { ...trace, line: { ...line, width: 1 }, opacity: 0.25 };
    return [
      { ...raw, showlegend: false, hoverinfo: "skip", legendgroup: trace.name },
      { ...trace, line, y: smoothed(trace.y, weight), customdata: trace.y,
        legendgroup: trace.name,
        hovertemplate: "%{y:.4g} (here %{customdata:.4g})" },
    ];
  });
}

function layout(figure) {
  const axis = {
    gridcolor: "#e8ecf0", zeroline: false, automargin: true, exponentformat: "e",
    ticks: "outside", tickcolor: "rgba(0,0,0,0)", // room between the labels of the two axes
  };
  return {
    ...figure.layout,
    margin: { l: 46, r: 10, t: 8, b: 44 },
    font: { size: 11, color: "#1f2933" },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    hovermode: figure.data.some((trace) => trace.type === "bar") ? "closest" : "x unified",
    hoverlabel: { namelength: -1 },
    legend: { orientation: "h", y: 1.01, yanchor: "bottom", x: 0, font: { size: 11 } },
    xaxis: { ...axis, automargin: false, ...figure.layout.xaxis },
    yaxis: { ...axis, ...figure.layout.yaxis },
  };
}

const weightOf = (slider) => (slider.value === "0" ? 0 : 1 - 1 / (1 + Number(slider.value)));

function drawCharts() {
  const charts = read("data-charts");
  const slider = document.getElementById("smoothing");
  const drawn = new Map();
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting || drawn.has(entry.target)) continue;
      const figure = charts[entry.target.dataset.chart];
      drawn.set(entry.target, figure);
      Plotly.newPlot(entry.target, traces(figure, weightOf(slider)), layout(figure), {
        responsive: true, displayModeBar: false,
      });
    }
  }, { rootMargin: "400px" });
  document.querySelectorAll(".plot").forEach((node) => seen.observe(node));
  slider.addEventListener("input", () => {
    const shown = slider.value === "0" ? "off" : `over about ${slider.value} points`;
    document.getElementById("smoothing-shown").textContent = shown;
    slider.setAttribute("aria-valuetext", shown);
    for (const [node, figure] of drawn) {
      Plotly.react(node, traces(figure, weightOf(slider)), layout(figure));
    }
  });
}

// ---- Rollouts

const PAGE = 20;
const field = (name) => document.getElementById(`filter-${name}`);
const successes = (group) => group.responses.filter((response) => response.success).length;
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const rewards = (group) => group.responses.map((r) => r.reward).filter((r) => r !== null);

const DIFFERENCES = {
  "trainer - generator": ["trainer_logprobs", "generator_logprobs"],
  "trainer - reference": ["trainer_logprobs", "reference_logprobs"],
  "generator - reference": ["generator_logprobs", "reference_logprobs"],
};

/* Differences of two logprobs, one per token; null where one of them is missing. */
function differences(response, what) {
  const [left, right] = DIFFERENCES[what].map((name) => response[name]);
  if (!left || !right) return null;
  return left.map((value, i) =>
    value === null || right[i] === null || right[i] === undefined ? null : value - right[i]);
}

function largest(group, what) {
  const found = group.responses.flatMap((r) => differences(r, what) || []);
  return found.reduce((most, value) => Math.max(most, Math.abs(value)), 0); // |null| is 0
}

const KINDS = {
  all: () => true,
  mixed: (group) => successes(group) > 0 && successes(group) < group.responses.length,
  right: (group) => successes(group) === group.responses.length,
  wrong: (group) => successes(group) === 0,
  failed: (group) => group.responses.some((response) => response.error !== null),
};

const ORDERS = {
  "newest first": (a, b) => b.step - a.step || b.group_id - a.group_id,
  "oldest first": (a, b) => a.step - b.step || a.group_id - b.group_id,
  "lowest reward": (a, b) => mean(rewards(a)) - mean(rewards(b)) || b.step - a.step,
  "highest reward": (a, b) => mean(rewards(b)) - mean(rewards(a)) || b.step - a.step,
  "longest": (a, b) => Math.max(...b.responses.map((r) => r.tokens)) -
    Math.max(...a.responses.map((r) => r.tokens)),
  "largest logprob difference": (a, b) => b.difference - a.difference,
};

function matchesFilters(group) {
  const from = field("from").value, to = field("to").value, finish = field("finish").value;
  const words = field("words").value.toLowerCase();
  const texts = [group.prompt, group.answer, ...group.responses.map((r) => r.text)];
  return (from === "" || group.step >= Number(from)) && (to === "" || group.step <= Number(to)) &&
    KINDS[field("kind").value](group) &&
    (finish === "" || group.responses.some((response) => response.finish === finish)) &&
    (words === "" || texts.some((text) => text.toLowerCase().includes(words)));
}

const isFromEnvironment = (response, i) =>
  response.generator_logprobs && response.generator_logprobs[i] === null;

function tokenTitle(response, i) {
  const lines = [`token ${i + 1}: ${JSON.stringify(response.pieces[i])}`];
  if (isFromEnvironment(response, i)) lines.push("from the environment");
  for (const who of ["generator", "trainer", "reference"]) {
    const values = response[`${who}_logprobs`];
    if (values && values[i] !== null) lines.push(`${who} logprob ${number(values[i], 5)}`);
  }
  for (const what of Object.keys(DIFFERENCES)) {
    const found = differences(response, what);
    if (found && found[i] !== null) lines.push(`${what}: ${number(found[i], 5)}`);
  }
  return lines.join("\n");
}

function differenceColor(share) {
  const end = share < 0 ? [244, 162, 97] : [110, 168, 220];
  const part = Math.min(1, Math.abs(share));
  return `rgb(${end.map((value) => Math.round(255 + (value - 255) * part)).join(",")})`;
}

/* Shows a token's numbers on hover; a click or the arrow keys show them below the box. */
function withTokenDetails(box, response) {
  const tokens = [...box.querySelectorAll(".token")];
  const shown = make("div", "facts");
  shown.setAttribute("role", "status");
  let picked = -1;
  const pick = (i) => {
    if (!tokens[i]) return;
    if (tokens[picked]) tokens[picked].classList.remove("picked");
    picked = i;
    tokens[i].classList.add("picked");
    shown.replaceChildren(...tokenTitle(response, i).split("\n").map((t) => make("span", "", t)));
  };
  box.tabIndex = 0;
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", "response; the arrow keys go from token to token");
  box.addEventListener("mouseover", ({ target }) => {
    const i = tokens.indexOf(target);
    if (i >= 0) target.title = tokenTitle(response, i);
  });
  box.addEventListener("click", ({ target }) => pick(tokens.indexOf(target)));
  box.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    pick(picked + step);
  });
  return [box, shown];
}

function responseText(response, what, scale) {
  const box = make("div", "text-box");
  box.dir = "auto";
  if (!response.pieces) {
    for (const { by, text } of response.turns || [{ by: "policy", text: response.text }]) {
      box.append(make("span", by === "policy" ? "" : "environment", text));
    }
    return [box];
  }
  const found = DIFFERENCES[what] ? differences(response, what) : null;
  response.pieces.forEach((piece, i) => {
    const token = make("span", "token", piece === "" ? "\u00b7" : piece);
    if (isFromEnvironment(response, i)) token.classList.add("environment");
    if (found && found[i] !== null) token.style.background = differenceColor(found[i] / scale);
    box.append(token);
  });
  if (response.more_tokens) box.append(`\n[... ${response.more_tokens} more tokens ...]`);
  return withTokenDetails(box, response);
}

function facts(response) {
  const line = make("div", "facts");
  const say = (name, value, className) => {
    const part = make("span", "", `${name} `);
    part.append(make("b", className || "", value));
    line.append(part);
  };
  say("reward", number(response.reward), response.success ? "good" : "bad");
  say("advantage", number(response.advantage));
  for (const [name, value] of Object.entries(response.terms)) say(name, number(value));
  say("finish", response.finish);
  say("tokens", number(response.tokens));
  if (response.versions) {
    const [oldest, newest] = response.versions;
    say("version", oldest === newest ? `${oldest}` : `${oldest} to ${newest}`);
  }
  return line;
}

function responseNode(response, what, scale) {
  const node = make("div", "response");
  node.append(facts(response));
  if (response.error !== null) node.append(make("div", "text-box warn", response.error));
  else node.append(...responseText(response, what, scale));
  return node;
}

function groupNode(group, scale) {
  const node = make("details", "box group");
  const summary = make("summary");
  const attempt = group.attempt ? `, attempt ${group.attempt}` : "";
  summary.append(make("span", "quiet", `step ${group.step}, group ${group.group_id}${attempt}`));
  const marks = make("span", "marks");
  for (const response of group.responses) {
    const kind = response.error !== null ? "none" : response.success ? "good" : "bad";
    const mark = make("span", `mark ${kind}`, { none: "!", good: "\u2713", bad: "\u00d7" }[kind]);
    mark.title = `reward ${number(response.reward)}`;
    marks.append(mark);
  }
  marks.setAttribute("role", "img");
  marks.setAttribute("aria-label", `${successes(group)} of ${group.responses.length} right`);
  summary.append(marks);
  const first = make("span", "first", group.prompt.trim().replace(/\s+/g, " "));
  first.dir = "auto";
  summary.append(first);
  summary.append(make("span", "quiet", `reward ${number(mean(rewards(group)))}`));
  node.append(summary);
  const fill = () => {
    if (!node.open) return;
    const what = field("color").value;
    const prompt = make("div", "text-box", group.prompt);
    prompt.dir = "auto";
    const answer = make("div", "facts", `answer ${group.answer}`);
    const about = `prompt ${group.prompt_index} of the data set, epoch ${group.epoch}`;
    node.replaceChildren(summary, make("div", "facts", about), prompt, answer,
      ...group.responses.map((response) => responseNode(response, what, scale())));
  };
  node.addEventListener("toggle", fill);
  node.refresh = fill;
  return node;
}

function showRollouts() {
  const groups = read("data-rollouts");
  const list = document.getElementById("rollout-list");
  if (!list) return;
  const more = document.getElementById("rollout-more");
  const count = document.getElementById("rollout-count");
  const legend = document.getElementById("rollout-legend");
  const finishes = new Set(groups.flatMap((g) => g.responses.map((response) => response.finish)));
  for (const finish of [...finishes].sort()) {
    const option = make("option", "", finish);
    option.value = finish;
    field("finish").append(option);
  }
  let scale = 1, matching = [], shown = 0;
  const rescale = () => {
    const what = field("color").value;
    legend.hidden = !DIFFERENCES[what];
    if (!DIFFERENCES[what]) return;
    const all = groups.flatMap((g) => g.responses.flatMap((r) => differences(r, what) || []));
    const sizes = all.filter((value) => value !== null).map(Math.abs).sort((a, b) => a - b);
    scale = Math.max(1e-4, sizes[Math.floor(sizes.length * 0.99)] || 0);
    for (const group of groups) group.difference = largest(group, what);
    const [left, right] = what.split(" - ");
    legend.lastElementChild.textContent = `+${number(scale, 4)} nats; ` + (sizes.length
      ? `blue: the ${left} finds the token likelier than the ${right}` : "not measured here");
    legend.firstElementChild.textContent = `-${number(scale, 4)}`;
  };
  const page = () => {
    const next = matching.slice(shown, shown + PAGE).map((group) => groupNode(group, () => scale));
    list.append(...next);
    shown += next.length;
    more.hidden = shown >= matching.length;
    count.textContent = `${matching.length} of ${groups.length} groups match`;
    return next;
  };
  const restart = () => {
    matching = groups.filter(matchesFilters).sort(ORDERS[field("order").value]);
    list.replaceChildren();
    shown = 0;
    return page();
  };
  rescale();
  for (const name of ["from", "to", "kind", "finish", "words", "order"]) {
    field(name).addEventListener("input", restart);
  }
  field("color").addEventListener("input", () => {
    rescale();
    if (field("order").value === "largest logprob difference") restart();
    else list.querySelectorAll("details[open]").forEach((node) => node.refresh());
  });
  more.addEventListener("click", page);
  const [newest] = restart();
  if (newest) newest.open = true;
}

drawCharts();
showRollouts();
