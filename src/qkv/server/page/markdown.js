// Markdown into DOM nodes, block by block. Model output is never trusted: it becomes text in elements of our choice.

import { h } from "./dom.js";
import { t } from "./i18n.js";
import { writeInline } from "./inline.js";

const FENCE = /^ {0,3}(`{3,}|~{3,}) *([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?: +(.*))?$/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +|$)/;
const DELIMITER = /^:?-+:?$/;
const DEEPEST = 8; // lists and quotes within each other; what is deeper is a paragraph

const isBlank = (line) => line.trim() === "";
const indent = (line) => line.length - line.trimStart().length;

/** All blocks of a text, as nodes with the line where each begins. */
export function blocks(lines, depth = 0) {
  const found = [];
  for (let at = 0; at < lines.length; ) {
    if (isBlank(lines[at])) {
      at++;
      continue;
    }
    const reader = READERS.find(({ starts }) => starts(lines, at, depth));
    const { node, end } = reader.read(lines, at, depth);
    found.push({ node, at });
    at = end;
  }
  return found;
}

/** The first line from `at` on where a test holds, or the number of lines. */
function until(lines, at, test) {
  let end = at;
  while (end < lines.length && !test(lines[end], end)) end++;
  return end;
}

const within = (lines, depth) => blocks(lines, depth + 1).map(({ node }) => node);

function readFence(lines, at) {
  const [, fence, language] = FENCE.exec(lines[at]);
  const margin = indent(lines[at]);
  const closes = (line) => {
    const text = line.trim();
    return indent(line) < 4 && text.length >= fence.length && text === fence[0].repeat(text.length);
  };
  const end = until(lines, at + 1, closes);
  const code = lines.slice(at + 1, end).map((line) => line.slice(Math.min(margin, indent(line))));
  return { node: codeBlock(code.join("\n"), language.trim().split(" ")[0]), end: end + 1 };
}

function codeBlock(text, language) {
  const pre = h("pre", { tabindex: 0, role: "region", "aria-label": t("code", { language }) }, h("code", {}, text));
  const copy = h("button", { type: "button", "data-copy": true }, t("copy"));
  return h("figure", { class: "code" }, h("figcaption", {}, h("span", {}, language), copy), pre);
}

/** A displayed formula is shown as its source: one that is half rendered would be wrong. */
function readFormula(lines, at) {
  const close = lines[at].trim().startsWith("$$") ? "$$" : "\\]";
  const rest = lines[at].trim().slice(2);
  const closes = (line) => line.trimEnd().endsWith(close) || isBlank(line);
  const end = rest.endsWith(close) ? at : until(lines, at + 1, closes);
  const code = h("code", {}, lines.slice(at, end + 1).join("\n"));
  return { node: h("pre", { tabindex: 0, role: "region", "aria-label": t("formula") }, code), end: end + 1 };
}

function readHeading(lines, at) {
  const [, marks, written = ""] = HEADING.exec(lines[at]);
  let text = written.trim();
  while (text.endsWith("#")) text = text.slice(0, -1);
  const node = h(`h${Math.min(marks.length + 2, 6)}`); // the page and its messages have the first two levels
  writeInline(text.trim(), node);
  return { node, end: at + 1 };
}

function readRule(lines, at) {
  return { node: h("hr"), end: at + 1 };
}

function readQuote(lines, at, depth) {
  const end = until(lines, at, (line, i) => !QUOTE.test(line) && (isBlank(line) || interrupts(lines, i, depth)));
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return { node: h("blockquote", {}, ...within(inner, depth)), end };
}

function readList(lines, at, depth) {
  const [, , first] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(first);
  const sameKind = (line) => {
    const marker = ITEM.exec(line)?.[2];
    return marker && !RULE.test(line) && /\d/.test(marker) === ordered && marker.at(-1) === first.at(-1);
  };
  const list = h(ordered ? "ol" : "ul", ordered && parseInt(first) !== 1 ? { start: parseInt(first) } : {});
  while (at < lines.length && sameKind(lines[at])) {
    const [marker, margin] = ITEM.exec(lines[at]);
    const inner = margin.length + 2; // models indent by two, three or four: two is enough to belong to the item
    let end = until(lines, at + 1, (line, i) => {
      if (isBlank(line) || indent(line) >= inner) return false;
      return isBlank(lines[i - 1]) || ITEM.test(line) || interrupts(lines, i, depth);
    });
    const own = lines.slice(at + 1, end).map((line) => line.slice(Math.min(indent(line), marker.length)));
    list.append(item([lines[at].slice(marker.length), ...own], depth));
    at = end;
  }
  return { node: list, end: at };
}

function item(lines, depth) {
  const task = /^\[([ xX])\] /.exec(lines[0]);
  const nodes = within(task ? [lines[0].slice(4), ...lines.slice(1)] : lines, depth);
  if (task) nodes.unshift(task[1] === " " ? "☐ " : "☑ ");
  return h("li", {}, ...nodes);
}

const cells = (line) => {
  const inner = line.trim().replace(/^\|/, "");
  const texts = (inner.endsWith("|") ? inner.slice(0, -1) : inner).split(/(?<!\\)\|/);
  return texts.map((cell) => cell.trim().replaceAll("\\|", "|"));
};

function startsTable(lines, at) {
  if (!lines[at].includes("|") || !lines[at + 1]?.includes("-")) return false;
  const rule = cells(lines[at + 1]);
  return rule.every((cell) => DELIMITER.test(cell)) && rule.length === cells(lines[at]).length;
}

function readTable(lines, at, depth) {
  const sideOf = (cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "middle" : "end") : null);
  const sides = cells(lines[at + 1]).map(sideOf);
  const row = (tag, line) => {
    const texts = cells(line);
    const made = sides.map((side) => h(tag, { class: side, scope: tag === "th" && "col" }));
    made.forEach((cell, i) => writeInline(texts[i] ?? "", cell));
    return h("tr", {}, ...made);
  };
  const end = until(lines, at + 2, (line, i) => isBlank(line) || interrupts(lines, i, depth));
  const rows = lines.slice(at + 2, end).map((line) => row("td", line));
  const table = h("table", {}, h("thead", {}, row("th", lines[at])), h("tbody", {}, ...rows));
  return { node: h("div", { class: "table", tabindex: 0, role: "region", "aria-label": t("table") }, table), end };
}

function readParagraph(lines, at, depth) {
  const end = until(lines, at + 1, (line, i) => isBlank(line) || interrupts(lines, i, depth));
  const node = h("p");
  writeInline(lines.slice(at, end).map((line) => line.trim()).join("\n"), node);
  return { node, end };
}

const READERS = [
  { starts: (lines, at) => FENCE.test(lines[at]), read: readFence },
  { starts: (lines, at) => /^ {0,3}(\\\[|\$\$)/.test(lines[at]), read: readFormula },
  { starts: (lines, at) => HEADING.test(lines[at]), read: readHeading },
  { starts: (lines, at) => RULE.test(lines[at]), read: readRule },
  { starts: (lines, at, depth) => depth < DEEPEST && QUOTE.test(lines[at]), read: readQuote },
  { starts: (lines, at, depth) => depth < DEEPEST && ITEM.test(lines[at]), read: readList },
  { starts: startsTable, read: readTable },
  { starts: () => true, read: readParagraph },
];

/** Whether a line ends the paragraph above it, because a block of another kind begins. */
function interrupts(lines, at, depth) {
  return READERS.slice(0, -1).some(({ starts }) => starts(lines, at, depth));
}
