// A growing text as Markdown: finished blocks stay as they are, only the last one is read again.

import { blocks } from "./markdown.js";

export class LiveMarkdown {
  #root;
  #rest = ""; // the text from the first block that may still change
  #live = []; // the nodes of that text
  #timer = null;
  #cost = 0;

  constructor(root) {
    this.#root = root;
  }

  /** Takes more text and shows it soon: a step that took long is followed by a longer pause. */
  push(text) {
    this.#rest += text;
    this.#timer ??= setTimeout(() => this.flush(), Math.max(16, 4 * this.#cost));
  }

  /** Shows everything that has arrived. */
  flush() {
    clearTimeout(this.#timer);
    this.#timer = null;
    const began = performance.now();
    const lines = this.#rest.split("\n");
    const found = blocks(lines);
    this.#replace(found.map(({ node }) => node));
    this.#settle(lines, found);
    this.#cost = performance.now() - began;
  }

  #replace(nodes) {
    const old = this.#live;
    this.#live = nodes.map((node, i) => (i < old.length ? morph(old[i], node) : node));
    this.#root.append(...this.#live.slice(old.length));
    for (const node of old.slice(nodes.length)) node.remove();
  }

  /** A block is final once two lines of the next one are complete: until then they may turn out to be its own. */
  #settle(lines, found) {
    const kept = found.findLastIndex(({ at }) => at < lines.length - 2);
    if (kept < 1) return;
    this.#rest = lines.slice(found[kept].at).join("\n");
    this.#live = this.#live.slice(kept);
  }
}

/** Makes a node equal to a fresh one and gives the node in place. What is equal stays, as does a selection in it. */
function morph(old, fresh) {
  if (old.isEqualNode(fresh)) return old;
  if (old.nodeType === Node.TEXT_NODE && fresh.nodeType === Node.TEXT_NODE) {
    if (fresh.data.startsWith(old.data)) old.appendData(fresh.data.slice(old.data.length));
    else old.data = fresh.data;
    return old;
  }
  if (old.nodeType !== fresh.nodeType || !old.cloneNode(false).isEqualNode(fresh.cloneNode(false))) {
    old.replaceWith(fresh);
    return fresh;
  }
  const [had, wanted] = [[...old.childNodes], [...fresh.childNodes]];
  wanted.forEach((node, i) => (i < had.length ? morph(had[i], node) : old.append(node)));
  for (const node of had.slice(wanted.length)) node.remove();
  return old;
}
