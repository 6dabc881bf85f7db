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

// ---- What the reader chose, kept while a live page reloads itself

/* Storage of this tab; a browser may refuse it to a file. */
const memory = {
  get(name) {
    try { return sessionStorage.getItem(`${location.pathname} ${name}`); } catch { return null; }
  },
  set(name, value) {
    try { sessionStorage.setItem(`${location.pathname} ${name}`, value); } catch { /* refused */ }
  },
};

function remember(field) {
  const kept = memory.get(field.id);
  if (kept !== null) field.value = kept;
  field.addEventListener("input", () => memory.set(field.id, field.value));
}

// ---- Charts

const DARK = matchMedia("(prefers-color-scheme: dark)");
const LIGHT_COLORS = ["#2563a8", "#d9822b", "#1b7f4b", "#8e4ec6", "#b42318", "#5b6774", "#0e7c86"];
const DARK_COLORS = ["#79b0f2", "#f0a45d", "#62cf95", "#c79bf2", "#ff8f82", "#aab6c4", "#4fcbd6"];
const DASHES = ["solid", "dash", "dot", "dashdot"];
const theme = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/* Exponential moving average with bias correction; equal values stay exactly as they are. */
function smoothed(values, weight) {
  let level = 0, norm = 0;
  return values.map((value) => {
    norm = norm * weight + (1 - weight);
    level += (value - level) * ((1 - weight) / norm);
    return level;
  });
}

/* Wall-clock minutes at a step, between those of the steps that were measured. */
function minutesAt(clock, step) {
  const after = clock.steps.findIndex((other) => other >= step);
  if (after < 0) return clock.minutes[clock.minutes.length - 1];
  const [left, right] = [clock.steps[after - 1], clock.steps[after]];
  if (after === 0 || right === step) return clock.minutes[after];
  const part = (step - left) / (right - left);
  return clock.minutes[after - 1] + part * (clock.minutes[after] - clock.minutes[after - 1]);
}

const isOverSteps = (figure) => figure.layout.xaxis.title.text === "step";

/* `chosen`: weight of the smoothing, and clocks of the runs if minutes are the horizontal axis. */
function traces(figure, chosen) {
  const colors = DARK.matches ? DARK_COLORS : LIGHT_COLORS;
  const clocks = isOverSteps(figure) ? chosen.clocks : null;
  return figure.data.flatMap((given, i) => {
    const style = given.meta || {};
    const order = style.color === undefined ? i : style.color;
    const color = colors[order % colors.length];
    const dash = DASHES[(style.dash || Math.floor(order / colors.length)) % DASHES.length];
    if (given.type === "bar") {
      const fill = style.color === undefined ? theme("--bar") : color;
      return [{ ...given, marker: { color: fill, line: { color: theme("--card"), width: 1 } } }];
    }
    const x = clocks ? given.x.map((step) => minutesAt(clocks[style.run || 0], step)) : given.x;
    const trace = { ...given, x, marker: { color, ...given.marker } };
    if (trace.mode === "markers") return [trace];
    const line = { width: 1.8, color, dash, ...trace.line };
    if (!style.smooth || chosen.weight === 0) return [{ ...trace, line }];
    const raw = { ...trace, line: { ...line, width: 1 }, opacity: DARK.matches ? 0.35 : 0.25 };
    const group = `${trace.name} ${i}`;
    return [
      { ...raw, showlegend: false, hoverinfo: "skip", legendgroup: group },
      { ...trace, line, y: smoothed(trace.y, chosen.weight), customdata: trace.y,
        legendgroup: group,
        hovertemplate: "%{y:.4g} (here %{customdata:.4g})" },
    ];
  });
}

