// Markdown inside a line: emphasis, code, links, formulas. Every step is linear in the text, whatever the text is.

import { h } from "./dom.js";

const ELEMENTS = { "**": "strong", __: "strong", "*": "em", _: "em", "~~": "del" };
const DEEPEST = 8; // marks within marks; what is deeper stays as it was written
const PLAIN = /(?:[^\\`*_~[!<$h]|!(?!\[)|<(?!http)|h(?!ttps?:))+/y;
const ESCAPED = /\\([!"#$%&'*+,\-./:;<=>?@\\^_`{|}~])/y; // not \( and \[: these begin formulas
const FORMULA = /\\\(.{1,1000}?\\\)|\\\[[^]{1,2000}?\\\]|\$\$[^$]{1,2000}\$\$|\$(?=\S)[^$\n]{1,200}(?<=\S)\$(?!\d)/y;
const LINK = /!?\[([^[\]\n]{0,500})\]\( *<?((?:[^\s()<>]|\([^\s()<>]*\)){1,2000})>?(?: +"[^"\n]{0,300}")? *\)/y;
const ADDRESS = /<?(https?:\/\/[^\s<>"'`*，。；：！？、）】》」』]{1,2000})>?/y;
const WORD = /[\p{L}\p{N}_]/u;

function match(pattern, text, at) {
  pattern.lastIndex = at;
  return pattern.exec(text);
}

/** The address, if following it is harmless: a page or a mail, never code and never a path on this server. */
export function safeAddress(text) {
  if (!URL.canParse(text)) return null;
  const url = new URL(text);
  return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
}

function link(address, ...children) {
  return h("a", { href: address, title: address, target: "_blank", rel: "noopener noreferrer" }, ...children);
}

/** Writes text with its marks into an element. */
export function writeInline(text, parent) {
  const stack = [{ node: parent, mark: "" }];
  const unclosed = new Set(); // lengths of backtick runs that no later run closes
  let words = ""; // text that is not in a node yet: many small pieces become one
  const flush = () => {
    if (words) stack.at(-1).node.append(words);
    words = "";
  };
  const add = (piece) => {
    if (typeof piece === "string") words += piece;
    else {
      flush();
      stack.at(-1).node.append(piece);
    }
  };
  let at = 0;
  while (at < text.length) {
    const plain = match(PLAIN, text, at);
    if (plain) add(plain[0]);
    at += plain?.[0].length ?? 0;
    if (at < text.length) at += special(text, at, { stack, unclosed, add, flush });
  }
  flush();
  while (stack.length > 1) undo(stack);
  parent.normalize();
}

/** Handles what begins at a special character; gives the number of characters taken. */
function special(text, at, state) {
  const character = text[at];
  if ("*_~".includes(character)) return mark(text, at, state);
  if (character === "`") return codeSpan(text, at, state);
  return formula(text, at, state) || escaped(text, at, state) || links(text, at, state) || literal(character, state);
}

function literal(text, { add }) {
  add(text);
  return text.length;
}

function escaped(text, at, { add }) {
  const found = match(ESCAPED, text, at);
  if (found) add(found[1]);
  return found?.[0].length;
}

function formula(text, at, { add }) {
  const found = match(FORMULA, text, at);
  if (found) add(h("code", { class: "formula" }, found[0]));
  return found?.[0].length;
}

function links(text, at, { add, stack }) {
  if (stack[0].node.nodeName === "A") return 0; // no link within a link
  const named = match(LINK, text, at);
  const address = named && safeAddress(named[2]);
  if (address) {
    const element = link(address);
    writeInline(named[1] || named[2], element);
    add(element);
    return named[0].length;
  }
  const bare = WORD.test(text[at - 1] ?? "") ? null : match(ADDRESS, text, at);
  if (!bare) return 0;
  const shown = bare[0].startsWith("<") ? bare[1] : withoutEnd(bare[1]);
  if (!safeAddress(shown)) return 0;
  add(link(safeAddress(shown), shown));
  return bare[0].startsWith("<") ? bare[0].length : shown.length;
}

/** An address in running text ends before the sentence's own signs. */
function withoutEnd(address) {
  let end = address.length;
  const isSign = (last) => ".,;:!?".includes(last) || (last === ")" && !address.includes("("));
  while (isSign(address[end - 1])) end--;
  return address.slice(0, end);
}

function codeSpan(text, at, { unclosed, add }) {
  const run = match(/`+/y, text, at)[0];
  let end = unclosed.has(run.length) ? -1 : at;
  const others = /`+/g;
  others.lastIndex = at + run.length;
  while (end === at) {
    const next = others.exec(text);
    if (!next) end = -1;
    else if (next[0].length === run.length) end = next.index;
  }
  if (end < 0) {
    unclosed.add(run.length);
    return literal(run, { add });
  }
  const code = text.slice(at + run.length, end);
  const padded = code.startsWith(" ") && code.endsWith(" ") && code.trim();
  add(h("code", {}, padded ? code.slice(1, -1) : code));
  return end + run.length - at;
}

/** Opens or closes emphasis. Of a run of three, `*` opens first and the innermost open mark closes first. */
function mark(text, at, { stack, add, flush }) {
  const run = match(/\*+|_+|~+/y, text, at)[0];
  const [before, after] = [text[at - 1] ?? " ", text[at + run.length] ?? " "];
  const inWord = run[0] === "_";
  const closes = /\S/.test(before) && !(inWord && WORD.test(after));
  const opens = /\S/.test(after) && !(inWord && WORD.test(before));
  const innermost = stack.at(-1).mark || "none";
  let size = Math.min(run.length, 2);
  if (run.length > 2) size = closes && run.startsWith(innermost) ? innermost.length : 1;
  const own = run.slice(0, size);
  const place = stack.findLastIndex((open) => open.mark === own);
  if (closes && place > 0) {
    flush();
    while (stack.length - 1 > place) undo(stack);
    stack.pop();
    return size;
  }
  if (!opens || !(own in ELEMENTS) || stack.length > DEEPEST) return literal(run, { add });
  const node = h(ELEMENTS[own]);
  add(node);
  stack.push({ node, mark: own });
  return size;
}

/** Takes back a mark that was never closed: it was meant as it stands. */
function undo(stack) {
  const { node, mark: written } = stack.pop();
  node.replaceWith(written, ...node.childNodes);
}
