"use strict";

/** Reads a color from the page's style sheet. It depends on light or dark mode. */
function cssColor(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** Returns the name of the CSS color of a category: "logits and loss" has the color --logits-and-loss. */
function colorName(category) {
  return category.toLowerCase().replaceAll(" ", "-");
}

/** Calls a function in the next frame whenever the width of an element has changed. */
function onNewWidth(element, call) {
  let width = element.clientWidth;
  const check = () => {
    if (element.clientWidth === width) return;
    width = element.clientWidth;
    call();
  };
  new ResizeObserver(() => requestAnimationFrame(check)).observe(element);
}

const PHASE_ROW = 22;
const MODULE_ROW = 18;
const MODULE_DEPTHS = 3;

/** One chart: memory by category over a training step, with the phases and modules below it. */
class Timeline {
  /**
   * @param container element that contains the chart
   * @param recording a `Recording`
   * @param options `budgetBytes` (null without a budget), `mostBytes` (end of the y axis), `onHover(moment or null)`,
   *   `onSelect(moment)`
   */
  constructor(container, recording, options) {
    Object.assign(this, { container, recording, options });
    this.unit = options.mostBytes >= 2 ** 30 ? [2 ** 30, "GiB"] : [2 ** 20, "MiB"];
    this.tip = Object.assign(document.createElement("div"), { className: "tip", hidden: true });
    this.strip = Object.assign(document.createElement("canvas"), { className: "strip" });
    this.strip.onmousemove = (event) => this.#hover(this.#momentAt(this.#stripValue(event)));
    this.strip.onmouseleave = () => this.#hover(null);
    this.strip.onclick = (event) => options.onSelect(this.#momentAt(this.#stripValue(event)));
    onNewWidth(container, () => this.plot?.setSize({ width: container.clientWidth, height: this.#height() }));
  }

  /**
   * Shows a training step.
   * @param step number of the step, from 0
   * @param axis "time" or "events"
   * @param end end of the x axis; the charts of all recordings have the same end
   */
  show(step, axis, end) {
    Object.assign(this, { step, axis, end });
    const [start, stop] = this.recording.steps[step];
    this.first = start;
    this.x = Array.from({ length: stop - start + 1 }, (_, index) => this.#position(start + index));
    let below = new Float64Array(this.x.length);
    const stacked = this.recording.bytes.map((bytes) => {
      below = below.map((total, index) => total + bytes[Math.min(start + index, stop - 1)]);
      return below;
    });
    // Areas are drawn from the top of the stack to the bottom: each covers the lower part of the area before it.
    this.data = [this.x, ...stacked.reverse().map((totals) => Array.from(totals, (bytes) => bytes / this.unit[0]))];
    this.labels = this.#labels();
    this.#draw();
  }

  /** Returns the end of a step on an axis. */
  endOf(step, axis) {
    Object.assign(this, { axis, first: this.recording.steps[step][0] });
    return this.#position(this.recording.steps[step][1]);
  }

  /** Marks a moment with a vertical line. */
  mark(moment) {
    this.marked = moment;
    this.plot?.redraw(false);
  }

  /** Zooms by a factor around the marked moment, or around the middle if it is not in view. */
  zoom(factor) {
    const { min, max } = this.plot.scales.x;
    const marked = this.marked === undefined ? NaN : this.x[this.marked - this.first];
    const center = marked >= min && marked <= max ? marked : (min + max) / 2;
    const half = Math.min((max - min) / factor, this.end) / 2;
    const low = Math.max(0, Math.min(center - half, this.end - 2 * half));
    this.plot.setScale("x", { min: low, max: low + 2 * half });
  }

  #position(moment) {
    const { timeNs, tick } = this.recording;
    return this.axis === "time"
      ? (timeNs[moment] - timeNs[this.first]) / 1e6
      : tick[moment] - tick[this.first];
  }

  /** Returns the last moment at or before a position on the x axis. */
  #momentAt(value) {
    let [low, high] = [0, this.x.length - 2];
    while (low < high) {
      const middle = Math.ceil((low + high) / 2);
      if (this.x[middle] <= value) low = middle;
      else high = middle - 1;
    }
    return this.first + low;
  }

  #stripValue(event) {
    return this.plot.posToVal(event.offsetX - this.plot.bbox.left / devicePixelRatio, "x");
  }

  #draw() {
    this.plot?.destroy();
    const color = (name) => cssColor(name);
    const grid = { stroke: color("grid"), width: 1 };
    const ticks = { stroke: color("axis"), width: 1, size: 5 };
    const text = { stroke: color("muted"), font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif" };
    const categories = [...this.recording.stack].reverse();
    this.plot = new uPlot(
      {
        width: this.container.clientWidth,
        height: this.#height(),
        legend: { show: false },
        drawOrder: ["series", "axes"],
        padding: [14, 12, 0, 0],
        scales: {
          x: { time: false, range: (_, min, max) => [min, max] },
          y: { range: () => [0, (1.06 * this.options.mostBytes) / this.unit[0]] },
        },
        axes: [
          {
            ...text, grid: { show: false }, ticks,
            label: this.axis === "time" ? "predicted time in the step (ms)" : "events in the step",
            labelSize: 20, size: 28,
          },
          { ...text, grid, ticks, size: 46, label: this.unit[1], labelSize: 18 },
        ],
        series: [
          {},
          ...categories.map((category) => ({
            label: category,
            fill: () => (category === "allocator slack" ? this.#hatched() : color(colorName(category))),
            stroke: color("background"),
            width: 0.5,
            paths: uPlot.paths.stepped({ align: 1 }),
            points: { show: false },
          })),
        ],
        cursor: {
          y: false,
          points: { show: false },
          drag: { x: true, y: false, dist: 6 },
          bind: { dblclick: (plot) => () => this.#showAll(plot) },
        },
        hooks: {
          ready: [(plot) => this.#listen(plot)],
          draw: [(plot) => this.#drawLines(plot), (plot) => this.#drawStrip(plot)],
          setCursor: [(plot) => this.#follow(plot)],
        },
      },
      this.data,
      this.container,
    );
    this.container.append(this.strip, this.tip);
    this.#showAll(this.plot);
  }

  #height() {
    return this.container.clientWidth < 560 ? 230 : 270;
  }

  #showAll(plot) {
    plot.setScale("x", { min: 0, max: this.end });
  }

  #listen(plot) {
    let pressedAt = 0;
    plot.over.addEventListener("mousedown", (event) => (pressedAt = event.clientX));
    plot.over.addEventListener("click", (event) => {
      if (Math.abs(event.clientX - pressedAt) < 5) {
        this.options.onSelect(this.#momentAt(plot.posToVal(event.offsetX, "x")));
      }
    });
    plot.over.addEventListener("mouseleave", () => this.#hover(null));
  }

  #follow(plot) {
    if (plot.cursor.left >= 0) this.#hover(this.#momentAt(plot.posToVal(plot.cursor.left, "x")));
  }

  #hover(moment) {
    this.options.onHover(moment);
    this.tip.hidden = moment === null;
    if (moment === null) return;
    const { phase, module, name } = this.recording.describeOp(this.recording.op[moment]);
    this.tip.replaceChildren(
      ...[formatSize(this.recording.total(moment)), `${phase}${module ? ` of ${module}` : ""}`, name].map((text, line) =>
        Object.assign(document.createElement(line ? "div" : "strong"), { textContent: text }),
      ),
    );
    const left = this.plot.bbox.left / devicePixelRatio + this.plot.valToPos(this.x[moment - this.first], "x");
    const room = this.container.clientWidth - this.tip.offsetWidth;
    this.tip.style.left = `${Math.max(0, Math.min(left + 12, room))}px`;
  }

  /** Returns the fill of allocator slack. It is hatched, because no tensor uses these bytes. */
  #hatched() {
    const tile = Object.assign(document.createElement("canvas"), { width: 8, height: 8 });
    const pen = tile.getContext("2d");
    pen.fillStyle = cssColor("allocator-slack");
    pen.fillRect(0, 0, 8, 8);
    pen.strokeStyle = cssColor("hatch");
    pen.lineWidth = 1.5;
    pen.beginPath();
    for (const shift of [-4, 0, 4, 8, 12]) {
      pen.moveTo(shift - 4, 8);
      pen.lineTo(shift + 4, 0);
    }
    pen.stroke();
    return pen.createPattern(tile, "repeat");
  }

  /** Draws the budget, the end of the step and the marked moment over the areas. */
  #drawLines(plot) {
    const { ctx: pen, bbox } = plot;
    const scale = devicePixelRatio;
    pen.save();
    pen.font = `600 ${12 * scale}px system-ui, sans-serif`;
    if (this.options.budgetBytes !== null) {
      const y = Math.round(plot.valToPos(this.options.budgetBytes / this.unit[0], "y", true));
      if (y > bbox.top) {
        pen.strokeStyle = pen.fillStyle = cssColor("budget");
        pen.lineWidth = 2 * scale;
        pen.setLineDash([7 * scale, 5 * scale]);
        pen.beginPath();
        pen.moveTo(bbox.left, y);
        pen.lineTo(bbox.left + bbox.width, y);
        pen.stroke();
        const label = `budget ${formatSize(this.options.budgetBytes)}`;
        const [wide, high] = [pen.measureText(label).width + 10 * scale, 17 * scale];
        const right = bbox.left + bbox.width;
        pen.fillStyle = cssColor("background");
        pen.fillRect(right - wide, y - high - 2 * scale, wide, high);
        pen.fillStyle = cssColor("budget");
        pen.textAlign = "right";
        pen.textBaseline = "middle";
        pen.fillText(label, right - 5 * scale, y - high / 2 - 2 * scale);
      }
    }
    const marked = this.marked === undefined ? undefined : this.x[this.marked - this.first];
    if (marked !== undefined && marked >= plot.scales.x.min && marked <= plot.scales.x.max) {
      const x = Math.round(plot.valToPos(marked, "x", true));
      pen.setLineDash([]);
      pen.strokeStyle = pen.fillStyle = cssColor("text");
      pen.lineWidth = 1.5 * scale;
      pen.beginPath();
      pen.moveTo(x, bbox.top);
      pen.lineTo(x, bbox.top + bbox.height);
      pen.stroke();
      pen.beginPath();
      pen.moveTo(x - 5 * scale, bbox.top - 8 * scale);
      pen.lineTo(x + 5 * scale, bbox.top - 8 * scale);
      pen.lineTo(x, bbox.top);
      pen.fill();
    }
    pen.restore();
  }

  /** Returns the rows of the strip, each a list of stretches: first the phases, then the modules by depth. */
  #labels() {
    const { recording, step } = this;
    const split = recording.microBatches.length > 1;
    const phase = ({ phase, microBatch }) => {
      if (!split || phase === "optimizer" || phase === "setup") return phase;
      const [first, last] = recording.microBatches[microBatch] ?? [microBatch + 1, microBatch + 1];
      return `${phase} ${first === last ? first : `${first}–${last}`}`;
    };
    const rows = [recording.stretches(step, phase)];
    for (let depth = 1; depth <= MODULE_DEPTHS; depth++) {
      const prefix = ({ module }) => {
        const parts = module ? module.split(/\.(?!\d+(?:\.|$))/) : [];
        return parts.length >= depth ? parts.slice(0, depth).join("\u0000") : "";
      };
      const found = recording.stretches(step, prefix);
      if (found.length) rows.push(found.map(([path, ...span]) => [path.split("\u0000").at(-1), ...span]));
    }
    return rows;
  }

  #drawStrip(plot) {
    const scale = devicePixelRatio;
    const high = PHASE_ROW + (this.labels.length - 1) * MODULE_ROW;
    this.strip.width = plot.ctx.canvas.width;
    this.strip.height = high * scale;
    this.strip.style.width = `${plot.width}px`;
    this.strip.style.height = `${high}px`;
    const pen = this.strip.getContext("2d");
    const left = plot.bbox.left;
    const right = left + plot.bbox.width;
    pen.textBaseline = "middle";
    this.labels.forEach((stretches, row) => {
      const top = (row ? PHASE_ROW + (row - 1) * MODULE_ROW : 0) * scale;
      const tall = (row ? MODULE_ROW : PHASE_ROW) * scale - scale;
      pen.font = `${row ? 11 * scale : 12 * scale}px system-ui, sans-serif`;
      stretches.forEach(([label, start, stop], number) => {
        const from = Math.max(plot.valToPos(this.x[start - this.first], "x", true), left);
        const to = Math.min(plot.valToPos(this.x[stop - this.first], "x", true), right);
        if (to <= from) return;
        pen.fillStyle = cssColor(row ? `module-${number % 2}` : `phase-${label.split(" ")[0]}`);
        pen.fillRect(from, top, Math.max(to - from - (to - from > 3 * scale ? scale : 0), 0.5), tall);
        if (to - from < 26 * scale) return;
        pen.save();
        pen.beginPath();
        pen.rect(from, top, to - from - 3 * scale, tall);
        pen.clip();
        pen.fillStyle = cssColor("text");
        pen.fillText(label, from + 4 * scale, top + tall / 2);
        pen.restore();
      });
    });
  }
}