function layout(figure, chosen) {
  const axis = {
    gridcolor: theme("--grid"), zeroline: false, automargin: true, exponentformat: "e",
    ticks: "outside", tickcolor: "rgba(0,0,0,0)", // room between the labels of the two axes
  };
  const minutes = chosen.clocks && isOverSteps(figure);
  const xaxis = minutes ? { title: { text: "minutes" } } : figure.layout.xaxis;
  return {
    ...figure.layout,
    margin: { l: 46, r: 10, t: 8, b: 44 },
    font: { size: 11, color: theme("--ink") },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    hovermode: figure.data.some((trace) => trace.type === "bar") ? "closest" : "x unified",
    hoverlabel: { namelength: -1, bgcolor: theme("--card"), bordercolor: theme("--line"),
      font: { color: theme("--ink") } },
    legend: { orientation: "h", y: 1.01, yanchor: "bottom", x: 0, font: { size: 11 } },
    xaxis: { ...axis, automargin: false, ...xaxis },
    yaxis: { ...axis, ...figure.layout.yaxis },
  };
}

/* A page without curves of training has no slider. */
const weightOf = (slider) =>
  (!slider || slider.value === "0" ? 0 : 1 - 1 / (1 + Number(slider.value)));

function drawCharts() {
  const charts = read("data-charts"), { clocks } = read("data-page");
  const slider = document.getElementById("smoothing"), axis = document.getElementById("axis");
  const drawn = new Map();
  const choice = () => ({
    weight: weightOf(slider), clocks: axis && axis.value === "minutes" ? clocks : null,
  });
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting || drawn.has(entry.target)) continue;
      const figure = charts[entry.target.dataset.chart];
      drawn.set(entry.target, figure);
      Plotly.newPlot(entry.target, traces(figure, choice()), layout(figure, choice()), {
        responsive: true, displayModeBar: false,
      });
    }
  }, { rootMargin: "400px" });
  const redraw = () => {
    for (const [node, figure] of drawn) {
      Plotly.react(node, traces(figure, choice()), layout(figure, choice()));
    }
  };
  const smooth = () => {
    const shown = slider.value === "0" ? "off" : `over about ${slider.value} points`;
    document.getElementById("smoothing-shown").textContent = shown;
    slider.setAttribute("aria-valuetext", shown);
    redraw();
  };
  if (slider) {
    remember(slider);
    smooth();
    slider.addEventListener("input", smooth);
  }
  document.querySelectorAll(".plot").forEach((node) => seen.observe(node));
  if (axis) {
    remember(axis);
    axis.addEventListener("input", redraw);
  }
  DARK.addEventListener("change", redraw);
}

// ---- Rollouts and evaluation samples

const PAGE = 20;
const successes = (group) => group.responses.filter((response) => response.success).length;
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const longest = (group) => Math.max(...group.responses.map((r) => r.response_tokens));
const rewards = (group) => group.responses.map((r) => r.reward).filter((r) => r !== null);

/* Pairs of logprobs whose difference can color the tokens. */
const DIFFERENCES = [
  "trainer - generator", "trainer - reference", "generator - reference", "trainer - teacher",
];

/* Differences of two logprobs, one per token; null where one of them is missing. */
function differences(response, what) {
  const [left, right] = what.split(" - ").map((who) => response[`${who}_logprobs`]);
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
  "longest": (a, b) => longest(b) - longest(a),
  "largest logprob difference": (a, b) => b.difference - a.difference,
  "by prompt": (a, b) => a.prompt_index - b.prompt_index || a.step - b.step,
};

/* `field`: function from the name of a filter to its form field. */
function matchesFilters(group, field) {
  const from = field("from").value, to = field("to").value, finish = field("finish").value;
  const words = field("words").value.toLowerCase();
  const texts = [group.prompt, group.answer, ...group.responses.map((r) => r.response)];
  return (from === "" || group.step >= Number(from)) && (to === "" || group.step <= Number(to)) &&
    KINDS[field("kind").value](group) &&
    (finish === "" || group.responses.some((r) => r.finish_reason === finish)) &&
    (words === "" || texts.some((text) => text.toLowerCase().includes(words)));
}

const isFromEnvironment = (response, i) =>
  response.generator_logprobs && response.generator_logprobs[i] === null;

