"use strict";

const page = JSON.parse(document.getElementById("data").textContent);
const recordings = Object.fromEntries(
  Object.entries(page.recordings).map(([name, data]) => [name, new Recording(data, page.stack)]),
);
const names = Object.keys(recordings);
const TITLES = { baseline: "baseline", plan: "plan" };
const FEW = innerWidth < 640 ? 6 : 12;
const MORE = 50;
const state = { axis: "time", step: {}, selected: {}, shown: names.at(-1), rows: FEW };

/** Creates an element with properties and children. */
function element(tag, properties = {}, ...children) {
  const created = Object.assign(document.createElement(tag), properties);
  created.append(...children);
  return created;
}

const find = (selector) => document.querySelector(selector);

// ---- charts -------------------------------------------------------------------------------------------------------

const mostBytes = Math.max(
  page.budget_bytes ?? 0,
  ...names.map((name) => {
    const { op } = recordings[name];
    return op.reduce((most, _, moment) => Math.max(most, recordings[name].total(moment)), 0);
  }),
);
const charts = Object.fromEntries(
  names.map((name) => [
    name,
    new Timeline(find(`#chart-${name}`), recordings[name], {
      budgetBytes: page.budget_bytes,
      mostBytes,
      onHover: (moment) => showBytes(name, moment ?? state.selected[name]),
      onSelect: (moment) => select(name, moment),
    }),
  ]),
);

/** Draws all charts for the chosen step and axis, on one scale. */
function drawCharts() {
  const end = Math.max(...names.map((name) => charts[name].endOf(state.step[name], state.axis)));
  for (const name of names) charts[name].show(state.step[name], state.axis, end);
}

/** Selects a moment of a recording: marks it, and lists its tensors. */
function select(name, moment) {
  state.selected[name] = moment;
  state.shown = name;
  state.rows = FEW;
  charts[name].mark(moment);
  showBytes(name, moment);
  showTensors();
}

/** Shows a training step of all recordings, with the moment of its largest total selected. */
function showStep(step) {
  for (const name of names) {
    state.step[name] = step;
    const [start, stop] = recordings[name].steps[step];
    const { peak } = recordings[name];
    let most = peak;
    if (peak < start || peak >= stop) {
      most = start;
      for (let moment = start; moment < stop; moment++) {
        if (recordings[name].total(moment) > recordings[name].total(most)) most = moment;
      }
    }
    charts[name].marked = state.selected[name] = most;
    showBytes(name, most);
  }
  drawCharts();
  showTensors();
}

// ---- bytes by category --------------------------------------------------------------------------------------------

const cells = {};

function buildLegend() {
  const body = find("#bytes tbody");
  const row = (label, key, swatch) => {
    const heading = element("th", { scope: "row" }, ...(swatch ? [swatch] : []), label);
    const created = element("tr", {}, heading);
    for (const name of names) {
      cells[`${name}/${key}`] = element("td");
      created.append(cells[`${name}/${key}`]);
    }
    return created;
  };
  const isUsed = (_, index) => names.some((name) => recordings[name].bytes[index].some((bytes) => bytes > 0));
  for (const category of page.stack.filter(isUsed).reverse()) {
    const swatch = element("span", { className: `swatch ${colorName(category)}` });
    swatch.style.backgroundColor = `var(--${colorName(category)})`;
    body.append(row(category, category, swatch));
  }
  const total = row("total of the process", "total", null);
  total.className = "total";
  body.append(total);
}

/** Shows the bytes by category of a recording in a moment. */
function showBytes(name, moment) {
  const recording = recordings[name];
  const write = (key, bytes) => {
    const cell = cells[`${name}/${key}`];
    cell.textContent = bytes ? formatSize(bytes) : "–";
    cell.title = `${bytes.toLocaleString("en")} bytes`;
    cell.dataset.bytes = bytes;
  };
  page.stack.forEach((category, index) => {
    if (`${name}/${category}` in cells) write(category, recording.bytes[index][moment]);
  });
  write("total", recording.total(moment));
  const { name: op, phase, module, source } = recording.describeOp(recording.op[moment]);
  find(`#where-${name}`).textContent = [
    `${recording.milliseconds(moment).toFixed(2)} ms`, phase, module, op, source,
  ].filter(Boolean).join(" · ");
  find(`#where-${name}`).dataset.moment = moment;
}

// ---- tensors ------------------------------------------------------------------------------------------------------

