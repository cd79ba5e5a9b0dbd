"use strict";

/** Builds the tree of modules from Map(path -> bytes). A node has `name`, `path`, `bytes` and `children`. */
function moduleTree(bytesByModule) {
  const root = { name: "model", path: "", bytes: 0, children: new Map() };
  for (const [path, bytes] of bytesByModule) {
    let node = root;
    node.bytes += bytes;
    // The number of an item in a module list is not a level of its own: "h.0" is one level.
    const parts = path ? path.split(/\.(?!\d+(?:\.|$))/) : ["(outside of submodules)"];
    for (const [index, name] of parts.entries()) {
      if (!node.children.has(name)) {
        node.children.set(name, { name, path: parts.slice(0, index + 1).join("."), bytes: 0, children: new Map() });
      }
      node = node.children.get(name);
      node.bytes += bytes;
    }
  }
  return root;
}

/**
 * Divides a rectangle between nodes in proportion to their bytes (squarified tree map: Bruls, Huizing and van Wijk,
 * Squarified treemaps, 2000). Returns [node, x, y, width, height] for each node.
 */
function squarify(nodes, x, y, width, height) {
  const queue = [...nodes].sort((one, other) => other.bytes - one.bytes);
  const placed = [];
  let rest = queue.reduce((sum, node) => sum + node.bytes, 0);
  while (queue.length) {
    const isWide = width >= height;
    const side = isWide ? height : width;
    const scale = (width * height) / rest;
    const row = [];
    let rowArea = 0;
    let worst = Infinity;
    while (queue.length) {
      const area = queue[0].bytes * scale;
      const areas = [...row.map((node) => node.bytes * scale), area];
      const thickness = (rowArea + area) / side;
      const ratio = Math.max(...areas.map((one) => Math.max(one / thickness ** 2, thickness ** 2 / one)));
      if (ratio > worst) break;
      worst = ratio;
      rowArea += area;
      row.push(queue.shift());
    }
    const thickness = rowArea / side;
    let offset = 0;
    for (const node of row) {
      const length = (node.bytes * scale) / thickness;
      placed.push(
        isWide ? [node, x, y + offset, thickness, length] : [node, x + offset, y, length, thickness],
      );
      offset += length;
      rest -= node.bytes;
    }
    if (isWide) [x, width] = [x + thickness, width - thickness];
    else [y, height] = [y + thickness, height - thickness];
  }
  return placed;
}

/** Draws a tree of modules as nested rectangles. A click on a module shows only that module. */
class Treemap {
  constructor(container, crumbs) {
    this.container = container;
    this.crumbs = crumbs;
    onNewWidth(container, () => this.#draw());
  }

  /** Shows a tree from its root on. `color` is the color of the rectangles. */
  show(root, color) {
    Object.assign(this, { root, path: [root], color });
    this.#draw();
  }

  #draw() {
    const node = this.path.at(-1);
    this.container.replaceChildren();
    this.container.style.setProperty("--area", this.color);
    this.#place([...node.children.values()], 0, 0, this.container.clientWidth, this.container.clientHeight, 0);
    this.crumbs.replaceChildren(
      ...this.path.map((step, index) => {
        const button = document.createElement("button");
        button.textContent = `${step.name} ${formatSize(step.bytes)}`;
        button.disabled = index === this.path.length - 1;
        button.onclick = () => this.#enter(this.path.slice(0, index + 1));
        return button;
      }),
    );
  }

  #enter(path) {
    this.path = path;
    this.#draw();
  }

  #place(nodes, x, y, width, height, depth) {
    for (const [node, left, top, wide, high] of squarify(nodes.filter((node) => node.bytes), x, y, width, height)) {
      const cell = document.createElement(node.children.size ? "button" : "div");
      cell.className = `cell depth${depth}`;
      cell.title = `${node.path}: ${formatSize(node.bytes)}`;
      Object.assign(cell.style, { left: `${left}px`, top: `${top}px`, width: `${wide}px`, height: `${high}px` });
      if (wide > 44 && high > 15) cell.append(this.#label(node, wide, high));
      if (node.children.size) cell.onclick = () => this.#enter(this.#pathTo(node));
      this.container.append(cell);
      const [inset, header] = [3, 18];
      if (depth === 0 && node.children.size && wide > 60 && high > 44) {
        const inner = [left + inset, top + header, wide - 2 * inset, high - header - inset];
        this.#place([...node.children.values()], ...inner, depth + 1);
      }
    }
  }

  #label(node, wide, high) {
    const label = document.createElement("span");
    const size = formatSize(node.bytes);
    label.textContent = wide > 7 * (node.name.length + size.length) + 12 ? `${node.name} ${size}` : node.name;
    return label;
  }

  /** Returns the nodes from the root to a node. */
  #pathTo(node) {
    const parent = this.path.at(-1);
    if (parent.children.get(node.name) === node) return [...this.path, node];
    const between = [...parent.children.values()].find((child) => child.children.get(node.name) === node);
    return [...this.path, between, node];
  }
}