function tokenFacts(response, i) {
  const lines = [`token ${i + 1}: ${JSON.stringify(response.tokens[i])}`];
  if (isFromEnvironment(response, i)) lines.push("from the environment");
  for (const who of ["generator", "trainer", "reference", "teacher"]) {
    const values = response[`${who}_logprobs`];
    if (values && values[i] !== null) lines.push(`${who} logprob ${number(values[i], 5)}`);
  }
  for (const what of DIFFERENCES) {
    const found = differences(response, what);
    if (found && found[i] !== null) lines.push(`${what}: ${number(found[i], 5)}`);
  }
  return lines;
}

function differenceColor(share) {
  const part = Math.round(100 * Math.min(1, Math.abs(share)));
  return `color-mix(in srgb, var(${share < 0 ? "--less" : "--more"}) ${part}%, transparent)`;
}

/* Shows the numbers of the token that is pointed at, or chosen by the arrow keys, below the box. */
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
    shown.replaceChildren(...tokenFacts(response, i).map((fact) => make("span", "", fact)));
  };
  box.tabIndex = 0;
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", "response; the arrow keys go from token to token");
  box.addEventListener("mouseover", ({ target }) => pick(tokens.indexOf(target)));
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
  if (!response.tokens) {
    for (const { by, text } of response.turns || [{ by: "policy", text: response.response }]) {
      box.append(make("span", by === "policy" ? "" : "environment", text));
    }
    return [box];
  }
  const found = what ? differences(response, what) : null;
  response.tokens.forEach((piece, i) => {
    const token = make("span", "token", piece === "" ? "\u00b7" : piece);
    if (isFromEnvironment(response, i)) token.classList.add("environment");
    if (found && found[i] !== null) token.style.background = differenceColor(found[i] / scale);
    box.append(token);
  });
  if (response.more_tokens) box.append(`\n[... ${response.more_tokens} more tokens ...]`);
  return withTokenDetails(box, response);
}

function facts(response, advantage) {
  const line = make("div", "facts");
  const say = (name, value, className) => {
    const part = make("span", "", `${name} `);
    part.append(make("b", className || "", value));
    line.append(part);
  };
  say("reward", number(response.reward), response.success ? "good" : "bad");
  if (advantage != null) say("advantage", number(advantage));
  for (const [name, value] of Object.entries(response.reward_terms || {})) {
    say(name, number(value));
  }
  say("finish", response.finish_reason);
  say("tokens", number(response.response_tokens));
  if (response.versions) {
    const [oldest, newest] = response.versions;
    say("version", oldest === newest ? `${oldest}` : `${oldest} to ${newest}`);
  }
  return line;
}

function responseNode(response, advantage, what, scale) {
  const node = make("div", "response");
  node.append(facts(response, advantage));
  if (response.error !== null) node.append(make("div", "text-box warn", response.error));
  else node.append(...responseText(response, what, scale));
  return node;
}

/* `color`: function that returns what the tokens are coloured by. */
function groupNode(group, scale, color) {
  const node = make("details", "box group");
  const summary = make("summary");
  const attempt = group.attempt ? `, attempt ${group.attempt}` : "";
  const isAnswer = group.group_id === undefined;
  const what = isAnswer ? `prompt ${group.prompt_index}` : `group ${group.group_id}`;
  summary.append(make("span", "quiet", `step ${group.step}, ${what}${attempt}`));
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
    const prompt = make("div", "text-box", group.prompt);
    prompt.dir = "auto";
    const answer = make("div", "facts", `answer ${group.answer}`);
    const about = isAnswer
      ? `prompt ${group.prompt_index} of the evaluation data set, ` +
        `answered by policy version ${number(group.policy_version)}`
      : `prompt ${group.prompt_index} of the data set, epoch ${group.epoch}`;
    node.replaceChildren(summary, make("div", "facts", about), prompt, answer,
      ...group.responses.map((response, i) =>
        responseNode(response, (group.advantages || [])[i], color(), scale())));
  };
  node.addEventListener("toggle", fill);
  node.refresh = fill;
  return node;
}