/** Lists the largest tensors that are alive in the selected moment. */
function showTensors() {
  const recording = recordings[state.shown];
  const moment = state.selected[state.shown];
  const rows = recording.aliveAt(moment);
  const { phase, module, name } = recording.describeOp(recording.op[moment]);
  const where = [phase, module, name].filter(Boolean).join(" · ");
  const isPeak = moment === recording.peak ? " at the peak of" : " in";
  find("#tensors-where").textContent =
    `${rows.length.toLocaleString("en")} tensors are alive${isPeak} the ${TITLES[state.shown]}, ` +
    `${recording.milliseconds(moment).toFixed(2)} ms into step ${recording.stepOf(moment) + 1} (${where}).`;
  find("#tensors tbody").replaceChildren(...rows.slice(0, state.rows).map((row) => tensorRow(recording, row)));
  find("#tensors-more").hidden = rows.length <= state.rows;
  for (const button of document.querySelectorAll("#tensors-of button")) {
    button.setAttribute("aria-pressed", button.value === state.shown);
  }
}

function tensorRow(recording, row) {
  const { bytes, category, name, shape, dtype, op, birth, death } = recording.describeStorage(row);
  const swatch = element("span", { className: `swatch ${colorName(category)}` });
  swatch.style.backgroundColor = `var(--${colorName(category)})`;
  const title = name || op.module || (op.name ? `${op.phase}, outside of modules` : "");
  const origin = [op.name, op.source].filter(Boolean).join(" at ");
  const time = (moment) => `${recording.milliseconds(moment).toFixed(2)} ms of step ${recording.stepOf(moment) + 1}`;
  const until = death < recording.op.length ? `to ${time(death)}` : "on";
  const life = birth <= recording.steps[0][0] && until === "on" ? "always" : `from ${time(birth)} ${until}`;
  return element(
    "tr",
    {},
    element("td", { className: "number", textContent: formatSize(bytes), title: `${bytes.toLocaleString("en")} bytes` }),
    element("td", {}, swatch, category),
    element(
      "td",
      { className: "wide" },
      element("strong", { textContent: title }),
      element("div", { className: "fine", textContent: origin }),
    ),
    element("td", { className: "wide" }, element("span", { textContent: [shape, dtype].filter(Boolean).join(" ") })),
    element("td", { className: "fine", textContent: life }),
  );
}

// ---- modules ------------------------------------------------------------------------------------------------------

const SAVED = ["activations", "logits and loss"];

function buildTreemap() {
  const map = new Treemap(find("#treemap"), find("#treemap-path"));
  const choices = find("#treemap-of");
  const views = [
    ...names.map((name) => [`activations, ${TITLES[name]}`, name, SAVED, "activations"]),
    ["parameters", names[0], ["parameters"], "parameters"],
  ];
  const show = ([, name, categories, color], chosen) => {
    const recording = recordings[name];
    const moment = recording.momentOfMost(categories);
    map.show(moduleTree(recording.bytesByModule(categories, moment)), `var(--${colorName(color)})`);
    for (const button of choices.children) button.setAttribute("aria-pressed", button === chosen);
  };
  for (const view of views) {
    const button = element("button", { textContent: view[0], type: "button" });
    button.onclick = () => show(view, button);
    choices.append(button);
  }
  show(views[0], choices.firstElementChild);
}

// ---- controls -----------------------------------------------------------------------------------------------------

function buildControls() {
  const pressed = (group, button) => {
    for (const other of group.querySelectorAll("button")) other.setAttribute("aria-pressed", other === button);
  };
  for (const button of document.querySelectorAll("#step button")) {
    button.onclick = () => (pressed(find("#step"), button), showStep(Number(button.value)));
  }
  for (const button of document.querySelectorAll("#axis button")) {
    button.onclick = () => {
      pressed(find("#axis"), button);
      state.axis = button.value;
      drawCharts();
    };
  }
  for (const button of document.querySelectorAll("[data-zoom]")) {
    button.onclick = () => charts[button.dataset.chart].zoom(Number(button.dataset.zoom));
  }
  for (const button of document.querySelectorAll("#tensors-of button")) {
    button.onclick = () => select(button.value, state.selected[button.value]);
  }
  find("#tensors-more").onclick = () => {
    state.rows += MORE;
    showTensors();
  };
  for (const name of names) {
    find(`#chart-${name}`).onkeydown = (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!by) return;
      event.preventDefault();
      const [start, stop] = recordings[name].steps[state.step[name]];
      select(name, Math.max(start, Math.min(state.selected[name] + by, stop - 1)));
    };
  }
  const copy = find("#copy");
  if (copy) {
    copy.onclick = async () => {
      await navigator.clipboard.writeText(find("#code").textContent);
      copy.textContent = "copied";
    };
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCharts);
}

buildLegend();
buildControls();
showStep(recordings[names.at(-1)].stepOf(recordings[names.at(-1)].peak));
find(`#step button[value="${state.step[names[0]]}"]`)?.setAttribute("aria-pressed", true);
buildTreemap();
