"use strict";

/** Returns the values of a column of differences: each value is the sum of the differences up to it. */
function sums(differences) {
  let total = 0;
  return differences.map((difference) => (total += difference));
}

/** Formats a number with some decimals. A tie is rounded to the even digit, as in Python. */
function rounded(value, decimals) {
  const scaled = value * 10 ** decimals;
  const below = Math.floor(scaled);
  const isTie = scaled - below === 0.5;
  return ((isTie ? below + (below % 2) : Math.round(scaled)) / 10 ** decimals).toFixed(decimals);
}

/** Formats bytes in the largest binary unit in which the number is at least 1, such as "5.79 GiB". */
function formatSize(bytes) {
  for (const [unit, size, decimals] of [["GiB", 2 ** 30, 2], ["MiB", 2 ** 20, 1], ["KiB", 2 ** 10, 1]]) {
    if (10 * bytes >= 10 * size - Math.floor(size / 2048)) return `${rounded(bytes / size, decimals)} ${unit}`;
  }
  return `${bytes} B`;
}

/** One recording: the life of every tensor, and the bytes by category that follow from it. */
class Recording {
  /**
   * @param data the result of `recording_data` in timeline.py, which describes its keys
   * @param stack names of the categories from the bottom of the chart to its top; the last is the allocator's slack
   */
  constructor(data, stack) {
    const { moments, storages, unit_bytes: unit } = data;
    this.stack = stack;
    this.steps = data.steps;
    this.microBatches = data.micro_batches;
    this.peak = moments.peak;
    this.tick = [...sums(moments.tick), moments.end[0]];
    this.timeNs = [...sums(moments.time_ns), moments.end[1]];
    this.op = sums(moments.op);
    this.birth = sums(storages.birth);
    this.death = this.birth.map((birth, row) => birth + storages.life[row]);
    this.size = storages.size.map((size) => size * unit);
    this.storages = storages;
    this.ops = data.ops;
    this.strings = data.strings;
    this.bytes = this.#bytesByCategory(sums(moments.reserved).map((size) => size * unit), data.outside_bytes);
  }

  /** Returns for each category the bytes in each moment. */
  #bytesByCategory(reserved, outside) {
    const bytes = this.stack.map(() => new Float64Array(this.op.length + 1));
    const live = new Float64Array(this.op.length);
    this.size.forEach((size, row) => {
      bytes[this.storages.category[row]][this.birth[row]] += size;
      bytes[this.storages.category[row]][this.death[row]] -= size;
    });
    for (const category of bytes) {
      for (let moment = 1; moment < category.length; moment++) category[moment] += category[moment - 1];
      live.forEach((total, moment) => (live[moment] = total + category[moment]));
    }
    for (const [category, size] of Object.entries(outside)) bytes[this.stack.indexOf(category)].fill(size);
    bytes[bytes.length - 1] = Float64Array.from(reserved, (size, moment) => size - live[moment]);
    return bytes.map((category) => category.slice(0, this.op.length));
  }

  /** Returns the bytes of the whole process in a moment. */
  total(moment) {
    return this.bytes.reduce((sum, category) => sum + category[moment], 0);
  }

  /** Returns the number of the training step that a moment belongs to, counted from 0. */
  stepOf(moment) {
    return Math.max(this.steps.findIndex(([start, stop]) => start <= moment && moment < stop), 0);
  }

  /** Returns the milliseconds from the start of its training step to a moment. */
  milliseconds(moment) {
    return (this.timeNs[moment] - this.timeNs[this.steps[this.stepOf(moment)][0]]) / 1e6;
  }

  /** Describes an op, given its row in the table of ops; -1 stands for the time before the first op. */
  describeOp(row) {
    if (row < 0) return { name: "", phase: "setup", module: "", source: "", microBatch: 0 };
    const text = (column) => this.strings[this.ops[column][row]];
    return {
      name: text("name"),
      phase: text("phase"),
      module: text("module"),
      source: text("source"),
      microBatch: this.ops.micro_batch[row],
    };
  }

  /** Returns the rows of the storages that are alive in a moment, the largest first. */
  aliveAt(moment) {
    const rows = this.size.map((_, row) => row);
    const alive = rows.filter((row) => this.birth[row] <= moment && moment < this.death[row]);
    return alive.sort((one, other) => this.size[other] - this.size[one]);
  }

  /** Returns everything known about a storage. */
  describeStorage(row) {
    const { category, name, shape, dtype, op } = this.storages;
    return {
      bytes: this.size[row],
      category: this.stack[category[row]],
      name: this.strings[name[row]],
      shape: this.strings[shape[row]],
      dtype: this.strings[dtype[row]],
      op: this.describeOp(op[row]),
      birth: this.birth[row],
      death: this.death[row],
    };
  }

  /** Returns the moment at which the categories together have the most bytes. */
  momentOfMost(categories) {
    const chosen = categories.map((name) => this.bytes[this.stack.indexOf(name)]);
    let best = 0;
    let most = -1;
    for (let moment = 0; moment < this.op.length; moment++) {
      const total = chosen.reduce((sum, bytes) => sum + bytes[moment], 0);
      if (total > most) [best, most] = [moment, total];
    }
    return best;
  }

  /** Returns Map(path of a module -> bytes) for the storages of some categories that are alive in a moment. */
  bytesByModule(categories, moment) {
    const totals = new Map();
    for (const row of this.aliveAt(moment)) {
      const { category, name, op, bytes } = this.describeStorage(row);
      if (!categories.includes(category)) continue;
      const module = op.name ? op.module : name.split(".").slice(0, -1).join(".");
      totals.set(module, (totals.get(module) ?? 0) + bytes);
    }
    return totals;
  }

  /**
   * Returns the stretches of consecutive moments of a step with the same label: [label, first moment, last + 1].
   * @param label function that returns a text for the description of an op; moments with an empty text are left out
   */
  stretches(step, label) {
    const [start, stop] = this.steps[step];
    const found = [];
    let [current, since] = ["", start];
    for (let moment = start; moment <= stop; moment++) {
      const text = moment < stop ? label(this.describeOp(this.op[moment])) : null;
      if (text === current) continue;
      if (current) found.push([current, since, moment]);
      [current, since] = [text, moment];
    }
    return found;
  }
}