/* Fills the list `name` with groups of responses, and makes its filters work. */
function showGroups(name) {
  const groups = read(`data-${name}`);
  const part = (what) => document.getElementById(`${name}-${what}`);
  const list = part("list"), more = part("more"), legend = part("legend");
  if (!list) return;
  const color = () => (part("color") ? part("color").value : "");
  const finishes = new Set(groups.flatMap((g) => g.responses.map((r) => r.finish_reason)));
  for (const finish of [...finishes].sort()) {
    const option = make("option", "", finish);
    option.value = finish;
    part("finish").append(option);
  }
  let scale = 1, matching = [], shown = 0;
  const rescale = () => {
    const what = color();
    if (!legend) return;
    legend.hidden = !what;
    if (!what) return;
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
    const next = matching.slice(shown, shown + PAGE)
      .map((group) => groupNode(group, () => scale, color));
    list.append(...next);
    shown += next.length;
    more.hidden = shown >= matching.length;
    const kind = name === "answers" ? "prompts" : "groups";
    part("count").textContent = `${matching.length} of ${groups.length} ${kind} match`;
    return next;
  };
  const restart = () => {
    matching = groups.filter((group) => matchesFilters(group, part)).sort(ORDERS[part("order").value]);
    list.replaceChildren();
    shown = 0;
    return page();
  };
  for (const what of ["from", "to", "kind", "finish", "words", "order"]) {
    remember(part(what));
    part(what).addEventListener("input", restart);
  }
  if (legend) {
    remember(part("color"));
    part("color").addEventListener("input", () => {
      rescale();
      if (part("order").value === "largest logprob difference") restart();
      else list.querySelectorAll("details[open]").forEach((node) => node.refresh());
    });
    DARK.addEventListener("change", () =>
      list.querySelectorAll("details[open]").forEach((node) => node.refresh()));
  }
  rescale();
  more.addEventListener("click", page);
  const [newest] = restart();
  if (newest) newest.open = true;
}

// ---- Live page

const PATIENCE = 6; // pages that may be late before the run counts as dead
const MIN_PATIENCE_S = 180;

/* Reloads the page of a running run; the page that the run writes at its end does not reload. */
function followRun() {
  const { live } = read("data-page");
  if (!live) return;
  const line = document.getElementById("live"), box = document.getElementById("reload");
  const now = Date.now() / 1000;
  if (memory.get("written") !== String(live.written)) {
    memory.set("written", String(live.written));
    memory.set("first seen", String(now));
  }
  const seen = Number(memory.get("first seen") || now);
  line.hidden = false;
  let killed = now - seen > Math.max(MIN_PATIENCE_S, PATIENCE * live.next_s);
  box.checked = !killed && memory.get("reload") !== "no";
  const update = () => {
    const written = `written ${new Date(live.written * 1000).toLocaleTimeString()}`;
    let text = `${written}; does not reload, because a sample was opened or the box unchecked`;
    if (box.checked) text = `${written}; reloads itself every ${Math.round(live.next_s)} s`;
    const minutes = Math.round((now - seen) / 60);
    if (killed) text = `no new page for ${minutes} minutes: the run was probably killed`;
    line.lastElementChild.textContent = text;
  };
  update();
  box.addEventListener("input", () => {
    memory.set("reload", box.checked ? "yes" : "no");
    memory.set("first seen", String(Date.now() / 1000));
    killed = false;
    update();
  });
  // Whoever reads a sample must not lose it.
  document.addEventListener("click", ({ target }) => {
    if (box.checked && target.closest("details.group > summary")) box.click();
  });
  setInterval(() => {
    if (box.checked && !document.hidden) location.reload();
  }, live.next_s * 1000);
}

drawCharts();
showGroups("answers");
showGroups("rollouts");
followRun();
